"""ssd: against its float64 reference, Mamba-1's scan, and the original package's numbers; its memory."""

import math

import pytest
import torch
from memory import allocations
from op_cases import (
    SSD,
    TOLERANCE,
    assert_near,
    cast,
    dtypes_of,
    error,
    outputs_and_grads,
    set_chunks,
    ssd_inputs,
    usable,
)
from published import assert_as_published, cases

from hf_ssm.ops import selective_scan, ssd, ssd_update

BACKENDS = usable("ssd")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("per_segment", [1, 3])
@pytest.mark.parametrize("seqlen", [1, 3, 4, 5, 8, 9, 11, 12, 13, 24, 31])  # around 4, 12 and their multiples
def test_agrees_with_reference(monkeypatch, backend, dtype, per_segment, seqlen):
    tensors = cast(ssd_inputs(seqlen=seqlen), dtype)
    set_chunks(monkeypatch, "ssd", tensors, chunk=4, per_segment=per_segment)
    want = outputs_and_grads(SSD("reference"), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(SSD(backend), tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqlen", [63, 64, 65, 600, 200, 256, 257])
def test_agrees_with_reference_in_chunks_as_shipped(backend, seqlen):
    tensors = ssd_inputs(seqlen=seqlen)
    assert_near(outputs_and_grads(SSD(backend), tensors), outputs_and_grads(SSD("reference"), tensors))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk_size", [1, 2, 7, 16, 1000])
def test_chunk_size_does_not_matter(backend, chunk_size):
    tensors = ssd_inputs()
    want = outputs_and_grads(SSD("reference"), tensors)
    assert_near(outputs_and_grads(SSD(backend, chunk_size=chunk_size), tensors), want)


VARIANTS = {
    "bare": {"D": None, "z": False, "dt_bias": False, "initial_state": False},
    "D per head": {"z": False, "dt_bias": False, "initial_state": False},
    "D per channel": {"D": "channel", "z": False, "dt_bias": False, "initial_state": False},
    "z": {"D": None, "dt_bias": False, "initial_state": False},
    "dt_bias": {"D": None, "z": False, "initial_state": False},
    "D per channel, z": {"D": "channel", "dt_bias": False},
    "no initial state": {"initial_state": False},
    "ngroups 1": {"ngroups": 1},
    "ngroups nheads": {"ngroups": 4},
    "nheads 6, ngroups 3": {"nheads": 6, "ngroups": 3},
    "nheads 1": {"nheads": 1, "ngroups": 1},
    "headdim 1": {"headdim": 1, "D": "channel"},
    "d_state 1": {"d_state": 1},
    "batch 1": {"batch": 1},
}
STEP_SIZES = {
    "softplus": {"dt_softplus": True},
    "no softplus": {"dt_softplus": False},
    "limits": {"dt_softplus": True, "dt_limit": (0.3, 1.2)},
    "limits, no softplus": {"dt_softplus": False, "dt_limit": (0.1, 0.7)},
    "upper limit": {"dt_softplus": True, "dt_limit": (0, 0.5)},
    "negative steps": {"dt_softplus": False, "dt_limit": (-math.inf, math.inf)},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step_size", STEP_SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_options(monkeypatch, backend, step_size, variant):
    tensors = ssd_inputs(**VARIANTS[variant])
    if step_size == "negative steps":
        tensors["A"] *= 0.05  # they let the state grow: not beyond what a tolerance can tell apart
    set_chunks(monkeypatch, "ssd", tensors, chunk=4, per_segment=2)
    want = outputs_and_grads(SSD("reference", **STEP_SIZES[step_size]), tensors)
    assert_near(outputs_and_grads(SSD(backend, **STEP_SIZES[step_size]), tensors), want)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("seqlen", [1, 6])
def test_step_size_stays_within_its_limits(backend, seqlen):
    """The definition: clamp(softplus(dt + dt_bias), *dt_limit); by default to at least 0, as published."""
    tensors = ssd_inputs(seqlen=seqlen)
    assert (tensors["dt"] < 0).any()

    def clamped_before(low, high, softplus, dt, dt_bias, **given):
        dt = dt + dt_bias
        dt = (torch.nn.functional.softplus(dt) if softplus else dt).clamp(low, high)
        return SSD("reference", dt_softplus=False, dt_limit=(-math.inf, math.inf))(dt=dt, **given)

    for low, high in ((0.3, 0.9), (0.0, math.inf), (-math.inf, 0.2)):
        for softplus in (True, False):
            want = outputs_and_grads(
                lambda **given: clamped_before(low, high, softplus, **given),  # noqa: B023
                tensors,
            )
            got = outputs_and_grads(SSD(backend, dt_softplus=softplus, dt_limit=(low, high)), tensors)
            assert_near(got, want)
            if (low, high) == (0.0, math.inf):
                assert_near(outputs_and_grads(SSD(backend, dt_softplus=softplus), tensors), want)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_is_a_selective_scan_with_one_decay_per_head(backend):
    """The same numbers from the other operator: Mamba-1's scan over nheads * headdim channels, A repeated."""

    def as_mamba1(x, dt, A, B, C, D, z, dt_bias, initial_state):
        headdim, d_state = x.shape[3], B.shape[3]

        def per_channel(t, dim):
            return t.repeat_interleave(headdim, dim=dim)

        out, state = selective_scan(
            x.flatten(2),
            per_channel(dt, 2),
            per_channel(A, 0)[:, None].expand(-1, d_state),
            B,
            C,
            per_channel(D, 0),
            z.flatten(2),
            per_channel(dt_bias, 0),
            dt_softplus=True,
            initial_state=initial_state.flatten(1, 2),
            backend="reference",
        )
        return out.view(x.shape), state.view(initial_state.shape)

    tensors = ssd_inputs()
    assert_near(outputs_and_grads(SSD(backend), tensors), outputs_and_grads(as_mamba1, tensors))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("through", ["out", "state"])
def test_gradient_of_one_output_only(backend, through):
    tensors = ssd_inputs()
    want = outputs_and_grads(SSD("reference"), tensors, through)
    assert_near(outputs_and_grads(SSD(backend), tensors, through), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtypes",
    [
        {"all": torch.bfloat16},
        {"all": torch.float16},
        {"all": torch.bfloat16, "dt": torch.float32, "A": torch.float32, "D": torch.float32, "dt_bias": torch.float32},
        {"all": torch.float32, "B": torch.bfloat16, "C": torch.float16, "z": torch.bfloat16, "D": torch.float64},
    ],
    ids=["bfloat16", "float16", "bfloat16 with float32 parameters", "a mixture"],
)
def test_half_precision_is_as_good_as_the_reference(backend, dtypes):
    """And every gradient has its input's dtype, the state that of the computation."""
    tensors = ssd_inputs(seqlen=80)
    tensors = cast(tensors, {name: dtypes.get(name, dtypes["all"]) for name in tensors})
    exact = outputs_and_grads(SSD("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(SSD(name), tensors) for name in (backend, "reference"))
    for name, want in exact.items():
        given = tensors["x" if name == "out" else name.removeprefix("d_")].dtype if name != "final_state" else None
        assert got[name].dtype == (given or torch.float32), name
        limit = 2 * error(reference[name], want) + TOLERANCE[torch.float32]
        assert error(got[name], want) <= limit, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_strong_decay(backend):
    """Decays that leave nothing of a token after a few others: no inf - inf, no 0 * inf, in float32 either."""
    tensors = cast(ssd_inputs(seqlen=100), torch.float32)
    tensors["A"] *= 200
    want = outputs_and_grads(SSD("reference"), cast(tensors, torch.float64))
    got = outputs_and_grads(SSD(backend), tensors)
    for name in want:  # two are sums over tokens of what is multiplied with A: the worst seen is 3.5e-5
        limit = 1e-4 if name in ("d_A", "d_dt_bias") else TOLERANCE[torch.float32]
        assert error(got[name], want[name]) <= limit, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [1e3, 1e6, 1e9])
def test_one_large_step(backend, step):
    """A token that makes the state forget all before it does not blur what comes behind it. (But A's gradient: in it
    rounding errors of the others are multiplied with that step.)"""
    tensors = cast(ssd_inputs(seqlen=100, dt_bias=False, initial_state=False), torch.float32)
    for name in ("dt",):
        tensors[name][:, 10] = step
    tensors["x"][:, 10] /= step
    want = outputs_and_grads(SSD("reference"), cast(tensors, torch.float64))
    got = outputs_and_grads(SSD(backend), tensors)
    for name in want.keys() - {"d_A"}:
        assert error(got[name], want[name]) <= TOLERANCE[torch.float32], name


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("case", cases("ssd"))
def test_published_numbers(backend, case):
    options = {name: tuple(v) if name == "dt_limit" else v for name, v in case.arguments.items()}

    def original_names(x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None):
        out, state = ssd(
            x, dt, A, B, C, D, z, dt_bias, initial_state=initial_states, seq_idx=seq_idx, backend=backend, **options
        )
        return {"out": out, "final_states": state}

    assert_as_published(case, original_names, dtypes_of(backend))


@pytest.mark.parametrize("D", ["head", "channel", None])
def test_one_token_updates(D):
    tensors = ssd_inputs(seqlen=7, D=D)
    options = {"dt_softplus": True, "dt_limit": (0.2, 1.0)}
    want, want_state = SSD("reference", **options)(**tensors)
    state = tensors.pop("initial_state")
    for t in range(7):
        before = state.clone()
        out, new_state = ssd_update(state, **SSD.tokens(tensors, t), **options)
        assert torch.equal(state, before), "the old state is left as it was"
        state = new_state
        torch.testing.assert_close(out, want[:, t], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, want_state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("D", ["head", "channel"])
def test_compiled_with_symbolic_sizes(D):
    """A parameter's sizes stay numbers beside the symbolic ones of x."""
    torch.compiler.reset()
    tensors = cast(ssd_inputs(D=D), torch.float32)
    tensors["D"] = torch.nn.Parameter(tensors["D"])
    compiled = torch.compile(ssd, dynamic=True, fullgraph=True, backend="eager")
    assert_near({"y": compiled(**tensors)[0]}, {"y": ssd(**tensors)[0]}, TOLERANCE[torch.float32])


# the triton kernels choose their parts by what keeps a GPU busy, not by memory: it is measured there
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
def test_memory(monkeypatch, backend):
    """What grows with the sequence is a few tensors of (batch, seqlen, nheads, headdim), forward and backward."""
    nheads, headdim, d_state, chunk, per_segment = 4, 32, 32, 16, 8
    segment, width = chunk * per_segment, nheads * headdim
    probe = cast(ssd_inputs(1, 1, nheads, headdim, 1, d_state), torch.float32)
    set_chunks(monkeypatch, "ssd", probe, chunk, per_segment)
    peaks = []
    for seqlen in (4 * segment, 8 * segment):
        tensors = cast(ssd_inputs(1, seqlen, nheads, headdim, 1, d_state), torch.float32)
        tensors = {name: t.requires_grad_() for name, t in tensors.items()}
        forward, (out, state) = allocations(lambda: SSD(backend)(**tensors))  # noqa: B023
        loss = out.sum() + state.sum()
        backward, _ = allocations(lambda: torch.autograd.grad(loss, list(tensors.values())))  # noqa: B023
        assert max(forward.largest, backward.largest) <= 4 * seqlen * width  # bytes of x
        peaks.append((forward.peak, backward.peak))
    grown = [(long - short) / (4 * 4 * segment * width) for short, long in zip(*peaks, strict=True)]
    # in units of x, with 1 % for small vectors:
    assert grown[0] <= 1.01 * (1 + 2 * d_state / segment)  # out, and each segment's state, in a list and then stacked
    assert grown[1] <= 1.01 * (2 + (2 * d_state + nheads) / width)  # the gradients of x and z, of B, C and dt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4, 12)}, r"x has shape \(2, 4, 12\), expected \(batch, seqlen, nheads, headdim\)"),
        ({"dt": torch.zeros(2, 4, 3)}, r"dt has shape \(2, 4, 3\), expected \(batch, seqlen, nheads\) = \(2, 4, 4\)"),
        ({"A": torch.zeros(4, 5)}, r"A has shape \(4, 5\), expected \(nheads,\) = \(4,\)"),
        ({"B": torch.zeros(2, 4, 5)}, r"B has shape \(2, 4, 5\), expected .* with batch=2, seqlen=4"),
        ({"C": torch.zeros(2, 4, 2, 6)}, r"C has shape \(2, 4, 2, 6\), expected .* = \(2, 4, 2, 5\)"),
        ({"B": torch.zeros(2, 4, 3, 5), "C": torch.zeros(2, 4, 3, 5)}, r"ngroups=3 \(B\) does not divide nheads=4"),
        ({"D": torch.zeros(3)}, r"D has shape \(3,\), expected \(nheads,\) or \(nheads, headdim\) = \(4, 3\)"),
        ({"z": torch.zeros(2, 4, 4)}, r"z has shape \(2, 4, 4\)"),
        ({"dt_bias": torch.zeros(3)}, r"dt_bias has shape \(3,\)"),
        ({"dt_limit": (1.0, 0.5)}, r"dt_limit=\(1.0, 0.5\), expected \(smallest, largest\)"),
        ({"chunk_size": 0}, "chunk_size=0, expected at least 1"),
        ({"initial_state": torch.zeros(2, 4, 5, 3)}, r"initial_state has shape .* = \(2, 4, 3, 5\)"),
        ({"seq_idx": torch.zeros(2, 4)}, "seq_idx is torch.float32, expected an integer type"),
        ({"mask": torch.ones(2, 3, dtype=torch.bool)}, r"mask has shape \(2, 3\), expected .* = \(2, 4\)"),
    ],
)
def test_errors(change, message):
    given = {"x": torch.zeros(2, 4, 4, 3), "dt": torch.zeros(2, 4, 4), "A": torch.zeros(4)}
    given |= {"B": torch.zeros(2, 4, 2, 5), "C": torch.zeros(2, 4, 2, 5), **change}
    with pytest.raises(ValueError, match="^ssd: " + message):
        ssd(**given)
