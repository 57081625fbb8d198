"""The `cpu` backend of `hf_ssm.ops.selective_scan`."""

import torch
from torch import Tensor

from ..library import at_once, single
from ..rows import sequence_starts
from . import kernels

_TILE = 64  # tokens between the states that forward keeps for backward: `checkpoint_tokens` of the kernel


def selective_scan_cpu(
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
    dt, B, C, D, z, dt_bias = (single(t) for t in (dt, B, C, D, z, dt_bias))
    A = A.float()
    starts = None if seq_idx is None else sequence_starts(seq_idx)
    inputs = (x, dt, A, B, C, D, z, dt_bias, dt_softplus, starts, initial_state)
    if at_once(x, dt, A, B, C, D, z, dt_bias, initial_state):
        return _run(*inputs, checkpoints=None)
    out, final_state, _ = _selective_scan_cpu(*inputs)
    return out, final_state


def _run(x, dt, A, B, C, D, z, dt_bias, dt_softplus, starts, initial_state, checkpoints):
    out = x.new_empty(x.shape)
    final_state = x.new_empty(x.shape[0], *A.shape, dtype=torch.float32)
    inputs = (x, dt, A, B, C, D, z, dt_bias, dt_softplus, starts, initial_state)
    kernels().selective_scan(*inputs, out, final_state, checkpoints, torch.get_num_threads())
    return out, final_state


@torch.library.custom_op("hf_ssm::selective_scan_cpu", mutates_args=(), device_types="cpu")
def _selective_scan_cpu(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    starts: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, the state before each tile of tokens (batch, tiles, d_state, d_inner))."""
    checkpoints = _checkpoints(x, A)
    inputs = (x, dt, A, B, C, D, z, dt_bias, dt_softplus, starts, initial_state)
    return *_run(*inputs, checkpoints=checkpoints), checkpoints


def _checkpoints(x: Tensor, A: Tensor) -> Tensor:
    batch, seqlen, d_inner = x.shape
    return x.new_empty(batch, -(-seqlen // _TILE), A.shape[1], d_inner, dtype=torch.float32)


@_selective_scan_cpu.register_fake
def _(x, dt, A, B, C, D, z, dt_bias, dt_softplus, starts, initial_state):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], *A.shape, dtype=torch.float32), _checkpoints(x, A)


@torch.library.custom_op("hf_ssm::selective_scan_cpu_backward", mutates_args=(), device_types="cpu")
def _selective_scan_cpu_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    starts: Tensor | None,
    initial_state: Tensor | None,
    checkpoints: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C, D, z, dt_bias, initial_state; empty where the input was None."""
    batch, _, d_inner = x.shape
    d_x, d_dt, d_B, d_C = (t.new_empty(t.shape) for t in (x, dt, B, C))
    d_z, d_state = (None if t is None else t.new_empty(t.shape) for t in (z, initial_state))
    # of every row of the batch by itself, so that threads need not wait for one another
    d_A, d_D, d_bias = (A.new_empty(batch, *shape) for shape in ((A.shape[1], d_inner), (d_inner,), (d_inner,)))
    inputs = (x, dt, A, B, C, D, z, dt_bias, dt_softplus, starts, initial_state)
    grads = (d_x, d_dt, d_A, d_B, d_C, d_D, d_z, d_bias, d_state)
    kernels().selective_scan_backward(*inputs, d_out, d_final, checkpoints, *grads, torch.get_num_threads())
    return (
        d_x,
        d_dt,
        d_A.sum(dim=0).t().contiguous(),
        d_B,
        d_C,
        x.new_empty(0) if D is None else d_D.sum(dim=0).to(D.dtype),
        x.new_empty(0) if d_z is None else d_z,
        x.new_empty(0) if dt_bias is None else d_bias.sum(dim=0).to(dt_bias.dtype),
        x.new_empty(0) if d_state is None else d_state,
    )


@_selective_scan_cpu_backward.register_fake
def _(d_out, d_final, x, dt, A, B, C, D, z, dt_bias, dt_softplus, starts, initial_state, checkpoints):
    return tuple(
        x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, dt, A, B, C, D, z, dt_bias, initial_state)
    )


def _setup_context(ctx, inputs, output):
    *tensors, ctx.dt_softplus, starts, initial_state = inputs
    ctx.save_for_backward(*tensors, starts, initial_state, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_final, _):
    *tensors, starts, initial_state, checkpoints = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(tensors[0])
    grads = _selective_scan_cpu_backward(d_out, d_final, *tensors, ctx.dt_softplus, starts, initial_state, checkpoints)
    *grads, d_state = (None if t is None else grad for t, grad in zip((*tensors, initial_state), grads, strict=True))
    return *grads, None, None, d_state


_selective_scan_cpu.register_autograd(_backward, setup_context=_setup_context)
