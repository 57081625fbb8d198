"""The `cpu` backend of `hf_ssm.ops.rms_norm` and `gated_rms_norm`: one kernel computes both."""

import torch
from torch import Tensor

from ..library import at_once, single
from . import DTYPES, kernels


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = weight.dtype if weight.dtype in DTYPES else torch.float32
    inputs = (x, single(weight), None, eps, weight.shape[0], False, dtype)
    out = (_run if at_once(x, weight) else _rms_norm_cpu)(*inputs)
    return out if dtype == weight.dtype else out.to(weight.dtype)


def gated_rms_norm_cpu(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    inputs = (x, single(weight), single(gate), eps, group_size, norm_before_gate, x.dtype)
    return (_run if at_once(x, weight, gate) else _rms_norm_cpu)(*inputs)


def _run(x, weight, gate, eps, group_size, norm_before_gate, dtype):
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    inputs = (_rows(x), weight, _rows(gate), group_size, norm_before_gate, eps)
    kernels().rms_norm(*inputs, out, torch.get_num_threads())
    return out


def _rows(t: Tensor | None) -> Tensor | None:
    """`t` with its channels one behind the other; a copy only where they are not."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


@torch.library.custom_op("hf_ssm::rms_norm_cpu", mutates_args=(), device_types="cpu")
def _rms_norm_cpu(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`dtype`: that of the result."""
    return _run(x, weight, gate, eps, group_size, norm_before_gate, dtype)


@_rms_norm_cpu.register_fake
def _(x, weight, gate, eps, group_size, norm_before_gate, dtype):
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("hf_ssm::rms_norm_cpu_backward", mutates_args=(), device_types="cpu")
def _rms_norm_cpu_backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and gate; empty without a gate."""
    d_x, d_weight = (torch.empty(t.shape, dtype=t.dtype) for t in (x, weight))
    d_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype)
    inputs = (_rows(x), weight, _rows(gate), group_size, norm_before_gate, eps)
    kernels().rms_norm_backward(*inputs, _rows(d_out), d_x, d_weight, d_gate, torch.get_num_threads())
    return d_x, d_weight, x.new_empty(0) if d_gate is None else d_gate


@_rms_norm_cpu_backward.register_fake
def _(d_out, x, weight, gate, eps, group_size, norm_before_gate):
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, weight, gate))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.eps, ctx.group_size, ctx.norm_before_gate, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_out):
    x, weight, gate = ctx.saved_tensors
    options = (ctx.eps, ctx.group_size, ctx.norm_before_gate)
    d_x, d_weight, d_gate = _rms_norm_cpu_backward(d_out, x, weight, gate, *options)
    return d_x, d_weight, None if gate is None else d_gate, None, None, None, None


_rms_norm_cpu.register_autograd(_backward, setup_context=_setup_context)
