"""The `triton` backend of `hf_ssm.ops.rms_norm` and `gated_rms_norm`: one kernel computes both.

A program has a group of channels of some rows in registers, so each is read once, and backward takes the mean square
again instead of keeping it. The weight's gradient is summed over the rows that a program goes through, and then over
the programs, always in the same order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import at_once, single
from . import DTYPES
from .common import channels_last, on_device_of, silu, silu_slope

ELEMENTS = 2048  # that a program takes at a time, more where a group is larger
ELEMENTS_OF_A_WARP = 512
BACKWARD_PROGRAMS = 1024  # at most: each leaves a sum for every channel of its group


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = weight.dtype if weight.dtype in DTYPES else torch.float32
    inputs = (x, single(weight), None, eps, weight.shape[0], False, dtype)
    out = (forward if at_once(x, weight) else _rms_norm)(*inputs)
    return out if dtype == weight.dtype else out.to(weight.dtype)


def gated_rms_norm(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    inputs = (x, single(weight), single(gate), eps, group_size, norm_before_gate, x.dtype)
    return (forward if at_once(x, weight, gate) else _rms_norm)(*inputs)


@torch.library.custom_op("hf_ssm::rms_norm_triton", mutates_args=())
def _rms_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`dtype`: that of the result."""
    return forward(x, weight, gate, eps, group_size, norm_before_gate, dtype)


@_rms_norm.register_fake
def _(x, weight, gate, eps, group_size, norm_before_gate, dtype):
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("hf_ssm::rms_norm_triton_backward", mutates_args=())
def _rms_norm_backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and gate; empty without a gate."""
    return backward(d_out, x, weight, gate, eps, group_size, norm_before_gate)


@_rms_norm_backward.register_fake
def _(d_out, x, weight, gate, eps, group_size, norm_before_gate):
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, weight, gate))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.eps, ctx.group_size, ctx.norm_before_gate, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_out):
    x, weight, gate = ctx.saved_tensors
    options = (ctx.eps, ctx.group_size, ctx.norm_before_gate)
    d_x, d_weight, d_gate = _rms_norm_backward(d_out, x, weight, gate, *options)
    return d_x, d_weight, None if gate is None else d_gate, None, None, None, None


_rms_norm.register_autograd(_backward, setup_context=_setup_context)


def forward(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    dtype: torch.dtype,
) -> Tensor:
    out = x.new_empty(x.shape, dtype=dtype)
    x, gate = _rows(x), _rows(gate)
    groups, at_a_time, options = _cut(x, group_size)
    with on_device_of(x):
        _forward_kernel[(groups * triton.cdiv(x.shape[0], at_a_time),)](
            x, weight.contiguous(), gate, out, *_sizes(x, gate, group_size, groups), eps,
            GATE_FIRST=not norm_before_gate, ROWS=at_a_time, **options,
        )  # fmt: skip
    return out


def backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d_x = x.new_empty(x.shape)
    d_gate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    x, gate, d_out = _rows(x), _rows(gate), _rows(d_out)
    groups, at_a_time, options = _cut(x, group_size)
    programs = min(triton.cdiv(x.shape[0], at_a_time), max(1, BACKWARD_PROGRAMS // groups))  # of a group
    d_weights = torch.empty(programs, weight.shape[0], dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _backward_kernel[(groups * programs,)](
            x, weight.contiguous(), gate, d_out, d_x, d_gate, d_weights,
            *_sizes(x, gate, group_size, groups), d_out.stride(0), programs, eps,
            GATE_FIRST=not norm_before_gate, ROWS=at_a_time, **options,
        )  # fmt: skip
    return d_x, d_weights.sum(dim=0).to(weight.dtype), d_gate


def _rows(t: Any) -> Any:
    """(rows, channels), a row's channels one behind the other; a copy only where they are not. None stays None."""
    return None if t is None else channels_last(t.reshape(-1, t.shape[-1]))


def _cut(x: Tensor, group_size: int) -> tuple[int, int, dict[str, int]]:
    """How many groups there are, how many rows a program takes at a time, and how large it is."""
    block = triton.next_power_of_2(group_size)
    at_a_time = min(max(1, ELEMENTS // block), triton.next_power_of_2(max(1, x.shape[0])))
    warps = min(max(1, at_a_time * block // ELEMENTS_OF_A_WARP), 16)
    return x.shape[1] // group_size, at_a_time, {"BLOCK": block, "num_warps": triton.next_power_of_2(warps)}


def _sizes(x: Tensor, gate: Tensor | None, group_size: int, groups: int) -> tuple[int, ...]:
    return x.shape[0], group_size, groups, x.stride(0), 0 if gate is None else gate.stride(0)


# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _load(pointer, given):
    return tl.load(pointer, mask=given, other=0.0).to(tl.float32)


@triton.jit
def _normalized(v, group_size, eps):
    """v / sqrt(mean(v^2) + eps), and the factor."""
    factor = tl.rsqrt(tl.sum(v * v, axis=1) / group_size + eps)[:, None]
    return v * factor, factor


@triton.jit(do_not_specialize=["rows", "groups", "eps"])
def _forward_kernel(
    x, weight, gate, out, rows, group_size, groups, x_l, gate_l, eps,
    GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inside = tl.arange(0, BLOCK)
    channels = tl.program_id(0) % groups * group_size + inside[None, :]
    row = ((tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    given = (row < rows) & (inside < group_size)[None, :]
    v = _load(x + row * x_l + channels, given)
    w = _load(weight + channels, (inside < group_size)[None, :])
    if gate is not None:
        factor = silu(_load(gate + row * gate_l + channels, given))
    if gate is not None and GATE_FIRST:
        v *= factor
    result = _normalized(v, group_size, eps)[0] * w
    if gate is not None and not GATE_FIRST:
        result *= factor
    tl.store(out + row * groups * group_size + channels, result, mask=given)


@triton.jit(do_not_specialize=["rows", "groups", "eps", "programs"])
def _backward_kernel(
    x, weight, gate, d_out, d_x, d_gate, d_weights, rows, group_size, groups, x_l, gate_l, d_out_l, programs, eps,
    GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `programs`-th block of rows of a group; the sum of its weight's gradient in d_weights (programs, d)."""
    inside = tl.arange(0, BLOCK)
    channels = tl.program_id(0) % groups * group_size + inside[None, :]
    program = tl.program_id(0) // groups
    w = _load(weight + channels, (inside < group_size)[None, :])
    d_w = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, rows, programs * ROWS):
        row = (tl.cast(first, tl.int64) + tl.arange(0, ROWS))[:, None]
        given = (row < rows) & (inside < group_size)[None, :]
        there = row * groups * group_size + channels
        x_here = _load(x + row * x_l + channels, given)
        grad = _load(d_out + row * d_out_l + channels, given)
        v = x_here
        if gate is not None:
            gate_here = _load(gate + row * gate_l + channels, given)
            factor = silu(gate_here)
            if GATE_FIRST:
                v *= factor
        normalized, scale = _normalized(v, group_size, eps)
        if gate is not None and not GATE_FIRST:
            tl.store(d_gate + there, grad * normalized * w * silu_slope(gate_here), mask=given)
            grad *= factor
        d_w += grad * normalized
        grad *= w
        mean = tl.sum(grad * normalized, axis=1)[:, None] / group_size
        grad = (grad - normalized * mean) * scale
        if gate is not None and GATE_FIRST:
            tl.store(d_gate + there, grad * x_here * silu_slope(gate_here), mask=given)
            grad *= factor
        tl.store(d_x + there, grad, mask=given)
    sums = d_weights + program.to(tl.int64) * groups * group_size + tl.program_id(0) % groups * group_size + inside
    tl.store(sums, tl.sum(d_w, axis=0), mask=inside < group_size)
