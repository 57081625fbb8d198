"""The operators on a GPU, at sizes that models have: against float64, packed and padded, in any layout, twice the
same, on any stream and device, compiled, captured, beyond 2**31 elements.

Small shapes in every option are the tests of tests/ops: HF_SSM_TEST_DEVICE=cuda runs them there.
"""

import pytest
import torch
from gpu_cases import (
    DEVICE,
    DTYPES,
    REHEARSAL,
    assert_as_good_as_the_reference,
    backends,
    call,
    every,
    inputs,
    on_a_gpu,
    rows,
    size,
)
from op_cases import (
    CENTRED,
    CONV,
    LAYOUTS,
    QUASISEPARABLE,
    SCAN,
    SSD,
    assert_near,
    cast,
    outputs_and_grads,
    tensors_of,
)

from hf_ssm.ops import (
    causal_conv1d_update,
    gated_rms_norm,
    rms_norm,
    selective_scan_update,
    ssd_update,
)

# --- values and gradients ------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("initial_state", [False, True], ids=["zeros", "state"])
def test_token_by_token(operator, backend, dtype, initial_state):
    """Against the recurrence itself. An odd length, no multiple of any block."""
    tensors = inputs(operator, 1, size(517, 37), dtype, initial_state=initial_state)
    assert_as_good_as_the_reference(operator, backend, tensors, "reference")


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "seqlen"), [(2, 4099), (33, 512)], ids=str)
def test_long_and_many(operator, backend, dtype, batch, seqlen):
    """Against the `torch` backend, which answers to the reference in tests/ops."""
    tensors = inputs(operator, size(batch, 2), size(seqlen, 65), dtype, initial_state=False)
    assert_as_good_as_the_reference(operator, backend, tensors, "torch")


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("initial_state", [False, True], ids=["zeros", "state"])
def test_packed_and_padded(operator, backend, dtype, initial_state):
    tensors = inputs(operator, 2, size(333, 37), dtype, initial_state=initial_state)
    assert_as_good_as_the_reference(operator, backend, tensors, "reference", **rows(2, size(333, 37)))


@every
@pytest.mark.parametrize("seqlen", [1, 2, 3, 15, 63, 64, 65, 127, 129, 255, 257])
def test_odd_lengths(operator, backend, seqlen):
    tensors = inputs(operator, 3, seqlen)
    assert_as_good_as_the_reference(operator, backend, tensors, "reference")


@every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(operator, backend, layout):
    def laid_out(**tensors):
        return call(operator, backend)(**{name: LAYOUTS[layout](t) for name, t in tensors.items()})

    tensors = inputs(operator, 2, size(261, 37))
    want = outputs_and_grads(operator("torch"), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(laid_out, tensors), want, 5e-5)


@every
@pytest.mark.parametrize("cut", [1, 64, 200])
def test_a_cut_is_no_cut(operator, backend, cut):
    """The second part from the state in which the first ended; gradients through it."""
    if not operator.causal:
        pytest.skip("it has no state to go on from")
    seqlen, cut = size(401, 41), size(cut, min(cut, 16))
    tensors = inputs(operator, 2, seqlen)

    def in_two(initial_state, **given):
        head, state = call(operator, backend)(**operator.tokens(given, slice(None, cut)), initial_state=initial_state)
        tail, state = call(operator, backend)(**operator.tokens(given, slice(cut, None)), initial_state=state)
        return torch.cat([head, tail], dim=1), state

    want = outputs_and_grads(operator("torch"), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(in_two, tensors), want, 5e-5)


@every
def test_one_large_step(operator, backend):
    """It empties the state and must not take its neighbours' precision along."""
    if operator in (CONV, CENTRED):
        pytest.skip("it has no steps")
    tensors = inputs(operator, 1, size(300, 40), initial_state=False)
    for name in tensors:
        if name.startswith("dt") and name != "dt_bias":
            tensors[name][:, 20] = 1e4
    tensors["x"][:, 20] *= 1e-4
    want = outputs_and_grads(operator("torch"), cast(tensors, torch.float64))
    got = outputs_and_grads(call(operator, backend), tensors)
    for name in ("A", "dt_bias"):  # rounding errors of the others are multiplied with that step
        got.pop(f"d_{name}", None), want.pop(f"d_{name}", None)
    assert_near(got, want, 5e-5)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_twice_the_same_bits(operator, backend, dtype):
    if backend in ("mamba_ssm", "causal_conv1d"):
        pytest.skip("another package's kernel, which adds gradients up in any order")
    batch, seqlen = size(4, 2), size(2051, 70)
    tensors = inputs(operator, batch, seqlen, dtype)
    first, second = (outputs_and_grads(call(operator, backend, **rows(batch, seqlen)), tensors) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


NORMS = [(name, backend) for name in ("rms_norm", "gated_rms_norm") for backend in backends(name)]


def norm(name: str, backend: str, **tensors: torch.Tensor) -> torch.Tensor:
    if name == "rms_norm":
        return rms_norm(tensors["x"], tensors["weight"], eps=1e-5, backend=backend)
    return gated_rms_norm(**tensors, eps=1e-5, norm_before_gate=False, backend=backend)


def norm_inputs(name: str, *shape: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {"x": torch.randn(shape, device=DEVICE), "weight": torch.rand(shape[-1], device=DEVICE)}
    if name != "rms_norm":
        tensors["gate"] = torch.randn(shape, device=DEVICE)
    return cast(tensors, dtype)


@pytest.mark.parametrize(("name", "backend"), NORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2049, 1536), (65, 5120), (7, 1000)], ids=str)
def test_norms(name, backend, dtype, shape):
    tensors = norm_inputs(name, *(shape if not REHEARSAL else (5, 100)), dtype=dtype)

    def run(backend):
        return lambda **given: norm(name, backend, **given)

    exact = outputs_and_grads(run("reference"), cast(tensors, torch.float64))
    got, same = (outputs_and_grads(run(which), tensors) for which in (backend, "reference"))
    again = outputs_and_grads(run(backend), tensors)
    for key, want in exact.items():
        scale = max(1.0, want.abs().max().item())
        errors = [(result[key].double() - want).abs().max().item() / scale for result in (got, same)]
        assert errors[0] <= 2 * errors[1] + 1e-5, key
        assert torch.equal(got[key], again[key])


# --- beyond 2**31 elements -----------------------------------------------------------------------------------------


@on_a_gpu
@every
@pytest.mark.parametrize("grown", ["seqlen", "batch"])
def test_more_than_2_31_elements(operator, backend, grown):
    """The last sequence of so many elements is what it is alone, forward and backward. In bfloat16, some 40 GB."""
    if backend != "triton":
        pytest.skip("another package's kernel")
    if torch.cuda.mem_get_info()[0] < 70 * 2**30:
        pytest.skip("needs 70 GiB of free device memory")
    wide = {
        "causal_conv1d": {"channels": 4096},
        "centred_conv1d": {"channels": 4096},
        "selective_scan": {"d_inner": 4096},
        "ssd": {"nheads": 64},
        "quasiseparable": {"nheads": 64},
    }[operator.name]
    tail, width = 200, 4096
    tokens = 2**31 // width + tail + 1
    alone = inputs(operator, 1, tail, torch.bfloat16, initial_state=False, **wide)
    batch, seqlen = (1, tokens) if grown == "seqlen" else (-(-tokens // tail) + 1, tail)
    large = {}
    for name, t in alone.items():
        if name not in operator.per_token:
            large[name] = t
            continue
        value = torch.empty(batch, seqlen, *t.shape[2:], dtype=t.dtype, device=t.device).normal_()
        value[-1, -tail:] = t[0]
        large[name] = value
    options = {}
    if grown == "seqlen":
        options["seq_idx"] = (torch.arange(seqlen, device=DEVICE) >= seqlen - tail).int()[None]
    assert large["x"].numel() > 2**31

    def run(tensors, **options):
        leaves = {name: t.requires_grad_() for name, t in tensors.items()}
        out = tensors_of(operator(backend, **options)(**leaves))[0]
        cotangent = torch.zeros_like(out)
        cotangent[-1, -tail:] = torch.arange(out[-1, -tail:].numel(), device=DEVICE).view(out[-1, -tail:].shape).sin()
        grads = torch.autograd.grad(out, [leaves[name] for name in operator.per_token if name in leaves], cotangent)
        return [t[-1, -tail:].detach().clone() for t in (out, *grads)]

    for got, want in zip(run(large, **options), run(alone), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


@on_a_gpu
@every
def test_rows_that_lie_far_apart(operator, backend):
    """Strides beyond 2**31, in tensors that are small themselves."""
    if backend != "triton":
        pytest.skip("another package's kernel")
    tensors = inputs(operator, 2, 100, torch.bfloat16)
    far = torch.empty(2**31 + tensors["x"][0].numel(), dtype=torch.bfloat16, device=DEVICE)
    apart = far.as_strided(tensors["x"].shape, (2**31, *tensors["x"].stride()[1:])).copy_(tensors["x"])
    results = []
    for x in (tensors["x"], apart):
        leaves = {name: t.requires_grad_() for name, t in (tensors | {"x": x.detach()}).items()}
        out = tensors_of(operator(backend)(**leaves))[0]
        results.append([out, *torch.autograd.grad(out.float().square().sum(), list(leaves.values()))])
    for near, distant in zip(*results, strict=True):
        assert torch.equal(near, distant)


# --- streams, devices, graphs ---------------------------------------------------------------------------------------


@on_a_gpu
@every
def test_current_stream(operator, backend):
    """Behind work that takes a while, on a stream that the default one does not wait for."""
    tensors = inputs(operator, 2, 260, initial_state=False)
    want = outputs_and_grads(call(operator, backend), tensors)  # compiles, too
    late = {name: torch.zeros_like(t) for name, t in tensors.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for name, t in tensors.items():
            late[name].copy_(t)
        got = outputs_and_grads(operator(backend), late)
    stream.synchronize()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@every
def test_second_device(operator, backend):
    tensors = inputs(operator, 2, 260)
    want = outputs_and_grads(call(operator, backend), tensors)
    assert torch.cuda.current_device() == 0
    got = outputs_and_grads(operator(backend), {name: t.to("cuda:1") for name, t in tensors.items()})
    assert torch.cuda.current_device() == 0
    for name in want:
        assert got[name].device.index == 1
        torch.testing.assert_close(got[name].to("cuda:0"), want[name], rtol=1e-5, atol=1e-5)


@on_a_gpu
@every
def test_never_waits_for_the_device(operator, backend):
    tensors = inputs(operator, 2, 260)
    seq_idx = rows(2, 260)["seq_idx"]
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}

    def step():
        results = tensors_of(call(operator, backend, seq_idx=seq_idx)(**leaves))
        torch.autograd.grad(results, list(leaves.values()), [torch.ones_like(t) for t in results])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replayed(function, tensors: dict[str, torch.Tensor]):
    """`function(**tensors)` captured in a graph, and what a replay gives once the tensors hold other values."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            function(**tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        results = tensors_of(function(**tensors))
    for name, t in tensors.items():
        t.copy_(t.roll(1, dims=-1) if name not in ("A",) else t)
    graph.replay()
    torch.cuda.synchronize()
    return results


@on_a_gpu
@every
@pytest.mark.parametrize("seqlen", [1, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured(operator, backend, seqlen, dtype):
    tensors = inputs(operator, 1, seqlen, dtype)
    results = replayed(call(operator, backend), tensors)
    for got, want in zip(results, tensors_of(operator(backend)(**tensors)), strict=True):
        assert torch.equal(got, want)


@on_a_gpu
@pytest.mark.parametrize("update", [causal_conv1d_update, selective_scan_update, ssd_update], ids=lambda f: f.__name__)
def test_captured_one_token_updates(update):
    operator = {"causal": CONV, "select": SCAN, "ssd_up": SSD}[update.__name__[:6]]
    given = operator.tokens(inputs(operator, 1, 1, torch.bfloat16), 0)
    given["state"] = given.pop("initial_state")

    def step(x, state, **rest):
        if operator is CONV:
            return update(x, state, rest["weight"], rest["bias"], activation="silu")
        return update(state, x, **rest, dt_softplus=True)

    results = replayed(step, given)
    for got, want in zip(results, step(**given), strict=True):
        assert torch.equal(got, want)


@every
@pytest.mark.parametrize("seqlen", [1, 130])
def test_compiled(operator, backend, seqlen):
    """By inductor, forward and backward: one graph, the same numbers."""
    if backend in ("mamba_ssm", "causal_conv1d"):
        pytest.skip("another package's kernel, which torch.compile may not see through")
    torch.compiler.reset()
    compiled = torch.compile(operator.function, fullgraph=True, backend="aot_eager" if REHEARSAL else "inductor")
    tensors = inputs(operator, 2, seqlen)
    options = {"backend": backend, **operator.options}
    want = outputs_and_grads(operator(backend), tensors)
    got = outputs_and_grads(lambda **given: compiled(**given, **options), tensors)
    assert_near(got, want, 1e-5)


# --- memory --------------------------------------------------------------------------------------------------------


@on_a_gpu
@every
def test_memory(operator, backend):
    """What grows with the sequence, forward and backward, is a few tensors as large as x; never one with a state for
    every token."""
    if backend != "triton":
        pytest.skip("another package's kernel")
    peaks = []
    for seqlen in (16384, 32768):
        tensors = inputs(operator, 1, seqlen, torch.bfloat16, initial_state=False)
        leaves = {name: t.requires_grad_() for name, t in tensors.items()}
        for _ in range(2):  # the first one compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = tensors_of(operator(backend)(**leaves))[0]
            torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
            del out
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
        given = sum(t.nbytes for t in tensors.values())
    # out, its cotangent, a gradient for every input, and as much again for states between chunks and partial sums
    assert peaks[1] - peaks[0] <= 0.5 * (2 * (given + 2 * tensors["x"].nbytes))


@on_a_gpu
def test_float32_is_not_tf32():
    """TF32 cuts the inputs to 10 bits: an error of some 1e-3, where float32's is below 1e-6 of the largest value."""
    for operator in (SSD, QUASISEPARABLE):
        for backend in backends(operator.name):
            tensors = inputs(operator, 1, 1024, initial_state=False)
            want = tensors_of(operator("torch")(**cast(tensors, torch.float64)))[0]
            got = tensors_of(operator(backend)(**tensors))[0].double()
            if backend == "triton":
                assert ((got - want).abs().max() / want.abs().max()).item() < 5e-6
