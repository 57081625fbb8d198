"""selective_scan: against its float64 reference and the original package's numbers; its memory."""

import pytest
import torch
from memory import allocations
from op_cases import (
    SCAN,
    TOLERANCE,
    assert_near,
    cast,
    dtypes_of,
    error,
    outputs_and_grads,
    positive_steps,
    scan_inputs,
    set_chunks,
    usable,
)
from published import assert_as_published, cases

from hf_ssm.ops import selective_scan, selective_scan_update

BACKENDS = usable("selective_scan")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("per_segment", [1, 3])
@pytest.mark.parametrize("seqlen", [1, 3, 4, 5, 8, 9, 11, 12, 13, 24, 31])  # around 4, 12 and their multiples
def test_agrees_with_reference(monkeypatch, backend, dtype, per_segment, seqlen):
    tensors = cast(scan_inputs(seqlen=seqlen), dtype)
    set_chunks(monkeypatch, "selective_scan", tensors, chunk=4, per_segment=per_segment)
    want = outputs_and_grads(SCAN("reference"), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(SCAN(backend), tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqlen", [15, 16, 17, 100])
def test_agrees_with_reference_in_chunks_as_shipped(backend, seqlen):
    tensors = scan_inputs(seqlen=seqlen)
    assert_near(outputs_and_grads(SCAN(backend), tensors), outputs_and_grads(SCAN("reference"), tensors))


VARIANTS = {
    "bare": {"D": False, "z": False, "dt_bias": False, "initial_state": False},
    "D": {"z": False, "dt_bias": False, "initial_state": False},
    "z": {"D": False, "dt_bias": False, "initial_state": False},
    "dt_bias": {"D": False, "z": False, "initial_state": False},
    "D, z": {"dt_bias": False, "initial_state": False},
    "no initial state": {"initial_state": False},
    "no group axis": {"ngroups": None},
    "ngroups 1": {"ngroups": 1},
    "ngroups 3": {"ngroups": 3},
    "ngroups d_inner": {"ngroups": 6},
    "d_state 1": {"d_state": 1},
    "d_inner 1": {"d_inner": 1, "ngroups": 1},
    "batch 1": {"batch": 1},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softplus", [True, False], ids=["softplus", "no-softplus"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_options(monkeypatch, backend, softplus, variant):
    tensors = scan_inputs(**VARIANTS[variant])
    tensors = tensors if softplus else positive_steps(tensors)
    set_chunks(monkeypatch, "selective_scan", tensors, chunk=4, per_segment=2)
    want = outputs_and_grads(SCAN("reference", dt_softplus=softplus), tensors)
    assert_near(outputs_and_grads(SCAN(backend, dt_softplus=softplus), tensors), want)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("single", ["B", "C"])
def test_one_group_serves_all_groups_of_the_other(backend, single):
    tensors = scan_inputs(ngroups=3)
    tensors[single] = tensors[single][:, :, :1]

    def repeated(**given):
        return SCAN("reference")(**{**given, single: given[single].expand(-1, -1, 3, -1)})

    want = outputs_and_grads(repeated, tensors)
    assert_near(outputs_and_grads(SCAN(backend), tensors), want)
    no_group_axis = {**tensors, single: tensors[single][:, :, 0]}
    want[f"d_{single}"] = want[f"d_{single}"][:, :, 0]
    assert_near(outputs_and_grads(SCAN(backend), no_group_axis), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("through", ["out", "state"])
def test_gradient_of_one_output_only(backend, through):
    tensors = scan_inputs()
    want = outputs_and_grads(SCAN("reference"), tensors, through)
    assert_near(outputs_and_grads(SCAN(backend), tensors, through), want)


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
    tensors = scan_inputs(seqlen=64)
    tensors = cast(tensors, {name: dtypes.get(name, dtypes["all"]) for name in tensors})
    exact = outputs_and_grads(SCAN("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(SCAN(name), tensors) for name in (backend, "reference"))
    for name, want in exact.items():
        given = tensors["x" if name == "out" else name.removeprefix("d_")].dtype if name != "final_state" else None
        assert got[name].dtype == (given or torch.float32), name
        limit = 2 * error(reference[name], want) + TOLERANCE[torch.float32]
        assert error(got[name], want) <= limit, name


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("case", cases("selective_scan", "update"))
def test_published_numbers(backend, case):
    def original_layout(u, delta, A, B, C, D=None, z=None, delta_bias=None):
        out, state = selective_scan(
            u.mT,
            delta.mT,
            A,
            _token_major(B, u),
            _token_major(C, u),
            D,
            None if z is None else z.mT,
            delta_bias,
            dt_softplus=case.arguments["delta_softplus"],
            backend=backend,
        )
        return {"out": out.mT, "last_state": state}

    assert_as_published(case, original_layout, dtypes_of(backend))


def _token_major(B, u):
    """(dim, n), one for all tokens | (batch, n, seqlen) | (batch, groups, n, seqlen) -> (batch, seqlen, groups, n)"""
    if B.ndim == 2:
        return B.expand(u.shape[0], u.shape[2], *B.shape)
    return B.mT if B.ndim == 3 else B.permute(0, 3, 1, 2)


@pytest.mark.parametrize("case", cases("selective_scan", "variable", "constant", "grouped"))
def test_published_one_token_updates(case):
    """`selective_state_update_ref`, without and with heads: a head's channels are channels, its group that of them."""
    given = {name: t.double() for name, t in case.inputs.items()}
    if given["x"].ndim == 3:
        channels = ("x", "dt", "z", "state")
        given = {name: t.flatten(1, 2) if name in channels else t for name, t in given.items()}
        given = {name: t.flatten(0, 1) if name in ("A", "D", "dt_bias") else t for name, t in given.items()}
    before = given["state"].clone()
    out, state = selective_scan_update(**given, dt_softplus=case.arguments["dt_softplus"])
    assert torch.equal(given["state"], before), "the old state is left as it was"
    for key, got in (("out", out), ("new_state", state)):
        difference = (got.view(case.outputs[key].shape) - case.outputs[key].double()).abs().max().item()
        assert difference <= 1.01 * case.rounding[key] + 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory(monkeypatch, backend):
    """Neither forward nor backward ever hold (batch, seqlen, d_inner, d_state), and what grows with the sequence is a
    few tensors of (batch, seqlen, d_inner)."""
    d_inner, d_state, chunk, per_segment = 64, 16, 4, 16
    segment = chunk * per_segment
    probe = cast(scan_inputs(1, 1, d_inner, d_state, 1), torch.float32)
    set_chunks(monkeypatch, "selective_scan", probe, chunk, per_segment)
    side_by_side = written_out = 0
    if backend == "triton":  # as shipped, but in one chunk: chunks that fill a GPU are as many for any length
        monkeypatch.undo()
        monkeypatch.setattr("hf_ssm.ops.triton.selective_scan.WANTED_PROGRAMS", 1)
        side_by_side = 2 * d_state / d_inner  # B and C once more, and in backward their gradients, too
        written_out = 1  # the gradient of a sum, which comes expanded
    peaks = []
    for seqlen in (4 * segment, 8 * segment):
        tensors = cast(scan_inputs(1, seqlen, d_inner, d_state, 1), torch.float32)
        tensors = {name: t.requires_grad_() for name, t in tensors.items()}
        forward, (out, state) = allocations(lambda: SCAN(backend)(**tensors))  # noqa: B023
        loss = out.sum() + state.sum()
        backward, _ = allocations(lambda: torch.autograd.grad(loss, list(tensors.values())))  # noqa: B023
        one_segment = 4 * segment * d_inner * d_state * (chunk + 1) // chunk  # bytes
        assert max(forward.largest, backward.largest) <= one_segment
        peaks.append((forward.peak, backward.peak))
    grown = [(long - short) / (4 * 4 * segment * d_inner) for short, long in zip(*peaks, strict=True)]
    # in units of (batch, seqlen, d_inner), with 1 % for small vectors:
    kept = 2 * d_state / segment  # each segment's state, in a list and then stacked
    gradients = 3 + 2 * d_state / d_inner  # of x, dt and z, and of B and C
    assert grown[0] <= 1.01 * (1 + kept + side_by_side)
    assert grown[1] <= 1.01 * (gradients + 2 * side_by_side + written_out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4)}, r"x has shape \(2, 4\), expected \(batch, seqlen, d_inner\)"),
        ({"dt": torch.zeros(2, 4, 5)}, r"dt has shape \(2, 4, 5\), expected \(batch, seqlen, d_inner\) = \(2, 4, 6\)"),
        ({"A": torch.zeros(5, 3)}, r"A has shape \(5, 3\), expected \(d_inner, d_state\) with d_inner=6"),
        ({"B": torch.zeros(2, 4, 5)}, r"B has shape \(2, 4, 5\), expected .* = \(2, 4, 3\)"),
        ({"C": torch.zeros(2, 5, 2, 3)}, r"C has shape \(2, 5, 2, 3\), expected .* = \(2, 4, \[ngroups,\] 3\)"),
        ({"B": torch.zeros(2, 4, 4, 3)}, r"ngroups=4 \(B\) does not divide d_inner=6 \(x\)"),
        ({"B": torch.zeros(2, 4, 2, 3), "C": torch.zeros(2, 4, 3, 3)}, "B has 2 groups and C has 3"),
        ({"D": torch.zeros(1)}, r"D has shape \(1,\), expected \(d_inner,\) = \(6,\)"),
        ({"dt_bias": torch.zeros(6, 1)}, r"dt_bias has shape \(6, 1\)"),
        ({"z": torch.zeros(2, 4, 1)}, r"z has shape \(2, 4, 1\)"),
        ({"initial_state": torch.zeros(2, 3, 6)}, r"initial_state has shape \(2, 3, 6\), expected .* = \(2, 6, 3\)"),
        ({"seq_idx": torch.zeros(4, 2, dtype=torch.int32)}, r"seq_idx has shape \(4, 2\)"),
        ({"seq_idx": torch.zeros(2, 4, dtype=torch.bool)}, r"seq_idx is torch.bool, expected an integer type"),
        ({"mask": torch.ones(2, 4)}, r"mask is torch.float32, expected bool"),
    ],
)
def test_errors(change, message):
    given = {"x": torch.zeros(2, 4, 6), "dt": torch.zeros(2, 4, 6), "A": torch.zeros(6, 3)}
    given |= {"B": torch.zeros(2, 4, 3), "C": torch.zeros(2, 4, 3), **change}
    with pytest.raises(ValueError, match="^selective_scan: " + message):
        selective_scan(**given)
