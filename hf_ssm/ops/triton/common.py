"""What the Triton kernels share: functions of a number in float32, where sequences begin, the place of a launch."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import DEVICES

LOG2_E = tl.constexpr(1.4426950408889634)


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Where kernels are launched for x: Triton launches on the current device, which x need not be on. They go to the
    device's current stream."""
    if x.device.type not in DEVICES:  # interpreted, or compiled ahead of time
        return nullcontext()
    module = torch.get_device_module(x.device.type)
    return nullcontext() if module.current_device() == x.device.index else module.device(x.device)


def channels_last(t: Any) -> Any:
    """A tensor with its channels one behind the other; a copy only where they are not. None stays None."""
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Those of rows and of tokens of each, as kernels take them; zeros for one that is missing."""
    return tuple(stride for t in tensors for stride in ((0, 0) if t is None else t.stride()[:2]))


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def log1p_of_fraction(x):
    """log(1 + x) for 0 <= x <= 1, to the last bits however small x is, where a GPU's logarithm of 1 + x is not:
    2 artanh(x / (2 + x)), whose series ends after eight terms there."""
    s = x / (2.0 + x)
    square = s * s
    series = 1.0 / 15
    series = series * square + 1.0 / 13
    series = series * square + 1.0 / 11
    series = series * square + 1.0 / 9
    series = series * square + 1.0 / 7
    series = series * square + 1.0 / 5
    series = series * square + 1.0 / 3
    return 2.0 * (s + s * square * series)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p_of_fraction(exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def silu_slope(x):
    """The derivative of `silu`."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def load_tokens(pointers, stride, count, given, TOKENS: tl.constexpr):
    """TOKENS tokens that are `stride` apart, a tuple of float32 vectors; zeros from the `count`-th on, and where a
    channel is not `given`."""
    rows = ()
    for j in tl.static_range(TOKENS):
        rows += (
            tl.load(pointers + j * tl.cast(stride, tl.int64), mask=given & (j < count), other=0.0).to(tl.float32),
        )
    return rows


@triton.jit
def begins_sequence(seq_idx, tokens, stride, given):
    """Whether each of a row's `tokens` is of another sequence than the one before it; token 0 is not: it continues the
    initial state. `seq_idx`: the row's first element; `given`: which tokens there are."""
    here = tl.load(seq_idx + tokens * stride, mask=given, other=0)
    before = tl.load(seq_idx + tl.maximum(tokens - 1, 0) * stride, mask=given, other=0)
    return here != before
