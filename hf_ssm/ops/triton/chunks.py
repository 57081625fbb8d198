"""What the kernels of the chunked scans share: decays inside a chunk, exact products, states on their way through chunks.

State space duality (arXiv:2405.21060, section 6): a chunk of tokens is a small matrix on its diagonal and, through the
state that enters it, a product with everything outside. A state is a tile (d_state, headdim) in float32; a program that
walks a row keeps it in registers from chunk to chunk. A row that a few programs only would walk is cut into segments
of several chunks, whose states are found first and chained.

Of a scan against the tokens' order everything is mirrored. Of either direction, `entering` is the side from which its
state comes. The gradient of a state walks the other way than the state.

q, k positions inside a chunk   n d_state   p headdim
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import INTERPRETED as _INTERPRETED
from .common import LOG2_E, begins_sequence, sigmoid, softplus

PROGRAMS = 264  # so many keep a large GPU busy: two for each of an H200's 132 multiprocessors

# --- decays --------------------------------------------------------------------------------------------------------
#
# Decays inside a chunk are exponentials of differences of sums of dt A. Behind one large step a float32 sum has lost
# the small ones, so the sums are integers: 2^-40 is 1, and a summand is at most 2^14, beyond which float32's
# exponential is 0 (or infinite) anyway; 2^8 of them fit into 63 bits. A difference of such integers is exact.

FIXED = tl.constexpr(2.0**40)
LARGEST = tl.constexpr(2.0**14)



@triton.jit
def step_sizes(dt, stride, dt_bias, head, low, high, q, given, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr):
    """clamp(softplus(dt + dt_bias), low, high) of a chunk's tokens, 0 where there is none, and its derivative."""
    steps = tl.load(dt + q * stride, mask=given, other=0).to(tl.float32)
    slope = given.to(tl.float32)
    if dt_bias is not None:
        steps += tl.load(dt_bias + head).to(tl.float32)
    if SOFTPLUS:
        slope *= sigmoid(steps)
        steps = softplus(steps)
    if LIMITED:
        slope = tl.where((steps >= low) & (steps <= high), slope, 0.0)
        steps = tl.where(steps < low, low, tl.where(steps > high, high, steps))
    return tl.where(given, steps, 0.0), slope


@triton.jit
def log_decays(steps, A):
    """dt A in base 2, as integers, and their sums up to every token of the chunk."""
    log_decay = tl.minimum(tl.maximum(steps * (A * LOG2_E), -LARGEST), LARGEST)
    log_decay = (log_decay * FIXED).to(tl.int64)
    return log_decay, tl.cumsum(log_decay, 0)


@triton.jit
def decays(log_decay):
    """exp of integer log decays."""
    return tl.exp2(log_decay.to(tl.float32) * (1.0 / FIXED))


@triton.jit
def decays_between(rows, columns, seen):
    """exp(rows - columns) of integer log decays where `seen`, (rows, columns), else 0.

    An integer is the sum of two floats: two differences in float32 instead of one of integers for every entry.
    """
    rows_high, columns_high = rows.to(tl.float32), columns.to(tl.float32)
    rows_low = (rows - rows_high.to(tl.int64)).to(tl.float32)
    columns_low = (columns - columns_high.to(tl.int64)).to(tl.float32)
    high = (rows_high * (1.0 / FIXED))[:, None] - (columns_high * (1.0 / FIXED))[None, :]
    low = (rows_low * (1.0 / FIXED))[:, None] - (columns_low * (1.0 / FIXED))[None, :]
    return tl.exp2(tl.where(seen, high + low, -float("inf")))


@triton.jit
def between(weights, q):
    """(Q,): the sum of weights[k, q] over all k before a token and all q from it on.

    Of differences of row and column sums, which are the same, rounding errors would remain for tokens far away.
    """
    from_here = tl.cumsum(tl.where(q[:, None] < q[None, :], weights, 0.0), 1, reverse=True)
    return tl.sum(tl.where(q[:, None] < q[None, :], from_here, 0.0), 0)


@triton.jit
def runs_of(seq_idx, stride, start, q, seqlen):
    """Numbers of the sequences of the chunk's tokens start + q, if that of the token before it is 0; then those of its
    first token, of its last and of the one behind it."""
    begins = begins_sequence(seq_idx, start + q, stride, start + q < seqlen).to(tl.int32)
    behind = start + q.shape[0]
    last = tl.sum(begins, 0)
    next_begins = begins_sequence(seq_idx, behind, stride, behind < seqlen).to(tl.int32)
    return tl.cumsum(begins, 0), tl.sum(tl.where(q == 0, begins, 0), 0), last, last + next_begins


# --- products ------------------------------------------------------------------------------------------------------

INTERPRETED = tl.constexpr(_INTERPRETED)


@triton.jit
def product(a, b, OPERAND: tl.constexpr):
    """a b, summed in float32. `OPERAND`: dtype of the inputs. An operand in it is taken as it is; one in float32 was
    computed, and 16 bits would lose half of it: it becomes the sum of two in that dtype.

    Matrix units take 16-bit operands much faster than float32. What is left out of the products is 2^-16 of them.
    """
    if OPERAND == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.float32:
        high, low, scale = _split(a, OPERAND)
        if b.dtype == tl.float32:
            b_high, b_low, b_scale = _split(b, OPERAND)
            return (_dot(high, b_high) + (_dot(high, b_low) + _dot(low, b_high))) * (scale * b_scale)
        return (_dot(high, b) + _dot(low, b)) * scale
    elif b.dtype == tl.float32:
        high, low, scale = _split(b, OPERAND)
        return (_dot(a, high) + _dot(a, low)) * scale
    else:
        return _dot(a, b)


@triton.jit
def _dot(a, b):
    if INTERPRETED:  # there, bfloat16 numbers are integers to NumPy's product
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def _split(t, OPERAND: tl.constexpr):
    """t = (high + low) scale. Only float16 needs a scale: its range is small."""
    scale = 1.0
    if OPERAND == tl.float16:
        scale = tl.max(tl.abs(t))
        scale = tl.where(scale > 0, scale, 1.0)
        t = t / scale
    high = t.to(OPERAND)
    return high, (t - high.to(tl.float32)).to(OPERAND), scale


@triton.jit
def load_tile(base, rows, columns, strides, given_rows, given_columns):
    """base[rows, columns], 0 where there is none."""
    places = rows[:, None] * strides[0] + columns[None, :] * strides[1]
    return tl.load(base + places, mask=given_rows[:, None] & given_columns[None, :], other=0)


@triton.jit
def store_tile(base, value, rows, columns, strides, given_rows, given_columns):
    places = rows[:, None] * strides[0] + columns[None, :] * strides[1]
    tl.store(base + places, value, mask=given_rows[:, None] & given_columns[None, :])


# --- states --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seqlen", "segment", "segments"])
def _walk(
    u,
    u_strides,
    v,
    v_strides,
    dt,
    dt_strides,
    A,
    dt_bias,
    dt_low,
    dt_high,
    seq_idx,
    seq_strides,
    initial,
    initial_strides,
    states,
    last,
    last_strides,
    across,
    seqlen,
    segment,
    segments,
    nheads,
    headdim,
    d_state,
    per_group,
    BACKWARD: tl.constexpr,
    GRADIENT: tl.constexpr,
    SHIFTED: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    OPERAND: tl.constexpr,
    Q: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
):
    """state -> decay state + sum over tokens of weight v u^T, chunk by chunk through one segment: a direction's states
    (u = dt x, v = B), or their gradients (u = the output's gradient, v = C).

    With `states` given, writes the state that enters each chunk there, and into `last` the one that leaves the row;
    else into `last` the one that leaves the segment, and the segment's decay into `across`.
    """
    blocks = tl.cdiv(headdim, P)
    program = tl.program_id(0)
    block = program % blocks
    head = (program // blocks) % nheads
    row_segment = program // (blocks * nheads)
    part = row_segment % segments
    row = (row_segment // segments).to(tl.int64)

    q, n, p = tl.arange(0, Q), tl.arange(0, N), block * P + tl.arange(0, P)
    given_n, given_p = n < d_state, p < headdim
    REVERSE: tl.constexpr = BACKWARD != GRADIENT
    first_chunk = part * segment
    count = tl.minimum(segment, tl.cdiv(seqlen, Q) - first_chunk)

    u += row * u_strides[0] + head * u_strides[2]
    v += row * v_strides[0] + (head // per_group) * v_strides[2]
    dt += row * dt_strides[0] + head * dt_strides[2]
    if seq_idx is not None:
        seq_idx += row * seq_strides[0]
    rate = tl.load(A + head)

    state = tl.zeros((N, P), dtype=tl.float32)
    if initial is not None:
        initial += row * initial_strides[0] + part * initial_strides[1] + head * initial_strides[2]
        state = load_tile(initial, n, p, (initial_strides[3], initial_strides[4]), given_n, given_p)
    through = tl.full((), 1.0, tl.float32)
    for i in range(count):
        chunk = first_chunk + i
        if REVERSE:
            chunk = first_chunk + count - 1 - i
        if states is not None:
            place = ((row * tl.cdiv(seqlen, Q) + chunk) * nheads + head) * d_state * headdim
            store_tile(states + place, state, n, p, (headdim, 1), given_n, given_p)
        start = (chunk * Q).to(tl.int64)
        given = start + q < seqlen
        steps, _ = step_sizes(
            dt + start * dt_strides[1], dt_strides[1], dt_bias, head, dt_low, dt_high, q, given, SOFTPLUS, LIMITED
        )
        log_decay, up_to = log_decays(steps, rate)
        total = tl.sum(log_decay, 0)
        if not REVERSE:
            weight = decays(total - up_to)
        elif GRADIENT and not SHIFTED:  # reads the state behind its token, the others the one before it
            weight = decays(up_to)
        else:
            weight = decays(up_to - log_decay)
        if not GRADIENT:
            weight *= steps
        decay = decays(total)
        if seq_idx is not None:
            runs, first, final, behind = runs_of(seq_idx, seq_strides[1], start, q, seqlen)
            entering, leaving = (behind, first) if BACKWARD else (0, final)
            weight = tl.where(runs == (entering if GRADIENT else leaving), weight, 0.0)
            decay = tl.where(entering == leaving, decay, 0.0)
        shift: tl.constexpr = 0 if not (GRADIENT and SHIFTED) else (1 if BACKWARD else -1)
        given_v = given & (start + q + shift >= 0) & (start + q + shift < seqlen)
        tile_u = load_tile(u + start * u_strides[1], q, p, (u_strides[1], u_strides[3]), given, given_p)
        tile_v = load_tile(v + (start + shift) * v_strides[1], q, n, (v_strides[1], v_strides[3]), given_v, given_n)
        weighted = tile_u.to(tl.float32) * weight[:, None]
        state = decay * state + product(tl.trans(tile_v.to(OPERAND)), weighted, OPERAND)
        through *= decay
    if states is None:
        tl.store(across + (row * segments + part) * nheads + head, through)
    if last is not None:
        last += row * last_strides[0] + part * last_strides[1] + head * last_strides[2]
        ends = part == (0 if REVERSE else segments - 1)
        if states is None:
            ends = part >= 0
        store_tile(last, state, n, p, (last_strides[3], last_strides[4]), given_n & ends, given_p)


@triton.jit(do_not_specialize=["segments"])
def _chain(states, across, initial, initial_strides, segments, nheads, headdim, d_state, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """(batch, segments, nheads, d_state, headdim): what each segment adds to a state -> the state that enters it."""
    blocks = tl.cdiv(d_state * headdim, BLOCK)
    head = (tl.program_id(0) // blocks) % nheads
    row = (tl.program_id(0) // (blocks * nheads)).to(tl.int64)
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    given = i < d_state * headdim
    state = tl.zeros((BLOCK,), dtype=tl.float32)
    if initial is not None:
        initial += row * initial_strides[0] + head * initial_strides[2]
        state = tl.load(initial + (i // headdim) * initial_strides[3] + (i % headdim) * initial_strides[4], mask=given, other=0)
    for k in range(segments):
        part = k
        if REVERSE:
            part = segments - 1 - k
        place = states + ((row * segments + part) * nheads + head) * d_state * headdim + i
        added = tl.load(place, mask=given, other=0)
        tl.store(place, state, mask=given)
        state = tl.load(across + (row * segments + part) * nheads + head) * state + added


class Steps(NamedTuple):
    """What the step sizes of a call are made of."""

    dt: Tensor  # b l h
    A: Tensor  # h
    dt_bias: Tensor | None = None
    softplus: bool = False
    low: float = -float("inf")
    high: float = float("inf")

    @property
    def limited(self) -> bool:
        return (self.low, self.high) != (-float("inf"), float("inf"))


class Shape(NamedTuple):
    """The sizes of a call, and those of the tiles in which it is computed."""

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    d_state: int
    chunk: int  # tokens
    shortest_segment: int  # chunks

    @property
    def per_group(self) -> int:
        return self.nheads // self.ngroups

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.seqlen, self.chunk)

    @property
    def padded_d_state(self) -> int:
        return padded(self.d_state)

    @property
    def headdim_block(self) -> int:
        """Channels of a head that a program computes: a state tile fits into the registers of eight warps."""
        return max(16, min(padded(self.headdim), 64, _STATE_TILE // self.padded_d_state))

    @property
    def headdim_blocks(self) -> int:
        return triton.cdiv(self.headdim, self.headdim_block)


_STATE_TILE = 128 * 128


def padded(size: int) -> int:
    """The tile that holds `size`: powers of two, and matrix units take 16 at least."""
    return max(16, triton.next_power_of_2(size))


def operand_dtype(*tensors: Tensor) -> Any:
    """In which dtype matrix units take the operands of these inputs: theirs, or float32 if they differ."""
    dtypes = {t.dtype for t in tensors}
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtypes.pop(), tl.float32) if len(dtypes) == 1 else tl.float32


def strides(t: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if t is None else t.stride()


def segment_chunks(shape: Shape, programs: int) -> int:
    """Chunks of a segment, where `programs` walk the rows if each takes all of one."""
    segments = max(1, min(PROGRAMS // max(programs, 1), shape.chunks // shape.shortest_segment))
    return triton.cdiv(shape.chunks, segments)


class Walk(NamedTuple):
    """One direction's states through all rows, or their gradients."""

    shape: Shape
    steps: Steps
    u: Tensor  # b l h p: x, or the output's gradient
    v: Tensor  # b l g n: B, or C
    seq_idx: Tensor | None
    operand: Any
    backward: bool = False
    gradient: bool = False
    shifted: bool = False

    def states(self, initial: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        """(b, chunks, h, n, p): the state that enters each chunk. `initial` enters the row, and the one that leaves it
        is written into `last`: both (b, h, p, n), or None."""
        shape = self.shape
        segment = segment_chunks(shape, shape.batch * shape.nheads * shape.headdim_blocks)
        entering = None if initial is None else by_segment(initial)
        if segment < shape.chunks:
            entering = self.entering(entering, segment)
        sizes = (shape.batch, shape.chunks, shape.nheads, shape.d_state, shape.headdim)
        states = self.u.new_empty(sizes, dtype=torch.float32)
        self._launch(segment, entering, states, None if last is None else by_segment(last), None)
        return states

    def entering(self, initial: Tensor | None, segment: int) -> Tensor:
        """(b, segments, h, n, p): the state that enters each segment of so many chunks. `initial` (b, 1, h, n, p)."""
        shape, new = self.shape, self.u.new_empty
        segments = triton.cdiv(shape.chunks, segment)
        states = new(shape.batch, segments, shape.nheads, shape.d_state, shape.headdim, dtype=torch.float32)
        across = new(shape.batch, segments, shape.nheads, dtype=torch.float32)
        self._launch(segment, None, None, states, across)
        block = 1024
        grid = (shape.batch * shape.nheads * triton.cdiv(shape.d_state * shape.headdim, block),)
        sizes = (segments, shape.nheads, shape.headdim, shape.d_state)
        reverse = self.backward != self.gradient
        _chain[grid](states, across, initial, strides(initial, 5), *sizes, REVERSE=reverse, BLOCK=block)
        return states

    def _launch(self, segment, initial, states, last, across):
        shape, steps = self.shape, self.steps
        segments = triton.cdiv(shape.chunks, segment)
        _walk[(shape.batch * segments * shape.nheads * shape.headdim_blocks,)](
            *(self.u, self.u.stride(), self.v, self.v.stride()),
            *(steps.dt, steps.dt.stride(), steps.A, steps.dt_bias, steps.low, steps.high),
            *(self.seq_idx, strides(self.seq_idx, 2)),
            *(initial, strides(initial, 5), states, last, strides(last, 5), across),
            *(shape.seqlen, segment, segments, shape.nheads, shape.headdim, shape.d_state, shape.per_group),
            BACKWARD=self.backward,
            GRADIENT=self.gradient,
            SHIFTED=self.shifted,
            SOFTPLUS=steps.softplus,
            LIMITED=steps.limited,
            OPERAND=self.operand,
            Q=shape.chunk,
            N=shape.padded_d_state,
            P=shape.headdim_block,
            num_warps=warps_of(shape),
        )


def by_segment(state: Tensor) -> Tensor:
    """(b, h, p, n) -> (b, 1, h, n, p)"""
    return state.transpose(2, 3)[:, None]


def warps_of(shape: Shape) -> int:
    """So that a thread holds 64 numbers of a state at most."""
    return 8 if shape.padded_d_state * shape.headdim_block > 64 * 128 else 4
