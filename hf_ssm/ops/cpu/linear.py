"""A linear layer on one or a few tokens, at the pace at which memory gives its weights.

Not an operator of its own: `hf_ssm.layers.Linear` asks `takes` and calls `linear` where it is faster than PyTorch.
"""

import torch
from torch import Tensor

from ..backends import allows
from ..library import at_once
from . import DTYPES, kernels

_ROWS = 4  # so many share one pass over the weights; beyond them PyTorch's matrix product is faster


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` can and should run the call: a few rows on the CPU, no gradient, ordinary dense weights."""
    return (
        x.numel() <= _ROWS * weight.shape[-1]
        and at_once(x, weight, bias)
        and x.is_cpu
        and weight.is_cpu
        and x.dtype == weight.dtype
        and x.dtype in DTYPES
        and x.shape[-1] == weight.shape[-1]
        and weight.is_contiguous()
        and allows("cpu")
        and not torch.is_autocast_enabled("cpu")
        and kernels() is not None
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias: x (..., in), weight (out, in), bias (out,) or None; sums in float32, the result in x's dtype.
    Call it where `takes` says so."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    kernels().linear(rows, weight, bias, out.view(-1, weight.shape[0]), torch.get_num_threads())
    return out
