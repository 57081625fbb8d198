"""What both scans do around their recurrence: the step size before it, the skip connection and the gate after it.

Forward and backward as plain functions, because the scans recompute instead of storing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu

NO_LIMIT = (-float("inf"), float("inf"))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of states, decays and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def decay_rates(A_log: Tensor) -> Tensor:
    """A = -exp(A_log), which the models learn by its logarithm; in float32 (float64 for float64).
    Source: arXiv:2312.00752, section 3.6, and its code."""
    A = cpu.step("decay_rates", A_log)
    return torch.exp(A_log.to(compute_dtype(A_log))).neg() if A is None else A


def step_size(
    dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], dtype: torch.dtype
) -> Tensor:
    """dt as projected -> clamp(softplus(dt + dt_bias), *dt_limit) in `dtype`."""
    dt = dt.to(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    if dt_limit != NO_LIMIT:
        dt = dt.clamp(*dt_limit)
    return dt


def step_size_slope(
    dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], dtype: torch.dtype
) -> Tensor | None:
    """The derivative of `step_size` with respect to dt (and to dt_bias); None where it is 1 everywhere."""
    raw = dt.to(dtype)
    if dt_bias is not None:
        raw = raw + dt_bias.to(dtype)
    slope = torch.sigmoid(raw) if dt_softplus else None
    if dt_limit != NO_LIMIT:
        unclamped = F.softplus(raw) if dt_softplus else raw
        inside = ((unclamped >= dt_limit[0]) & (unclamped <= dt_limit[1])).to(dtype)
        slope = inside if slope is None else slope * inside
    return slope


def skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """(y + D x) silu(z), in y's dtype and in y's memory."""
    if D is not None:
        y.addcmul_(x.to(y.dtype), D.to(y.dtype))
    if z is not None:
        y.mul_(F.silu(z.to(y.dtype)))
    return y


def skip_and_gate_backward(
    d_out: Tensor, y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """d_out -> the gradients of y, of D (per element: not yet summed to D's shape) and of z; y is before the skip."""
    d_z = None
    if z is not None:
        before_gate = y if D is None else torch.addcmul(y, x, D.to(y.dtype))
        z = z.to(y.dtype)
        sigmoid = torch.sigmoid(z)
        d_z = d_out * before_gate * (sigmoid * (1 + z * (1 - sigmoid)))
        d_out = d_out * (z * sigmoid)
    return d_out, (d_out * x if D is not None else None), d_z
