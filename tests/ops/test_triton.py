"""The triton kernels themselves, interpreted where there is no GPU: across what a program takes at a time, as shipped;
their registration; the row in the operators' tables."""

import pytest
import torch
from op_cases import (
    CENTRED,
    CONV,
    DEVICE,
    SCAN,
    TOLERANCE,
    assert_near,
    cast,
    conv_inputs,
    error,
    outputs_and_grads,
    scan_inputs,
    set_chunks,
    usable,
)

from hf_ssm.ops import backends, triton

if "triton" not in usable("selective_scan"):
    pytest.skip("triton is not installed", allow_module_level=True)

from hf_ssm.ops.triton import causal_conv1d as conv_kernels
from hf_ssm.ops.triton import rms_norm as norm_kernels
from hf_ssm.ops.triton import selective_scan as scan_kernels


def sequences(seqlen: int, *ends: int, batch: int = 2) -> torch.Tensor:
    """Rows of sequences that end before `ends`."""
    positions = torch.arange(seqlen, device=DEVICE).repeat(batch, 1)
    return torch.bucketize(positions, torch.tensor(ends, device=DEVICE), right=True)


def check(operator, tensors, **rows):
    tensors = cast(tensors, torch.float32)
    want = outputs_and_grads(operator("reference", **rows), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(operator("triton", **rows), tensors), want)


# --- selective_scan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_scan_of_chained_chunks(packed):
    """Chunks, segments and tiles as shipped; a chunk without a restart between two with one, which both ends of the
    chain must get across."""
    seqlen = 2 * scan_kernels.SHORTEST_CHUNK + 7
    cut = scan_kernels._Cut(
        *(torch.empty(shape, device=DEVICE) for shape in ((1, seqlen, 4), (4, 2), (1, seqlen, 1, 2))), 64
    )
    assert cut.chunks == 3
    rows = {"seq_idx": sequences(seqlen, 20, 64, batch=1)} if packed else {}
    check(SCAN, scan_inputs(1, seqlen, 4, 2, 1), **rows)


def test_scan_of_rows_that_need_no_chunks(monkeypatch):
    monkeypatch.setattr(scan_kernels, "ENOUGH_PROGRAMS", 1)
    check(SCAN, scan_inputs(1, scan_kernels.SEGMENT + 5, 3, 2, 1), seq_idx=sequences(37, 12, batch=1))


def test_scan_of_several_blocks_of_channels():
    d_inner = 2 * (scan_kernels.BACKWARD_CHANNELS + 2)  # two groups of two blocks
    check(SCAN, scan_inputs(1, 3, d_inner, 2, 2))


def test_a_huge_step_between_small_ones():
    """It empties the state and must not take its neighbours' precision along."""
    tensors = scan_inputs(1, 40, 3, 2, 1)
    tensors["dt"] = tensors["dt"] - 4
    tensors["dt"][:, 20] = 1e4
    tensors["x"][:, 20] *= 1e-4
    check(SCAN, tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scan_in_half_precision(monkeypatch, dtype):
    """As `test_half_precision_is_as_good_as_the_reference`, which takes long when it is interpreted."""
    tensors = cast(scan_inputs(1, 9, 4, 2, 1), dtype)
    set_chunks(monkeypatch, "selective_scan", tensors, 4, 1)
    exact = outputs_and_grads(SCAN("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(SCAN(name), tensors) for name in ("triton", "reference"))
    for name, want in exact.items():
        assert got[name].dtype == reference[name].dtype, name
        assert error(got[name], want) <= 2 * error(reference[name], want) + TOLERANCE[torch.float32], name


@pytest.mark.parametrize("d_state", [1, 5, 16])
@pytest.mark.parametrize(
    "options", [{}, {"D": False, "z": False, "dt_bias": False}, {"initial_state": False}], ids=str
)
def test_one_token_past_the_dispatcher(d_state, options):
    """The kernel for decoding, without and with the state that backward wants."""
    tensors = cast(scan_inputs(3, 1, 6, d_state, 2, **options), torch.float32)
    out, state = SCAN("triton")(**tensors)
    want_out, want_state = SCAN("reference")(**cast(tensors, torch.float64))
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), want_state.double(), rtol=1e-5, atol=1e-5)
    if d_state == 1:
        check(SCAN, tensors)


# --- convolutions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "width", "state"), [(CONV, 4, True), (CONV, 2, False), (CENTRED, 7, False)], ids=lambda v: str(v)[:20]
)
def test_conv_of_many_tokens_at_a_time(monkeypatch, operator, width, state):
    monkeypatch.setattr(conv_kernels, "ENOUGH_PROGRAMS", 0)
    seqlen = conv_kernels.FORWARD_TOKENS + 3
    check(operator, conv_inputs(1, seqlen, 5, width, initial_state=state), seq_idx=sequences(seqlen, 2, 9, batch=1))


def test_conv_of_several_parts_and_blocks(monkeypatch):
    monkeypatch.setattr(conv_kernels, "BACKWARD_PROGRAMS", 4)
    check(CONV, conv_inputs(1, 3 * conv_kernels.BACKWARD_TOKENS, 130, 3))


# --- registration --------------------------------------------------------------------------------------------------


def test_opcheck_scan(monkeypatch):
    set_chunks(monkeypatch, "selective_scan", {"x": torch.zeros(1), "A": torch.zeros(1)}, 4, 1)
    tensors = cast(scan_inputs(1, 3, 4, 2, 1), torch.float32)
    *given, initial_state = (
        tensors[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
    )
    seq_idx = sequences(3, 1, batch=1)
    op, backward = torch.ops.hf_ssm.selective_scan_triton, torch.ops.hf_ssm.selective_scan_triton_backward
    leaves = [t.clone().requires_grad_() for t in (*given, initial_state)]
    torch.library.opcheck(op.default, (*leaves[:-1], True, leaves[-1], seq_idx))
    out, state, kept = op(*given, True, initial_state, seq_idx)
    for d_final in (None, torch.ones_like(state)):
        arguments = (torch.ones_like(out), d_final, *given, True, initial_state, seq_idx, kept)
        torch.library.opcheck(backward.default, arguments)


def test_opcheck_conv():
    tensors = cast(conv_inputs(1, 5, 4, 3), torch.float32)
    given = [tensors[name] for name in ("x", "weight", "bias", "initial_state")]
    rest = (sequences(5, 2, batch=1), True, 0)
    leaves = [t.clone().requires_grad_() for t in given]
    torch.library.opcheck(torch.ops.hf_ssm.conv1d_triton.default, (*leaves, *rest))
    grad = torch.ones_like(given[0])
    torch.library.opcheck(torch.ops.hf_ssm.conv1d_triton_backward.default, (grad, *given, *rest))


def test_opcheck_norm():
    x, gate, weight = (torch.randn(*shape, device=DEVICE) for shape in ((3, 24), (3, 24), (24,)))
    leaves = [t.clone().requires_grad_() for t in (x, weight, gate)]
    op, backward = torch.ops.hf_ssm.rms_norm_triton, torch.ops.hf_ssm.rms_norm_triton_backward
    torch.library.opcheck(op.default, (*leaves, 1e-5, 12, True, torch.bfloat16))
    torch.library.opcheck(backward.default, (torch.ones_like(x), x, weight, gate, 1e-5, 12, True))


def test_norm_of_rows_that_share_programs(monkeypatch):
    """Backward's programs go through several blocks of rows."""
    monkeypatch.setattr(norm_kernels, "BACKWARD_PROGRAMS", 2)
    monkeypatch.setattr(norm_kernels, "ELEMENTS", 16)
    x, weight, grad = (torch.randn(*shape, dtype=torch.float64, device=DEVICE) for shape in ((11, 6), (6,), (11, 6)))
    got = norm_kernels.backward(grad.float(), x.float(), weight.float(), None, 1e-5, 6, False)
    leaves = [t.requires_grad_() for t in (x, weight)]
    want = torch.autograd.grad(torch.nn.functional.rms_norm(leaves[0], (6,), leaves[1], eps=1e-5), leaves, grad)
    for result, exact in zip(got, want, strict=False):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


# --- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not triton.INTERPRETED, reason="there is a GPU")
def test_interpreted_only_by_name():
    for operator in ("selective_scan", "causal_conv1d", "centred_conv1d", "rms_norm", "gated_rms_norm"):
        names = [row.name for row in backends.OPERATORS[operator]]
        assert names.index("triton") < names.index("cpu")
        assert not next(row for row in backends.OPERATORS[operator] if row.name == "triton").automatic


@pytest.mark.parametrize("operator", [SCAN, CONV, CENTRED], ids=lambda operator: operator.name)
def test_float64_is_refused(operator):
    tensors = operator.inputs(1, 3)
    with pytest.raises(backends.UnsupportedByBackend, match="float64, the kernels have float32, bfloat16 and float16"):
        operator.function(**tensors, backend="triton")
