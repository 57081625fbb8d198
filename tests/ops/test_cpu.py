"""The native kernels themselves: every instruction set, any memory layout, any number of threads, the same bits again;
and what happens where there are none."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import (
    ALL,
    CAUSAL,
    CONV,
    TOLERANCE,
    assert_near,
    cast,
    error,
    outputs_and_grads,
    packed_rows,
    tensors_of,
    usable,
)

from hf_ssm.layers import Linear
from hf_ssm.ops import backends, cpu, use_backend
from hf_ssm.ops.cpu import linear as few_rows
from hf_ssm.ops.discretize import decay_rates

native = cpu.kernels()
pytestmark = pytest.mark.skipif(native is None, reason=cpu.NOT_BUILT)
SETS = native.instruction_sets() if native is not None else []
OPERATORS = [operator for operator in ALL if "cpu" in usable(operator.name)]
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
every_set = pytest.mark.parametrize("instruction_set", SETS, indirect=True)


@pytest.fixture
def instruction_set(request):
    before = native.in_use()
    native.use(request.param)
    yield request.param
    native.use(before)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@every_operator
@every_set
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 130])  # around the kernels' tiles of tokens
def test_every_instruction_set(instruction_set, operator, dtype, seqlen):
    tensors = cast(operator.inputs(seqlen=seqlen), dtype)
    exact = outputs_and_grads(operator("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(operator(name), tensors) for name in ("cpu", "reference"))
    for name, want in exact.items():
        limit = 2 * error(reference[name], want) if dtype != torch.float32 else 0
        assert error(got[name], want) <= limit + TOLERANCE[torch.float32], name


def draw_layout(data, name: str, t: torch.Tensor):
    """A function that copies `t` to memory with its axes in another order, gaps between the elements and an offset
    that no vector is aligned to; gradients flow back through it."""
    order = data.draw(st.permutations(range(t.ndim)), label=f"{name}: axes")
    gap = data.draw(st.integers(1, 3), label=f"{name}: gap")
    offset = data.draw(st.integers(0, 5), label=f"{name}: offset")
    strides, step = [0] * t.ndim, gap
    for axis in reversed(order):
        strides[axis], step = step, step * t.shape[axis]

    def lay_out(given: torch.Tensor) -> torch.Tensor:
        memory = torch.full((offset + step,), float("nan"), dtype=given.dtype)
        return memory.as_strided(given.shape, strides, offset).detach().copy_(given)

    return lay_out


@every_operator
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_fuzzed_shapes_and_layouts(operator, data):
    """No more than twice as far from the exact result as the worse of the other two backends: what is looked for here
    is memory that is misread, and what hypothesis finds besides is unlucky rounding, which they share."""
    draw = data.draw
    sizes = {"batch": draw(st.integers(1, 3)), "seqlen": draw(st.sampled_from([1, 2, 17, 64, 65, 70]))}
    if operator.name.endswith("conv1d"):
        sizes |= {"channels": draw(st.integers(1, 40)), "width": draw(st.sampled_from([1, 3, 5, 7]))}
    elif operator.name == "selective_scan":
        groups = draw(st.integers(1, 3))
        sizes |= {"d_inner": groups * draw(st.integers(1, 20)), "d_state": draw(st.integers(1, 20)), "ngroups": groups}
    else:
        groups = draw(st.integers(1, 2))
        sizes |= {"nheads": groups * draw(st.integers(1, 3)), "headdim": draw(st.integers(1, 20)), "ngroups": groups}
        sizes |= {"d_state": draw(st.integers(1, 35))}
    dtype = draw(st.sampled_from(cpu.DTYPES))
    tensors = cast(operator.inputs(**sizes), dtype)
    rows = {}
    if draw(st.booleans(), label="packed"):
        lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
        ends = torch.tensor(lengths).cumsum(0)
        rows["seq_idx"] = torch.bucketize(torch.arange(sizes["seqlen"]), ends, right=True).expand(sizes["batch"], -1)
    exact = outputs_and_grads(operator("reference", **rows), cast(tensors, torch.float64))
    others = [outputs_and_grads(operator(name, **rows), tensors) for name in ("reference", "torch")]
    limits = {
        name: 2 * max(error(other[name], exact[name]) for other in others) + TOLERANCE[torch.float32] for name in exact
    }
    layouts = {name: draw_layout(data, name, t) for name, t in tensors.items()}

    def call(**given):
        return operator("cpu", **rows)(**{name: layouts[name](t) for name, t in given.items()})

    past_autograd = dict(zip(("out", "final_state"), tensors_of(call(**tensors)), strict=False))
    for got in (outputs_and_grads(call, tensors), past_autograd):
        for name in got:
            assert error(got[name], exact[name]) <= limits[name], name


@every_operator
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_threads_and_the_same_bits_again(threads, operator, count):
    tensors = cast(operator.inputs(batch=3, seqlen=100), torch.float32)
    seq_idx = packed_rows([[list(range(40)), list(range(40, 100))]] * 3, 100)["seq_idx"]
    want = outputs_and_grads(operator("reference", seq_idx=seq_idx), cast(tensors, torch.float64))
    threads(count)
    got, again = (outputs_and_grads(operator("cpu", seq_idx=seq_idx), tensors) for _ in range(2))
    assert_near(got, want)
    assert all(torch.equal(got[name], again[name]) for name in got)


@every_operator
def test_sequences_across_the_states_that_are_kept(operator):
    """Backward recomputes from states that forward kept, ssd every 256 tokens: sequences end there and elsewhere."""
    tensors = cast(operator.inputs(seqlen=530), torch.float32)
    ends = torch.tensor([[200, 256, 257, 400], [10, 300, 512, 529]])
    seq_idx = torch.searchsorted(ends, torch.arange(530).expand(2, -1).contiguous(), right=True)
    want = outputs_and_grads(operator("reference", seq_idx=seq_idx), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(operator("cpu", seq_idx=seq_idx), tensors), want)


@every_operator
def test_from_several_python_threads_at_once(operator):
    from concurrent.futures import ThreadPoolExecutor

    cases = [cast(operator.inputs(seqlen=80, seed=seed), torch.float32) for seed in range(4)]
    want = [outputs_and_grads(operator("cpu"), case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda case: outputs_and_grads(operator("cpu"), case), cases * 5))
    for i, result in enumerate(got):
        assert_near(result, want[i % 4], 1e-6)


# --- linear layers -------------------------------------------------------------------------------------------------


@every_set
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, 1), (3, 5), (16, 4), (31, 7), (32, 8), (33, 9), (100, 50), (770, 3)]
)
def test_linear(instruction_set, inputs, outputs, bias, dtype):
    torch.manual_seed(0)
    layer = Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    exact = torch.nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    for shape in ((), (1,), (2,), (3, 1), (1, 4), (0,), (5,)):
        x = torch.randn(*shape, inputs).to(dtype)
        want = exact(x.double()).detach()
        plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
        got = layer(x)
        assert got.dtype == dtype and got.shape == plain.shape
        taken = few_rows.linear(x, layer.weight, layer.bias)
        assert (taken is not None) == (0 < x.numel() <= 4 * inputs)
        assert error(got, want) <= 2 * error(plain, want) + TOLERANCE[torch.float32]


def test_linear_takes_any_layout_of_its_input():
    layer = Linear(24, 6).requires_grad_(False)
    x = torch.randn(24, 3)
    torch.testing.assert_close(layer(x.t()), layer(x.t().contiguous()), rtol=0, atol=0)
    wide = torch.randn(2, 48)
    torch.testing.assert_close(layer(wide[:, ::2]), layer(wide[:, ::2].contiguous()), rtol=0, atol=0)
    torch.testing.assert_close(layer(wide[:1, :1].expand(2, 24)), layer(wide[:1, :1].repeat(2, 24)), rtol=0, atol=0)


class Marked(torch.Tensor):
    """Weights that a quantisation would bring: a subclass with products of its own."""


def test_linear_leaves_the_rest_to_pytorch():
    """Gradients, other dtypes, weights of a kind of their own, autocast, another backend by name."""
    layer = Linear(8, 4)
    x = torch.randn(1, 8)
    assert few_rows.linear(x, layer.weight, layer.bias) is None
    assert layer(x).requires_grad
    layer.requires_grad_(False)
    assert few_rows.linear(x, layer.weight, layer.bias) is not None
    assert few_rows.linear(x.clone().requires_grad_(), layer.weight, layer.bias) is None
    assert few_rows.linear(x.double(), layer.weight.double(), layer.bias.double()) is None
    assert few_rows.linear(x.bfloat16(), layer.weight, layer.bias) is None
    assert few_rows.linear(x, torch.randn(8, 4).t(), layer.bias) is None
    assert few_rows.linear(x, layer.weight.detach().as_subclass(Marked), layer.bias) is None
    assert few_rows.linear(x.to("meta"), layer.weight.to("meta"), None) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with use_backend("torch"):
        assert few_rows.linear(x, layer.weight, layer.bias) is None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(1, 7))
    assert torch.func.vmap(layer)(torch.randn(3, 1, 8)).shape == (3, 1, 4)


# --- steps: kernels that make their own results -------------------------------------------------------------------


def step_inputs(operator, **sizes) -> tuple[dict, tuple]:
    """One token of `operator`, and its arguments as its step takes them."""
    tensors = operator.inputs(seqlen=1, **sizes)
    get = tensors.get
    if operator.name == "causal_conv1d":
        return tensors, ("conv1d", tensors["x"], tensors["weight"], get("bias"), tensors["initial_state"], True)
    scan = *(tensors[name] for name in ("x", "dt", "A", "B", "C")), get("D"), get("z"), get("dt_bias"), True
    limits = (0.0, float("inf")) if operator.name == "ssd" else ()
    return tensors, (operator.name, *scan, *limits, tensors["initial_state"])


def in_dtype(arguments: tuple, dtype: torch.dtype) -> tuple:
    """What a model in `dtype` gives to a step: A and, but for a convolution's, the state are float32."""
    name, *values = arguments
    single = {2, len(values) - 1} if name != "conv1d" else set()
    kinds = [torch.float32 if i in single else dtype for i in range(len(values))]
    return name, *(v.to(kind) if torch.is_tensor(v) else v for v, kind in zip(values, kinds, strict=True))


@every_set
@pytest.mark.parametrize("operator", CAUSAL, ids=lambda operator: operator.name)
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize("parts", ["all", "few"])
def test_step_is_its_operator(instruction_set, operator, dtype, parts):
    optional = {name: parts == "all" for name in ("bias", "z", "dt_bias") if name in operator.inputs()}
    if "D" in operator.inputs():
        optional["D"] = ("channel" if parts == "all" else "head") if operator.name == "ssd" else parts == "all"
    tensors, arguments = step_inputs(operator, **optional)
    arguments = in_dtype(arguments, dtype)
    given = cast(tensors, dtype)
    for name in ("A", "initial_state") if operator.name != "causal_conv1d" else ():
        given[name] = tensors[name].to(torch.float32)
    exact = operator("reference")(**cast(given, torch.float64))
    reference = operator("reference")(**given)
    results = cpu.step(*arguments)
    assert results is not None
    for got, plain, want in zip(results, reference, exact, strict=True):
        assert got.dtype == plain.dtype and got.shape == plain.shape
        assert error(got, want) <= 2 * error(plain, want) + TOLERANCE[torch.float32]


@pytest.mark.parametrize("operator", CAUSAL, ids=lambda operator: operator.name)
def test_step_takes_the_layouts_that_models_have(operator):
    """Parts of a projection's output, a row of a batch, the states of a cache (channels before tokens)."""
    _, arguments = step_inputs(operator, batch=3)
    name, *values = in_dtype(arguments, torch.float32)
    want = cpu.step(name, *values)
    last = len(values) - 1

    def laid_out(i, t):
        if not torch.is_tensor(t):
            return t
        if name == "conv1d" and i in (0, 3):  # channels one behind the other, rows anywhere
            return torch.cat([t, t], dim=-1)[..., : t.shape[-1]]
        if i == last:
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.stack([t, t], dim=-1)[..., 0]

    got = cpu.step(name, *(laid_out(i, t) for i, t in enumerate(values)))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("operator", CAUSAL, ids=lambda operator: operator.name)
def test_step_leaves_the_extraordinary_alone(operator):
    _, arguments = step_inputs(operator)
    name, *values = in_dtype(arguments, torch.float32)

    def refuses(change, *which: int) -> bool:
        changed = [change(v) if torch.is_tensor(v) and (not which or i in which) else v for i, v in enumerate(values)]
        return cpu.step(name, *changed) is None

    assert cpu.step(name, *values) is not None
    assert refuses(lambda t: t.clone().requires_grad_())
    with torch.no_grad():
        assert not refuses(lambda t: t.clone().requires_grad_())
    assert refuses(torch.Tensor.double)
    assert refuses(torch.Tensor.int)
    assert refuses(lambda t: t.to("meta"))
    assert refuses(lambda t: t.as_subclass(Marked))
    for i, value in enumerate(values):
        if torch.is_tensor(value):  # one element too few or one axis too many
            axis = 0 if (name, i) == ("conv1d", 1) else -1  # a convolution may be shorter
            assert refuses(lambda t, axis=axis: t.narrow(axis, 0, t.shape[axis] - 1), i), i
            assert refuses(lambda t: t[None], i), i
    assert refuses(lambda t: t.repeat_interleave(2, dim=1), 0)  # two tokens
    assert refuses(lambda t: t[:0], 0, len(values) - 1)  # no rows
    with use_backend("torch"):
        assert refuses(torch.Tensor.clone)
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert refuses(lambda t: t)
    with torch.autograd.forward_ad.dual_level():
        assert refuses(lambda t: t)


def test_step_refusal_gives_the_operators_own_message():
    tensors = {name: t.float() for name, t in CONV.inputs(seqlen=1).items()}
    with pytest.raises(ValueError, match="activation='relu', expected None, 'silu' or 'swish'"):
        CONV.function(**tensors, activation="relu")
    tensors["weight"] = tensors["weight"][:-1]
    with pytest.raises(ValueError, match=r"weight has shape \(5, 4\)"):
        CONV.function(**tensors)


@every_set
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (16,), (5, 13), (1536, 16)], ids=str)
def test_decay_rates(instruction_set, shape, dtype):
    torch.manual_seed(0)
    A_log = (4 * torch.randn(shape)).to(dtype)
    got = decay_rates(A_log)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, -torch.exp(A_log.double()).float(), rtol=3e-7, atol=0)
    special = decay_rates(torch.tensor([0.0, -math.inf, 200.0, math.nan]))
    torch.testing.assert_close(special, torch.tensor([-1.0, -0.0, -math.inf, math.nan]), equal_nan=True)
    assert decay_rates(A_log.clone().requires_grad_()).requires_grad
    assert decay_rates(A_log.double()).dtype == torch.float64
    torch.testing.assert_close(decay_rates(A_log.expand(2, *shape)), got.expand(2, *shape))


@torch.no_grad()
def test_what_is_traced_and_differentiated_forward_is_seen():
    layer, x = Linear(8, 4), torch.randn(1, 8)
    traced = torch.jit.trace(layer, x)
    other = torch.randn(1, 8)
    torch.testing.assert_close(traced(other), layer(other))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, other)
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    torch.testing.assert_close(tangent, other @ layer.weight.t())


# --- set-up --------------------------------------------------------------------------------------------------------

SHOW = "from hf_ssm.ops import cpu; print(cpu.describe())"


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_instruction_set_by_name():
    assert run(SHOW, HF_SSM_CPU="plain").stdout.startswith("plain")
    wrong = run(SHOW, HF_SSM_CPU="avx1024")
    assert wrong.returncode and f"ValueError: HF_SSM_CPU=avx1024: this machine has {', '.join(SETS)}" in wrong.stderr
    with pytest.raises(ValueError, match="no kernels named 'avx1024'"):
        native.use("avx1024")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says which libraries are loaded")
def test_shares_pytorchs_threads():
    """The kernels find the OpenMP runtime that torch has loaded, and bring none of their own."""
    assert native.pool()
    libraries = run(SHOW + "; print(open('/proc/self/maps').read())").stdout
    assert "on PyTorch's threads" in libraries
    assert len(set(re.findall(r"/lib(?:g|i|)omp\S*", libraries))) == 1


def test_without_the_kernels(monkeypatch):
    """A machine that had no compiler: everything runs, on another backend."""
    monkeypatch.setattr(cpu, "kernels", lambda: None)
    backends._choose_row.cache_clear()
    try:
        for operator in OPERATORS:
            tensors = operator.inputs(seqlen=5)
            assert_near(outputs_and_grads(operator(None), tensors), outputs_and_grads(operator("torch"), tensors), 0.0)
            with pytest.raises(backends.BackendUnavailable, match="were not built, which takes"):
                operator("cpu")(**tensors)
        assert cpu.describe().startswith("none: the native kernels were not built")
    finally:
        monkeypatch.undo()
        backends._choose_row.cache_clear()


@pytest.mark.parametrize("arguments", [(), (1,), (None,) * 15], ids=["too few", "no tensor", "too many"])
def test_wrong_arguments_are_python_errors(arguments):
    with pytest.raises((TypeError, RuntimeError)):
        native.selective_scan(*arguments)
