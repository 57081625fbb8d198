"""The scans written out as matrices over the sequence: what they are by definition, and far too large to compute with.

Structured matrices of state-space models: arXiv:2405.21060, section 3 (semiseparable), and arXiv:2407.09941, section 3
(quasiseparable). Memory grows with seqlen^2.

b batch   l seqlen   t row: the token that reads   s column: the token that is read   h nheads   d channels   n d_state
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .rows import sequence_starts


def semiseparable(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, seq_idx: Tensor | None) -> Tensor:
    """(b, h, l, l) of one scan with a scalar decay per head: C[t]^T B[s] exp(A (dt[s+1] + ... + dt[t])) dt[s], s <= t.

    dt (b, l, h) step sizes; A (h,); B, C (b, l, ngroups, n).
    """
    B, C = (t.repeat_interleave(dt.shape[2] // B.shape[2], dim=2) for t in (B, C))  # b l h n
    decay = torch.exp(segment_sums((dt * A).transpose(1, 2)))  # b h t s
    return torch.einsum("bthn,bshn,bhts,bsh->bhts", C, B, decay, dt) * seen(dt, seq_idx)[:, None]


def semiseparable_per_channel(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, seq_idx: Tensor | None) -> Tensor:
    """(b, d, l, l) of one scan whose channels decay at rates of their own: the sum over n of
    C[t, n] B[s, n] exp(A[n] (dt[s+1] + ... + dt[t])) dt[s], s <= t.

    dt (b, l, d) step sizes; A (d, n); B, C (b, l, ngroups, n).
    """
    per_group = dt.shape[2] // B.shape[2]
    matrix = dt.new_zeros(*dt.transpose(1, 2).shape, dt.shape[1])
    steps = segment_sums(dt.transpose(1, 2))  # b d t s
    for n in range(A.shape[1]):
        b, c = (t[..., n].repeat_interleave(per_group, dim=2).transpose(1, 2) for t in (B, C))  # b d l
        matrix = matrix + torch.exp(steps * A[:, n, None, None]) * c[..., :, None] * b[..., None, :]
    return matrix * dt.transpose(1, 2)[..., None, :] * seen(dt, seq_idx)[:, None]


def quasiseparable(scans: Sequence[Tensor], diagonal: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    """(b, h, l, l): shift(SS) + flip(shift(SS(flip))) + diagonal, where a shift moves every row on by one and nothing
    across sequences.

    `scans`: dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward; diagonal (b, l, h).
    """
    dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward = scans
    below = _next_row(semiseparable(dt_forward, A, B_forward, C_forward, seq_idx))
    dt, B, C = (t.flip(1) for t in (dt_backward, B_backward, C_backward))
    above = _next_row(semiseparable(dt, A, B, C, None if seq_idx is None else seq_idx.flip(1))).flip(2, 3)
    matrix = (below + above) * connected(dt_forward, seq_idx)[:, None]
    return matrix if diagonal is None else matrix + torch.diag_embed(diagonal.transpose(1, 2))


def segment_sums(steps: Tensor) -> Tensor:
    """(..., l) -> (..., l, l) with steps[s+1] + ... + steps[t] at [t, s] for s <= t, 0 above. Sums, not differences
    of sums: exact however large the whole is."""
    return steps[..., None].expand(*steps.shape, steps.shape[-1]).tril(-1).cumsum(dim=-2)


def seen(like: Tensor, seq_idx: Tensor | None) -> Tensor:
    """(b or 1, l, l) of `like`'s dtype: 1 where token s is token t or a token of its sequence before it, else 0."""
    return connected(like, seq_idx).tril()


def connected(like: Tensor, seq_idx: Tensor | None) -> Tensor:
    """(b or 1, l, l) of `like`'s (b, l, ...) dtype: 1 where two tokens are of the same sequence, else 0."""
    if seq_idx is None:
        return like.new_ones(1, like.shape[1], like.shape[1])
    run = sequence_starts(seq_idx).cumsum(dim=1)
    return (run[:, :, None] == run[:, None, :]).to(like.dtype)


def _next_row(matrix: Tensor) -> Tensor:
    """Row t becomes what row t - 1 was; the first row is 0."""
    return torch.nn.functional.pad(matrix, (0, 0, 1, 0))[..., :-1, :]
