"""quasiseparable: against the dense matrix in float64, two scans put together, and the original's numbers."""

import math

import pytest
import torch
from memory import allocations
from op_cases import (
    DEVICE,
    QUASISEPARABLE,
    TOLERANCE,
    assert_near,
    cast,
    dtypes_of,
    error,
    outputs_and_grads,
    quasiseparable_inputs,
    set_chunks,
    usable,
)
from published import assert_as_published, cases

from hf_ssm.ops import quasiseparable, ssd

BACKENDS = usable("quasiseparable")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("per_segment", [1, 3])
@pytest.mark.parametrize("seqlen", [1, 2, 3, 4, 5, 8, 9, 11, 12, 13, 24, 31])  # around 4, 12 and their multiples
def test_agrees_with_reference(monkeypatch, backend, dtype, per_segment, seqlen):
    tensors = cast(quasiseparable_inputs(seqlen=seqlen), dtype)
    set_chunks(monkeypatch, "quasiseparable", tensors, chunk=4, per_segment=per_segment)
    want = outputs_and_grads(QUASISEPARABLE("reference"), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(QUASISEPARABLE(backend), tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqlen", [63, 64, 65, 600, 200, 256, 257])
def test_agrees_with_reference_in_chunks_as_shipped(backend, seqlen):
    tensors = quasiseparable_inputs(seqlen=seqlen)
    want = outputs_and_grads(QUASISEPARABLE("reference"), tensors)
    assert_near(outputs_and_grads(QUASISEPARABLE(backend), tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk_size", [1, 2, 7, 16, 1000])
def test_chunk_size_does_not_matter(backend, chunk_size):
    tensors = quasiseparable_inputs()
    want = outputs_and_grads(QUASISEPARABLE("reference"), tensors)
    assert_near(outputs_and_grads(QUASISEPARABLE(backend, chunk_size=chunk_size), tensors), want)


def two_scans(lengths, x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, **given):
    """The definition of the paper, with Mamba-2's scan token by token: shift(SS(x)) + flip(shift(SS(flip(x)))) + D x,
    every sequence of the given lengths by itself."""
    diagonal, D, dt_bias, initial_state = (given[n] for n in ("diagonal", "D", "dt_bias", "initial_state"))
    initial_state = initial_state.expand(x.shape[0], *initial_state.shape)

    def scan(tokens, flip, dt, B, C):
        part = [t[:, tokens].flip(1) if flip else t[:, tokens] for t in (x, dt, B, C)]
        read, _ = ssd(
            part[0],
            part[1],
            A,
            *part[2:],
            dt_bias=dt_bias,
            dt_softplus=True,
            initial_state=initial_state,
            backend="reference",
        )
        read = torch.nn.functional.pad(read, (0, 0, 0, 0, 1, 0))[:, :-1]
        return read.flip(1) if flip else read

    parts, start = [], 0
    for length in lengths:
        tokens = slice(start, start + length)
        start += length
        forward = scan(tokens, False, dt_forward, B_forward, C_forward)
        backward = scan(tokens, True, dt_backward, B_backward, C_backward)
        parts.append(forward + backward + (diagonal[:, tokens] + D)[..., None] * x[:, tokens])
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("lengths", [[23], [1], [1, 1, 1], [5, 1, 9, 2, 6]], ids=str)
def test_is_two_scans_shifted_and_a_diagonal(monkeypatch, backend, lengths):
    """The initial state, too, which is that of every packed sequence in either direction."""
    tensors = quasiseparable_inputs(seqlen=sum(lengths))
    set_chunks(monkeypatch, "quasiseparable", tensors, chunk=4, per_segment=2)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1).to(DEVICE)
    want = outputs_and_grads(lambda **given: two_scans(lengths, **given), tensors)
    assert_near(outputs_and_grads(QUASISEPARABLE(backend, seq_idx=seq_idx), tensors), want)


def test_initial_state_at_the_end_of_a_long_row():
    """In float32: the decay from a sequence's start is as exact behind 20,000 tokens as behind none."""
    tensors = cast(quasiseparable_inputs(1, 20_000, 2, 2, 1, 3), torch.float32)
    seq_idx = (torch.arange(20_000, device=DEVICE) >= 19_990).long()[None]
    out = quasiseparable(**tensors, dt_softplus=True, seq_idx=seq_idx)[:, 19_990:]
    alone = QUASISEPARABLE.tokens(tensors, slice(19_990, None))
    want = quasiseparable(**cast(alone, torch.float64), dt_softplus=True, backend="reference")
    assert error(out, want) <= TOLERANCE[torch.float32]


VARIANTS = {
    "bare": {"diagonal": False, "D": False, "dt_bias": False, "initial_state": False},
    "diagonal": {"D": False, "dt_bias": False, "initial_state": False},
    "D": {"diagonal": False, "dt_bias": False, "initial_state": False},
    "dt_bias": {"diagonal": False, "D": False, "initial_state": False},
    "initial state": {"diagonal": False, "D": False, "dt_bias": False},
    "ngroups 1": {"ngroups": 1},
    "ngroups nheads": {"ngroups": 4},
    "nheads 6, ngroups 3": {"nheads": 6, "ngroups": 3},
    "nheads 1": {"nheads": 1, "ngroups": 1},
    "headdim 1": {"headdim": 1},
    "d_state 1": {"d_state": 1},
    "batch 1": {"batch": 1},
}
STEP_SIZES = {
    "softplus": {"dt_softplus": True},
    "no softplus": {"dt_softplus": False},
    "limits": {"dt_softplus": True, "dt_limit": (0.3, 1.2)},
    "limits, no softplus": {"dt_softplus": False, "dt_limit": (0.1, 0.7)},
    "negative steps": {"dt_softplus": False, "dt_limit": (-math.inf, math.inf)},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step_size", STEP_SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_options(monkeypatch, backend, step_size, variant):
    tensors = quasiseparable_inputs(**VARIANTS[variant])
    if step_size == "negative steps":
        tensors["A"] *= 0.05  # they let the state grow: not beyond what a tolerance can tell apart
    set_chunks(monkeypatch, "quasiseparable", tensors, chunk=4, per_segment=2)
    want = outputs_and_grads(QUASISEPARABLE("reference", **STEP_SIZES[step_size]), tensors)
    assert_near(outputs_and_grads(QUASISEPARABLE(backend, **STEP_SIZES[step_size]), tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parameters", ["in the same", "in float32"])
def test_half_precision_is_as_good_as_the_reference(backend, dtype, parameters):
    tensors = cast(quasiseparable_inputs(seqlen=80), dtype)
    if parameters == "in float32":
        tensors |= cast({name: tensors[name] for name in ("A", "D", "dt_bias")}, torch.float32)
    exact = outputs_and_grads(QUASISEPARABLE("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(QUASISEPARABLE(name), tensors) for name in (backend, "reference"))
    for name, want in exact.items():
        assert got[name].dtype == tensors["x" if name == "out" else name.removeprefix("d_")].dtype, name
        limit = 2 * error(reference[name], want) + TOLERANCE[torch.float32]
        assert error(got[name], want) <= limit, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_strong_decay(backend):
    """Decays that leave nothing of a token after a few others: no inf - inf, no 0 * inf, in float32 either."""
    tensors = cast(quasiseparable_inputs(seqlen=100), torch.float32)
    tensors["A"] *= 200
    want = outputs_and_grads(QUASISEPARABLE("reference"), cast(tensors, torch.float64))
    got = outputs_and_grads(QUASISEPARABLE(backend), tensors)
    for name in want:  # two are sums over tokens of what is multiplied with A: the worst seen is 3.5e-5
        limit = 1e-4 if name in ("d_A", "d_dt_bias") else TOLERANCE[torch.float32]
        assert error(got[name], want[name]) <= limit, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [1e3, 1e6, 1e9])
def test_one_large_step(backend, step):
    """A token that makes the state forget all before it does not blur what comes behind it. (But A's gradient: in it
    rounding errors of the others are multiplied with that step.)"""
    tensors = cast(quasiseparable_inputs(seqlen=100, dt_bias=False, initial_state=False), torch.float32)
    for name in ("dt_forward", "dt_backward"):
        tensors[name][:, 10] = step
    tensors["x"][:, 10] /= step
    want = outputs_and_grads(QUASISEPARABLE("reference"), cast(tensors, torch.float64))
    got = outputs_and_grads(QUASISEPARABLE(backend), tensors)
    for name in want.keys() - {"d_A"}:
        assert error(got[name], want[name]) <= TOLERANCE[torch.float32], name


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("case", cases("quasiseparable"))
def test_published_numbers(backend, case):
    def original_names(diag, initial_states=None, **given):
        out = quasiseparable(**given, diagonal=diag, initial_state=initial_states, backend=backend, **case.arguments)
        return {"output": out}

    assert_as_published(case, original_names, dtypes_of(backend))


# the triton kernels choose their parts by what keeps a GPU busy, not by memory: it is measured there
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
def test_memory(monkeypatch, backend):
    """What grows with the sequence is a few tensors of (batch, seqlen, nheads, headdim), forward and backward."""
    nheads, headdim, d_state, chunk, per_segment = 4, 32, 32, 16, 8
    segment, width = chunk * per_segment, nheads * headdim
    probe = cast(quasiseparable_inputs(1, 1, nheads, headdim, 1, d_state, initial_state=False), torch.float32)
    set_chunks(monkeypatch, "quasiseparable", probe, chunk, per_segment)
    peaks = []
    for seqlen in (4 * segment, 8 * segment):
        tensors = quasiseparable_inputs(1, seqlen, nheads, headdim, 1, d_state, initial_state=False)
        tensors = {name: t.float().requires_grad_() for name, t in tensors.items()}
        forward, out = allocations(lambda: QUASISEPARABLE(backend)(**tensors))  # noqa: B023
        backward, _ = allocations(lambda: torch.autograd.grad(out.sum(), list(tensors.values())))  # noqa: B023
        assert max(forward.largest, backward.largest) <= 4 * seqlen * width  # bytes of x
        peaks.append((forward.peak, backward.peak))
    grown = [(long - short) / (4 * 4 * segment * width) for short, long in zip(*peaks, strict=True)]
    # in units of x, with 1 % for small vectors: out, each segment's two states, and a few numbers per token and head
    # (step sizes, what softplus's backward needs of them, the diagonal)
    assert grown[0] <= 1.01 * (1 + 2 * d_state / segment + 8 * nheads / width)
    # the gradients of x, of the four B and C, of dt and the diagonal; the state gradients of each segment
    assert grown[1] <= 1.01 * (1 + d_state / segment + (4 * d_state + 10 * nheads) / width)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4, 12)}, r"x has shape \(2, 4, 12\), expected \(batch, seqlen, nheads, headdim\)"),
        ({"dt_forward": torch.zeros(2, 4, 3)}, r"dt_forward has shape .* \(batch, seqlen, nheads\) = \(2, 4, 4\)"),
        ({"dt_backward": torch.zeros(2, 5, 4)}, r"dt_backward has shape \(2, 5, 4\)"),
        ({"diagonal": torch.zeros(2, 4, 4, 3)}, r"diagonal has shape .* \(batch, seqlen, nheads\) = \(2, 4, 4\)"),
        ({"A": torch.zeros(4, 5)}, r"A has shape \(4, 5\), expected \(nheads,\) = \(4,\)"),
        ({"B_forward": torch.zeros(2, 4, 5)}, r"B_forward has shape \(2, 4, 5\), expected .* with batch=2, seqlen=4"),
        ({"C_forward": torch.zeros(2, 4, 2, 6)}, r"C_forward has shape .* = \(2, 4, 2, 5\)"),
        ({"B_backward": torch.zeros(2, 4, 1, 5)}, r"B_backward has shape .* = \(2, 4, 2, 5\)"),
        ({"C_backward": torch.zeros(2, 3, 2, 5)}, r"C_backward has shape .* = \(2, 4, 2, 5\)"),
        (
            {f"{n}_{side}": torch.zeros(2, 4, 3, 5) for n in "BC" for side in ("forward", "backward")},
            r"ngroups=3 \(B_forward\) does not divide nheads=4",
        ),
        ({"D": torch.zeros(4, 3)}, r"D has shape \(4, 3\), expected \(nheads,\) = \(4,\)"),
        ({"dt_bias": torch.zeros(3)}, r"dt_bias has shape \(3,\)"),
        ({"dt_limit": (1.0, 0.5)}, r"dt_limit=\(1.0, 0.5\), expected \(smallest, largest\)"),
        ({"chunk_size": 0}, "chunk_size=0, expected at least 1"),
        ({"initial_state": torch.zeros(2, 4, 3, 5)}, r"initial_state has shape .* = \(4, 3, 5\)"),
        ({"seq_idx": torch.zeros(2, 4)}, "seq_idx is torch.float32, expected an integer type"),
        ({"mask": torch.ones(2, 3, dtype=torch.bool)}, r"mask has shape \(2, 3\), expected .* = \(2, 4\)"),
    ],
)
def test_errors(change, message):
    given = {"x": torch.zeros(2, 4, 4, 3), "A": torch.zeros(4)}
    given |= {f"dt_{side}": torch.zeros(2, 4, 4) for side in ("forward", "backward")}
    given |= {f"{n}_{side}": torch.zeros(2, 4, 2, 5) for n in "BC" for side in ("forward", "backward")}
    with pytest.raises(ValueError, match="^quasiseparable: " + message):
        quasiseparable(**{**given, **change})
