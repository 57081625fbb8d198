"""The `cpu` backend of `hf_ssm.ops.quasiseparable`."""

from typing import Any

import torch
from torch import Tensor

from ..library import at_once, single
from ..rows import sequence_starts
from . import kernels
from .ssd import checkpoints_of


def quasiseparable_cpu(
    x: Tensor,
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    diagonal: Tensor | None,
    seq_idx: Tensor | None,
    chunk_size: int,
) -> Tensor:
    BC = tuple(single(t) for t in (B_forward, C_forward, B_backward, C_backward))
    starts = None if seq_idx is None else sequence_starts(seq_idx)
    inputs = (x, single(dt_forward), single(dt_backward), A.float(), *BC, single(diagonal), starts)
    if at_once(*inputs):
        return _run(*inputs)
    return _quasiseparable_cpu(*inputs)[0]


def _run(*inputs: Tensor | None, before: Tensor | None = None, behind: Tensor | None = None) -> Tensor:
    x: Any = inputs[0]
    out = x.new_empty(x.shape)
    kernels().quasiseparable(*inputs, out, before, behind, torch.get_num_threads())
    return out


@torch.library.custom_op("hf_ssm::quasiseparable_cpu", mutates_args=(), device_types="cpu")
def _quasiseparable_cpu(
    x: Tensor,
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    diagonal: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, the states of the forward and of the backward direction as in `checkpoints_of`)."""
    before, behind = checkpoints_of(x, B_forward), checkpoints_of(x, B_forward)
    scans = (dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward)
    return _run(x, *scans, diagonal, starts, before=before, behind=behind), before, behind


@_quasiseparable_cpu.register_fake
def _(x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal, starts):
    return x.new_empty(x.shape), checkpoints_of(x, B_forward), checkpoints_of(x, B_forward)


@torch.library.custom_op("hf_ssm::quasiseparable_cpu_backward", mutates_args=(), device_types="cpu")
def _quasiseparable_cpu_backward(
    d_out: Tensor,
    x: Tensor,
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    diagonal: Tensor | None,
    starts: Tensor | None,
    before: Tensor,
    behind: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal (empty
    without)."""
    inputs = (x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal)
    grads: list[Any] = [None if t is None else t.new_empty(t.shape) for t in inputs]
    grads[3] = A.new_zeros(x.shape[0], x.shape[2])  # of every row of the batch by itself
    kernels().quasiseparable_backward(*inputs, starts, d_out, before, behind, *grads, torch.get_num_threads())
    grads[3] = grads[3].sum(dim=0)
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)  # type: ignore[return-value]


@_quasiseparable_cpu_backward.register_fake
def _(d_out, *inputs):
    return tuple(d_out.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs[:9])


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 10
    saved = ctx.saved_tensors  # once: under gradient checkpointing, asking computes them again
    *grads, d_diagonal = _quasiseparable_cpu_backward(d_out, *saved)
    return *grads, None if saved[8] is None else d_diagonal, None


_quasiseparable_cpu.register_autograd(_backward, setup_context=_setup_context)
