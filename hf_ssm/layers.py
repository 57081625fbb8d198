"""The modules that several architectures share.

b batch   l seqlen   d channels
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_ssm.ops import causal_conv1d, centred_conv1d, gated_rms_norm, rms_norm
from hf_ssm.ops.cpu import linear as few_rows
from hf_ssm.ops.discretize import compute_dtype


class Linear(nn.Linear):
    """nn.Linear that reads its weights at the pace of the memory when a CPU applies it to one or a few tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        out = few_rows.linear(x, weight, bias)
        return F.linear(x, weight, bias) if out is None else out


class RMSNorm(nn.Module):
    """x / RMS(x) * weight over the last axis, computed in float32 (float64 for float64) and returned in the weight's
    dtype, so that a float32 residual stream enters the projections in theirs. Source: arXiv:1910.07467."""

    def __init__(self, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm that, like `RMSNorm`, computes in float32 at least and returns its weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        out = F.layer_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), bias, self.eps)
        return out.to(self.weight.dtype)


class GatedRMSNorm(nn.Module):
    """RMS norm of the mixer's output with its gate, in groups of `group_size` channels.

    `norm_before_gate=False` (Mamba-2): RMS(x silu(gate)) * weight; True: RMS(x) * weight * silu(gate).
    Both in float32 (float64 for float64), returned in x's dtype. Source: arXiv:2405.21060, section 7.
    """

    def __init__(self, hidden_size: int, group_size: int | None = None, eps: float = 1e-5, *, norm_before_gate: bool):
        super().__init__()
        group_size = hidden_size if group_size is None else group_size
        if hidden_size % group_size:
            raise ValueError(f"GatedRMSNorm: group_size={group_size} does not divide hidden_size={hidden_size}")
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return gated_rms_norm(
            x,
            self.weight,
            gate,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.weight.shape[0]}, group_size={self.group_size}, eps={self.eps}, "
            f"norm_before_gate={self.norm_before_gate}"
        )


class CausalConv1d(nn.Conv1d):
    """`hf_ssm.ops.causal_conv1d` with the parameters of a depthwise nn.Conv1d: weight (channels, 1, width), bias."""

    def __init__(self, channels: int, width: int, bias: bool = True):
        super().__init__(channels, channels, width, groups=channels, padding=width - 1, bias=bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, seq_idx: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x (b, l, d), state (b, state_len, d) -> silu(convolution) (b, l, d) and the new state."""
        return causal_conv1d(
            x,
            self.weight.squeeze(1),
            self.bias,
            activation="silu",
            initial_state=state,
            seq_idx=seq_idx,
            mask=mask,
        )


class CentredConv1d(nn.Conv1d):
    """`hf_ssm.ops.centred_conv1d` with the parameters of a depthwise nn.Conv1d: weight (channels, 1, width), bias."""

    def __init__(self, channels: int, width: int, bias: bool = True):
        super().__init__(channels, channels, width, groups=channels, padding=width // 2, bias=bias)

    def forward(self, x: Tensor, seq_idx: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """x (b, l, d) -> silu(convolution) (b, l, d)."""
        return centred_conv1d(x, self.weight.squeeze(1), self.bias, activation="silu", seq_idx=seq_idx, mask=mask)


class GatedMLP(nn.Module):
    """fc2(y * silu(gate)) with (y, gate) = fc1(x), as the original Mamba code puts behind a mixer."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.fc1 = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.fc2 = Linear(intermediate_size, hidden_size, bias=bias)
        self.fc2.writes_to_residual = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(y * F.silu(gate))


def log_uniform_time_step_bias(
    channels: int, minimum: float = 0.001, maximum: float = 0.1, floor: float = 1e-4
) -> Tensor:
    """(channels,) draws b with softplus(b) log-uniform in [minimum, maximum] and at least `floor`.
    Source: arXiv:2312.00752, section 3.6."""
    low, high = math.log(minimum), math.log(maximum)
    dt = torch.exp(torch.rand(channels) * (high - low) + low).clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
