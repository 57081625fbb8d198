"""Hydra's bidirectional mixer: a quasiseparable matrix made of two scans that share their decay rates.

Hydra (arXiv:2407.09941), section 3: QS(X) = shift(SS(X)) + flip(shift(SS(flip(X)))) + D X, with SS Mamba-2's scan
(`ssd`). Each scan's read-out moves on by one token, so that the diagonal is D's alone.
The `torch` backend works in chunks (see `chunks`, and there for the letters of the axes).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import cpu, matrices, triton
from .backends import Backend, Call, choose, register
from .chunks import Chunks, Direction, DirectionGradients
from .discretize import compute_dtype, step_size
from .rows import check_row_tensor, check_shape, padding_last, put_tokens_back, sequence_starts, shifted, take_tokens


def quasiseparable(
    x: Tensor,
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    diagonal: Tensor | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    chunk_size: int = 256,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """out[t] = forward[t-1] C_forward[t-1] + backward[t+1] C_backward[t+1] + (diagonal[t] + D) x[t], per head, with

        forward[t]  = exp(dt_forward[t] A) forward[t-1] + dt_forward[t] x[t] B_forward[t]^T
        backward[t] = exp(dt_backward[t] A) backward[t+1] + dt_backward[t] x[t] B_backward[t]^T

    and nothing read out before the first and behind the last token. States and what decays them are float32 (float64
    for float64 inputs) whatever the input dtype. Source: arXiv:2407.09941, section 3 (Hydra).

    Args:
        x: (batch, seqlen, nheads, headdim), any floating dtype; seqlen may be 0.
        dt_forward, dt_backward: (batch, seqlen, nheads), as projected; `dt_bias`, softplus and `dt_limit` are applied
            here.
        A: (nheads,), real and negative, of both directions.
        B_forward, C_forward, B_backward, C_backward: (batch, seqlen, ngroups, d_state); head i is in group
            i // (nheads / ngroups).
        diagonal: (batch, seqlen, nheads), what a token adds to its own output, per head (in Hydra a projection of x).
        D: (nheads,), added to `diagonal`.
        dt_bias: (nheads,), added to both dt before softplus.
        dt_softplus: whether a step is softplus(dt + dt_bias) rather than dt + dt_bias.
        dt_limit: (smallest, largest) step size, applied last; its gradient outside is zero.
        chunk_size: tokens that are computed as one matrix; at most a matter of speed, never of the result.
        initial_state: (nheads, headdim, d_state), the state before the first token of every sequence, of either
            direction; zeros if None. It is part of the model, so packed sequences begin with it, too.
        seq_idx: (batch, seqlen) integers; where the index changes a new sequence begins: neither direction reaches
            across.
        mask: (batch, seqlen) bool, False for padding: such a token gives 0, and its neighbours see past it, so a row
            equals the same row without its padding, wherever that is.
        backend: name of a backend; None takes the fastest that can run the call.

    Returns:
        out (batch, seqlen, nheads, headdim) in x's dtype. There is no final state: nothing continues from both ends.

    Raises:
        ValueError for shapes that disagree; UnsupportedByBackend, BackendUnavailable for a backend asked for by name.
    """
    directions = (dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward)
    _check(x, *directions, diagonal, D, dt_bias, dt_limit, chunk_size, initial_state, seq_idx, mask)
    if x.shape[1] == 0:
        return torch.zeros_like(x)
    dtype = compute_dtype(x)
    dt_limit = (float(dt_limit[0]), float(dt_limit[1]))
    dt_forward, dt_backward = (
        step_size(dt, dt_bias, dt_softplus, dt_limit, dtype) for dt in (dt_forward, dt_backward)
    )
    diagonal = _diagonal(diagonal, D, dt_forward)

    order = None
    if mask is not None:  # run the rows without their padding, then put every token back into its place
        order, seq_idx = padding_last(mask, seq_idx)
        x, dt_forward, dt_backward, B_forward, C_forward, B_backward, C_backward = (
            take_tokens(t, order) for t in (x, dt_forward, dt_backward, B_forward, C_forward, B_backward, C_backward)
        )
        diagonal = None if diagonal is None else take_tokens(diagonal, order)

    inputs = (x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward)
    traits = (("packed", seq_idx is not None), ("headdim", x.shape[3]), ("d_state", B_forward.shape[3]))
    run = choose(Call("quasiseparable", x.device.type, x.dtype, traits), backend)
    out = run(*inputs, diagonal, seq_idx, chunk_size)
    if initial_state is not None:
        out = (out.to(dtype) + _from_initial_state(*inputs, initial_state, seq_idx)).to(x.dtype)
    if order is not None and mask is not None:
        out = put_tokens_back(out, order).masked_fill(~mask[..., None, None], 0)
    return out


def quasiseparable_matrix(
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    diagonal: Tensor | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The matrix M of `quasiseparable`, per row and head: without initial state, out = M x. Below the diagonal

        M[t, s] = C_forward[t-1]^T B_forward[s] exp(A (dt_forward[s+1] + ... + dt_forward[t-1])) dt_forward[s],

    above it the same from the other side, M[t, t] = diagonal[t] + D, and 0 across sequences. Source: arXiv:2407.09941,
    section 3, definition 3.1. Memory grows with seqlen^2.

    Args: as those of `quasiseparable`.

    Returns (batch, nheads, seqlen, seqlen), float32 (float64 for float64 inputs), differentiable.
    """
    directions = (dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward)
    x = dt_forward[..., None]  # one channel per head stands for all
    _check(x, *directions, diagonal, D, dt_bias, dt_limit, 1, None, seq_idx, None)
    dtype = compute_dtype(x)
    steps = [step_size(dt, dt_bias, dt_softplus, dt_limit, dtype) for dt in (dt_forward, dt_backward)]
    scans = [*steps, *(t.to(dtype) for t in directions[2:])]
    return matrices.quasiseparable(scans, _diagonal(diagonal, D, dt_forward), seq_idx)


def quasiseparable_reference(
    x: Tensor,
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    diagonal: Tensor | None,
    seq_idx: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """The definition: the whole matrix, times x. dt_forward and dt_backward are step sizes, `diagonal` holds D. Every
    backend answers to it."""
    with torch.autocast(x.device.type, enabled=False):
        dtype = compute_dtype(x)
        scans = [t.to(dtype) for t in (dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward)]
        matrix = matrices.quasiseparable(scans, None if diagonal is None else diagonal.to(dtype), seq_idx)
        return torch.einsum("bhts,bshp->bthp", matrix, x.to(dtype)).to(x.dtype)


def _diagonal(diagonal: Tensor | None, D: Tensor | None, dt: Tensor) -> Tensor | None:
    """(b, l, h) in the compute dtype of `dt`, or None for zeros."""
    if D is None:
        return diagonal if diagonal is None else diagonal.to(compute_dtype(dt))
    D = D.to(compute_dtype(dt))
    return D.expand(dt.shape) if diagonal is None else diagonal.to(D.dtype) + D


def _from_initial_state(
    x: Tensor,
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    initial_state: Tensor,
    seq_idx: Tensor | None,
) -> Tensor:
    """What the state before every sequence adds to the output, (b, l, h, p).

    It only decays: no scan is needed, but the log decay from the sequence's start. That is a difference of sums over
    the row, which float64 holds exactly enough for any row.
    """
    with torch.autocast(x.device.type, enabled=False):
        dtype = compute_dtype(x)
        exact = dtype if x.device.type == "mps" else torch.float64  # MPS has no float64
        batch, seqlen, nheads, _ = x.shape
        position = torch.arange(seqlen, device=x.device)
        starts = torch.zeros(batch, seqlen, dtype=torch.bool, device=x.device)
        if seq_idx is not None:
            starts = sequence_starts(seq_idx)
        run = starts.cumsum(dim=1)
        first = torch.where(starts, position, 0).cummax(dim=1).values
        ends = torch.nn.functional.pad(starts[:, 1:], (0, 1))
        last = torch.where(ends, position, seqlen - 1).flip(1).cummin(dim=1).values.flip(1)

        def reaching(dt: Tensor, C: Tensor, bound: Tensor, backward: bool) -> Tensor:
            steps = dt.to(exact) * A.to(exact)  # b l h
            up_to = steps.cumsum(dim=1)
            before = up_to - steps
            from_start = take_tokens(up_to, bound) - before if backward else up_to - take_tokens(before, bound)
            heads = C.to(dtype).repeat_interleave(nheads // C.shape[2], dim=2)
            read = torch.einsum("blhn,hpn->blhp", heads, initial_state.to(dtype))
            read = read * torch.exp(from_start).to(dtype)[..., None]
            return _neighbour(read, run, -1 if backward else 1)

        return reaching(dt_forward, C_forward, first, False) + reaching(dt_backward, C_backward, last, True)


def _neighbour(t: Tensor, run: Tensor | None, distance: int) -> Tensor:
    """`shifted`, with zeros where the token is of another sequence, too."""
    moved = shifted(t, distance)
    if run is None:
        return moved
    same = shifted(run + 1, distance) == run + 1
    return moved * same.view(*same.shape, *[1] * (t.ndim - 2))


# --- the `torch` backend -------------------------------------------------------------------------------------------
#
# A chunk's own matrix holds both directions, one on either side of its diagonal, so x is multiplied with it once. The
# forward states pass the segments from the left, the backward ones from the right: one pass over the segments for the
# backward states, then one for everything else. x, B and C are read where they lie, in either direction.


def quasiseparable_torch(
    x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal, seq_idx, chunk_size
):
    scans = (dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward)
    return _quasiseparable(x, *scans, diagonal, seq_idx, chunk_size)[0]


@torch.library.custom_op("hf_ssm::quasiseparable", mutates_args=())
def _quasiseparable(
    x: Tensor,
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    diagonal: Tensor | None,
    seq_idx: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, the forward state before each segment, the backward state behind it: (b, segments, g, n, r p))."""
    with torch.autocast(x.device.type, enabled=False):
        mixer = _Mixer(x, A, B_forward, chunk_size, seq_idx)
        segments = list(enumerate(mixer.segments()))
        forward = _Inputs(dt_forward, B_forward, C_forward)
        backward = _Inputs(dt_backward, B_backward, C_backward, backward=True)
        behind = x.new_zeros(mixer.batch, len(segments), *mixer.state_shape, dtype=mixer.dtype)
        before = torch.empty_like(behind)
        for i, tokens in reversed(segments[1:]):
            behind[:, i - 1] = mixer.direction(tokens, mixer.load(tokens, x), backward).states(behind[:, i])[1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        state = mixer.no_state()
        for i, tokens in segments:
            before[:, i] = state
            part = mixer.segment_of(tokens, x, forward, backward, diagonal)
            entering, state = part.forward.states(state)
            y = (part.matrix() @ part.x.transpose(2, 3)).transpose(2, 3)
            y = y + part.forward.outputs(entering)
            y += part.backward.outputs(part.backward.states(behind[:, i])[0])
            out[:, tokens] = mixer.rows(y, part.tokens)
        return out, before, behind


@_quasiseparable.register_fake
def _(x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal, seq_idx, chunk_size):
    chunks = Chunks(x, B_forward, chunk_size)
    states = x.new_empty(chunks.batch, chunks.segment_count, *chunks.state_shape, dtype=chunks.dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format), states, torch.empty_like(states)


@torch.library.custom_op("hf_ssm::quasiseparable_backward", mutates_args=())
def _quasiseparable_backward(
    d_out: Tensor,
    x: Tensor,
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    diagonal: Tensor | None,
    seq_idx: Tensor | None,
    before: Tensor,
    behind: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal (empty
    without)."""
    with torch.autocast(x.device.type, enabled=False):
        mixer = _Mixer(x, A, B_forward, chunk_size, seq_idx)
        segments = list(enumerate(mixer.segments()))
        forward = _Inputs(dt_forward, B_forward, C_forward)
        backward = _Inputs(dt_backward, B_backward, C_backward, backward=True)
        d_x, d_diagonal = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(0)
        if diagonal is not None:
            d_diagonal = torch.empty_like(diagonal, memory_format=torch.contiguous_format)
        d_A = torch.zeros(A.shape, dtype=mixer.dtype, device=x.device)
        d_forward, d_backward = forward.no_gradients(), backward.no_gradients()
        d_behind = [mixer.no_state()]  # of the backward state that leaves each segment, at its front
        for _, tokens in segments[:-1]:
            scan = mixer.direction(tokens, mixer.load(tokens, x), backward)
            d_behind.append(scan.state_gradients(mixer.load(tokens, d_out), d_behind[-1])[1])
        d_before = mixer.no_state()  # of the forward state that leaves each segment, at its end
        for i, tokens in reversed(segments):
            part = mixer.segment_of(tokens, x, forward, backward, diagonal)
            d_y = mixer.load(tokens, d_out)
            d_part, d_matrix_forward, d_matrix_backward = part.matrix_gradients(d_y)
            d_part_x, d_part_diagonal = d_part
            d_leaving, d_before = part.forward.state_gradients(d_y, d_before)
            through_forward = part.forward.gradients(d_y, part.forward.states(before[:, i])[0], d_leaving)
            d_leaving, _ = part.backward.state_gradients(d_y, d_behind[i])
            through_backward = part.backward.gradients(d_y, part.backward.states(behind[:, i])[0], d_leaving)
            d_x[:, tokens] = mixer.rows(d_part_x + through_forward.x + through_backward.x, part.tokens)
            if diagonal is not None:
                d_diagonal[:, tokens] = mixer.rows(d_part_diagonal, part.tokens)
            d_A += mixer.store(d_forward, tokens, part.forward, d_matrix_forward, through_forward)
            d_A += mixer.store(d_backward, tokens, part.backward, d_matrix_backward, through_backward)
        return (
            *(d_x, d_forward.dt, d_backward.dt, d_A.to(A.dtype)),
            *(d_forward.B, d_forward.C, d_backward.B, d_backward.C, d_diagonal),
        )


@_quasiseparable_backward.register_fake
def _(d_out, x, *inputs):
    (*scans, diagonal), dtype = inputs[:8], compute_dtype(x)
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *scans)]
    return (*like, x.new_empty(0) if diagonal is None else torch.empty_like(diagonal, dtype=dtype))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 11
    *scans, diagonal, seq_idx, before, behind = ctx.saved_tensors
    grads = _quasiseparable_backward(d_out, *scans, diagonal, seq_idx, before, behind, ctx.chunk_size)
    return (*grads[:-1], None if diagonal is None else grads[-1], None, None)


_quasiseparable.register_autograd(_backward, setup_context=_setup_context)


@dataclass
class _Inputs:
    """dt, B, C of one direction, or their gradients. A scan's read-out is moved on by one token: C belongs to the
    token behind it (`backward`: before it)."""

    dt: Tensor
    B: Tensor
    C: Tensor
    backward: bool = False

    def no_gradients(self) -> "_Inputs":
        """To be written into; C's are zero where nothing reads it, at the last token (or the first)."""
        dt, B, C = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (self.dt, self.B, self.C))
        return _Inputs(dt, B, C, self.backward)

    def readers(self, tokens: slice) -> tuple[slice, slice]:
        """The tokens whose C is read by `tokens`, and which of `tokens` these readers are."""
        distance = -1 if self.backward else 1
        start, stop = tokens.start - distance, tokens.stop - distance
        first, last = max(start, 0), min(stop, self.C.shape[1])
        return slice(first, last), slice(first - start, last - start)


@dataclass
class _Direction(Direction):
    """Entry [q, k] of the log decays is row[q] + column[k], (b, c, h, q) each, in float64."""

    row: Tensor
    column: Tensor

    def log_decay_gradient(self, d_row: Tensor, d_column: Tensor, through_states: DirectionGradients) -> Tensor:
        """Of every token's log decay dt A, (b, c, q, h); d_row, d_column (b, c, q, h)."""
        d_row = d_row + through_states.log_read
        d_column = d_column + through_states.log_keep
        # `_Mixer.direction`: row and column are the sums before a token and up to it, or the other way round
        d_before, d_up_to = (d_column, -d_row) if self.backward else (d_row, -d_column)
        d_sums = d_up_to + torch.nn.functional.pad(d_before[:, :, 1:], (0, 0, 0, 1))
        with_total = through_states.log_read if self.backward else through_states.log_keep
        d_total = with_total.sum(dim=2) + through_states.log_across
        return d_sums.flip(2).cumsum(dim=2).flip(2) + d_total[:, :, None]


@dataclass
class _Segment:
    """One segment's tensors in float, cut into chunks. What depends on the direction holds the forward one below the
    diagonal and the backward one above it."""

    mixer: "_Mixer"
    tokens: int
    x: Tensor  # b c q h p
    forward: _Direction
    backward: _Direction
    diagonal: Tensor | None  # b c h q
    below: Tensor  # q k, bool
    decay: Tensor  # b c h q k, 0 on the diagonal and across sequences
    scores: Tensor  # b c g q k

    def _unweighted(self) -> Tensor:
        """The matrix before its columns' step sizes and the diagonal, (b, c, h, q, k)."""
        decay = self.decay.unflatten(2, (self.mixer.ngroups, -1))
        return (decay * self.mixer.per_head(self.scores)).flatten(2, 3)

    def _steps(self) -> Tensor:
        """(b, c, h, q, k): the step size of column k."""
        forward, backward = (scan.dt.transpose(2, 3)[..., None, :] for scan in (self.forward, self.backward))
        return torch.where(self.below, forward, backward)

    def matrix(self) -> Tensor:
        matrix = self._unweighted().mul_(self._steps())
        if self.diagonal is not None:
            matrix.diagonal(dim1=-2, dim2=-1).copy_(self.diagonal)
        return matrix

    def matrix_gradients(self, d_y: Tensor) -> tuple[tuple[Tensor, Tensor], "_MatrixGradients", "_MatrixGradients"]:
        """Gradients through the chunks' own matrices: of x and the diagonal, and of either direction."""
        d_y = d_y.transpose(2, 3)  # b c h q p
        unweighted, steps = self._unweighted(), self._steps()
        d_matrix = d_y @ self.x.permute(0, 1, 3, 4, 2)  # b c h q k
        d_x = (self.matrix().transpose(-1, -2) @ d_y).transpose(2, 3)
        d_diagonal = d_matrix.diagonal(dim1=-2, dim2=-1).transpose(2, 3).clone()
        d_weights = unweighted.mul_(d_matrix)
        d_scores = d_matrix.mul_(self.decay).mul_(steps).unflatten(2, (self.mixer.ngroups, -1)).sum(dim=3)
        return (
            (d_x, d_diagonal),
            _MatrixGradients.of(self.forward, d_weights.tril(-1), d_scores.tril(-1)),
            _MatrixGradients.of(self.backward, d_weights.triu_(1), d_scores.triu(1)),
        )


@dataclass
class _MatrixGradients:
    """Gradients through one triangle of the chunks' own matrices."""

    dt: Tensor  # b c q h, as the last factor of a column
    B: Tensor  # b c g q n
    C: Tensor
    row: Tensor  # b c q h, of the log decays' summands
    column: Tensor

    @staticmethod
    def of(scan: Direction, d_steps: Tensor, d_scores: Tensor) -> "_MatrixGradients":
        """d_steps (b, c, h, q, k): gradient of each entry's step size; d_scores (b, c, g, q, k)."""
        d_dt = d_steps.sum(dim=-2).transpose(2, 3)
        return _MatrixGradients(
            dt=d_dt,
            B=d_scores.transpose(-1, -2) @ scan.C,
            C=d_scores @ scan.B,
            row=(d_steps @ scan.dt.transpose(2, 3)[..., None]).squeeze(-1).transpose(2, 3),
            column=d_dt * scan.dt,
        )


class _Mixer(Chunks):
    """The steps of one call's forward and backward."""

    def __init__(self, x: Tensor, A: Tensor, B: Tensor, chunk_size: int, seq_idx: Tensor | None):
        super().__init__(x, B, chunk_size)
        self.A = A.to(self.dtype)
        self.run = None if seq_idx is None else sequence_starts(seq_idx).int().cumsum(dim=1)

    def load(self, tokens: slice, t: Tensor) -> Tensor:
        """x or out's gradient: (b, l, h, p) -> (b, c, q, h, p)"""
        return self.cut(t[:, tokens].to(self.dtype))

    def segment_of(
        self, tokens: slice, x: Tensor, forward: _Inputs, backward: _Inputs, diagonal: Tensor | None
    ) -> _Segment:
        x = self.load(tokens, x)
        scans = [self.direction(tokens, x, inputs) for inputs in (forward, backward)]
        length = x.shape[2]
        below = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-1)
        unseen = torch.eye(length, dtype=torch.bool, device=x.device)
        if self.run is not None:
            run = self.cut(self.run[:, tokens], repeat_last=True)[:, :, None]  # b c 1 q
            unseen = unseen | (run[..., :, None] != run[..., None, :])
        decays = [(scan.row[..., :, None] + scan.column[..., None, :]).to(self.dtype) for scan in scans]
        scores = [scan.C @ scan.B.transpose(-1, -2) for scan in scans]
        return _Segment(
            mixer=self,
            tokens=tokens.stop - tokens.start,
            x=x,
            forward=scans[0],
            backward=scans[1],
            diagonal=None if diagonal is None else self.cut(diagonal[:, tokens].to(self.dtype)).transpose(2, 3),
            below=below,
            decay=torch.where(below, decays[0], decays[1]).masked_fill_(unseen, -torch.inf).exp_(),
            scores=torch.where(below, scores[0], scores[1]),
        )

    def direction(self, tokens: slice, x: Tensor, inputs: _Inputs) -> _Direction:
        """One direction through the chunks of a segment; x is `load`ed."""
        dt = self.cut(inputs.dt[:, tokens].to(self.dtype))
        up_to = torch.cumsum((dt * self.A).to(self.exact), dim=2).transpose(2, 3)  # b c h q, from the chunk's start
        before = torch.nn.functional.pad(up_to, (1, 0))[..., :-1]
        across = up_to[..., -1]
        row, column = (-up_to, before) if inputs.backward else (before, -up_to)
        read, keep = (row + across[..., None], column) if inputs.backward else (row, column + across[..., None])
        if self.run is not None:
            run = self.cut(self.run[:, tokens], repeat_last=True)  # b c q
            entering, leaving = self._run_at_edges(tokens, run, inputs.backward)
            read = read.masked_fill((run != entering[..., None])[:, :, None], -torch.inf)
            keep = keep.masked_fill((run != leaving[..., None])[:, :, None], -torch.inf)
            across = across.masked_fill((leaving != entering)[..., None], -torch.inf)
        read_tokens, readers = inputs.readers(tokens)
        C = inputs.C.new_zeros(self.batch, tokens.stop - tokens.start, *inputs.C.shape[2:])
        C[:, readers] = inputs.C[:, read_tokens]
        return _Direction(
            chunks=self,
            x=x,
            dt=dt,
            B=self.cut_by_group(inputs.B[:, tokens]),
            C=self.cut_by_group(C),
            read=read.to(self.dtype).exp().transpose(2, 3),
            keep=keep.to(self.dtype).exp().transpose(2, 3),
            across=across.to(self.dtype).exp(),
            backward=inputs.backward,
            row=row,
            column=column,
        )

    def _run_at_edges(self, tokens: slice, run: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
        """(b, c): the sequences that the states which enter and leave each chunk belong to."""
        assert self.run is not None
        first, last = run[..., 0], run[..., -1]
        if backward:
            behind = self.run[:, min(tokens.stop, self.seqlen - 1), None]
            return torch.cat([first[:, 1:], behind], dim=1), first
        before = self.run[:, max(tokens.start - 1, 0), None]
        return torch.cat([before, last[:, :-1]], dim=1), last

    def store(
        self,
        into: _Inputs,
        tokens: slice,
        scan: _Direction,
        through_matrix: _MatrixGradients,
        through_states: DirectionGradients,
    ) -> Tensor:
        """Write the gradients of one direction's dt, B and C; returns what the segment adds to A's."""
        count = tokens.stop - tokens.start
        d_log_decay = scan.log_decay_gradient(through_matrix.row, through_matrix.column, through_states)
        d_dt = (through_matrix.dt + through_states.dt).addcmul_(d_log_decay, self.A)
        d_B, d_C = (
            self.rows((ours + theirs).transpose(2, 3), count)
            for ours, theirs in ((through_matrix.B, through_states.B), (through_matrix.C, through_states.C))
        )
        read_tokens, readers = into.readers(tokens)
        into.dt[:, tokens], into.B[:, tokens] = self.rows(d_dt, count), d_B
        into.C[:, read_tokens] = d_C[:, readers]
        return (d_log_decay * scan.dt).sum(dim=(0, 1, 2))


# --- checks --------------------------------------------------------------------------------------------------------


def _check(
    x,
    dt_forward,
    dt_backward,
    A,
    B_forward,
    C_forward,
    B_backward,
    C_backward,
    diagonal,
    D,
    dt_bias,
    dt_limit,
    chunk_size,
    initial_state,
    seq_idx,
    mask,
) -> None:
    name = "quasiseparable"
    if x.ndim != 4:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (batch, seqlen, nheads, headdim)")
    batch, seqlen, nheads, headdim = x.shape
    per_head = {"dt_forward": dt_forward, "dt_backward": dt_backward}
    if diagonal is not None:
        per_head["diagonal"] = diagonal
    for key, value in per_head.items():
        check_shape(name, key, value, (batch, seqlen, nheads), "(batch, seqlen, nheads)")
    for key, value in {"A": A, "D": D, "dt_bias": dt_bias}.items():
        if value is not None:
            check_shape(name, key, value, (nheads,), "(nheads,)")
    if B_forward.ndim != 4 or B_forward.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"{name}: B_forward has shape {tuple(B_forward.shape)}, expected (batch, seqlen, ngroups, d_state) with "
            f"batch={batch}, seqlen={seqlen}"
        )
    for key, value in {"C_forward": C_forward, "B_backward": B_backward, "C_backward": C_backward}.items():
        check_shape(name, key, value, tuple(B_forward.shape), "(batch, seqlen, ngroups, d_state)")
    if B_forward.shape[2] == 0 or nheads % B_forward.shape[2]:
        raise ValueError(f"{name}: ngroups={B_forward.shape[2]} (B_forward) does not divide nheads={nheads} (x)")
    if not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"{name}: dt_limit={dt_limit}, expected (smallest, largest)")
    if chunk_size < 1:
        raise ValueError(f"{name}: chunk_size={chunk_size}, expected at least 1")
    if initial_state is not None:
        check_shape(
            name, "initial_state", initial_state, (nheads, headdim, B_forward.shape[3]), "(nheads, headdim, d_state)"
        )
    if seq_idx is not None:
        check_row_tensor(name, "seq_idx", seq_idx, x)
    if mask is not None:
        check_row_tensor(name, "mask", mask, x)


# --- the table -----------------------------------------------------------------------------------------------------

register(
    "quasiseparable",
    triton.backend("quasiseparable:quasiseparable_triton"),
    cpu.backend("quasiseparable:quasiseparable_cpu"),
    Backend("torch", "hf_ssm.ops.quasiseparable:quasiseparable_torch"),
    Backend("reference", "hf_ssm.ops.quasiseparable:quasiseparable_reference", automatic=False),
)
