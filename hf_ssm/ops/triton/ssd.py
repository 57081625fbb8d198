"""The `triton` backend of `hf_ssm.ops.ssd`.

Forward is one kernel, behind one that prepares decays: a program walks one head of one row, chunk by chunk, with the
state in registers, so that no states pass through memory. (Where heads and rows are too few to keep a GPU busy, rows
are cut into segments; see `chunks`.) Backward computes the states and their gradients at the chunks' borders; then a
program takes one chunk with all heads, or some, that share B and C, of which it sums the gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import at_once, single
from .chunks import (
    GRADIENT_OPTIONS,
    StepSizes,
    Strided,
    Walk,
    as_it_is,
    between,
    by_segment,
    chunk_of_program,
    differences,
    edge_runs,
    load_tile,
    padded,
    prepare,
    product,
    read_gradients,
    rounded,
    shape_of,
    start_of,
    state_decays,
    step_size_slopes,
    step_sizes,
    store_tile,
    strided,
    sums_up_to,
)
from .common import exp, on_device_of, silu, silu_slope

CHUNK = 64  # tokens
SHORTEST_SEGMENT = 4  # chunks: a segment costs another look at its tokens, and a state in memory


@triton.jit(do_not_specialize=["seqlen", "segment", "segments"])
def _forward(
    scan,
    x,
    B,
    C,
    D,
    z,
    initial,
    out,
    final,
    d_out,
    d_z,
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
    """Walks through one segment's chunks, for some channels of one head. With `d_out` given, writes instead of the
    output the gradients of what the gate z takes and of z."""
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
    if D is not None:
        skip = tl.load(D.data + head * D.strides[0] + p * D.strides[1], mask=given_p, other=0).to(tl.float32)
    for i in range(tl.minimum(segment, chunks - part * segment)):
        chunk = part * segment + i
        row_chunk = row * chunks + chunk
        start = (chunk * Q).to(tl.int64)
        given = q < seqlen - chunk * Q
        tile_B = load_tile(start_of(B, row, start, group), q, n, B.strides[1], B.strides[3], given, given_n)
        tile_C = load_tile(start_of(C, row, start, group), q, n, C.strides[1], C.strides[3], given, given_n)
        tile_B, tile_C = tile_B.to(OPERAND), tile_C.to(OPERAND)
        tile_x = load_tile(start_of(x, row, start, head), q, p, x.strides[1], x.strides[3], given, given_p)

        place = (row_chunk * nheads + head) * Q
        steps = tl.load(scan.steps + place + q)
        high, low = sums_up_to(scan, place, q)
        read, across = state_decays(scan, place, q, Q, FROM_FRONT=True, AT_TOKEN=True)
        keep, _ = state_decays(scan, place, q, Q, FROM_FRONT=False, AT_TOKEN=False)
        seen = q[:, None] >= q[None, :]
        if scan.runs is not None:
            runs = tl.load(scan.runs + row_chunk * Q + q)
            entering, leaving = edge_runs(scan, row_chunk, chunk == chunks - 1, Q, BACKWARD=False)
            seen = seen & (runs[:, None] == runs[None, :])
            read = tl.where(runs == entering, read, 0.0)
            keep = tl.where(runs == leaving, keep, 0.0)
            across = tl.where(entering == leaving, across, 0.0)

        y = product(tile_C, rounded(state, OPERAND), None, OPERAND) * read[:, None]
        weighted = tile_x.to(tl.float32) * (keep * steps)[:, None]
        state = product(tl.trans(tile_B), weighted, across * state, OPERAND)
        matrix = product(tile_C, tl.trans(tile_B), None, OPERAND)
        matrix *= tl.exp2(tl.where(seen, differences(high, low, high, low), -float("inf"))) * steps[None, :]
        y = product(rounded(matrix, OPERAND), tile_x.to(OPERAND), y, OPERAND)

        if D is not None:
            y += skip[None, :] * tile_x.to(tl.float32)
        if z is not None:
            gate = load_tile(start_of(z, row, start, head), q, p, z.strides[1], z.strides[3], given, given_p)
            gate = gate.to(tl.float32)
            if d_out is not None:
                base = start_of(d_out, row, start, head)
                grad = load_tile(base, q, p, d_out.strides[1], d_out.strides[3], given, given_p).to(tl.float32)
                base = start_of(d_z, row, start, head)
                d_gate = grad * y * silu_slope(gate)
                store_tile(base, d_gate, q, p, d_z.strides[1], d_z.strides[3], given, given_p)
                y = grad
            y *= silu(gate)
        store_tile(start_of(out, row, start, head), y, q, p, out.strides[1], out.strides[3], given, given_p)

    if final is not None:
        ends = part == segments - 1
        base = start_of(final, row, 0, head)
        store_tile(base, state, n, p, final.strides[3], final.strides[4], given_n & ends, given_p)


@triton.jit(do_not_specialize=["seqlen"])
def _backward(
    scan,
    x,
    d_y,
    B,
    C,
    D,
    dt,
    A,
    dt_bias,
    lowest,
    highest,
    d_leaving_states,
    d_read_C,
    d_read,
    d_across,
    d_x,
    d_dt,
    d_A,
    d_bias,
    d_D,
    d_B,
    d_C,
    seqlen,
    nheads,
    headdim,
    d_state,
    per_group,
    per_program,
    splits,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    OPERAND: tl.constexpr,
    Q: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Gradients through one chunk, for some heads of one group. Matrices are transposed here: [k, q], the token that
    is read and the one that reads it."""
    chunks, groups = tl.cdiv(seqlen, Q), nheads // per_group
    split, group, row, chunk, row_chunk = chunk_of_program(splits, groups, chunks)
    start = chunk * Q
    q, n = tl.arange(0, Q), tl.arange(0, N)
    given, given_n = q < seqlen - start, n < d_state

    tile_B = load_tile(start_of(B, row, start, group), q, n, B.strides[1], B.strides[3], given, given_n).to(OPERAND)
    tile_C = load_tile(start_of(C, row, start, group), q, n, C.strides[1], C.strides[3], given, given_n).to(OPERAND)
    seen = q[:, None] <= q[None, :]
    if scan.runs is not None:
        runs = tl.load(scan.runs + row_chunk * Q + q)
        _entering, leaving = edge_runs(scan, row_chunk, chunk == chunks - 1, Q, BACKWARD=False)
        seen = seen & (runs[:, None] == runs[None, :])

    scores = product(tile_B, tl.trans(tile_C), None, OPERAND)
    d_scores = tl.zeros((Q, Q), dtype=tl.float32)
    d_tile_B = tl.zeros((Q, N), dtype=tl.float32)
    first_head = group * per_group + split * per_program
    for head in range(first_head, tl.minimum(first_head + per_program, (group + 1) * per_group)):
        of_head = row_chunk * nheads + head
        place = of_head * Q
        steps = tl.load(scan.steps + place + q)
        high, low = sums_up_to(scan, place, q)
        keep, _ = state_decays(scan, place, q, Q, FROM_FRONT=False, AT_TOKEN=False)
        if scan.runs is not None:
            keep = tl.where(runs == leaving, keep, 0.0)

        # through the chunk's own matrix
        d_matrix = tl.zeros((Q, Q), dtype=tl.float32)
        for block in tl.static_range(BLOCKS):
            p = block * P + tl.arange(0, P)
            given_p = p < headdim
            tile_x = load_tile(start_of(x, row, start, head), q, p, x.strides[1], x.strides[3], given, given_p)
            tile_dy = load_tile(start_of(d_y, row, start, head), q, p, d_y.strides[1], d_y.strides[3], given, given_p)
            d_matrix = product(tile_x.to(OPERAND), tl.trans(tile_dy), d_matrix, OPERAND)
        decay = tl.exp2(tl.where(seen, 0.0 - differences(high, low, high, low), -float("inf")))
        matrix = decay * scores
        d_steps = tl.sum(d_matrix * matrix, 1)
        matrix *= steps[:, None]
        d_log_decay = between(d_matrix * matrix, q)
        d_scores += d_matrix * decay * steps[:, None]

        # through the states
        d_keep = tl.zeros((Q,), dtype=tl.float32)
        kept = (keep * steps)[:, None]
        for block in tl.static_range(BLOCKS):
            p = block * P + tl.arange(0, P)
            given_p = p < headdim
            tile_x = load_tile(start_of(x, row, start, head), q, p, x.strides[1], x.strides[3], given, given_p)
            tile_dy = load_tile(start_of(d_y, row, start, head), q, p, d_y.strides[1], d_y.strides[3], given, given_p)
            base = of_head * d_state * headdim
            d_state_tile = load_tile(d_leaving_states + base, n, p, headdim, 1, given_n, given_p)
            from_state = product(tile_B, d_state_tile, None, OPERAND)
            d_keep += tl.sum(from_state * tile_x.to(tl.float32), 1)
            d_tile_x = product(matrix, tile_dy, kept * from_state, OPERAND)
            if D is not None:
                skip = tl.load(D.data + head * D.strides[0] + p * D.strides[1], mask=given_p, other=0).to(tl.float32)
                d_tile_x += skip[None, :] * tile_dy.to(tl.float32)
                d_skip = tl.sum(tile_x.to(tl.float32) * tile_dy.to(tl.float32), 0)
                tl.store(d_D + of_head * headdim + p, d_skip, mask=given_p)
            base = start_of(d_x, row, start, head)
            store_tile(base, d_tile_x, q, p, d_x.strides[1], d_x.strides[3], given, given_p)

            d_tile_B += kept * product(tile_x.to(OPERAND), tl.trans(d_state_tile), None, OPERAND)

        # a step decays what its token and later ones read of the state before the chunk, what earlier ones add to the
        # state behind it, and the state on its way
        d_keep *= keep
        d_steps += d_keep
        d_keep *= steps
        d_log_decay += tl.cumsum(tl.load(d_read + place + q), 0, reverse=True) + (tl.cumsum(d_keep, 0) - d_keep)
        d_log_decay += tl.load(d_across + of_head)
        d_log_decay = tl.where(given, d_log_decay, 0.0)
        raw = dt.data + row * dt.strides[0] + start * dt.strides[1] + head * dt.strides[2]
        raw = tl.load(raw + q * dt.strides[1], mask=given, other=0).to(tl.float32)
        if dt_bias is not None:
            raw += tl.load(dt_bias + head).to(tl.float32)
        slope = step_size_slopes(raw, SOFTPLUS, LIMITED, lowest, highest)
        d_steps = tl.where(given, (d_steps + tl.load(A + head) * d_log_decay) * slope, 0.0)
        base = d_dt.data + row * d_dt.strides[0] + start * d_dt.strides[1] + head * d_dt.strides[2]
        tl.store(base + q * d_dt.strides[1], d_steps, mask=given)
        tl.store(d_A + of_head, tl.sum(d_log_decay * steps, 0))
        if dt_bias is not None:
            tl.store(d_bias + of_head, tl.sum(d_steps, 0))

    d_tile_B = product(d_scores, tile_C, d_tile_B, OPERAND)
    base = ((split * (tl.num_programs(0) // (splits * groups)) + row_chunk) * Q * groups + group) * d_state
    d_tile_C = load_tile(d_read_C + base, q, n, groups * d_state, 1, given, given_n)
    d_tile_C = product(tl.trans(d_scores), tile_B, d_tile_C, OPERAND)
    base = split * d_B.strides[0] + row * d_B.strides[1] + start * d_B.strides[2] + group * d_B.strides[3]
    store_tile(d_B.data + base, d_tile_B, q, n, d_B.strides[2], d_B.strides[4], given, given_n)
    store_tile(d_C.data + base, d_tile_C, q, n, d_C.strides[2], d_C.strides[4], given, given_n)


@triton.jit
def _step(
    x,
    dt,
    A,
    dt_bias,
    lowest,
    highest,
    B,
    C,
    D,
    z,
    before,
    out,
    after,
    nheads,
    headdim,
    d_state,
    per_group,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
):
    """One token: the state is read once and written once, by a program for some channels of a head."""
    blocks = tl.cdiv(headdim, P)
    head = (tl.program_id(0) // blocks) % nheads
    group = head // per_group
    row = (tl.program_id(0) // (blocks * nheads)).to(tl.int64)
    p, n = (tl.program_id(0) % blocks) * P + tl.arange(0, P), tl.arange(0, N)
    given_p, given_n = p < headdim, n < d_state

    step = tl.load(dt.data + row * dt.strides[0] + head * dt.strides[2]).to(tl.float32)
    if dt_bias is not None:
        step += tl.load(dt_bias + head).to(tl.float32)
    step = step_sizes(step, SOFTPLUS, LIMITED, lowest, highest)
    value = tl.load(start_of(x, row, 0, head) + p * x.strides[3], mask=given_p, other=0).to(tl.float32)
    b = tl.load(start_of(B, row, 0, group) + n * B.strides[3], mask=given_n, other=0).to(tl.float32)
    c = tl.load(start_of(C, row, 0, group) + n * C.strides[3], mask=given_n, other=0).to(tl.float32)
    state = (step * value)[:, None] * b[None, :]
    if before is not None:
        base = before.data + row * before.strides[0] + head * before.strides[1]
        old = load_tile(base, p, n, before.strides[2], before.strides[3], given_p, given_n)
        state += exp(step * tl.load(A + head)) * old
    y = tl.sum(state * c[None, :], 1)
    if D is not None:
        skip = tl.load(D.data + head * D.strides[0] + p * D.strides[1], mask=given_p, other=0)
        y += skip.to(tl.float32) * value
    if z is not None:
        gate = tl.load(start_of(z, row, 0, head) + p * z.strides[3], mask=given_p, other=0)
        y *= silu(gate.to(tl.float32))
    tl.store(out + (row * nheads + head) * headdim + p, y, mask=given_p)
    base = after + (row * nheads + head) * headdim * d_state
    store_tile(base, state, p, n, d_state, 1, given_p, given_n)


# --- launches ------------------------------------------------------------------------------------------------------


def ssd_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    chunk_size: int,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dt, B, C, D, z, dt_bias = (single(t) for t in (dt, B, C, D, z, dt_bias))
    inputs = (x, dt, A.float(), B, C, dt_bias, dt_softplus, *dt_limit, seq_idx, D, z, initial_state)
    if at_once(x, dt, A, B, C, D, z, dt_bias, initial_state):
        return _run(*inputs)
    return _ssd_triton(*inputs)


def _run(x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, seq_idx, D, z, initial_state):
    batch, seqlen, nheads, headdim = x.shape
    out = x.new_empty(x.shape)
    final_state = x.new_empty(batch, nheads, headdim, B.shape[3], dtype=torch.float32)
    if batch == 0:
        return out, final_state
    steps = _steps(dt, A, dt_bias, dt_softplus, dt_min, dt_max)
    with on_device_of(x):
        if seqlen == 1:
            _one_token(x, steps, B, C, D, z, initial_state, out, final_state)
        else:
            shape = shape_of(x, (B, C), CHUNK, SHORTEST_SEGMENT)
            _scan(shape, prepare(shape, steps, seq_idx), x, B, C, D, z, initial_state, out, final_state)
    return out, final_state


def _one_token(x, steps, B, C, D, z, initial_state, out, final_state):
    batch, _, nheads, headdim = x.shape
    d_state = B.shape[3]
    block_n = padded(d_state)
    block_p = max(1, min(triton.next_power_of_2(headdim), 2048 // block_n))
    _step[(batch * nheads * triton.cdiv(headdim, block_p),)](
        *(strided(x), strided(steps.dt), steps.A, steps.dt_bias, steps.lowest, steps.highest),
        *(strided(B), strided(C), _per_channel(D), strided(z), as_it_is(initial_state), out, final_state),
        *(nheads, headdim, d_state, nheads // B.shape[2]),
        **steps.options,
        N=block_n,
        P=block_p,
    )


def _scan(shape, scan, x, B, C, D, z, initial_state, out, final_state, d_out=None, d_z=None):
    n, p = shape.state_block
    entering = Walk(shape, scan, x, B).entering_segments(initial_state)
    _forward[(shape.walkers * shape.segments,)](
        *(scan, strided(x), strided(B), strided(C), _per_channel(D), strided(z), as_it_is(entering), strided(out)),
        *(as_it_is(by_segment(final_state)), strided(d_out), strided(d_z)),
        *(shape.seqlen, shape.segment, shape.segments, shape.nheads, shape.headdim, shape.d_state, shape.per_group),
        OPERAND=shape.operand,
        Q=shape.chunk,
        N=n,
        P=p,
        **shape.walking,
    )


def _steps(dt, A, dt_bias, dt_softplus, dt_min, dt_max) -> StepSizes:
    dt_bias = None if dt_bias is None else dt_bias.contiguous()
    return StepSizes(dt, A.contiguous(), dt_bias, dt_softplus, dt_min, dt_max)


def _per_channel(D: Tensor | None) -> Strided | None:
    """D (nheads,) or (nheads, headdim), as (nheads, headdim)."""
    return None if D is None else Strided(D, (D.stride(0), D.stride(1) if D.ndim == 2 else 0))


@torch.library.custom_op("hf_ssm::ssd_triton", mutates_args=())
def _ssd_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    seq_idx: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, final_state)"""
    return _run(x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, seq_idx, D, z, initial_state)


@_ssd_triton.register_fake
def _(x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, seq_idx, D, z, initial_state):
    batch, _, nheads, headdim = x.shape
    return x.new_empty(x.shape), x.new_empty(batch, nheads, headdim, B.shape[3], dtype=torch.float32)


@torch.library.custom_op("hf_ssm::ssd_triton_backward", mutates_args=())
def _ssd_triton_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    seq_idx: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C, dt_bias, D, z, initial_state; empty where the input was None."""
    steps = _steps(dt, A, dt_bias, dt_softplus, dt_min, dt_max)
    with on_device_of(x):
        grads = _gradients(d_out, d_final, x, steps, B, C, seq_idx, D, z, initial_state)
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)  # type: ignore[return-value]


def _gradients(d_out, d_final, x, steps, B, C, seq_idx, D, z, initial_state):
    whole = shape_of(x, (B, C), CHUNK, SHORTEST_SEGMENT)
    batch, chunks, nheads, headdim = whole.batch, whole.chunks, whole.nheads, whole.headdim
    at_once = min(whole.rows_at_once, max(1, batch))
    splits, per_program = whole._replace(batch=at_once).split_heads()
    new = steps.A.new_empty  # float32
    d_x, d_dt = x.new_empty(x.shape), steps.dt.new_empty(steps.dt.shape)
    d_A = new(batch, chunks, nheads)
    d_bias = None if steps.dt_bias is None else new(batch, chunks, nheads)
    d_D = None if D is None else new(batch, chunks, nheads, headdim)
    d_z = None if z is None else z.new_empty(z.shape)
    d_state = None if initial_state is None else new(initial_state.shape)
    sums = torch.float32 if splits > 1 else None  # else rounded once, in the kernel
    d_B, d_C = (t.new_empty((splits, *t.shape), dtype=sums or t.dtype) for t in (B, C))
    for first in range(0, batch, at_once):
        rows = slice(first, first + at_once)
        given = [None if t is None else t[rows] for t in (d_out, d_final, x, B, C, seq_idx, z, initial_state)]
        d_rows = [None if t is None else t[rows] for t in (d_x, d_dt, d_A, d_bias, d_D, d_z, d_state)]
        of_rows = steps._replace(dt=steps.dt[rows])
        rest = (*given, splits, per_program, *d_rows, d_B[:, rows], d_C[:, rows])
        _gradients_of_rows(of_rows, D, *rest)
    d_A = d_A.sum(dim=(0, 1))
    if d_bias is not None:
        d_bias = d_bias.sum(dim=(0, 1)).to(steps.dt_bias.dtype)
    if d_D is not None:
        d_D = d_D.sum(dim=(0, 1) if D.ndim == 2 else (0, 1, 3)).to(D.dtype)
    d_B, d_C = (d[0] if splits == 1 else d.sum(dim=0).to(t.dtype) for d, t in ((d_B, B), (d_C, C)))
    return d_x, d_dt, d_A, d_B, d_C, d_bias, d_D, d_z, d_state


def _gradients_of_rows(
    steps, D, d_out, d_final, x, B, C, seq_idx, z, initial_state,
    splits, per_program, d_x, d_dt, d_A, d_bias, d_D, d_z, d_state, d_B, d_C,
):  # fmt: skip
    """Writes them into d_x, ..., d_C."""
    shape = shape_of(x, (B, C), CHUNK, SHORTEST_SEGMENT)
    scan = prepare(shape, steps, seq_idx)
    if z is not None:
        d_y = x.new_empty(x.shape, dtype=torch.float32)
        _scan(shape, scan, x, B, C, D, z, initial_state, d_y, None, d_out, d_z)
        d_out = d_y
    states = Walk(shape, scan, x, B)
    entering = states.states(initial_state)
    gradients = states._replace(u=d_out, v=C, gradient=True)
    d_leaving = gradients.states(d_final, d_state)
    read = read_gradients(gradients, splits, per_program, entering, d_leaving)
    del entering
    n, p = shape.state_block
    _backward[(shape.batch * shape.chunks * shape.ngroups * splits,)](
        *(scan, strided(x), strided(d_out), strided(B), strided(C), _per_channel(D)),
        *(strided(steps.dt), steps.A, steps.dt_bias, steps.lowest, steps.highest, d_leaving, *read),
        *(strided(d_x), strided(d_dt), d_A, d_bias, d_D, as_it_is(d_B), as_it_is(d_C)),
        *(shape.seqlen, shape.nheads, shape.headdim, shape.d_state, shape.per_group, per_program, splits),
        **steps.options,
        OPERAND=shape.operand,
        Q=shape.chunk,
        N=n,
        P=p,
        BLOCKS=triton.cdiv(shape.headdim, p),
        **GRADIENT_OPTIONS,
    )


@_ssd_triton_backward.register_fake
def _(d_out, d_final, x, dt, A, B, C, dt_bias, softplus, dt_min, dt_max, seq_idx, D, z, initial_state):
    given = (x, dt, A, B, C, dt_bias, D, z, initial_state)
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)


def _setup_context(ctx, inputs, output):
    *scan, dt_softplus, dt_min, dt_max, seq_idx, D, z, initial_state = inputs
    ctx.step_size = (dt_softplus, dt_min, dt_max)
    ctx.save_for_backward(*scan, seq_idx, D, z, initial_state)
    ctx.set_materialize_grads(False)


def _backward_of_op(ctx, d_out, d_final):
    *scan, seq_idx, D, z, initial_state = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(scan[0])
    grads = _ssd_triton_backward(d_out, d_final, *scan, *ctx.step_size, seq_idx, D, z, initial_state)
    given = (*scan, D, z, initial_state)
    *scan, D, z, d_state = (None if t is None else grad for t, grad in zip(given, grads, strict=True))
    return *scan, None, None, None, None, D, z, d_state


_ssd_triton.register_autograd(_backward_of_op, setup_context=_setup_context)
