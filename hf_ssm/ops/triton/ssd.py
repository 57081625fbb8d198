"""The `triton` backend of `hf_ssm.ops.ssd`.

Forward is one kernel: a program walks one head of one row, chunk by chunk, with the state in registers, so that nothing
but inputs and output passes through memory. (Where heads and rows are too few to keep a GPU busy, a row is cut into
segments; see `chunks`.) Backward computes the states and their gradients at the chunks' borders once more; then a
program takes one chunk with all heads, or some, that share B and C, of which it sums the gradients.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import at_once, single
from .chunks import (
    PROGRAMS,
    Shape,
    Steps,
    Walk,
    between,
    by_segment,
    decays,
    decays_between,
    load_tile,
    log_decays,
    operand_dtype,
    padded,
    product,
    runs_of,
    segment_chunks,
    step_sizes,
    store_tile,
    strides,
    warps_of,
)
from .common import exp, on_device_of, silu, silu_slope

CHUNK = 64  # tokens
SHORTEST_SEGMENT = 4  # chunks: a segment costs another look at its tokens, and a state in memory


@triton.jit(do_not_specialize=["seqlen", "segment", "segments"])
def _forward(
    x,
    x_strides,
    dt,
    dt_strides,
    A,
    dt_bias,
    dt_low,
    dt_high,
    B,
    B_strides,
    C,
    C_strides,
    seq_idx,
    seq_strides,
    D,
    D_strides,
    z,
    z_strides,
    initial,
    initial_strides,
    d_out,
    d_out_strides,
    d_z,
    out,
    out_strides,
    final,
    final_strides,
    seqlen,
    segment,
    segments,
    nheads,
    headdim,
    d_state,
    per_group,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    OPERAND: tl.constexpr,
    Q: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
):
    """Walks through one segment's chunks, for some channels of one head. With `d_out` given, writes instead of the
    output the gradients of what the gate z takes and of z."""
    blocks = tl.cdiv(headdim, P)
    program = tl.program_id(0)
    head = (program // blocks) % nheads
    row_segment = program // (blocks * nheads)
    part = row_segment % segments
    row = (row_segment // segments).to(tl.int64)
    q, n, p = tl.arange(0, Q), tl.arange(0, N), (program % blocks) * P + tl.arange(0, P)
    given_n, given_p = n < d_state, p < headdim

    x += row * x_strides[0] + head * x_strides[2]
    B += row * B_strides[0] + (head // per_group) * B_strides[2]
    C += row * C_strides[0] + (head // per_group) * C_strides[2]
    dt += row * dt_strides[0] + head * dt_strides[2]
    out += row * out_strides[0] + head * out_strides[2]
    if seq_idx is not None:
        seq_idx += row * seq_strides[0]
    if z is not None:
        z += row * z_strides[0] + head * z_strides[2]
    if d_out is not None:
        d_out += row * d_out_strides[0] + head * d_out_strides[2]
        d_z += row * out_strides[0] + head * out_strides[2]
    rate = tl.load(A + head)
    if D is not None:
        skip = tl.load(D + head * D_strides[0] + p * D_strides[1], mask=given_p, other=0).to(tl.float32)

    state = tl.zeros((N, P), dtype=tl.float32)
    if initial is not None:
        initial += row * initial_strides[0] + part * initial_strides[1] + head * initial_strides[2]
        state = load_tile(initial, n, p, (initial_strides[3], initial_strides[4]), given_n, given_p)
    count = tl.minimum(segment, tl.cdiv(seqlen, Q) - part * segment)
    for i in range(count):
        start = ((part * segment + i) * Q).to(tl.int64)
        given = start + q < seqlen
        tile_x = load_tile(x + start * x_strides[1], q, p, (x_strides[1], x_strides[3]), given, given_p)
        tile_B = load_tile(B + start * B_strides[1], q, n, (B_strides[1], B_strides[3]), given, given_n).to(OPERAND)
        tile_C = load_tile(C + start * C_strides[1], q, n, (C_strides[1], C_strides[3]), given, given_n).to(OPERAND)
        steps, _ = step_sizes(
            dt + start * dt_strides[1], dt_strides[1], dt_bias, head, dt_low, dt_high, q, given, SOFTPLUS, LIMITED
        )
        log_decay, up_to = log_decays(steps, rate)
        total = tl.sum(log_decay, 0)
        read, keep, across = decays(up_to), decays(total - up_to), decays(total)
        seen = q[:, None] >= q[None, :]
        if seq_idx is not None:
            runs, _, last, _ = runs_of(seq_idx, seq_strides[1], start, q, seqlen)
            seen = seen & (runs[:, None] == runs[None, :])
            read = tl.where(runs == 0, read, 0.0)
            keep = tl.where(runs == last, keep, 0.0)
            across = tl.where(last == 0, across, 0.0)

        scores = product(tile_C, tl.trans(tile_B), OPERAND)
        matrix = scores * decays_between(up_to, up_to, seen) * steps[None, :]
        y = product(tile_C, state, OPERAND) * read[:, None]
        y += product(matrix, tile_x.to(OPERAND), OPERAND)
        weighted = tile_x.to(tl.float32) * (keep * steps)[:, None]
        state = across * state + product(tl.trans(tile_B), weighted, OPERAND)

        if D is not None:
            y += skip[None, :] * tile_x.to(tl.float32)
        out_here = out + start * out_strides[1]
        if z is not None:
            gate = load_tile(z + start * z_strides[1], q, p, (z_strides[1], z_strides[3]), given, given_p)
            gate = gate.to(tl.float32)
            if d_out is not None:
                d_out_here = d_out + start * d_out_strides[1]
                grad = load_tile(d_out_here, q, p, (d_out_strides[1], d_out_strides[3]), given, given_p)
                grad = grad.to(tl.float32)
                d_gate = grad * y * silu_slope(gate)
                d_z_here = d_z + start * out_strides[1]
                store_tile(d_z_here, d_gate, q, p, (out_strides[1], out_strides[3]), given, given_p)
                y = grad
            y *= silu(gate)
        store_tile(out_here, y, q, p, (out_strides[1], out_strides[3]), given, given_p)

    if final is not None:
        final += row * final_strides[0] + head * final_strides[2]
        ends = part == segments - 1
        store_tile(final, state, n, p, (final_strides[3], final_strides[4]), given_n & ends, given_p)


@triton.jit(do_not_specialize=["seqlen"])
def _backward(
    x,
    x_strides,
    d_y,
    d_y_strides,
    dt,
    dt_strides,
    A,
    dt_bias,
    dt_low,
    dt_high,
    B,
    B_strides,
    C,
    C_strides,
    seq_idx,
    seq_strides,
    D,
    D_strides,
    entering,
    d_leaving,
    d_x,
    d_x_strides,
    d_dt,
    d_dt_strides,
    d_A,
    d_bias,
    d_D,
    d_B,
    d_C,
    d_B_strides,
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
):
    """Gradients through one chunk, for some heads of one group. `entering`: the states before the chunks, `d_leaving`:
    the gradients of those behind them. Matrices are transposed here: [k, q], the token read and the one that reads."""
    chunks = tl.cdiv(seqlen, Q)
    split = tl.program_id(0) % splits
    group = (tl.program_id(0) // splits) % (nheads // per_group)
    row_chunk = tl.program_id(0) // (splits * (nheads // per_group))
    row = (row_chunk // chunks).to(tl.int64)
    chunk = row_chunk % chunks
    start = (chunk * Q).to(tl.int64)
    q, n = tl.arange(0, Q), tl.arange(0, N)
    given, given_n = start + q < seqlen, n < d_state

    x += row * x_strides[0] + start * x_strides[1]
    d_y += row * d_y_strides[0] + start * d_y_strides[1]
    d_x += row * d_x_strides[0] + start * d_x_strides[1]
    dt += row * dt_strides[0] + start * dt_strides[1]
    d_dt += row * d_dt_strides[0] + start * d_dt_strides[1]
    B += row * B_strides[0] + start * B_strides[1] + group * B_strides[2]
    C += row * C_strides[0] + start * C_strides[1] + group * C_strides[2]
    tile_B = load_tile(B, q, n, (B_strides[1], B_strides[3]), given, given_n).to(OPERAND)
    tile_C = load_tile(C, q, n, (C_strides[1], C_strides[3]), given, given_n).to(OPERAND)

    seen = q[:, None] <= q[None, :]
    if seq_idx is not None:
        runs, _, last, _ = runs_of(seq_idx + row * seq_strides[0], seq_strides[1], start, q, seqlen)
        seen = seen & (runs[:, None] == runs[None, :])

    scores = product(tile_B, tl.trans(tile_C), OPERAND)
    d_scores = tl.zeros((Q, Q), dtype=tl.float32)
    d_tile_B = tl.zeros((Q, N), dtype=tl.float32)
    d_tile_C = tl.zeros((Q, N), dtype=tl.float32)
    first_head = group * per_group + split * per_program
    for head in range(first_head, tl.minimum(first_head + per_program, (group + 1) * per_group)):
        steps, slope = step_sizes(
            dt + head * dt_strides[2], dt_strides[1], dt_bias, head, dt_low, dt_high, q, given, SOFTPLUS, LIMITED
        )
        rate = tl.load(A + head)
        log_decay, up_to = log_decays(steps, rate)
        total = tl.sum(log_decay, 0)
        read, keep, across = decays(up_to), decays(total - up_to), decays(total)
        if seq_idx is not None:
            read = tl.where(runs == 0, read, 0.0)
            keep = tl.where(runs == last, keep, 0.0)
            across = tl.where(last == 0, across, 0.0)
        decay = decays_between(0 - up_to, 0 - up_to, seen)

        # through the chunk's own matrix
        d_matrix = tl.zeros((Q, Q), dtype=tl.float32)
        for first in range(0, headdim, P):
            p = first + tl.arange(0, P)
            given_p = p < headdim
            tile_x = load_tile(x + head * x_strides[2], q, p, (x_strides[1], x_strides[3]), given, given_p)
            tile_dy = load_tile(d_y + head * d_y_strides[2], q, p, (d_y_strides[1], d_y_strides[3]), given, given_p)
            d_matrix += product(tile_x.to(OPERAND), tl.trans(tile_dy), OPERAND)
        d_weights = d_matrix * decay  # of the matrix's columns before their step sizes
        d_scores += d_weights * steps[:, None]
        d_weights *= scores
        d_steps = tl.sum(d_weights, 1)
        d_log_decay = between(d_weights * steps[:, None], q)
        matrix = scores * decay * steps[:, None]

        # through the states
        place = ((row * chunks + chunk) * nheads + head) * d_state * headdim
        d_read = tl.zeros((Q,), dtype=tl.float32)
        d_keep = tl.zeros((Q,), dtype=tl.float32)
        d_across = 0.0
        weight = (keep * steps)[:, None]
        for first in range(0, headdim, P):
            p = first + tl.arange(0, P)
            given_p = p < headdim
            tile_x = load_tile(x + head * x_strides[2], q, p, (x_strides[1], x_strides[3]), given, given_p)
            tile_dy = load_tile(d_y + head * d_y_strides[2], q, p, (d_y_strides[1], d_y_strides[3]), given, given_p)
            state = load_tile(entering + place, n, p, (headdim, 1), given_n, given_p)
            d_state_tile = load_tile(d_leaving + place, n, p, (headdim, 1), given_n, given_p)
            d_across += tl.sum(state * d_state_tile)

            from_state = product(tile_B, d_state_tile, OPERAND)
            d_keep += tl.sum(from_state * tile_x.to(tl.float32), 1)
            d_tile_x = weight * from_state + product(matrix, tile_dy, OPERAND)
            if D is not None:
                skip = tl.load(D + head * D_strides[0] + p * D_strides[1], mask=given_p, other=0).to(tl.float32)
                d_tile_x += skip[None, :] * tile_dy.to(tl.float32)
                d_skip = tl.sum(tile_x.to(tl.float32) * tile_dy.to(tl.float32), 0)
                tl.store(d_D + ((row * chunks + chunk) * nheads + head) * headdim + p, d_skip, mask=given_p)
            store_tile(d_x + head * d_x_strides[2], d_tile_x, q, p, (d_x_strides[1], d_x_strides[3]), given, given_p)

            d_tile_B += weight * product(tile_x.to(OPERAND), tl.trans(d_state_tile), OPERAND)
            through_C = read[:, None] * product(tile_dy, tl.trans(state), OPERAND)
            d_tile_C += through_C
            d_read += tl.sum(through_C * tile_C.to(tl.float32), 1)

        # a step decays what its token and later ones read of the state before the chunk, and what earlier ones add to
        # the state behind it
        d_keep *= keep
        d_steps += d_keep
        d_keep *= steps
        d_log_decay += tl.cumsum(d_read, 0, reverse=True) + (tl.cumsum(d_keep, 0) - d_keep) + d_across * across
        d_log_decay = tl.where(given, d_log_decay, 0.0)
        d_steps = (d_steps + rate * d_log_decay) * slope
        tl.store(d_dt + head * d_dt_strides[2] + q * d_dt_strides[1], d_steps, mask=given)
        of_head = (row * chunks + chunk) * nheads + head
        tl.store(d_A + of_head, tl.sum(d_log_decay * steps, 0))
        if dt_bias is not None:
            tl.store(d_bias + of_head, tl.sum(d_steps, 0))

    d_tile_B += product(d_scores, tile_C, OPERAND)
    d_tile_C += product(tl.trans(d_scores), tile_B, OPERAND)
    place = split * d_B_strides[0] + row * d_B_strides[1] + start * d_B_strides[2] + group * d_B_strides[3]
    store_tile(d_B + place, d_tile_B, q, n, (d_B_strides[2], d_B_strides[4]), given, given_n)
    store_tile(d_C + place, d_tile_C, q, n, (d_B_strides[2], d_B_strides[4]), given, given_n)


@triton.jit
def _step(
    x,
    x_strides,
    dt,
    dt_strides,
    A,
    dt_bias,
    dt_low,
    dt_high,
    B,
    B_strides,
    C,
    C_strides,
    D,
    D_strides,
    z,
    z_strides,
    before,
    before_strides,
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
    row = (tl.program_id(0) // (blocks * nheads)).to(tl.int64)
    p, n = (tl.program_id(0) % blocks) * P + tl.arange(0, P), tl.arange(0, N)
    given_p, given_n = p < headdim, n < d_state

    steps, _ = step_sizes(
        *(dt + row * dt_strides[0] + head * dt_strides[2], 0, dt_bias, head, dt_low, dt_high),
        *(tl.arange(0, 1), tl.arange(0, 1) == 0, SOFTPLUS, LIMITED),
    )
    step = tl.sum(steps, 0)
    group = head // per_group
    value = tl.load(x + row * x_strides[0] + head * x_strides[2] + p * x_strides[3], mask=given_p, other=0)
    value = value.to(tl.float32)
    b = tl.load(B + row * B_strides[0] + group * B_strides[2] + n * B_strides[3], mask=given_n, other=0)
    c = tl.load(C + row * C_strides[0] + group * C_strides[2] + n * C_strides[3], mask=given_n, other=0)
    state = (step * value)[:, None] * b.to(tl.float32)[None, :]
    if before is not None:
        before += row * before_strides[0] + head * before_strides[1]
        old = load_tile(before, p, n, (before_strides[2], before_strides[3]), given_p, given_n)
        state += exp(step * tl.load(A + head)) * old
    y = tl.sum(state * c.to(tl.float32)[None, :], 1)
    if D is not None:
        y += tl.load(D + head * D_strides[0] + p * D_strides[1], mask=given_p, other=0).to(tl.float32) * value
    if z is not None:
        gate = tl.load(z + row * z_strides[0] + head * z_strides[2] + p * z_strides[3], mask=given_p, other=0)
        y *= silu(gate.to(tl.float32))
    tl.store(out + (row * nheads + head) * headdim + p, y, mask=given_p)
    place = (row * nheads + head) * headdim * d_state
    store_tile(after + place, state, p, n, (d_state, 1), given_p, given_n)


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
            _scan(x, steps, B, C, seq_idx, D, z, initial_state, out, final_state)
    return out, final_state


def _one_token(x, steps, B, C, D, z, initial_state, out, final_state):
    batch, _, nheads, headdim = x.shape
    d_state = B.shape[3]
    block_n = padded(d_state)
    block_p = max(1, min(triton.next_power_of_2(headdim), 2048 // block_n))
    _step[(batch * nheads * triton.cdiv(headdim, block_p),)](
        *(x, x.stride(), steps.dt, steps.dt.stride(), steps.A, steps.dt_bias, steps.low, steps.high),
        *(B, B.stride(), C, C.stride(), D, _skip_strides(D), z, strides(z, 4)),
        *(initial_state, strides(initial_state, 4), out, final_state),
        *(nheads, headdim, d_state, nheads // B.shape[2]),
        SOFTPLUS=steps.softplus,
        LIMITED=steps.limited,
        N=block_n,
        P=block_p,
    )


def _scan(x, steps, B, C, seq_idx, D, z, initial_state, out, final_state, d_out=None, d_z=None):
    shape = _shape(x, B)
    operand = operand_dtype(x, B, C)
    segment = segment_chunks(shape, shape.batch * shape.nheads * shape.headdim_blocks)
    entering = None if initial_state is None else by_segment(initial_state)
    if segment < shape.chunks:
        entering = Walk(shape, steps, x, B, seq_idx, operand).entering(entering, segment)
    final = None if final_state is None else by_segment(final_state)
    segments = triton.cdiv(shape.chunks, segment)
    _forward[(shape.batch * segments * shape.nheads * shape.headdim_blocks,)](
        *(x, x.stride(), steps.dt, steps.dt.stride(), steps.A, steps.dt_bias, steps.low, steps.high),
        *(B, B.stride(), C, C.stride(), seq_idx, strides(seq_idx, 2), D, _skip_strides(D), z, strides(z, 4)),
        *(entering, strides(entering, 5), d_out, strides(d_out, 4), d_z, out, out.stride(), final, strides(final, 5)),
        *(shape.seqlen, segment, segments, shape.nheads, shape.headdim, shape.d_state, shape.per_group),
        SOFTPLUS=steps.softplus,
        LIMITED=steps.limited,
        OPERAND=operand,
        Q=shape.chunk,
        N=shape.padded_d_state,
        P=shape.headdim_block,
        num_warps=warps_of(shape),
    )


def _shape(x: Tensor, B: Tensor) -> Shape:
    return Shape(*x.shape, *B.shape[2:], CHUNK, SHORTEST_SEGMENT)


def _steps(dt, A, dt_bias, dt_softplus, dt_min, dt_max) -> Steps:
    dt_bias = None if dt_bias is None else dt_bias.contiguous()
    return Steps(dt, A.contiguous(), dt_bias, dt_softplus, dt_min, dt_max)


def _skip_strides(D: Tensor | None) -> tuple[int, int]:
    """Of nheads and headdim."""
    return (0, 0) if D is None else (D.stride(0), D.stride(1) if D.ndim == 2 else 0)


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
    shape = _shape(x, B)
    batch, chunks, nheads, headdim = shape.batch, shape.chunks, shape.nheads, shape.headdim
    operand = operand_dtype(x, B, C)
    d_x, d_dt = x.new_empty(x.shape), steps.dt.new_empty(steps.dt.shape)
    new = steps.A.new_empty  # float32
    d_A = new(batch, chunks, nheads)
    d_bias = None if steps.dt_bias is None else new(batch, chunks, nheads)
    d_D = None if D is None else new(batch, chunks, nheads, headdim)
    d_z = None if z is None else z.new_empty(z.shape)
    d_state = None if initial_state is None else new(initial_state.shape)
    splits, per_program = _split_heads(shape)
    sums = torch.float32 if splits > 1 else None  # else rounded once, in the kernel
    d_B, d_C = (t.new_empty((splits, *t.shape), dtype=sums or t.dtype) for t in (B, C))
    if batch:
        if z is not None:
            d_y = x.new_empty(x.shape, dtype=torch.float32)
            _scan(x, steps, B, C, seq_idx, D, z, initial_state, d_y, None, d_out, d_z)
            d_out = d_y
        states = Walk(shape, steps, x, B, seq_idx, operand)
        entering = states.states(initial_state)
        d_leaving = states._replace(u=d_out, v=C, gradient=True).states(d_final, d_state)
        _backward[(batch * chunks * shape.ngroups * splits,)](
            *(x, x.stride(), d_out, d_out.stride()),
            *(steps.dt, steps.dt.stride(), steps.A, steps.dt_bias, steps.low, steps.high),
            *(B, B.stride(), C, C.stride(), seq_idx, strides(seq_idx, 2), D, _skip_strides(D), entering, d_leaving),
            *(d_x, d_x.stride(), d_dt, d_dt.stride(), d_A, d_bias, d_D, d_B, d_C, d_B.stride()),
            *(shape.seqlen, nheads, headdim, shape.d_state, shape.per_group, per_program, splits),
            SOFTPLUS=steps.softplus,
            LIMITED=steps.limited,
            OPERAND=operand,
            Q=shape.chunk,
            N=shape.padded_d_state,
            P=shape.headdim_block,
            num_warps=8,
        )
    d_A = d_A.sum(dim=(0, 1))
    if d_bias is not None:
        d_bias = d_bias.sum(dim=(0, 1)).to(steps.dt_bias.dtype)
    if d_D is not None:
        d_D = d_D.sum(dim=(0, 1) if D.ndim == 2 else (0, 1, 3)).to(D.dtype)
    d_B, d_C = (d[0] if splits == 1 else d.sum(dim=0).to(t.dtype) for d, t in ((d_B, B), (d_C, C)))
    return d_x, d_dt, d_A, d_B, d_C, d_bias, d_D, d_z, d_state


def _split_heads(shape: Shape) -> tuple[int, int]:
    """Programs that share the heads of a group, and how many each has."""
    programs = max(1, shape.batch * shape.chunks * shape.ngroups)
    splits = max(1, min(shape.per_group, PROGRAMS // programs))
    per_program = triton.cdiv(shape.per_group, splits)
    return triton.cdiv(shape.per_group, per_program), per_program


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
