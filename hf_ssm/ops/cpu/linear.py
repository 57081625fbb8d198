"""A linear layer on one or a few tokens, at the pace at which memory gives its weights.

Not an operator of its own: `hf_ssm.layers.Linear` asks it first.
"""

import torch
from torch import Tensor

from . import step

_ROWS = 4  # so many share one pass over the weights; beyond them PyTorch's matrix product is faster


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x weight^T + bias: x (..., in), weight (out, in), bias (out,) or None; sums in float32, the result in x's dtype.

    None where PyTorch has to do it: more than a few rows, a gradient, autocast, weights that are not plain and dense.
    """
    if torch.is_autocast_enabled("cpu"):
        return None
    return step("linear", x, weight, bias, _ROWS)
