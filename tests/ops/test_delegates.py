"""The rows that delegate to mamba_ssm and causal_conv1d, run on a CPU with stand-ins that check what the real ones do:
what an adapter passes on is what the kernel takes, means the same, and what the kernel cannot do is refused before."""

import inspect

import pytest
import torch
from op_cases import (
    CONV,
    SCAN,
    SSD,
    TOLERANCE,
    assert_near,
    cast,
    conv_inputs,
    documents_alone,
    error,
    outputs_and_grads,
    packed_rows,
    positive_steps,
    scan_inputs,
    ssd_inputs,
    usable,
)
from stand_ins import stand_ins  # noqa: F401  (a fixture)

from hf_ssm.ops import UnsupportedByBackend
from hf_ssm.ops.backends import OPERATORS

pytestmark = pytest.mark.usefixtures("stand_ins")

FLOAT32 = TOLERANCE[torch.float32]
ROWS = ["aaaaaaabb.bbc..", ".aaaaaaaaaabbb."]
DOCUMENTS = [[[i for i, c in enumerate(row) if c == name] for name in sorted(set(row) - {"."})] for row in ROWS]


def agrees(operator, backend, tensors, through="both", **options):
    """The delegate in float32 against the reference in float64."""
    got = outputs_and_grads(operator(backend, **options), cast(tensors, torch.float32), through)
    assert_near(got, outputs_and_grads(operator("reference", **options), tensors, through), FLOAT32)


def half_precision_agrees(operator, backend, tensors, dtypes, through="both"):
    """As good as the reference in the same dtypes, and gradients in their inputs' dtypes."""
    tensors = cast(tensors, {name: dtypes.get(name, dtypes["all"]) for name in tensors})
    exact = outputs_and_grads(operator("reference"), cast(tensors, torch.float64), through)
    got, reference = (outputs_and_grads(operator(name), tensors, through) for name in (backend, "reference"))
    for name, want in exact.items():
        if name.startswith("d_"):
            assert got[name].dtype == tensors[name.removeprefix("d_")].dtype, name
        assert error(got[name], want) <= 2 * error(reference[name], want) + FLOAT32, name


# --- causal_conv1d -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("initial_state", [False, True, 6], ids=["zeros", "state", "longer-state"])
@pytest.mark.parametrize("seqlen", [1, 2, 23])
def test_conv(stand_ins, width, bias, initial_state, seqlen):  # noqa: F811
    tensors = conv_inputs(seqlen=seqlen, channels=8, width=width, bias=bias, initial_state=initial_state)
    for activation in (None, "silu", "swish"):
        agrees(CONV, "causal_conv1d", tensors, activation=activation)
    assert stand_ins["causal_conv1d_fn"] == 3


def test_conv_packed_and_padded():
    tensors = conv_inputs(seqlen=15, channels=16, initial_state=False)
    packed = packed_rows(DOCUMENTS, 15)
    for options in ({"seq_idx": packed["seq_idx"]}, {"mask": packed["mask"]}, packed):
        agrees(CONV, "causal_conv1d", tensors, **options)
    got = outputs_and_grads(CONV("causal_conv1d", **packed), cast(tensors, torch.float32))
    assert_near(got, outputs_and_grads(documents_alone(CONV, DOCUMENTS), tensors), FLOAT32)
    agrees(CONV, "causal_conv1d", {**tensors, **conv_inputs(seqlen=15, channels=16)}, mask=packed["mask"])


def test_conv_ids_that_return():
    """The kernel compares indices: ids that come back within its width must not meet."""
    tensors = conv_inputs(seqlen=15, channels=8, initial_state=False)
    agrees(CONV, "causal_conv1d", tensors, seq_idx=torch.tensor([[7, -1, 7, 7, 0] * 3] * 2))


@pytest.mark.parametrize(
    "dtypes",
    [
        {"all": torch.bfloat16},
        {"all": torch.float16},
        {"all": torch.bfloat16, "weight": torch.float32, "bias": torch.float32},
        {"all": torch.bfloat16, "weight": torch.float32},
        {"all": torch.bfloat16, "initial_state": torch.float32},
    ],
    ids=str,
)
def test_conv_dtypes(dtypes):
    half_precision_agrees(CONV, "causal_conv1d", conv_inputs(channels=8), dtypes)


@pytest.mark.parametrize("seqlen", [1, 23])
def test_conv_layouts(seqlen):
    """The kernel reads the layout off the strides, which mean nothing where a size is 1."""
    layouts = {
        "channels first": lambda t: t.mT.clone(memory_format=torch.contiguous_format).mT,
        "part of a projection": lambda t: torch.cat([t[..., :5], t], dim=-1)[..., 5:],
        "expanded": lambda t: t[:, :1].expand(t.shape),
    }
    tensors = conv_inputs(seqlen=seqlen, channels=8)
    for layout in layouts.values():

        def laid_out(function, layout=layout):
            def run(x, initial_state, **rest):
                return function(x=layout(x), initial_state=layout(initial_state), **rest)

            return run

        got = outputs_and_grads(laid_out(CONV("causal_conv1d")), cast(tensors, torch.float32))
        assert_near(got, outputs_and_grads(laid_out(CONV("reference")), tensors), FLOAT32)


def test_conv_gradients_of_any_layout():
    tensors = cast(conv_inputs(channels=8), torch.float32)
    x = tensors.pop("x").requires_grad_()
    out, _ = CONV("causal_conv1d")(x, **tensors)
    for loss in (
        out.sum(),
        (out.mT.contiguous() * torch.arange(23.0)).sum(),
        out[:, 3:, 1].sum(),
        out[1].square().sum(),
    ):
        torch.autograd.grad(loss, x, retain_graph=True)


# --- selective_scan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"D": False},
        {"z": False},
        {"dt_bias": False},
        {"D": False, "z": False, "dt_bias": False},
        {"ngroups": None},
        {"ngroups": 1},
        {"ngroups": 6},
        {"seqlen": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("softplus", [True, False], ids=["softplus", "no-softplus"])
def test_scan(stand_ins, variant, softplus):  # noqa: F811
    tensors = scan_inputs(initial_state=False, **variant)
    agrees(SCAN, "mamba_ssm", tensors if softplus else positive_steps(tensors), "out", dt_softplus=softplus)
    assert stand_ins["selective_scan_fn"] == 1


@pytest.mark.parametrize("softplus", [True, False], ids=["softplus", "no-softplus"])
def test_scan_padded(softplus):
    rows = ["....aaaaaaaaaaa", "aaaa..aaaa.aaa.", "." * 15]
    mask = torch.tensor([[c == "a" for c in row] for row in rows])
    tensors = positive_steps(scan_inputs(3, 15, initial_state=False))
    agrees(SCAN, "mamba_ssm", tensors, "out", mask=mask, dt_softplus=softplus)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"all": torch.bfloat16},
        {"all": torch.float16},
        {"all": torch.bfloat16, "A": torch.float32, "D": torch.float32, "dt_bias": torch.float32},
        {"all": torch.float32, "z": torch.bfloat16, "B": torch.float16, "D": torch.float64},
    ],
    ids=str,
)
def test_scan_dtypes(dtypes):
    half_precision_agrees(SCAN, "mamba_ssm", scan_inputs(initial_state=False), dtypes, "out")


def test_scan_has_no_gradient_for_its_state():
    """The kernel would drop it silently; a loss without the state is fine."""
    tensors = cast(scan_inputs(initial_state=False), torch.float32)
    with pytest.raises(RuntimeError, match=r'no gradient for its final state: .*use_backend\("torch"\)'):
        outputs_and_grads(SCAN("mamba_ssm"), tensors, "state")
    with torch.no_grad():
        _, state = SCAN("mamba_ssm")(**tensors)
    assert state.dtype == torch.float32


# --- ssd -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"D": None},
        {"D": "channel"},
        {"z": False},
        {"dt_bias": False},
        {"D": None, "z": False, "dt_bias": False, "initial_state": False},
        {"initial_state": False},
        {"ngroups": 1},
        {"ngroups": 4},
        {"seqlen": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [{}, {"dt_softplus": False}, {"dt_limit": (0.2, 0.8)}, {"dt_softplus": False, "dt_limit": (0.1, 0.5)}],
    ids=str,
)
def test_ssd(stand_ins, variant, options):  # noqa: F811
    agrees(SSD, "mamba_ssm", ssd_inputs(**variant), **options)
    assert stand_ins["mamba_chunk_scan_combined"] == 1


@pytest.mark.parametrize("initial_state", [False, True], ids=["zeros", "state"])
def test_ssd_packed_and_padded(initial_state):
    """Wherever a row's numbering begins, the initial state is its first sequence's; ids that return do not meet."""
    tensors = ssd_inputs(seqlen=15, initial_state=initial_state)
    packed = packed_rows(DOCUMENTS, 15)
    for options in ({"seq_idx": packed["seq_idx"]}, {"mask": packed["mask"]}, packed):
        agrees(SSD, "mamba_ssm", tensors, **options)
    for ids in ([7, -1, 7, 7, 0], [0, 1, 0, 1, 0], [5, 5, 4, 4, 3]):
        agrees(SSD, "mamba_ssm", tensors, seq_idx=torch.tensor([ids * 3] * 2))
    limits = {"dt_limit": (0.2, 0.8)}
    got = outputs_and_grads(SSD("mamba_ssm", **packed, **limits), cast(tensors, torch.float32))
    assert_near(got, outputs_and_grads(documents_alone(SSD, DOCUMENTS, **limits), tensors), FLOAT32)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"all": torch.bfloat16, "initial_state": torch.float32},
        {"all": torch.bfloat16, "dt": torch.float32, "A": torch.float32, "D": torch.float32, "dt_bias": torch.float32},
    ],
    ids=str,
)
def test_ssd_dtypes(dtypes):
    half_precision_agrees(SSD, "mamba_ssm", ssd_inputs(), dtypes)


# --- what is refused, and what is chosen ---------------------------------------------------------------------------

SEQ_IDX = torch.zeros(2, 5, dtype=torch.int64)
REFUSED = {
    "conv width 1": (CONV, "causal_conv1d", {"channels": 8, "width": 1}, {}, "width=1, the kernel has 2 to 4"),
    "conv width 5": (CONV, "causal_conv1d", {"channels": 8, "width": 5}, {}, "width=5, the kernel has 2 to 4"),
    "conv channels": (CONV, "causal_conv1d", {"channels": 12}, {}, "channels=12, the kernel has multiples of 8"),
    "conv packed state": (CONV, "causal_conv1d", {"channels": 8}, {"seq_idx": SEQ_IDX}, "seq_idx together with an "),
    "scan state": (SCAN, "mamba_ssm", {}, {}, "the kernel has no initial state"),
    "scan packed": (SCAN, "mamba_ssm", {"initial_state": False}, {"seq_idx": SEQ_IDX}, "no packed sequences"),
    "scan d_state": (SCAN, "mamba_ssm", {"initial_state": False, "d_state": 257}, {}, "d_state=257, .* at most 256"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_the_kernel_cannot_do(stand_ins, refused):  # noqa: F811
    """By name it is an error that says so; of itself the next backend is taken."""
    operator, backend, inputs, options, message = REFUSED[refused]
    tensors = cast(operator.inputs(seqlen=5, **inputs), torch.float32)
    with pytest.raises(UnsupportedByBackend, match=rf"^{operator.name}\[{backend}\]: .*{message}"):
        operator(backend, **options)(**tensors)
    got = outputs_and_grads(operator(None, **options), tensors)
    rows = [row.name for row in OPERATORS[operator.name] if row.automatic and row.name in usable(operator.name)]
    following = next(name for name in rows if name != backend)
    assert_near(got, outputs_and_grads(operator(following, **options), tensors), 0.0)
    assert not stand_ins


@pytest.mark.parametrize(
    ("operator", "backend", "inputs"),
    [
        (CONV, "causal_conv1d", conv_inputs(channels=8)),
        (SCAN, "mamba_ssm", scan_inputs(initial_state=False)),
        (SSD, "mamba_ssm", ssd_inputs()),
    ],
    ids=["causal_conv1d", "selective_scan", "ssd"],
)
def test_float64_is_float64(stand_ins, operator, backend, inputs):  # noqa: F811
    with pytest.raises(UnsupportedByBackend, match="float64, the kernel has float32, float16 and bfloat16"):
        operator(backend)(**inputs)
    operator(None)(**inputs)
    assert not stand_ins
    operator(None)(**cast(inputs, torch.float32))
    assert sum(stand_ins.values()) == 1, "the delegate is the first choice where it can run the call"


def test_signatures():
    """The published ones, argument by argument: mamba_ssm 2.3.2.post1, causal_conv1d 1.6.1 and 1.7.0."""
    from causal_conv1d import causal_conv1d_fn
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    published = {
        causal_conv1d_fn: "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, "
        "final_states_out=None, activation=None",
        selective_scan_fn: "u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, "
        "return_last_state=False",
        mamba_chunk_scan_combined: "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, "
        "seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, inf), return_final_states=False, "
        "return_varlen_states=False",
    }
    for function, signature in published.items():
        assert str(inspect.signature(function)) == f"({signature})"


def test_ssd_takes_its_gradients_through_the_state():
    """Two halves, the second from the first's state, through the delegate's own backward."""
    tensors = ssd_inputs(seqlen=12)

    def halves(backend):
        def run(initial_state, **given):
            head, state = SSD(backend)(**SSD.tokens(given, slice(0, 5)), initial_state=initial_state)
            tail, state = SSD(backend)(**SSD.tokens(given, slice(5, 12)), initial_state=state)
            return torch.cat([head, tail], dim=1), state

        return run

    want = outputs_and_grads(SSD("reference"), tensors)
    assert_near(outputs_and_grads(halves("mamba_ssm"), cast(tensors, torch.float32)), want, FLOAT32)
