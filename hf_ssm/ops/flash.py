"""flash-attn under attention with a sliding window and meta tokens.

flash-attn knows neither: a window hides the meta tokens, and all heads have one size. So the tokens and the meta
tokens are attended to in two calls whose results are merged by their log-sum-exp, and a value head goes in parts as
wide as a key head. The backward pass gives each call the merged output and log-sum-exp, of which its own softmax is
a share.

Rows become lists of sequences without padding, (tokens, heads, head size), with the ends of each: flash-attn aligns
the last query of a sequence with its last key, as caches need it.

Signatures: flash-attn 2.7 and 2.8, flash_attn.flash_attn_interface; flash-attn 3.0, flash_attn_interface (hopper/ in
the same repository).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import Pattern, Places


@torch.compiler.disable  # it reads lengths off the device: one graph break, where there would be many
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: "Pattern",
    implementation: str,
    *,
    dropout: float,
    training: bool,
) -> Tensor:
    """As `hf_ssm.ops.attention.attend`; padded queries give 0.

    Raises ValueError for another version than 2 and 3, for dropout, and for dtypes that flash-attn does not have.
    """
    if implementation not in _VERSIONS:
        raise ValueError(
            f"attn_implementation={implementation!r}: of flash-attn, {' and '.join(_VERSIONS)} are supported"
        )
    if dropout and training:
        raise ValueError(f"{implementation} with attention_dropout: two merged calls cannot drop the same weights")
    if query.dtype not in _DTYPES:
        raise ValueError(f"{implementation} computes in float16 and bfloat16, not {query.dtype}: load the model so")
    kernels = _VERSIONS[implementation]()
    queries, keys, rows = pattern.queries, pattern.keys, query.shape[0]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    tokens_q, tokens_k, meta_k = (
        _select(p, rows, meta) for p, meta in ((queries, False), (keys, False), (keys, True))
    )
    count = max(len(s.ends) for s in (tokens_q, tokens_k, meta_k)) - 1
    tokens_q, tokens_k, meta_k = (s.with_sequences(count) for s in (tokens_q, tokens_k, meta_k))
    parts = [_Part(tokens_k, causal=True, window=pattern.window)]
    if meta_k.longest:
        parts.append(_Part(meta_k, causal=False, window=None))
    out[tokens_q.where] = _merged(kernels, q[tokens_q.where], k, v, tokens_q, parts)
    meta_q = _select(queries, rows, True).with_sequences(count)
    if meta_q.longest:
        part = _Part(meta_k, causal=True, window=None)
        out[meta_q.where] = _merged(kernels, q[meta_q.where], k, v, meta_q, [part])
    return out


_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
# forward(q, k, v, **options) -> (out, log-sum-exp, ...); backward(d_out, q, k, v, out, log-sum-exp, d_q, d_k, d_v,
# **options, deterministic), which writes the last three
_Kernels = tuple[Callable[..., Any], Callable[..., Any]]


def _version_2() -> _Kernels:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

    off = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
    return partial(_flash_attn_varlen_forward, **off), partial(_flash_attn_varlen_backward, **off)


def _version_3() -> _Kernels:
    from flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    def backward(*tensors: Tensor, causal: bool, **options: Any) -> None:
        d_q, d_k, d_v = tensors[6:]
        _flash_attn_backward(*tensors[:6], dq=d_q, dk=d_k, dv=d_v, is_causal=causal, **options)

    return _flash_attn_forward, backward


_VERSIONS = {"flash_attention_2": _version_2, "flash_attention_3": _version_3}


@dataclass
class _Sequences:
    """Tokens of a batch as one list, sequence after sequence."""

    where: tuple[Tensor, Tensor]  # their rows and columns
    ends: Tensor  # (sequences + 1,) int32, the first 0
    longest: int

    def with_sequences(self, count: int) -> "_Sequences":
        """With empty sequences added at the end."""
        missing = count + 1 - len(self.ends)
        return _Sequences(self.where, torch.cat([self.ends, self.ends[-1:].expand(missing)]), self.longest)


def _select(places: "Places", rows: int, meta: bool) -> _Sequences:
    """The real tokens that are, or are not, meta tokens."""
    chosen = (places.meta if meta else ~places.meta).expand(rows, -1)
    if places.real is not None:
        chosen = chosen & places.real
    sequences = torch.zeros_like(places.positions) if places.sequences is None else places.sequences
    sequences = sequences.expand(rows, -1)
    most = int(sequences.max()) + 1 if sequences.numel() else 1
    number = torch.arange(rows, device=chosen.device)[:, None] * most + sequences
    lengths = torch.bincount(number[chosen], minlength=rows * most)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    row, column = chosen.nonzero(as_tuple=True)
    return _Sequences((row, column), ends, int(lengths.max()) if lengths.numel() else 0)


@dataclass
class _Part:
    """One call's keys, and how the queries see them."""

    keys: _Sequences
    causal: bool
    window: int | None

    def options(self, queries: _Sequences, size: int) -> dict[str, Any]:
        return {
            "cu_seqlens_q": queries.ends,
            "cu_seqlens_k": self.keys.ends,
            "max_seqlen_q": queries.longest,
            "max_seqlen_k": self.keys.longest,
            "softmax_scale": size**-0.5,
            "causal": self.causal,
            "window_size_left": -1 if self.window is None else self.window,
            "window_size_right": 0 if self.causal else -1,
        }


def _merged(kernels: _Kernels, q: Tensor, k: Tensor, v: Tensor, queries: _Sequences, parts: list[_Part]) -> Tensor:
    """q (tokens, h, d); k, v (b, k, kv_heads, size) -> (tokens, h, e)"""
    given = [t[part.keys.where] for part in parts for t in (k, v)]
    return _MergedAttention.apply(q, kernels, queries, parts, *given)


class _MergedAttention(torch.autograd.Function):
    """Softmax over the keys of all parts. apply(q, kernels, queries, parts, k, v of part 0, k, v of part 1, ...)"""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kernels: _Kernels, queries: _Sequences, parts: list[_Part], *keys_and_values: Tensor
    ) -> Tensor:
        forward, ctx.backward_kernel = kernels
        size, width = q.shape[-1], keys_and_values[1].shape[-1]
        outs, sums = [], []
        for part, k, v in zip(parts, keys_and_values[::2], keys_and_values[1::2], strict=True):
            results = [forward(q, k, piece, **part.options(queries, size)) for piece in _pieces(v, size)]
            outs.append(torch.cat([out for out, *_ in results], dim=-1)[..., :width].float())
            sums.append(results[0][1].float())  # log-sum-exp (h, tokens)
        total = torch.logsumexp(torch.stack(sums), dim=0)
        shares = [torch.exp(part_sum - total).transpose(0, 1)[..., None] for part_sum in sums]
        weighted = [part_out * share for part_out, share in zip(outs, shares, strict=True)]
        out = torch.stack(weighted).sum(dim=0).to(q.dtype)
        ctx.queries, ctx.parts = queries, parts
        ctx.save_for_backward(q, out, total, *keys_and_values)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        q, out, total, *keys_and_values = ctx.saved_tensors
        size, width = q.shape[-1], out.shape[-1]
        d_q = torch.zeros_like(q, dtype=torch.float32)
        grads: list[Tensor] = []
        for part, k, v in zip(ctx.parts, keys_and_values[::2], keys_and_values[1::2], strict=True):
            d_k, d_v = torch.zeros_like(k, dtype=torch.float32), []
            pieces = zip(_pieces(d_out, size), _pieces(out, size), _pieces(v, size), strict=True)
            for d_out_piece, out_piece, v_piece in pieces:
                d_part = [torch.empty_like(t) for t in (q, k, v_piece)]
                ctx.backward_kernel(
                    *(d_out_piece, q, k, v_piece, out_piece, total, *d_part),
                    **part.options(ctx.queries, size),
                    deterministic=torch.are_deterministic_algorithms_enabled(),
                )
                d_q += d_part[0]
                d_k += d_part[1]
                d_v.append(d_part[2])
            grads += [d_k.to(k.dtype), torch.cat(d_v, dim=-1)[..., :width]]
        return d_q.to(q.dtype), None, None, None, *grads


def _pieces(t: Tensor, size: int) -> list[Tensor]:
    """(tokens, heads, width) -> as many (tokens, heads, size), the last filled up with zeros."""
    missing = -t.shape[-1] % size
    return [piece.contiguous() for piece in torch.nn.functional.pad(t, (0, missing)).split(size, dim=-1)]
