"""Adapters to other packages' kernels: they transpose, rename and convert, nothing else.

mamba_ssm (state-spaces/mamba) and causal_conv1d (Dao-AILab/causal-conv1d) bring their own autograd, so these functions
are called as they are. What the kernels cannot do is refused by the operators' tables before it comes here.
"""

import torch
from torch import Tensor

from .discretize import compute_dtype
from .rows import sequence_starts


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, initial_state: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    """`causal_conv1d.causal_conv1d_fn`: (batch, channels, seqlen), channels last in memory for states and packing."""
    from causal_conv1d import causal_conv1d_fn

    out = causal_conv1d_fn(
        x.reshape(-1).view(x.shape).transpose(1, 2),  # its strides tell the kernel the layout, for one token too
        weight,
        None if bias is None else bias.to(weight.dtype),
        seq_idx=None if seq_idx is None else _runs(seq_idx),
        initial_states=None if initial_state is None else initial_state.contiguous().transpose(1, 2),
        activation="silu" if silu else None,
    )
    return out.transpose(1, 2)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`mamba_ssm.ops.selective_scan_interface.selective_scan_fn`: (batch, d_inner, seqlen), (batch, groups, d_state,
    seqlen). Its backward drops the gradient of the last state; ours says so instead of training on a wrong gradient.
    """
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    out, state = selective_scan_fn(
        x.transpose(1, 2).contiguous(),
        dt.to(x.dtype).transpose(1, 2).contiguous(),
        A.float(),
        B.to(x.dtype).permute(0, 2, 3, 1).contiguous(),
        C.to(x.dtype).permute(0, 2, 3, 1).contiguous(),
        None if D is None else D.float(),
        None if z is None else z.to(x.dtype).transpose(1, 2).contiguous(),
        None if dt_bias is None else dt_bias.float(),
        dt_softplus,
        return_last_state=True,
    )
    if out.requires_grad:
        state = _NoGradient.apply(state, out)
    return out.transpose(1, 2), state.to(compute_dtype(x))


class _NoGradient(torch.autograd.Function):
    """Pass `state` on, and refuse a gradient for it."""

    @staticmethod
    def forward(ctx, state, out):
        return state.detach().clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "mamba_ssm's selective scan has no gradient for its final state: run this model under "
            'hf_ssm.ops.use_backend("torch")'
        )


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    chunk_size: int,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined`. It gives the initial state to the tokens whose
    index is 0 and compares indices only, so the runs of each row are numbered from 0."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined(
        x,
        dt,
        A.float(),
        B,
        C,
        chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        initial_states=initial_state,
        seq_idx=None if seq_idx is None else _runs(seq_idx),
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        return_final_states=True,
    )


def _runs(seq_idx: Tensor) -> Tensor:
    """0 for a row's first sequence, 1 for its second, ...; int32, as the kernels want it."""
    return sequence_starts(seq_idx).cumsum(dim=1).to(torch.int32)
