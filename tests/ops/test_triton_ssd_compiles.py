"""The triton kernels of ssd and quasiseparable, compiled for GPUs that are not here: that they compile in the dtypes
and with the options of the models, fit there and use matrix units."""

import pytest
import torch
from compile_ahead import TARGETS, compile_ahead

from hf_ssm.ops import triton as backend

pytestmark = pytest.mark.skipif(
    backend.backend("").obstacle() is not None and not backend.INTERPRETED, reason="triton is not installed"
)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ssd_call(dtype=torch.bfloat16, batch=8, seqlen=2048, nheads=24, headdim=64, d_state=128, *, z=False, packed=False):
    """Mamba-2-130m's: x, B, C from one projection, parameters and state in float32."""
    from hf_ssm.ops.triton import chunks
    from hf_ssm.ops.triton import ssd as kernels

    xBC = empty(batch, seqlen, nheads * headdim + 2 * d_state, dtype=dtype)
    x, B, C = xBC.split([nheads * headdim, d_state, d_state], dim=-1)
    x, B, C = x.unflatten(-1, (nheads, headdim)), B.unsqueeze(2), C.unsqueeze(2)
    dt, gate = empty(batch, seqlen, nheads, dtype=dtype), empty(*x.shape, dtype=dtype) if z else None
    state = empty(batch, nheads, headdim, d_state)
    seq_idx = empty(batch, seqlen, dtype=torch.int32) if packed else None
    A, dt_bias, D = (empty(nheads) for _ in range(3))
    options = (True, 0.0, float("inf"))
    kernels._run(x, dt, A, B, C, dt_bias, *options, seq_idx, D, gate, state)
    if seqlen > 1:
        steps = chunks.StepSizes(dt, A, dt_bias, *options)
        kernels._gradients(empty(*x.shape, dtype=dtype), None, x, steps, B, C, seq_idx, D, gate, state)


def quasiseparable_call(
    dtype=torch.bfloat16, batch=32, seqlen=512, nheads=24, headdim=64, d_state=64, *, packed=False
):
    """Hydra base's."""
    from hf_ssm.ops.triton import quasiseparable as kernels

    x = empty(batch, seqlen, nheads, headdim, dtype=dtype)
    dts = [empty(batch, seqlen, nheads) for _ in range(2)]
    BC = [empty(batch, seqlen, 1, d_state, dtype=dtype) for _ in range(4)]
    seq_idx = empty(batch, seqlen, dtype=torch.int32) if packed else None
    given = (x, *dts, empty(nheads), *BC, empty(batch, seqlen, nheads), seq_idx)
    kernels._run(*given)
    kernels._gradients(empty(*x.shape, dtype=dtype), *given)


def ssd_bfloat16():
    ssd_call()


def ssd_float32():
    ssd_call(torch.float32)


def ssd_float16_packed_gated():
    ssd_call(torch.float16, packed=True, z=True)


def ssd_one_long_row():
    ssd_call(batch=1, seqlen=131072)


def ssd_one_token():
    ssd_call(batch=1, seqlen=1)


def ssd_odd_sizes():
    ssd_call(headdim=80, d_state=100)


def quasiseparable_bfloat16():
    quasiseparable_call()


def quasiseparable_float32_packed():
    quasiseparable_call(torch.float32, packed=True)


ORDINARY = ("ssd_bfloat16", "quasiseparable_bfloat16")
ALL = (
    *ORDINARY,
    *("ssd_float32", "ssd_float16_packed_gated", "ssd_one_long_row", "ssd_one_token", "ssd_odd_sizes"),
    "quasiseparable_float32_packed",
)


def compiled(names, targets):
    kernels = compile_ahead([f"{__name__}:{name}" for name in names], targets)
    assert kernels
    for kernel in kernels:
        target = TARGETS[kernel.target]
        assert kernel.registers <= target.registers, kernel
        assert kernel.shared <= target.shared, kernel
    return kernels


def test_ordinary_calls_on_matrix_units():
    for kernel in compiled(ORDINARY, ["sm_90"]):
        if kernel.name != "_prepare":
            assert kernel.count("wgmma.mma_async") and not kernel.count(r"mma\.sync"), kernel
        if kernel.name in ("_walk", "_prepare", "_read_gradients"):
            assert kernel.spilled <= 64, kernel


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ALL)
def test_every_call_for_every_target(name, target):
    compiled([name], [target])
