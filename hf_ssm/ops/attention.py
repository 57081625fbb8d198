"""Causal attention with a sliding window and meta tokens: which key a query sees, and the calls that compute it.

Hymba (arXiv:2411.13676), section 2: query i sees key j when j <= i and (i - j <= window or j is a meta token).
Positions count the real tokens of a sequence, its meta tokens first, so neither padding nor what is packed beside it
moves them.

b batch   q queries   k keys   h query heads   d head size of queries and keys   e head size of values
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import flash
from .discretize import compute_dtype

_BLOCK = 1024  # queries that sdpa computes at once, where a row is long
_SCORES = 1 << 20  # that are computed at once on a CPU: as many as its cache holds
_QUERIES = 64  # and of no more queries, so that what lies after them is not computed


class lazy:
    """functools.cached_property without its lock, which torch.compile cannot enter before Python 3.12."""

    def __init__(self, compute: Callable[[Any], Any]):
        self.compute, self.name = compute, compute.__name__

    def __get__(self, owner: Any, kind: type) -> Any:
        value = self.compute(owner)
        setattr(owner, self.name, value)  # found there from now on
        return value


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
        rows = max(t.shape[0] for part in parts for t in (part.positions, part.sequences, part.real) if t is not None)

        def cat(tensors: list[Tensor | None], otherwise: int) -> Tensor | None:
            if all(t is None for t in tensors):
                return None
            full = [
                torch.full_like(part.positions, otherwise) if t is None else t.to(part.positions.dtype)
                for part, t in zip(parts, tensors, strict=True)
            ]
            return torch.cat([t.expand(rows, -1) for t in full], dim=1)

        real = cat([part.real for part in parts], 1)
        return Places(
            torch.cat([part.positions.expand(rows, -1) for part in parts], dim=1),
            torch.cat([part.meta.expand(rows, -1) for part in parts], dim=1),
            cat([part.sequences for part in parts], 0),
            None if real is None else real.bool(),
        )

    def at(self, tokens: slice | Tensor) -> "Places":
        return self._each(lambda t: t[:, tokens])

    def to(self, device: Any) -> "Places":
        return self._each(lambda t: t.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Places":
        sequences, real = (None if t is None else change(t) for t in (self.sequences, self.real))
        return Places(change(self.positions), change(self.meta), sequences, real)

    @property
    def plain(self) -> bool:
        """One sequence per row, no padding: tokens stand where they are counted."""
        return self.sequences is None and self.real is None


@dataclass
class Block:
    """Queries that are computed at once, all keys that they see, and which each of them sees; None for everything."""

    queries: slice
    keys: Tensor | slice  # indices
    seen: Tensor | None  # (b or 1, 1, q, k) bool


@dataclass
class Pattern:
    """Which key each query sees. The queries are the last of the real keys. `window` None: all keys before it.
    `front`: how many meta tokens are the first keys of every row, as a number that no device must be asked for."""

    queries: Places
    keys: Places
    window: int | None
    front: int
    _elsewhere: dict[Any, "Pattern"] = field(default_factory=dict, repr=False)
    _blocks: dict[int, list[Block]] = field(default_factory=dict, repr=False)

    def to(self, device: Any, **kwargs: Any) -> "Pattern":
        """The same on another device, once for all layers there; accelerate calls it where a model spans several."""
        if torch.device(device) == self.queries.positions.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Pattern(self.queries.to(device), self.keys.to(device), self.window, self.front)
        return self._elsewhere[device]

    @lazy
    def everything(self) -> bool:
        """Whether every query sees every key."""
        one = self.queries.positions.shape[1] == 1 and self.keys.plain
        return one and (self.window is None or self.keys.positions.shape[1] - self.front <= self.window + 1)

    @lazy
    def seen(self) -> Tensor | None:
        """(b or 1, 1, q, k) bool; None for everything. A padded query sees all keys, so that no softmax is empty."""
        return None if self.everything else self._seen(self.queries, self.keys)

    def _seen(self, queries: Places, keys: Places) -> Tensor:
        distance = queries.positions[:, :, None] - keys.positions[:, None, :]
        seen = distance >= 0
        if self.window is not None:
            seen = seen & ((distance <= self.window) | keys.meta[:, None, :])
        if queries.sequences is not None and keys.sequences is not None:
            seen = seen & (queries.sequences[:, :, None] == keys.sequences[:, None, :])
        if keys.real is not None:
            seen = seen & keys.real[:, None, :]
        if queries.real is not None:
            seen = seen | ~queries.real[:, :, None]
        return seen[:, None]

    def blocks(self, size: int) -> list[Block]:
        """The queries in blocks of `size`, so that neither the mask nor the work grows with keys that a block does not
        see. Computed once for all layers."""
        if size not in self._blocks:
            count = self.queries.positions.shape[1]
            if count <= size:
                self._blocks[size] = [Block(slice(None), slice(None), self.seen)]
            else:
                self._blocks[size] = [
                    self._block(slice(start, min(start + size, count))) for start in range(0, count, size)
                ]
        return self._blocks[size]

    def _block(self, queries: slice) -> Block:
        if not self.keys.plain:
            seen = self.seen
            return Block(queries, slice(None), None if seen is None else seen[:, :, queries])
        before = self.keys.positions.shape[1] - self.queries.positions.shape[1]
        stop = before + queries.stop
        first = 0 if self.window is None else before + queries.start - self.window
        keys: Tensor | slice = slice(0, stop)
        if first > self.front:
            device = self.keys.meta.device
            meta = torch.arange(self.front, device=device)
            keys = torch.cat([meta, torch.arange(first, stop, device=device)])
        return Block(queries, keys, self._seen(self.queries.at(queries), self.keys.at(keys)))

    @lazy
    def block_mask(self) -> Any:
        """`seen` as flex_attention takes it."""
        from torch.nn.attention.flex_attention import create_block_mask

        seen = self.seen
        if seen is None:
            return None
        rows = seen.shape[0]

        def sees(b, h, q, k):
            return seen[b if rows > 1 else 0, 0, q, k]

        count, total = seen.shape[2:]
        return create_block_mask(sees, rows if rows > 1 else None, None, count, total, device=seen.device)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    implementation: str,
    *,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention by one of transformers' implementations.

    query (b, h, q, d), key (b, kv_heads, k, d), value (b, kv_heads, k, e). Returns (b, q, h, e), and the weights
    (b, h, q, k) if the implementation has them. `module` has num_key_value_groups = h / kv_heads.

    Raises ValueError for what flash-attn cannot do, as `flash.attend` says, and KeyError for an implementation that
    transformers does not know.
    """
    if not query.shape[2]:  # not every kernel takes a call of no tokens
        return eager_attention(module, query, key, value, None, scaling=1.0)
    if "flash" in implementation:
        return flash.attend(
            query, key, value, pattern, implementation, dropout=dropout, training=module.training
        ), None
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    options = {"scaling": query.shape[-1] ** -0.5, "dropout": dropout, "is_causal": False}
    if implementation == "flex_attention":
        return function(module, query, key, value, pattern.block_mask, **options)
    if implementation != "sdpa":
        bias = None if pattern.seen is None else _additive(pattern.seen, query.dtype)
        return function(module, query, key, value, bias, **options)

    if _fits_matrix_products(query, key, value, dropout):
        return _in_cache(query, key, value, pattern), None
    outs = []
    for block in pattern.blocks(_BLOCK):
        keys, values = key[:, :, block.keys], value[:, :, block.keys]
        part = query[:, :, block.queries]
        # on a CPU there is a fast kernel for equal head sizes only; each call draws its own dropout
        halved = query.device.type == "cpu" and part.shape[2] > 1 and not dropout
        sizes = query.shape[-1] if halved else value.shape[-1]
        heads = [function(module, part, keys, v, block.seen, **options)[0] for v in values.split(sizes, dim=-1)]
        outs.append(torch.cat(heads, dim=-1) if len(heads) > 1 else heads[0])
    return torch.cat(outs, dim=1) if len(outs) > 1 else outs[0], None


def _fits_matrix_products(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether `_in_cache` runs the call faster than sdpa: a prompt on a CPU, no gradient, and not so many keys that
    only a few queries' scores fit into its cache."""
    return (
        not torch.compiler.is_compiling()
        and query.device.type == "cpu"
        and query.dtype != torch.float16
        and query.shape[2] > 1
        and not dropout
        and 16 * query.shape[0] * query.shape[1] * key.shape[2] <= _SCORES
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)))
    )


def _in_cache(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
    """Softmax attention by matrix products, of so few queries at once that their scores stay in the cache. Twice to
    three times as fast as PyTorch's kernel, which takes values of the keys' size only, all of a group's keys once for
    each of its heads, and multiplies bfloat16 in float32. Scores and softmax are float32 (float64 for float64)."""
    batch, heads, count, size = query.shape
    kv_heads, total = key.shape[1:3]
    dtype = compute_dtype(query)
    query, key = query.to(dtype) * size**-0.5, key.to(dtype)
    at_once = min(_QUERIES, _SCORES // (batch * heads * total))
    out = value.new_empty(batch, count, heads, value.shape[3])
    for block in pattern.blocks(at_once):
        part, keys = query[:, :, block.queries], key[:, :, block.keys]
        rows = part.shape[2]
        scores = part.reshape(batch, kv_heads, -1, size) @ keys.transpose(-1, -2)  # a group's heads share its keys
        scores = scores.view(batch, heads, rows, -1)
        if block.seen is not None:
            scores += _additive(block.seen, dtype)
        weights = torch.softmax(scores, dim=-1).to(value.dtype).view(batch, kv_heads, heads // kv_heads * rows, -1)
        out[:, block.queries] = (weights @ value[:, :, block.keys]).view(batch, heads, rows, -1).transpose(1, 2)
    return out


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


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `seen`, else the least number."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
