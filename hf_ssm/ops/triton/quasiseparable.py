"""The `triton` backend of `hf_ssm.ops.quasiseparable`.

x is read where it lies, in both directions, and there are no flipped copies. In one chunk both directions are one full
matrix, the forward one below its diagonal and the backward one above it, so one product with x serves both. The
backward direction's states are computed first, at every chunk's end; then programs walk the heads from the front, with
the forward state in registers (see `chunks`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import at_once, single
from .chunks import (
    GRADIENT_OPTIONS,
    Scan,
    StepSizes,
    Walk,
    as_it_is,
    chunk_of_program,
    differences,
    edge_runs,
    load_tile,
    prepare,
    product,
    read_gradients,
    rounded,
    shape_of,
    start_of,
    state_decays,
    store_tile,
    strided,
    sums_before,
    sums_up_to,
)
from .common import on_device_of

CHUNK = 64  # tokens
SHORTEST_SEGMENT = 4  # chunks: a segment costs another look at its tokens, and a state in memory


@triton.jit
def _decay_matrix(forward, backward, place, q, connected, ROWS_READ: tl.constexpr):
    """What is left of a token at the one that reads it, from the forward direction where the latter comes later, from
    the backward one where it comes earlier; 0 where they are one, or not `connected`. `ROWS_READ`: rows are the tokens
    that read, else those that are read."""
    reads_forward, reads_forward_low = sums_before(forward, place, q)
    adds_forward, adds_forward_low = sums_up_to(forward, place, q)
    reads_backward, reads_backward_low = sums_up_to(backward, place, q)
    adds_backward, adds_backward_low = sums_before(backward, place, q)
    if ROWS_READ:
        later = q[:, None] > q[None, :]
        below = differences(reads_forward, reads_forward_low, adds_forward, adds_forward_low)
        above = 0.0 - differences(reads_backward, reads_backward_low, adds_backward, adds_backward_low)
    else:
        later = q[:, None] < q[None, :]
        below = 0.0 - differences(adds_forward, adds_forward_low, reads_forward, reads_forward_low)
        above = differences(adds_backward, adds_backward_low, reads_backward, reads_backward_low)
    seen = connected & (q[:, None] != q[None, :])
    return tl.exp2(tl.where(seen, tl.where(later, below, above), -float("inf")))


@triton.jit(do_not_specialize=["seqlen", "segment", "segments"])
def _forward(
    forward,
    backward,
    x,
    B_forward,
    C_forward,
    B_backward,
    C_backward,
    diagonal,
    initial,
    behind,
    out,
    seqlen,
    segment,
    segments,
    nheads,
    headdim,
    d_state,
    per_group,
    OPERAND: tl.constexpr,
    Q: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
):
    """Walks through one segment's chunks, for some channels of one head; `initial` is the forward state that enters
    the segment, `behind` has the backward states that enter the chunks."""
    blocks, chunks = tl.cdiv(headdim, P), tl.cdiv(seqlen, Q)
    program = tl.program_id(0)
    head = (program // blocks) % nheads
    group = head // per_group
    row_segment = program // (blocks * nheads)
    part = row_segment % segments
    row = (row_segment // segments).to(tl.int64)
    q, n, p = tl.arange(0, Q), tl.arange(0, N), (program % blocks) * P + tl.arange(0, P)
    given_n, given_p = n < d_state, p < headdim

    state = tl.zeros((N, P), dtype=tl.float32)
    if initial is not None:
        begins = start_of(initial, row, part.to(tl.int64), head)
        state = load_tile(begins, n, p, initial.strides[3], initial.strides[4], given_n, given_p)
    for i in range(tl.minimum(segment, chunks - part * segment)):
        chunk = part * segment + i
        row_chunk = row * chunks + chunk
        of_head = row_chunk * nheads + head
        place = of_head * Q
        start = (chunk * Q).to(tl.int64)
        left = seqlen - chunk * Q
        given = q < left
        given_before, given_after = given & (chunk + q > 0), q + 1 < left
        connected = q[:, None] < Q
        read, across = state_decays(forward, place, q, Q, FROM_FRONT=True, AT_TOKEN=False)
        keep, _ = state_decays(forward, place, q, Q, FROM_FRONT=False, AT_TOKEN=False)
        read_backward, _ = state_decays(backward, place, q, Q, FROM_FRONT=False, AT_TOKEN=False)
        if forward.runs is not None:
            runs = tl.load(forward.runs + row_chunk * Q + q)
            entering, leaving = edge_runs(forward, row_chunk, chunk == chunks - 1, Q, BACKWARD=False)
            behind_run, _ = edge_runs(forward, row_chunk, chunk == chunks - 1, Q, BACKWARD=True)
            connected = runs[:, None] == runs[None, :]
            read = tl.where(runs == entering, read, 0.0)
            keep = tl.where(runs == leaving, keep, 0.0)
            across = tl.where(entering == leaving, across, 0.0)
            read_backward = tl.where(runs == behind_run, read_backward, 0.0)

        tile_x = load_tile(start_of(x, row, start, head), q, p, x.strides[1], x.strides[3], given, given_p)
        base = start_of(C_forward, row, start - 1, group)
        tile_C = load_tile(base, q, n, C_forward.strides[1], C_forward.strides[3], given_before, given_n).to(OPERAND)
        base = start_of(B_forward, row, start, group)
        tile_B = load_tile(base, q, n, B_forward.strides[1], B_forward.strides[3], given, given_n).to(OPERAND)
        steps = tl.load(forward.steps + place + q)
        y = product(tile_C, rounded(state, OPERAND), None, OPERAND) * read[:, None]
        weighted = tile_x.to(tl.float32) * (keep * steps)[:, None]
        state = product(tl.trans(tile_B), weighted, across * state, OPERAND)
        below = product(tile_C, tl.trans(tile_B), None, OPERAND) * steps[None, :]

        base = start_of(C_backward, row, start + 1, group)
        tile_C = load_tile(base, q, n, C_backward.strides[1], C_backward.strides[3], given_after, given_n).to(OPERAND)
        base = start_of(B_backward, row, start, group)
        tile_B = load_tile(base, q, n, B_backward.strides[1], B_backward.strides[3], given, given_n).to(OPERAND)
        state_behind = load_tile(behind + of_head * d_state * headdim, n, p, headdim, 1, given_n, given_p)
        y += product(tile_C, state_behind, None, OPERAND) * read_backward[:, None]
        steps = tl.load(backward.steps + place + q)
        above = product(tile_C, tl.trans(tile_B), None, OPERAND) * steps[None, :]

        matrix = tl.where(q[:, None] > q[None, :], below, above)
        matrix *= _decay_matrix(forward, backward, place, q, connected, ROWS_READ=True)
        y = product(rounded(matrix, OPERAND), tile_x.to(OPERAND), y, OPERAND)
        if diagonal is not None:
            base = diagonal.data + row * diagonal.strides[0] + start * diagonal.strides[1] + head * diagonal.strides[2]
            own = tl.load(base + q * diagonal.strides[1], mask=given, other=0).to(tl.float32)
            y += own[:, None] * tile_x.to(tl.float32)
        store_tile(start_of(out, row, start, head), y, q, p, out.strides[1], out.strides[3], given, given_p)


@triton.jit
def _log_decay_gradient(through_matrix, d_read, d_keep, d_across, BACKWARD: tl.constexpr):
    """Of each token's log decay, which is no part of what is read at the token itself, but of all that passes it."""
    if BACKWARD:
        d_read, d_keep = d_keep, d_read  # mirrored: what is kept comes from behind
    after = tl.cumsum(d_read, 0, reverse=True) - d_read
    before = tl.cumsum(d_keep, 0) - d_keep
    return through_matrix + after + before + d_across


@triton.jit
def _store_scan_gradients(d_dt, d_A, of_head, row, start, head, q, given, d_steps, d_log_decay, steps, rate):
    d_log_decay = tl.where(given, d_log_decay, 0.0)
    base = d_dt.data + row * d_dt.strides[0] + start * d_dt.strides[1] + head * d_dt.strides[2]
    tl.store(base + q * d_dt.strides[1], d_steps + rate * d_log_decay, mask=given)
    tl.store(d_A + of_head, tl.sum(d_log_decay * steps, 0))


@triton.jit
def _store_BC_gradients(
    d_B, d_C, d_read_C, d_tile_B, d_scores, tile_B, tile_C, split, row, row_chunk, start, group, groups, programs,
    q, n, given, given_C, given_n, d_state, SHIFT: tl.constexpr, OPERAND: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """d_scores [k, q]: of the scores B[k]^T C[q + SHIFT], of all heads."""
    d_tile_B = product(d_scores, tile_C, d_tile_B, OPERAND)
    base = d_B.data + split * d_B.strides[0] + row * d_B.strides[1] + start * d_B.strides[2] + group * d_B.strides[3]
    store_tile(base, d_tile_B, q, n, d_B.strides[2], d_B.strides[4], given, given_n)
    base = ((split * programs + row_chunk) * Q * groups + group) * d_state
    d_tile_C = load_tile(d_read_C + base, q, n, groups * d_state, 1, given, given_n)
    d_tile_C = product(tl.trans(d_scores), tile_B, d_tile_C, OPERAND)
    base = d_C.data + split * d_C.strides[0] + row * d_C.strides[1] + group * d_C.strides[3]
    base += (start + SHIFT) * d_C.strides[2]
    store_tile(base, d_tile_C, q, n, d_C.strides[2], d_C.strides[4], given_C, given_n)


@triton.jit(do_not_specialize=["seqlen"])
def _backward(
    forward,
    backward,
    x,
    d_y,
    A,
    B_forward,
    C_forward,
    B_backward,
    C_backward,
    diagonal,
    d_leaving_forward,
    d_leaving_backward,
    read_forward,
    read_backward,
    d_x,
    d_dt_forward,
    d_dt_backward,
    d_A,
    d_A_backward,
    d_B_forward,
    d_C_forward,
    d_B_backward,
    d_C_backward,
    d_diagonal,
    seqlen,
    nheads,
    headdim,
    d_state,
    per_group,
    per_program,
    splits,
    OPERAND: tl.constexpr,
    Q: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Gradients through one chunk, for some heads of one group. Matrices are transposed here: [k, q], the token that
    is read and the one that reads it: the forward direction above the diagonal, the backward one below it."""
    chunks, groups = tl.cdiv(seqlen, Q), nheads // per_group
    split, group, row, chunk, row_chunk = chunk_of_program(splits, groups, chunks)
    programs = tl.num_programs(0) // (splits * groups)
    start = chunk * Q
    q, n = tl.arange(0, Q), tl.arange(0, N)
    left = seqlen - start
    given, given_n = q < left, n < d_state
    given_before, given_after = given & (start + q > 0), q + 1 < left

    of_group = start_of(B_forward, row, start, group)
    B_f = load_tile(of_group, q, n, B_forward.strides[1], B_forward.strides[3], given, given_n).to(OPERAND)
    of_group = start_of(C_forward, row, start - 1, group)
    C_f = load_tile(of_group, q, n, C_forward.strides[1], C_forward.strides[3], given_before, given_n).to(OPERAND)
    of_group = start_of(B_backward, row, start, group)
    B_b = load_tile(of_group, q, n, B_backward.strides[1], B_backward.strides[3], given, given_n).to(OPERAND)
    of_group = start_of(C_backward, row, start + 1, group)
    C_b = load_tile(of_group, q, n, C_backward.strides[1], C_backward.strides[3], given_after, given_n).to(OPERAND)
    connected = q[:, None] < Q
    if forward.runs is not None:
        runs = tl.load(forward.runs + row_chunk * Q + q)
        _entering, leaving = edge_runs(forward, row_chunk, chunk == chunks - 1, Q, BACKWARD=False)
        _behind, leaving_backward = edge_runs(forward, row_chunk, chunk == chunks - 1, Q, BACKWARD=True)
        connected = runs[:, None] == runs[None, :]

    later = q[:, None] < q[None, :]  # q reads k from the forward direction
    scores = product(B_f, tl.trans(C_f), None, OPERAND)
    scores = tl.where(later, scores, product(B_b, tl.trans(C_b), None, OPERAND))
    d_scores = tl.zeros((Q, Q), dtype=tl.float32)
    d_B_f = tl.zeros((Q, N), dtype=tl.float32)
    d_B_b = tl.zeros((Q, N), dtype=tl.float32)
    first_head = group * per_group + split * per_program
    for head in range(first_head, tl.minimum(first_head + per_program, (group + 1) * per_group)):
        of_head = row_chunk * nheads + head
        place = of_head * Q
        steps_f, steps_b = tl.load(forward.steps + place + q), tl.load(backward.steps + place + q)
        keep_f, _ = state_decays(forward, place, q, Q, FROM_FRONT=False, AT_TOKEN=False)
        keep_b, _ = state_decays(backward, place, q, Q, FROM_FRONT=True, AT_TOKEN=False)
        if forward.runs is not None:
            keep_f = tl.where(runs == leaving, keep_f, 0.0)
            keep_b = tl.where(runs == leaving_backward, keep_b, 0.0)

        # through the chunk's own matrix
        d_matrix = tl.zeros((Q, Q), dtype=tl.float32)
        for block in tl.static_range(BLOCKS):
            p = block * P + tl.arange(0, P)
            given_p = p < headdim
            tile_x = load_tile(start_of(x, row, start, head), q, p, x.strides[1], x.strides[3], given, given_p)
            tile_dy = load_tile(start_of(d_y, row, start, head), q, p, d_y.strides[1], d_y.strides[3], given, given_p)
            d_matrix = product(tile_x.to(OPERAND), tl.trans(tile_dy), d_matrix, OPERAND)
        if diagonal is not None:
            own = tl.sum(tl.where(q[:, None] == q[None, :], d_matrix, 0.0), 1)
            tl.store(d_diagonal + (row * seqlen + start + q) * nheads + head, own, mask=given)
        decay = _decay_matrix(forward, backward, place, q, connected, ROWS_READ=False)
        matrix = decay * scores
        through = d_matrix * matrix
        d_steps_f = tl.sum(tl.where(later, through, 0.0), 1)
        d_steps_b = tl.sum(tl.where(later, 0.0, through), 1)
        steps = tl.where(later, steps_f[:, None], steps_b[:, None])
        through *= steps
        matrix *= steps
        d_scores += d_matrix * decay * steps
        # strictly between the token that is read and the one that reads it
        behind = tl.cumsum(tl.where(later, through, 0.0), 1, reverse=True)
        d_log_f = tl.sum(tl.where(later, behind - through, 0.0), 0)
        before = tl.cumsum(tl.where(later, 0.0, through), 1)
        d_log_b = tl.sum(tl.where(q[:, None] > q[None, :], before - through, 0.0), 0)

        # through the states
        d_keep_f = tl.zeros((Q,), dtype=tl.float32)
        d_keep_b = tl.zeros((Q,), dtype=tl.float32)
        for block in tl.static_range(BLOCKS):
            p = block * P + tl.arange(0, P)
            given_p = p < headdim
            tile_x = load_tile(start_of(x, row, start, head), q, p, x.strides[1], x.strides[3], given, given_p)
            tile_dy = load_tile(start_of(d_y, row, start, head), q, p, d_y.strides[1], d_y.strides[3], given, given_p)
            base = of_head * d_state * headdim
            d_leaving = load_tile(d_leaving_forward + base, n, p, headdim, 1, given_n, given_p)
            from_state = product(B_f, d_leaving, None, OPERAND)
            d_keep_f += tl.sum(from_state * tile_x.to(tl.float32), 1)
            d_tile_x = (keep_f * steps_f)[:, None] * from_state
            kept = product(tile_x.to(OPERAND), tl.trans(d_leaving), None, OPERAND)
            d_B_f += (keep_f * steps_f)[:, None] * kept
            d_leaving = load_tile(d_leaving_backward + base, n, p, headdim, 1, given_n, given_p)
            from_state = product(B_b, d_leaving, None, OPERAND)
            d_keep_b += tl.sum(from_state * tile_x.to(tl.float32), 1)
            d_tile_x += (keep_b * steps_b)[:, None] * from_state
            kept = product(tile_x.to(OPERAND), tl.trans(d_leaving), None, OPERAND)
            d_B_b += (keep_b * steps_b)[:, None] * kept
            d_tile_x = product(matrix, tile_dy, d_tile_x, OPERAND)
            if diagonal is not None:
                base = diagonal.data + row * diagonal.strides[0] + start * diagonal.strides[1]
                base += head * diagonal.strides[2]
                own = tl.load(base + q * diagonal.strides[1], mask=given, other=0).to(tl.float32)
                d_tile_x += own[:, None] * tile_dy.to(tl.float32)
            base = start_of(d_x, row, start, head)
            store_tile(base, d_tile_x, q, p, d_x.strides[1], d_x.strides[3], given, given_p)

        rate = tl.load(A + head)
        d_steps_f += d_keep_f * keep_f
        d_steps_b += d_keep_b * keep_b
        d_log_f = _log_decay_gradient(
            *(d_log_f, tl.load(read_forward[1] + place + q), d_keep_f * keep_f * steps_f),
            *(tl.load(read_forward[2] + of_head), False),
        )
        d_log_b = _log_decay_gradient(
            *(d_log_b, tl.load(read_backward[1] + place + q), d_keep_b * keep_b * steps_b),
            *(tl.load(read_backward[2] + of_head), True),
        )
        _store_scan_gradients(
            d_dt_forward, d_A, of_head, row, start, head, q, given, d_steps_f, d_log_f, steps_f, rate
        )
        _store_scan_gradients(
            d_dt_backward, d_A_backward, of_head, row, start, head, q, given, d_steps_b, d_log_b, steps_b, rate
        )

    _store_BC_gradients(
        *(d_B_forward, d_C_forward, read_forward[0], d_B_f, tl.where(later, d_scores, 0.0), B_f, C_f),
        *(split, row, row_chunk, start, group, groups, programs, q, n, given, given_before, given_n, d_state),
        *(-1, OPERAND, Q),
    )
    _store_BC_gradients(
        *(d_B_backward, d_C_backward, read_backward[0], d_B_b, tl.where(later, 0.0, d_scores), B_b, C_b),
        *(split, row, row_chunk, start, group, groups, programs, q, n, given, given_after, given_n, d_state),
        *(1, OPERAND, Q),
    )


# --- launches ------------------------------------------------------------------------------------------------------


def quasiseparable_triton(
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
    BC = tuple(single(t) for t in (B_forward, C_forward, B_backward, C_backward))
    inputs = (x, single(dt_forward), single(dt_backward), A.float(), *BC, single(diagonal), seq_idx)
    return _run(*inputs) if at_once(*inputs) else _quasiseparable_triton(*inputs)


def _run(x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal, seq_idx):
    out = x.new_empty(x.shape)
    if x.shape[0] == 0:
        return out
    with on_device_of(x):
        shape = shape_of(x, (B_forward, C_forward, B_backward, C_backward), CHUNK, SHORTEST_SEGMENT)
        forward, backward = _prepare(shape, dt_forward, dt_backward, A, seq_idx)
        behind = Walk(shape, backward, x, B_backward, backward=True).states()
        entering = Walk(shape, forward, x, B_forward).entering_segments(None)
        n, p = shape.state_block
        _forward[(shape.walkers * shape.segments,)](
            *(forward, backward, strided(x)),
            *(strided(t) for t in (B_forward, C_forward, B_backward, C_backward, diagonal)),
            *(as_it_is(entering), behind, strided(out)),
            *(shape.seqlen, shape.segment, shape.segments, shape.nheads, shape.headdim, shape.d_state),
            shape.per_group,
            OPERAND=shape.operand,
            Q=shape.chunk,
            N=n,
            P=p,
            **shape.walking,
        )
    return out


def _prepare(shape, dt_forward, dt_backward, A, seq_idx) -> tuple[Scan, Scan]:
    forward = prepare(shape, StepSizes(dt_forward, A.contiguous()), seq_idx)
    backward = prepare(shape, StepSizes(dt_backward, A.contiguous()), None)
    return forward, backward._replace(runs=forward.runs)


@torch.library.custom_op("hf_ssm::quasiseparable_triton", mutates_args=())
def _quasiseparable_triton(
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
) -> Tensor:
    return _run(x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal, seq_idx)


@_quasiseparable_triton.register_fake
def _(x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal, seq_idx):
    return x.new_empty(x.shape)


@torch.library.custom_op("hf_ssm::quasiseparable_triton_backward", mutates_args=())
def _quasiseparable_triton_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal (empty
    without)."""
    BC = (B_forward, C_forward, B_backward, C_backward)
    with on_device_of(x):
        grads = _gradients(d_out, x, dt_forward, dt_backward, A, *BC, diagonal, seq_idx)
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)  # type: ignore[return-value]


def _gradients(
    d_out, x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal, seq_idx
) -> tuple[Any, ...]:
    BC = (B_forward, C_forward, B_backward, C_backward)
    whole = shape_of(x, BC, CHUNK, SHORTEST_SEGMENT)
    at_once = min(max(1, whole.rows_at_once // 2), max(1, whole.batch))  # states of two directions
    splits, per_program = whole._replace(batch=at_once).split_heads()
    d_x, d_forward, d_backward = (t.new_empty(t.shape) for t in (x, dt_forward, dt_backward))
    d_diagonal = None if diagonal is None else diagonal.new_empty(diagonal.shape)
    d_A = A.new_empty(2, whole.batch, whole.chunks, whole.nheads)
    sums = torch.float32 if splits > 1 else None  # else rounded once, in the kernel
    d_BC = [t.new_zeros((splits, *t.shape), dtype=sums or t.dtype) for t in BC]  # nothing reads C at the ends
    for first in range(0, whole.batch, at_once):
        rows = slice(first, first + at_once)
        given = [None if t is None else t[rows] for t in (d_out, x, dt_forward, dt_backward, *BC, diagonal, seq_idx)]
        d_rows = [None if t is None else t[rows] for t in (d_x, d_forward, d_backward, *d_A, d_diagonal)]
        rest: list[Any] = [*given, splits, per_program, *d_rows, [d[:, rows] for d in d_BC]]
        _gradients_of_rows(A.contiguous(), *rest)
    d_BC = [d[0] if splits == 1 else d.sum(dim=0).to(t.dtype) for d, t in zip(d_BC, BC, strict=True)]
    return d_x, d_forward, d_backward, d_A.sum(dim=(0, 1, 2)), *d_BC, d_diagonal


def _gradients_of_rows(
    A, d_out, x, dt_forward, dt_backward, B_forward, C_forward, B_backward, C_backward, diagonal, seq_idx,
    splits, per_program, d_x, d_forward, d_backward, d_A, d_A_backward, d_diagonal, d_BC,
):  # fmt: skip
    """Writes them into d_x, ..., d_BC."""
    BC = (B_forward, C_forward, B_backward, C_backward)
    shape = shape_of(x, BC, CHUNK, SHORTEST_SEGMENT)
    forward, backward = _prepare(shape, dt_forward, dt_backward, A, seq_idx)
    leaving, read = [], []
    for scan, B, C, mirrored in ((forward, *BC[:2], False), (backward, *BC[2:], True)):
        states = Walk(shape, scan, x, B, backward=mirrored)
        gradients = states._replace(u=d_out, v=C, gradient=True, shifted=True)
        leaving.append(gradients.states())
        read.append(read_gradients(gradients, splits, per_program, states.states(), leaving[-1]))
    n, p = shape.state_block
    _backward[(shape.batch * shape.chunks * shape.ngroups * splits,)](
        *(forward, backward, strided(x), strided(d_out), A, *(strided(t) for t in BC)),
        *(strided(diagonal), *leaving, *read, strided(d_x), strided(d_forward), strided(d_backward)),
        *(d_A, d_A_backward, *(as_it_is(t) for t in d_BC), d_diagonal),
        *(shape.seqlen, shape.nheads, shape.headdim, shape.d_state, shape.per_group, per_program, splits),
        OPERAND=shape.operand,
        Q=shape.chunk,
        N=n,
        P=p,
        BLOCKS=triton.cdiv(shape.headdim, p),
        **GRADIENT_OPTIONS,
    )


@_quasiseparable_triton_backward.register_fake
def _(d_out, *inputs):
    return tuple(d_out.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs[:9])


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward_of_op(ctx, d_out):
    saved = ctx.saved_tensors  # once: under gradient checkpointing, asking computes them again
    *grads, d_diagonal = _quasiseparable_triton_backward(d_out, *saved)
    return *grads, None if saved[8] is None else d_diagonal, None


_quasiseparable_triton.register_autograd(_backward_of_op, setup_context=_setup_context)
