"""RMS norms: plain, and the mixers' gated one.

arXiv:1910.07467, section 3; with a gate arXiv:2405.21060, section 7 (gate, then norm) and its code (either order).

d channels   g groups of channels
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu, triton
from .backends import Backend, Call, choose, register
from .discretize import compute_dtype
from .rows import check_shape


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, backend: str | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean over the last axis.

    Args:
        x: (..., channels), any floating dtype.
        weight: (channels,).
        eps: added to the mean square.
        backend: name of a backend; None takes the fastest that can run the call.

    Returns:
        (..., channels), computed in float32 (float64 for float64 x), in the weight's dtype: a float32 residual stream
        enters the projections in theirs.

    Raises:
        ValueError for shapes that disagree; UnsupportedByBackend, BackendUnavailable for a backend asked for by name.
    """
    if backend in (None, "cpu"):
        out = cpu.step("rms_norm", x, weight, None, x.shape[-1] if x.ndim else 0, False, eps, True)
        if out is not None:
            return out
    _check("rms_norm", x, weight)
    run = choose(Call("rms_norm", x.device.type, x.dtype), backend)
    return run(x, weight, eps)


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None = None,
    *,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool,
    backend: str | None = None,
) -> Tensor:
    """norm(x silu(gate)) * weight, or norm(x) * weight * silu(gate) with `norm_before_gate`.

    norm(v) = v / sqrt(mean(v^2) + eps), the mean over each group of `group_size` neighbouring channels.

    Args:
        x: (..., channels), any floating dtype.
        weight: (channels,).
        gate: as x, in any floating dtype; without one silu(gate) is 1.
        eps: added to the mean square.
        group_size: a divisor of channels; None for all of them.
        norm_before_gate: False as in Mamba-2, True as in Hydra.
        backend: name of a backend; None takes the fastest that can run the call.

    Returns:
        (..., channels) in x's dtype, computed in float32 (float64 for float64 x).

    Raises:
        ValueError for shapes that disagree; UnsupportedByBackend, BackendUnavailable for a backend asked for by name.
    """
    group_size = weight.numel() if group_size is None else group_size
    if backend in (None, "cpu"):
        out = cpu.step("rms_norm", x, weight, gate, group_size, norm_before_gate, eps, False)
        if out is not None:
            return out
    _check("gated_rms_norm", x, weight)
    channels = weight.shape[0]
    if group_size < 1 or channels % group_size:
        raise ValueError(f"gated_rms_norm: group_size={group_size} does not divide channels={channels} (weight)")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"gated_rms_norm: gate has shape {tuple(gate.shape)}, expected that of x = {tuple(x.shape)}")
    run = choose(Call("gated_rms_norm", x.device.type, x.dtype), backend)
    return run(x, weight, gate, eps, group_size, norm_before_gate)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition. Every backend answers to it."""
    return _normalized(x.to(compute_dtype(x)), eps).to(weight.dtype) * weight


def gated_rms_norm_reference(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    """The definition, one group after the other. Every backend answers to it."""
    dtype = compute_dtype(x)
    open_ = torch.ones_like(x, dtype=dtype) if gate is None else F.silu(gate.to(dtype))
    groups = []
    for start in range(0, x.shape[-1], group_size):
        group = slice(start, start + group_size)
        v, silu = x[..., group].to(dtype), open_[..., group]
        normalized = _normalized(v, eps) * silu if norm_before_gate else _normalized(v * silu, eps)
        groups.append(normalized * weight[group].to(dtype))
    return torch.cat(groups, dim=-1).to(x.dtype)


def _normalized(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps)


# --- the `torch` backend -------------------------------------------------------------------------------------------


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_normalize(x.to(compute_dtype(x)), eps).to(weight.dtype) * weight


def gated_rms_norm_torch(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    dtype = compute_dtype(x)
    out = x.to(dtype)
    gate = None if gate is None else F.silu(gate.to(dtype))
    if gate is not None and not norm_before_gate:
        out = out * gate
    out = _rms_normalize(out.unflatten(-1, (-1, group_size)), eps).flatten(-2) * weight.to(dtype)
    if gate is not None and norm_before_gate:
        out = out * gate
    return out.to(x.dtype)


def _rms_normalize(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _check(name: str, x: Tensor, weight: Tensor) -> None:
    if x.ndim < 1:
        raise ValueError(f"{name}: x has shape (), expected (..., channels)")
    check_shape(name, "weight", weight, (x.shape[-1],), "(channels,)")


# --- the table -----------------------------------------------------------------------------------------------------

register(
    "rms_norm",
    triton.backend("rms_norm:rms_norm"),
    cpu.backend("rms_norm:rms_norm_cpu"),
    Backend("torch", "hf_ssm.ops.rms_norm:rms_norm_torch"),
    Backend("reference", "hf_ssm.ops.rms_norm:rms_norm_reference", automatic=False),
    minor=True,
)

register(
    "gated_rms_norm",
    triton.backend("rms_norm:gated_rms_norm"),
    cpu.backend("rms_norm:gated_rms_norm_cpu"),
    Backend("torch", "hf_ssm.ops.rms_norm:gated_rms_norm_torch"),
    Backend("reference", "hf_ssm.ops.rms_norm:gated_rms_norm_reference", automatic=False),
    minor=True,
)
