"""What the chunked scans of the `torch` backend share: how tokens are cut, and the way of a state through the chunks.

State space duality (arXiv:2405.21060, section 6): a chunk is a small matrix on its diagonal and, through the state
that enters it, one matrix product with everything outside. A segment is as many chunks as are computed at once; states
are chained from chunk to chunk and from segment to segment. Only the state that enters each segment is kept for
backward, which recomputes the rest.
Inside, a state is (g, n, r p): all heads of a group share B and C, so they share one matrix product.

b batch   l seqlen   s segment   c chunk   q, k positions inside a chunk   h nheads   p headdim   g ngroups
r heads per group   n d_state
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .discretize import compute_dtype

_CHUNK = 64  # the largest chunk: exp runs over chunk_size values per token and head, the state's cost does not depend
_SEGMENT_ELEMENTS = 1 << 20  # target size of a segment's attention matrices, b * c * h * q * k


class Chunks:
    """The shapes of one call: x (b, l, h, p), B (b, l, g, n)."""

    def __init__(self, x: Tensor, B: Tensor, chunk_size: int):
        self.batch, self.seqlen, self.nheads, self.headdim = x.shape
        self.ngroups, self.d_state = B.shape[2], B.shape[3]
        self.per_group = self.nheads // self.ngroups
        self.state_shape = (self.ngroups, self.d_state, self.per_group * self.headdim)  # g n rp
        self.dtype = compute_dtype(x)
        # of log decays summed up from a chunk's start, whose differences must be exact behind a large one, too
        self.exact = self.dtype if x.device.type == "mps" else torch.float64  # MPS has no float64
        self.chunk = min(chunk_size, _CHUNK)
        per_chunk = max(1, self.batch * self.nheads * self.chunk**2)
        self.segment = max(1, _SEGMENT_ELEMENTS // per_chunk) * self.chunk
        self.new = x.new_empty

    @property
    def segment_count(self) -> int:
        return -(-self.seqlen // self.segment)

    def segments(self) -> list[slice]:
        return [slice(i, min(i + self.segment, self.seqlen)) for i in range(0, self.seqlen, self.segment)]

    def no_state(self) -> Tensor:
        return self.new(self.batch, *self.state_shape, dtype=self.dtype).zero_()

    def cut(self, rows: Tensor, repeat_last: bool = False) -> Tensor:
        """(b, s, ...) -> (b, c, q, ...), padded behind: a step of size 0 leaves the state as it is."""
        chunk = min(self.chunk, rows.shape[1])
        missing = -rows.shape[1] % chunk
        if missing:
            filling = rows[:, -1:] if repeat_last else torch.zeros_like(rows[:, -1:])
            rows = torch.cat([rows, filling.expand(-1, missing, *rows.shape[2:])], dim=1)
        return rows.unflatten(1, (-1, chunk))

    def cut_by_group(self, rows: Tensor) -> Tensor:
        """B or C: (b, s, g, n) of any dtype -> (b, c, g, q, n)"""
        return self.cut(rows.to(self.dtype)).transpose(2, 3).contiguous()

    def rows(self, chunks: Tensor, tokens: int) -> Tensor:
        """(b, c, q, ...) -> (b, s, ...), the inverse of `cut`."""
        return chunks.flatten(1, 2)[:, :tokens]

    def by_group(self, t: Tensor) -> Tensor:
        """(b, c, q, h, p) -> (b, c, g, q, rp)"""
        return t.unflatten(3, (self.ngroups, self.per_group)).transpose(2, 3).flatten(4)

    def by_head(self, t: Tensor) -> Tensor:
        """(b, c, g, q, rp) -> (b, c, q, h, p)"""
        return t.unflatten(4, (self.per_group, self.headdim)).transpose(2, 3).flatten(3, 4)

    def per_head(self, scores: Tensor) -> Tensor:
        """(b, c, g, q, k) -> a view (b, c, g, r, q, k) that stands for (b, c, h, q, k)"""
        return scores[:, :, :, None].expand(-1, -1, -1, self.per_group, -1, -1)

    def chain(self, gained: Tensor, across: Tensor, state: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
        """state -> across * state + gained, chunk by chunk, from the last one if `backward`.

        gained (b, c, g, n, rp), across (b, c, h). Returns the state that enters each chunk, (b, c, g, n, rp), and the
        one that leaves the last.
        """
        across = across.repeat_interleave(self.headdim, dim=2).unflatten(2, (self.ngroups, 1, -1))  # b c g 1 rp
        chunks = range(gained.shape[1])
        entering = torch.empty_like(gained)
        for c in reversed(chunks) if backward else chunks:
            entering[:, c] = state
            state = torch.addcmul(gained[:, c], across[:, c], state)
        return entering, state


@dataclass
class Direction:
    """One scan through the chunks of a segment, from either side."""

    chunks: Chunks
    x: Tensor  # b c q h p
    dt: Tensor  # b c q h
    B: Tensor  # b c g q n
    C: Tensor  # b c g q n
    read: Tensor  # b c q h: what reaches token q of the state that enters the chunk
    keep: Tensor  # b c q h: what the state that leaves the chunk keeps of what token q adds
    across: Tensor  # b c h: what it keeps of the state that enters
    backward: bool  # from the last chunk to the first

    def states(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The state that enters each chunk, (b, c, g, n, rp), and the one that leaves the segment."""
        added = self.chunks.by_group(self.x * (self.keep * self.dt)[..., None])
        return self.chunks.chain(self.B.transpose(-1, -2) @ added, self.across, state, self.backward)

    def outputs(self, entering: Tensor) -> Tensor:
        """What the entering states contribute to y, (b, c, q, h, p)."""
        return self.chunks.by_head(self.C @ entering) * self.read[..., None]

    def state_gradients(self, d_y: Tensor, d_leaving: Tensor) -> tuple[Tensor, Tensor]:
        """d_y (b, c, q, h, p) and the gradient of the state that leaves the segment -> those of the states that leave
        the chunks, and of the one that enters the segment."""
        d_read = self.chunks.by_group(d_y * self.read[..., None])
        return self.chunks.chain(self.C.transpose(-1, -2) @ d_read, self.across, d_leaving, not self.backward)

    def gradients(self, d_y: Tensor, entering: Tensor, d_leaving: Tensor) -> "DirectionGradients":
        """Of everything but the states, for what goes through them. `d_leaving` is that of `state_gradients`."""
        chunks = self.chunks
        kept = self.keep * self.dt
        d_added = chunks.by_head(self.B @ d_leaving)  # b c q h p, of keep dt x
        d_kept = (d_added * self.x).sum(dim=-1)
        d_across = (d_leaving * entering).sum(dim=3).unflatten(3, (chunks.per_group, chunks.headdim)).sum(dim=-1)
        return DirectionGradients(
            x=d_added * kept[..., None],
            dt=d_kept * self.keep,
            B=chunks.by_group(self.x * kept[..., None]) @ d_leaving.transpose(-1, -2),
            C=chunks.by_group(d_y * self.read[..., None]) @ entering.transpose(-1, -2),
            log_read=(chunks.by_head(self.C @ entering) * d_y).sum(dim=-1) * self.read,
            log_keep=d_kept * kept,
            log_across=d_across.flatten(2) * self.across,
        )


@dataclass
class DirectionGradients:
    """Gradients of a `Direction`'s fields, those of `read`, `keep` and `across` taken of their logarithms."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    log_read: Tensor
    log_keep: Tensor
    log_across: Tensor
