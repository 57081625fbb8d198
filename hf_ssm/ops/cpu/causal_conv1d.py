"""The `cpu` backend of `hf_ssm.ops.causal_conv1d` and `centred_conv1d`: one kernel computes both."""

import torch
from torch import Tensor

from ..library import at_once, single
from ..rows import sequence_starts
from . import kernels


def causal_conv1d_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, initial_state: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    return _convolve(x, weight, bias, initial_state, seq_idx, silu, 0)


def centred_conv1d_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, seq_idx: Tensor | None) -> Tensor:
    return _convolve(x, weight, bias, None, seq_idx, silu, weight.shape[1] // 2)


def _convolve(x, weight, bias, initial_state, seq_idx, silu, ahead):
    starts = None if seq_idx is None else sequence_starts(seq_idx)
    inputs = (x, single(weight), single(bias), initial_state, starts, silu, ahead)
    return (_run if at_once(x, weight, bias, initial_state) else _conv1d_cpu)(*inputs)


def _run(x, weight, bias, initial_state, starts, silu, ahead):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    inputs = (_rows(x), weight, bias, _rows(initial_state), starts, silu, ahead)
    kernels().conv1d(*inputs, out, torch.get_num_threads())
    return out


def _rows(t: Tensor | None) -> Tensor | None:
    """`t` with its channels one behind the other; a copy only where they are not."""
    return t if t is None or t.stride(2) == 1 else t.contiguous()


@torch.library.custom_op("hf_ssm::conv1d_cpu", mutates_args=(), device_types="cpu")
def _conv1d_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    starts: Tensor | None,
    silu: bool,
    ahead: int,
) -> Tensor:
    """A token sees `ahead` tokens behind it and width - 1 - ahead before it; a state only with 0 ahead."""
    return _run(x, weight, bias, initial_state, starts, silu, ahead)


@_conv1d_cpu.register_fake
def _(x, weight, bias, initial_state, starts, silu, ahead):
    return x.new_empty(x.shape)


@torch.library.custom_op("hf_ssm::conv1d_cpu_backward", mutates_args=(), device_types="cpu")
def _conv1d_cpu_backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    starts: Tensor | None,
    silu: bool,
    ahead: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias, initial_state; empty where the input was None."""
    grads = [None if t is None else torch.empty(t.shape, dtype=t.dtype) for t in (x, weight, bias, initial_state)]
    inputs = (_rows(x), weight, bias, _rows(initial_state), starts, silu, ahead)
    kernels().conv1d_backward(*inputs, _rows(d_out), *grads, torch.get_num_threads())
    d_x, d_weight, d_bias, d_state = (x.new_empty(0) if grad is None else grad for grad in grads)
    return d_x, d_weight, d_bias, d_state


@_conv1d_cpu_backward.register_fake
def _(d_out, x, weight, bias, initial_state, starts, silu, ahead):
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, weight, bias, initial_state))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.silu, ctx.ahead = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_out):
    *tensors, starts = ctx.saved_tensors
    grads = _conv1d_cpu_backward(d_out, *tensors, starts, ctx.silu, ctx.ahead)
    return *(None if t is None else grad for t, grad in zip(tensors, grads, strict=True)), None, None, None


_conv1d_cpu.register_autograd(_backward, setup_context=_setup_context)
