"""The `cpu` backend of `hf_ssm.ops.ssd`."""

from typing import Any

import torch
from torch import Tensor

from ..library import at_once, single
from ..rows import sequence_starts
from . import kernels

_CHECKPOINT = 256  # tokens between the states that forward keeps for backward: `ssd_checkpoint_tokens` of the kernel


def ssd_cpu(
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
    dt, B, C, D, z, dt_bias = (single(t) for t in (dt, B, C, D, z, dt_bias))
    A = A.float()
    starts = None if seq_idx is None else sequence_starts(seq_idx)
    inputs = (x, dt, A, B, C, dt_bias, dt_softplus, *dt_limit, starts, D, z, initial_state)
    if at_once(x, dt, A, B, C, D, z, dt_bias, initial_state):
        return _run(*inputs, checkpoints=None)
    out, final_state, _ = _ssd_cpu(*inputs)
    return out, final_state


def _run(x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, starts, D, z, initial_state, checkpoints):
    out = x.new_empty(x.shape)
    batch, _, nheads, headdim = x.shape
    final_state = x.new_empty(batch, nheads, headdim, B.shape[3], dtype=torch.float32)
    scan = (x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, starts)
    kernels().ssd(*scan, D, z, initial_state, out, final_state, checkpoints, torch.get_num_threads())
    return out, final_state


@torch.library.custom_op("hf_ssm::ssd_cpu", mutates_args=(), device_types="cpu")
def _ssd_cpu(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    starts: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, the states before every _CHECKPOINT tokens without the first (batch, count, nheads, d_state,
    headdim))."""
    checkpoints = checkpoints_of(x, B)
    inputs = (x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, starts, D, z, initial_state)
    return *_run(*inputs, checkpoints=checkpoints), checkpoints


def checkpoints_of(x: Tensor, B: Tensor) -> Tensor:
    batch, seqlen, nheads, headdim = x.shape
    return x.new_empty(batch, -(-seqlen // _CHECKPOINT) - 1, nheads, B.shape[3], headdim, dtype=torch.float32)


@_ssd_cpu.register_fake
def _(x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, starts, D, z, initial_state):
    batch, _, nheads, headdim = x.shape
    final_state = x.new_empty(batch, nheads, headdim, B.shape[3], dtype=torch.float32)
    return x.new_empty(x.shape), final_state, checkpoints_of(x, B)


@torch.library.custom_op("hf_ssm::ssd_cpu_backward", mutates_args=(), device_types="cpu")
def _ssd_cpu_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    starts: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    checkpoints: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C, dt_bias, D, z, initial_state; empty where the input was None."""
    batch, _, nheads, headdim = x.shape
    d_x, d_dt, d_B, d_C = (t.new_empty(t.shape) for t in (x, dt, B, C))
    d_z, d_state = (None if t is None else t.new_empty(t.shape) for t in (z, initial_state))
    # of every row of the batch by itself, so that threads need not wait for one another
    d_A, d_bias, d_D = A.new_zeros(batch, nheads), A.new_zeros(batch, nheads), A.new_zeros(batch, nheads, headdim)
    scan = (x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, starts)
    grads = (d_dt, d_A, d_B, d_C, d_bias, d_x, d_D, d_z, d_state)
    threads = torch.get_num_threads()
    kernels().ssd_backward(*scan, D, z, initial_state, d_out, d_final, checkpoints, *grads, threads)
    d_bias, d_D = d_bias.sum(dim=0), d_D.sum(dim=0) if D is None or D.ndim == 2 else d_D.sum(dim=(0, 2))
    sums: tuple[Any, ...] = (d_x, d_dt, d_A.sum(dim=0), d_B, d_C, d_bias, d_D, d_z, d_state)
    given = (x, dt, A, B, C, dt_bias, D, z, initial_state)
    return tuple(x.new_empty(0) if t is None else s.to(t.dtype) for t, s in zip(given, sums, strict=True))  # type: ignore[return-value]


@_ssd_cpu_backward.register_fake
def _(d_out, d_final, x, dt, A, B, C, dt_bias, softplus, dt_min, dt_max, starts, D, z, initial_state, checkpoints):
    given = (x, dt, A, B, C, dt_bias, D, z, initial_state)
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)


def _setup_context(ctx, inputs, output):
    *scan, dt_softplus, dt_min, dt_max, starts, D, z, initial_state = inputs
    ctx.step_size = (dt_softplus, dt_min, dt_max)
    ctx.save_for_backward(*scan, starts, D, z, initial_state, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_final, _):
    *scan, starts, D, z, initial_state, checkpoints = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(scan[0])
    rest = (starts, D, z, initial_state, checkpoints)
    grads = _ssd_cpu_backward(d_out, d_final, *scan, *ctx.step_size, *rest)
    given = (*scan, D, z, initial_state)
    *scan, D, z, d_state = (None if t is None else grad for t, grad in zip(given, grads, strict=True))
    return *scan, None, None, None, None, D, z, d_state


_ssd_cpu.register_autograd(_backward, setup_context=_setup_context)
