"""The triton kernels of ssd and quasiseparable: across what a program takes at a time, as shipped; exactness of their
decays and products; registration."""

import pytest
import torch
from op_cases import (
    DEVICE,
    QUASISEPARABLE,
    SSD,
    assert_near,
    cast,
    error,
    outputs_and_grads,
    quasiseparable_inputs,
    ssd_inputs,
    usable,
)

from hf_ssm.ops import backends, ssd_update

if "triton" not in usable("ssd"):
    pytest.skip("triton is not installed", allow_module_level=True)

from hf_ssm.ops.triton import chunks
from hf_ssm.ops.triton import quasiseparable as quasiseparable_kernels
from hf_ssm.ops.triton import ssd as ssd_kernels

OPERATORS = pytest.mark.parametrize(
    ("operator", "inputs"), [(SSD, ssd_inputs), (QUASISEPARABLE, quasiseparable_inputs)], ids=["ssd", "quasiseparable"]
)


def sequences(seqlen: int, *ends: int, batch: int = 1) -> torch.Tensor:
    """Rows of sequences that end before `ends`."""
    positions = torch.arange(seqlen, device=DEVICE).repeat(batch, 1)
    return torch.bucketize(positions, torch.tensor(ends, device=DEVICE), right=True)


def check(operator, tensors, **rows):
    tensors = cast(tensors, torch.float32)
    want = outputs_and_grads(operator("reference", **rows), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(operator("triton", **rows), tensors), want)


def cut(monkeypatch, shortest_segment: int) -> None:
    for kernels in (ssd_kernels, quasiseparable_kernels):
        monkeypatch.setattr(kernels, "CHUNK", 16)
        monkeypatch.setattr(kernels, "SHORTEST_SEGMENT", shortest_segment)


# --- what one program takes ----------------------------------------------------------------------------------------


@OPERATORS
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_segments_of_several_chunks(monkeypatch, operator, inputs, packed):
    """Three segments of two chunks, the last one short; one without a restart between two with one."""
    cut(monkeypatch, shortest_segment=2)
    tensors = inputs(1, 85, 2, 3, 1, 4)
    check(operator, tensors, **({"seq_idx": sequences(85, 20, 64, 80)} if packed else {}))


@OPERATORS
def test_heads_of_a_group_in_several_programs(monkeypatch, operator, inputs):
    cut(monkeypatch, shortest_segment=9)
    monkeypatch.setattr(chunks, "PROGRAMS", 6)  # two chunks and groups: two programs share the three heads of each
    check(operator, inputs(1, 20, 6, 2, 2, 3))


@OPERATORS
def test_several_blocks_of_channels(monkeypatch, operator, inputs):
    cut(monkeypatch, shortest_segment=9)
    check(operator, inputs(1, 9, 2, 70, 1, 35), seq_idx=sequences(9, 4))


@OPERATORS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chunks_of_sixteen_bit_inputs_as_shipped(operator, inputs, dtype):
    """Their chunks are the longest. float32's error would be far smaller: a few of these numbers are enough."""
    tensors = cast(inputs(1, 150, 1, 16, 1, 32), dtype)
    exact = outputs_and_grads(operator("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(operator(name), tensors) for name in ("triton", "reference"))
    for name, want in exact.items():
        assert error(got[name], want) <= 2 * error(reference[name], want) + 1e-5, name


def test_one_token_updates():
    tensors = cast(ssd_inputs(3, 4, 4, 20, 2, 9, D="channel"), torch.float32)
    options = {"dt_softplus": True, "dt_limit": (0.2, 1.0)}
    want, want_state = SSD("reference", **options)(**cast(tensors, torch.float64))
    state = tensors.pop("initial_state")
    with backends.use_backend("triton"):
        for t in range(4):
            before = state.clone()
            out, new_state = ssd_update(state, **SSD.tokens(tensors, t), **options)
            assert torch.equal(state, before), "the old state is left as it was"
            state = new_state
            torch.testing.assert_close(out.double(), want[:, t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), want_state, rtol=1e-5, atol=1e-5)


@OPERATORS
def test_states_beyond_the_range_of_float16(operator, inputs):
    """States are float32, also where products take them as operands."""
    tensors = inputs(1, 20, 2, 3, 1, 4)
    for name in tensors:
        if name.startswith("B"):
            tensors[name] = tensors[name] * 1.2e4
        if name.startswith("C"):
            tensors[name] = tensors[name] * 1e-4
    tensors = cast(tensors, torch.float16)
    want = operator("reference")(**cast(tensors, torch.float64))
    got = operator("triton")(**tensors)
    for result, exact in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True):
        assert error(result, exact) <= 2e-3


# --- registration --------------------------------------------------------------------------------------------------


def test_opcheck_ssd():
    tensors = cast(ssd_inputs(1, 3, 2, 2, 1, 3), torch.float32)
    names = ("x", "dt", "A", "B", "C", "dt_bias", "D", "z", "initial_state")
    *scan, dt_bias, D, z, initial_state = (tensors[name] for name in names)
    rest = (True, 0.0, float("inf"), sequences(3, 1))
    op, backward = torch.ops.hf_ssm.ssd_triton, torch.ops.hf_ssm.ssd_triton_backward
    given = (*scan, dt_bias, *rest, D, z, initial_state)
    leaves = [t.clone().requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t for t in given]
    torch.library.opcheck(op.default, tuple(leaves))
    out, state = op(*given)
    for d_final in (None, torch.ones_like(state)):
        torch.library.opcheck(backward.default, (torch.ones_like(out), d_final, *given))


def test_opcheck_quasiseparable():
    tensors = cast(quasiseparable_inputs(1, 3, 2, 2, 1, 3), torch.float32)
    names = ("x", "dt_forward", "dt_backward", "A", "B_forward", "C_forward", "B_backward", "C_backward", "diagonal")
    given = [tensors[name].abs() if "dt" in name else tensors[name] for name in names]
    op = torch.ops.hf_ssm.quasiseparable_triton
    backward = torch.ops.hf_ssm.quasiseparable_triton_backward
    torch.library.opcheck(op.default, (*(t.clone().requires_grad_() for t in given), sequences(3, 1)))
    torch.library.opcheck(backward.default, (torch.ones_like(given[0]), *given, None))


@OPERATORS
def test_float64_is_refused(operator, inputs):
    with pytest.raises(backends.UnsupportedByBackend, match="float64, the kernels have float32, bfloat16 and float16"):
        operator.function(**inputs(1, 3), backend="triton")
