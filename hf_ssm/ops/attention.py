"""Causal attention with a sliding window and meta tokens: which key a query sees, and the call that computes it.

Hymba (arXiv:2411.13676), section 2: query i sees key j when j <= i and (i - j <= window or j is a meta token).
Positions count the real tokens of a sequence, its meta tokens first, so neither padding nor what is packed beside it
moves them.

b batch   q queries   k keys   h query heads   d, e head sizes of keys and of values
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@dataclass
class Places:
    """Where tokens stand: each (b or 1, tokens). None means zeros for `sequences`, and True for `real`."""

    positions: Tensor
    meta: Tensor  # bool
    sequences: Tensor | None = None
    real: Tensor | None = None

    @staticmethod
    def join(*parts: "Places") -> "Places":
        """One after the other, along the tokens."""
        rows = max(t.shape[0] for part in parts for t in part._given())

        def cat(tensors: list[Tensor | None], default: Any) -> Tensor | None:
            if all(t is None for t in tensors):
                return None
            full = []
            for part, t in zip(parts, tensors, strict=True):
                t = torch.full_like(part.positions, default, dtype=torch.long) if t is None else t
                full.append(t.expand(rows, -1))
            dtype = torch.bool if default is True else torch.long
            return torch.cat([t.to(dtype) for t in full], dim=1)

        return Places(
            torch.cat([part.positions.expand(rows, -1) for part in parts], dim=1),
            torch.cat([part.meta.expand(rows, -1) for part in parts], dim=1),
            cat([part.sequences for part in parts], 0),
            cat([part.real for part in parts], True),
        )

    def _given(self) -> list[Tensor]:
        return [t for t in (self.positions, self.meta, self.sequences, self.real) if t is not None]


def visible(queries: Places, keys: Places, window: int | None) -> Tensor:
    """(b or 1, 1, q, k) bool: what each query sees. The queries are the last of the keys, and each sees itself, even
    padding, so that no row of the softmax is empty."""
    distance = queries.positions[:, :, None] - keys.positions[:, None, :]
    seen = distance >= 0
    if window is not None:
        seen = seen & ((distance <= window) | keys.meta[:, None, :])
    if queries.sequences is not None and keys.sequences is not None:
        seen = seen & (queries.sequences[:, :, None] == keys.sequences[:, None, :])
    if keys.real is not None:
        count = queries.positions.shape[1]
        itself = torch.zeros(count, keys.positions.shape[1], dtype=torch.bool, device=seen.device)
        itself[:, -count:].fill_diagonal_(True)
        seen = (seen & keys.real[:, None, :]) | itself
    return seen[:, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    implementation: str,
    *,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention by one of transformers' implementations.

    query (b, h, q, d), key (b, kv_heads, k, d), value (b, kv_heads, k, e); seen (b or 1, 1, q, k) bool, or None where
    every query sees every key. Returns (b, q, h, e), and the weights (b, h, q, k) if the implementation has them.
    `module` has num_key_value_groups = h / kv_heads.
    """
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    mask = seen
    if function is eager_attention and seen is not None:
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=seen.device)
        mask = mask.masked_fill_(~seen, torch.finfo(query.dtype).min)
    return function(module, query, key, value, mask, scaling=query.shape[-1] ** -0.5, dropout=dropout, is_causal=False)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The definition, which every implementation answers to; the softmax is float32, or float64 for float64 inputs."""
    groups: int = module.num_key_value_groups  # type: ignore[assignment]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    dtype = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=dtype).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights
