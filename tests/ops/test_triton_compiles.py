"""The triton kernels of selective_scan, the convolutions and the norms, compiled for GPUs that are not here: that they
compile in the dtypes and with the options of the models, keep their numbers in registers and read whole vectors."""

import pytest
import torch
from compile_ahead import TARGETS, compile_ahead

from hf_ssm.ops import triton as backend

pytestmark = pytest.mark.skipif(
    backend.backend("").obstacle() is not None and not backend.INTERPRETED, reason="triton is not installed"
)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# --- calls, as the models make them --------------------------------------------------------------------------------


def scan(dtype=torch.bfloat16, batch=32, seqlen=2048, d_inner=1536, d_state=16, *, backward=True, packed=False):
    """Mamba-130m's: x and z from one projection, B and C from another, parameters and state in float32."""
    from hf_ssm.ops.triton import selective_scan as kernels

    x, z = empty(batch, seqlen, 2 * d_inner, dtype=dtype).chunk(2, dim=-1)
    dt = empty(batch, seqlen, d_inner, dtype=dtype)
    B, C = empty(batch, seqlen, 48 + 2 * d_state, dtype=dtype)[..., 48:].unsqueeze(2).chunk(2, dim=-1)
    A, D, dt_bias, state = empty(d_inner, d_state), empty(d_inner), empty(d_inner), empty(batch, d_inner, d_state)
    seq_idx = empty(batch, seqlen, dtype=torch.int32) if packed else None
    given = (x, dt, A, B, C, D, z, dt_bias, True, state, seq_idx)
    _, _, kept = kernels.forward(*given, keep=backward)
    if backward:
        kernels.backward(empty(batch, seqlen, d_inner, dtype=dtype), state, *given, kept)


def conv(dtype=torch.bfloat16, batch=32, seqlen=2048, channels=1536, width=4, *, ahead=0, packed=False, state=False):
    from hf_ssm.ops.triton import causal_conv1d as kernels

    x = empty(batch, seqlen, 2 * channels, dtype=dtype)[..., :channels]
    initial_state = empty(batch, width - 1, channels, dtype=dtype) if state else None
    seq_idx = empty(batch, seqlen, dtype=torch.int32) if packed else None
    given = (x, empty(channels, width), empty(channels), initial_state, seq_idx, True, ahead)
    kernels.forward(*given)
    kernels.backward(empty(batch, seqlen, channels, dtype=dtype), *given)


def norm(dtype=torch.bfloat16, rows=65536, channels=1536, *, group_size=None, gate="first"):
    from hf_ssm.ops.triton import rms_norm as kernels

    x, z, d_out = (empty(rows, channels, dtype=dtype) for _ in range(3))
    given = (x, empty(channels), None if gate is None else z, 1e-5, group_size or channels, gate == "last")
    kernels.forward(*given, dtype)
    kernels.backward(d_out, *given)


def scan_bfloat16():
    scan()


def scan_float32():
    scan(torch.float32)


def scan_float16_packed():
    scan(torch.float16, packed=True)


def scan_one_long_row():
    scan(batch=1, seqlen=131072, packed=True)


def scan_wide_state():
    scan(d_state=256)


def scan_one_token():
    scan(seqlen=1)


def conv_bfloat16():
    conv()


def conv_float32():
    conv(torch.float32)


def conv_float16_packed():
    conv(torch.float16, packed=True, state=True)


def conv_wide():
    conv(width=8, state=True)


def conv_centred():
    conv(width=7, ahead=3)


def conv_one_token():
    conv(seqlen=1, state=True)


def norm_bfloat16():
    norm()


def norm_float32_groups():
    norm(torch.float32, group_size=256, gate="last")


def norm_wide():
    norm(torch.float16, channels=8192, gate=None)


ORDINARY = ("scan_bfloat16", "conv_bfloat16", "norm_bfloat16")
ALL = (
    *ORDINARY,
    *("scan_float32", "scan_float16_packed", "scan_one_long_row", "scan_wide_state", "scan_one_token"),
    *("conv_float32", "conv_float16_packed", "conv_wide", "conv_centred", "conv_one_token"),
    *("norm_float32_groups", "norm_wide"),
)


# --- tests ---------------------------------------------------------------------------------------------------------


def kernels_of(names, targets):
    return compile_ahead([f"{__name__}:{name}" for name in names], targets)


def check(kernels):
    assert kernels
    for kernel in kernels:
        target = TARGETS[kernel.target]
        assert kernel.registers <= target.registers, kernel
        assert kernel.shared <= target.shared, kernel
        # The scan fills all registers; what it spills waits outside its innermost loop.
        assert kernel.spilled <= (96 if "scan" in kernel.call else 0), kernel


def test_ordinary_calls():
    kernels = kernels_of(ORDINARY, ["sm_90"])
    check(kernels)
    by_call = {(kernel.call.partition(":")[2], kernel.name): kernel for kernel in kernels}
    assert len(by_call) == 7
    for kernel in by_call.values():
        if "scan" not in kernel.call and kernel.name == "_forward_kernel":
            assert kernel.count(r"ld\.global\.v4\.b32") and not kernel.count(r"ld\.global\.\w*16"), kernel
    scan = by_call["scan_bfloat16", "_forward_kernel"]
    # a tile's exponentials: of its decays, in softplus, in silu; 2 channels of a thread
    assert scan.count("ex2") == 2 * 16 * 3, scan


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ALL)
def test_every_call_for_every_target(name, target):
    check(kernels_of([name], [target]))
