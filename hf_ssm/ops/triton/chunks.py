"""What the kernels of the chunked scans share: decays inside a chunk, exact products, states that walk from chunk to
chunk.

State space duality (arXiv:2405.21060, section 6): a chunk of tokens is a small matrix on its diagonal and, through the
state that enters it, a product with everything outside. A state is a tile (d_state, headdim) in float32; a program
that walks a row keeps it in registers from chunk to chunk. Rows that too few programs would walk are cut into segments
of several chunks, whose states are found first and chained.

Of a scan against the tokens' order everything is mirrored: its state `enters` a chunk from behind and `leaves` it at
its front. The gradient of a state walks the other way than the state.

q, k positions inside a chunk   n d_state   p headdim
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import INTERPRETED as _INTERPRETED
from .common import LOG2_E, begins_sequence, sigmoid, softplus

INTERPRETED = tl.constexpr(_INTERPRETED)
PROGRAMS = 264  # so many keep a large GPU busy: two for each of an H200's 132 multiprocessors
STATES_BYTES = 1 << 29  # of memory for states in backward, which takes as many rows at once as fit
# numbers of a chunk's B, or C, that fit into shared memory
BC_TILE = 8192 if torch.version.hip else 16384
FARTHEST = 1 << 22  # elements between neighbours: offsets inside a tile have 32 bits, and a tile 512 rows or columns

# --- tensors as kernels take them ----------------------------------------------------------------------------------


class Strided(NamedTuple):
    data: Any
    strides: Any


def strided(t: Tensor | None) -> Strided | None:
    """An input or output (b, l, ...)."""
    if t is not None and any(stride > FARTHEST for stride in t.stride()[1:]):
        t = t.contiguous()
    return as_it_is(t)


def as_it_is(t: Tensor | None) -> Strided | None:
    return None if t is None else Strided(t, t.stride())


@triton.jit
def start_of(t, row, token, head):
    """Where the numbers of a token and a head, or group, begin: t (batch, seqlen, heads, channels)."""
    return t.data + row * t.strides[0] + token * t.strides[1] + head * t.strides[2]


@triton.jit
def load_tile(base, rows, columns, row_stride, column_stride, given_rows, given_columns):
    """base[rows, columns], 0 where there is none."""
    places = rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(base + places, mask=given_rows[:, None] & given_columns[None, :], other=0)


@triton.jit
def store_tile(base, value, rows, columns, row_stride, column_stride, given_rows, given_columns):
    places = rows[:, None] * row_stride + columns[None, :] * column_stride
    tl.store(base + places, value, mask=given_rows[:, None] & given_columns[None, :])


# --- decays --------------------------------------------------------------------------------------------------------
#
# Decays inside a chunk are exponentials of differences of sums of dt A. Behind one large step a float32 sum has lost
# the small ones, so they are summed as integers: 2^-40 is 1, and a summand is at most 2^14, beyond which float32's
# exponential is 0 (or infinite) anyway; 2^8 of them fit into 63 bits. Two floats hold such a sum, and the differences
# of both add up to that of the sums.

FIXED = tl.constexpr(2.0**40)
LARGEST = tl.constexpr(2.0**14)


class Scan(NamedTuple):
    """One direction's step sizes and decays, (b, chunks, h, q) in float32, with steps of size 0 behind the row's end.
    `runs` (b, chunks, q), for packed rows: numbers of sequences, counted from that of the token before the chunk."""

    steps: Any
    high: Any  # and low: the sum of dt A up to each token of the chunk, to base 2
    low: Any
    runs: Any


@triton.jit
def step_sizes(dt, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, lowest, highest):
    """clamp(softplus(dt), lowest, highest)"""
    if SOFTPLUS:
        dt = softplus(dt)
    if LIMITED:
        dt = tl.where(dt < lowest, lowest, tl.where(dt > highest, highest, dt))
    return dt


@triton.jit
def step_size_slopes(dt, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, lowest, highest):
    """The derivative of `step_sizes`."""
    slope = tl.full(dt.shape, 1.0, tl.float32)
    if SOFTPLUS:
        slope = sigmoid(dt)
        dt = softplus(dt)
    if LIMITED:
        slope = tl.where((dt >= lowest) & (dt <= highest), slope, 0.0)
    return slope


@triton.jit(do_not_specialize=["seqlen"])
def _prepare(
    dt,
    A,
    dt_bias,
    lowest,
    highest,
    seq_idx,
    scan,
    seqlen,
    nheads,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    Q: tl.constexpr,
    H: tl.constexpr,
):
    """Writes the scan of one chunk and H heads."""
    blocks, chunks = tl.cdiv(nheads, H), tl.cdiv(seqlen, Q)
    block, row_chunk = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    row, start = row_chunk // chunks, (row_chunk % chunks) * Q
    q, h = tl.arange(0, Q), block * H + tl.arange(0, H)
    given, given_h = start + q < seqlen, h < nheads

    base = dt.data + row * dt.strides[0] + start * dt.strides[1]
    steps = load_tile(base, q, h, dt.strides[1], dt.strides[2], given, given_h).to(tl.float32)
    if dt_bias is not None:
        steps += tl.load(dt_bias + h, mask=given_h, other=0).to(tl.float32)[None, :]
    steps = step_sizes(steps, SOFTPLUS, LIMITED, lowest, highest)
    steps = tl.where(given[:, None], steps, 0.0)
    rates = tl.load(A + h, mask=given_h, other=0) * LOG2_E
    log_decays = tl.minimum(tl.maximum(steps * rates[None, :], -LARGEST), LARGEST)
    up_to = tl.cumsum((log_decays * FIXED).to(tl.int64), 0)
    high = up_to.to(tl.float32)
    low = (up_to - high.to(tl.int64)).to(tl.float32)
    place = row_chunk * nheads * Q
    store_tile(scan.steps + place, steps, q, h, 1, Q, q >= 0, given_h)
    store_tile(scan.high + place, high * (1.0 / FIXED), q, h, 1, Q, q >= 0, given_h)
    store_tile(scan.low + place, low * (1.0 / FIXED), q, h, 1, Q, q >= 0, given_h)
    if seq_idx is not None:
        begins = begins_sequence(seq_idx.data + row * seq_idx.strides[0], start + q, seq_idx.strides[1], given)
        tl.store(scan.runs + row_chunk * Q + q, tl.cumsum(begins.to(tl.int32), 0), mask=(q >= 0) & (block == 0))


@triton.jit
def sums_up_to(scan, place, q):
    """Of the log decays up to each token, and of all, as two floats."""
    return tl.load(scan.high + place + q), tl.load(scan.low + place + q)


@triton.jit
def sums_before(scan, place, q):
    before = place + tl.maximum(q - 1, 0)
    high, low = tl.load(scan.high + before), tl.load(scan.low + before)
    return tl.where(q > 0, high, 0.0), tl.where(q > 0, low, 0.0)


@triton.jit
def differences(rows_high, rows_low, columns_high, columns_low):
    """rows - columns, (rows, columns), of sums of log decays."""
    return (rows_high[:, None] - columns_high[None, :]) + (rows_low[:, None] - columns_low[None, :])


@triton.jit
def between(weights, q):
    """(Q,): the sum of weights[k, q] over all k before a token and all q from it on.

    Of differences of row and column sums, which are the same, rounding errors would remain for tokens far away.
    """
    from_here = tl.cumsum(tl.where(q[:, None] < q[None, :], weights, 0.0), 1, reverse=True)
    return tl.sum(tl.where(q[:, None] < q[None, :], from_here, 0.0), 0)


@triton.jit
def state_decays(scan, place, q, Q: tl.constexpr, FROM_FRONT: tl.constexpr, AT_TOKEN: tl.constexpr):
    """(of each token: how much of a state is left on the way between it and the chunk's front, or its end, with the
    token's own decay or without; how much is left on the way through the chunk)"""
    all_high, all_low = tl.load(scan.high + place + Q - 1), tl.load(scan.low + place + Q - 1)
    if AT_TOKEN == FROM_FRONT:
        high, low = sums_up_to(scan, place, q)
    else:
        high, low = sums_before(scan, place, q)
    exponents = high + low if FROM_FRONT else (all_high - high) + (all_low - low)
    return tl.exp2(exponents), tl.exp2(all_high + all_low)


@triton.jit
def edge_runs(scan, row_chunk, last_chunk, Q: tl.constexpr, BACKWARD: tl.constexpr):
    """The sequences of the state that enters a chunk and of the one that leaves it, as `runs` numbers them."""
    if BACKWARD:
        last = tl.load(scan.runs + row_chunk * Q + Q - 1)
        behind = tl.load(scan.runs + (row_chunk + 1) * Q, mask=last_chunk == 0, other=0)
        return last + behind, tl.load(scan.runs + row_chunk * Q)
    else:
        return 0, tl.load(scan.runs + row_chunk * Q + Q - 1)


# --- products ------------------------------------------------------------------------------------------------------


@triton.jit
def rounded(t, OPERAND: tl.constexpr):
    """A computed operand of products that are rounded to 16 bits themselves, or are summed up to such gradients: no
    better than the inputs where these are bfloat16. (float16's range is too small for what was computed.)"""
    return t.to(tl.bfloat16) if OPERAND.is_bf16() else t


@triton.jit
def product(a, b, sum, OPERAND: tl.constexpr):
    """sum + a b, in float32; `sum` may be None. `OPERAND`: dtype of the inputs. An operand in it is taken as it is;
    one in float32 was computed, and 16 bits would lose half of it: it becomes the sum of two in that dtype.

    Matrix units take 16-bit operands much faster than float32. What is left out of the products is 2^-16 of them.
    """
    if OPERAND.is_fp32():
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=sum, input_precision="ieee")
    elif OPERAND.is_fp16() and (a.dtype == tl.float32 or b.dtype == tl.float32):  # its range is small
        a, a_scale = _scaled(a)
        b, b_scale = _scaled(b)
        scaled = _product_of_parts(a, b, None, OPERAND) * (a_scale * b_scale)
        return scaled if sum is None else sum + scaled
    else:
        return _product_of_parts(a, b, sum, OPERAND)


@triton.jit
def _product_of_parts(a, b, sum, OPERAND: tl.constexpr):
    if a.dtype == OPERAND and b.dtype == OPERAND:
        return _dot(a, b, sum)
    elif b.dtype == OPERAND:
        high, low = _parts(a, OPERAND)
        return _dot(high, b, _dot(low, b, sum))
    else:
        high, low = _parts(b, OPERAND)
        return _product_of_parts(a, high, _dot(a.to(OPERAND), low, sum), OPERAND)


@triton.jit
def _parts(t, OPERAND: tl.constexpr):
    """t as a sum of two."""
    if OPERAND.is_bf16():  # half of a float32's bits: cheaper than a conversion there and back
        bits = (t.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000
        high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return high, (t - bits.to(tl.float32, bitcast=True)).to(tl.bfloat16)
    else:
        high = t.to(OPERAND)
        return high, (t - high.to(tl.float32)).to(OPERAND)


@triton.jit
def _scaled(t):
    """t / scale, scale: with a largest number of 1, if t was computed."""
    if t.dtype == tl.float32:
        scale = tl.max(tl.abs(t))
        scale = tl.where(scale > 0, scale, 1.0)
        return t / scale, scale
    else:
        return t, 1.0


@triton.jit
def _dot(a, b, sum):
    if INTERPRETED:  # there, bfloat16 numbers are integers to NumPy's product
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc=sum)


# --- states --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seqlen", "segment", "segments"])
def _walk(
    scan,
    u,
    v,
    initial,
    states,
    last,
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
    OPERAND: tl.constexpr,
    Q: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
):
    """state -> decay state + sum over tokens of weight v u^T, chunk by chunk through one segment: a direction's states
    (u = x, v = B), or their gradients (u = the output's gradient, v = C).

    With `states` given, writes the state that enters each chunk there, and into `last` the one that leaves the row;
    else into `last` the one that leaves the segment, and the segment's decay into `across`.
    """
    blocks, chunks = tl.cdiv(headdim, P), tl.cdiv(seqlen, Q)
    program = tl.program_id(0)
    head = (program // blocks) % nheads
    row_segment = program // (blocks * nheads)
    part = row_segment % segments
    row = (row_segment // segments).to(tl.int64)
    q, n, p = tl.arange(0, Q), tl.arange(0, N), (program % blocks) * P + tl.arange(0, P)
    given_n, given_p = n < d_state, p < headdim
    REVERSE: tl.constexpr = BACKWARD != GRADIENT
    SHIFT: tl.constexpr = 0 if not (GRADIENT and SHIFTED) else (1 if BACKWARD else -1)  # to the token whose C is read
    first_chunk = part * segment
    count = tl.minimum(segment, chunks - first_chunk)

    state = tl.zeros((N, P), dtype=tl.float32)
    if initial is not None:
        begins = start_of(initial, row, part.to(tl.int64), head)
        state = load_tile(begins, n, p, initial.strides[3], initial.strides[4], given_n, given_p)
    through = tl.full((), 1.0, tl.float32)
    for i in range(count):
        chunk = first_chunk + i
        if REVERSE:
            chunk = first_chunk + count - 1 - i
        row_chunk = row * chunks + chunk
        if states is not None:
            place = states + (row_chunk * nheads + head) * d_state * headdim
            store_tile(place, state, n, p, headdim, 1, given_n, given_p)
        left = seqlen - chunk * Q
        given = q < left
        given_v = (q + SHIFT < left) & ((chunk > 0) | (q + SHIFT >= 0)) & given
        start = (chunk * Q).to(tl.int64)
        tile_u = load_tile(start_of(u, row, start, head), q, p, u.strides[1], u.strides[3], given, given_p)
        base_v = start_of(v, row, start + SHIFT, head // per_group)
        tile_v = load_tile(base_v, q, n, v.strides[1], v.strides[3], given_v, given_n).to(OPERAND)

        place = (row_chunk * nheads + head) * Q
        # a state, and what reads it unshifted, have the token's own decay behind them
        weights, decay = state_decays(scan, place, q, Q, REVERSE, GRADIENT and not SHIFTED)
        if not GRADIENT:
            weights *= tl.load(scan.steps + place + q)
        if scan.runs is not None:
            entering, leaving = edge_runs(scan, row_chunk, chunk == chunks - 1, Q, BACKWARD)
            runs = tl.load(scan.runs + row_chunk * Q + q)
            weights = tl.where(runs == (entering if GRADIENT else leaving), weights, 0.0)
            decay = tl.where(entering == leaving, decay, 0.0)
        weighted = tile_u.to(tl.float32) * weights[:, None]
        state = product(tl.trans(tile_v), weighted, decay * state, OPERAND)
        through *= decay
    ends = part == (0 if REVERSE else segments - 1)
    if states is None:
        tl.store(across + (row * segments + part) * nheads + head, through)
        ends = part >= 0
    if last is not None:
        base = start_of(last, row, part.to(tl.int64), head)
        store_tile(base, state, n, p, last.strides[3], last.strides[4], given_n & ends, given_p)


@triton.jit(do_not_specialize=["segments"])
def _chain(states, across, initial, segments, nheads, headdim, d_state, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """(batch, segments, nheads, d_state, headdim): what each segment adds to a state -> the state that enters it."""
    blocks = tl.cdiv(d_state * headdim, BLOCK)
    head = (tl.program_id(0) // blocks) % nheads
    row = (tl.program_id(0) // (blocks * nheads)).to(tl.int64)
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    given = i < d_state * headdim
    state = tl.zeros((BLOCK,), dtype=tl.float32)
    if initial is not None:
        places = (i // headdim) * initial.strides[3] + (i % headdim) * initial.strides[4]
        state = tl.load(start_of(initial, row, 0, head) + places, mask=given, other=0)
    for k in range(segments):
        part = k
        if REVERSE:
            part = segments - 1 - k
        of_head = (row * segments + part) * nheads + head
        added = tl.load(states + of_head * d_state * headdim + i, mask=given, other=0)
        tl.store(states + of_head * d_state * headdim + i, state, mask=given)
        state = tl.load(across + of_head) * state + added


# --- gradients -----------------------------------------------------------------------------------------------------


@triton.jit
def chunk_of_program(splits, groups, chunks):
    """(split, group, row, chunk, which chunk of all rows) of a program that has some heads of a group in one chunk."""
    program = tl.program_id(0)
    row_chunk = (program // (splits * groups)).to(tl.int64)
    return program % splits, (program // splits) % groups, row_chunk // chunks, row_chunk % chunks, row_chunk


@triton.jit(do_not_specialize=["seqlen"])
def _read_gradients(
    scan,
    d_y,
    C,
    entering_states,
    d_leaving_states,
    d_C,
    d_read,
    d_across,
    seqlen,
    nheads,
    headdim,
    d_state,
    per_group,
    per_program,
    splits,
    BACKWARD: tl.constexpr,
    SHIFTED: tl.constexpr,
    OPERAND: tl.constexpr,
    Q: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """What the tokens of a chunk read of one direction's entering state: gradients of C, (splits, batch, chunks, q,
    ngroups, d_state) by the token that reads, of the logarithms of what is left of the state at each token,
    (batch, chunks, nheads, q), and behind the chunk."""
    chunks, groups = tl.cdiv(seqlen, Q), nheads // per_group
    split, group, row, chunk, row_chunk = chunk_of_program(splits, groups, chunks)
    start = chunk * Q
    SHIFT: tl.constexpr = 0 if not SHIFTED else (1 if BACKWARD else -1)
    q, n = tl.arange(0, Q), tl.arange(0, N)
    given, given_n = q < seqlen - start, n < d_state
    given_C = given & (q + SHIFT < seqlen - start) & (q + SHIFT >= 0 - start)
    of_group = start_of(C, row, start + SHIFT, group)
    tile_C = load_tile(of_group, q, n, C.strides[1], C.strides[3], given_C, given_n).to(tl.float32)
    if scan.runs is not None:
        runs = tl.load(scan.runs + row_chunk * Q + q)
        entering, leaving = edge_runs(scan, row_chunk, chunk == chunks - 1, Q, BACKWARD)
    d_tile_C = tl.zeros((Q, N), dtype=tl.float32)
    first_head = group * per_group + split * per_program
    for head in range(first_head, tl.minimum(first_head + per_program, (group + 1) * per_group)):
        of_head = row_chunk * nheads + head
        read, across = state_decays(scan, of_head * Q, q, Q, not BACKWARD, not SHIFTED)
        if scan.runs is not None:
            read = tl.where(runs == entering, read, 0.0)
            across = tl.where(entering == leaving, across, 0.0)
        d_log_read = tl.zeros((Q,), dtype=tl.float32)
        d_log_across = 0.0
        for block in tl.static_range(BLOCKS):
            p = block * P + tl.arange(0, P)
            given_p = p < headdim
            base = of_head * d_state * headdim
            state = load_tile(entering_states + base, n, p, headdim, 1, given_n, given_p)
            d_leaving = load_tile(d_leaving_states + base, n, p, headdim, 1, given_n, given_p)
            d_log_across += tl.sum(state.to(tl.float32) * d_leaving.to(tl.float32))
            base = start_of(d_y, row, start, head)
            tile_dy = load_tile(base, q, p, d_y.strides[1], d_y.strides[3], given, given_p)
            d_read_C = product(tile_dy, tl.trans(state), None, OPERAND) * read[:, None]
            d_log_read += tl.sum(d_read_C * tile_C, 1)
            d_tile_C += d_read_C
        tl.store(d_read + of_head * Q + q, d_log_read)
        tl.store(d_across + of_head, d_log_across * across)
    base = ((split * (tl.num_programs(0) // (splits * groups)) + row_chunk) * Q * groups + group) * d_state
    store_tile(d_C + base, d_tile_C, q, n, groups * d_state, 1, q >= 0, given_n)


# --- launches ------------------------------------------------------------------------------------------------------


class StepSizes(NamedTuple):
    """How a call's step sizes are made."""

    dt: Tensor  # b l h
    A: Tensor  # h, contiguous float32
    dt_bias: Tensor | None = None  # contiguous
    softplus: bool = False
    lowest: float = -float("inf")
    highest: float = float("inf")

    @property
    def options(self) -> dict[str, bool]:
        limited = (self.lowest, self.highest) != (-float("inf"), float("inf"))
        return {"SOFTPLUS": self.softplus, "LIMITED": limited}


class Shape(NamedTuple):
    """The sizes of a call, and those in which it is computed."""

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    d_state: int
    operand: Any  # the dtype of matrix products' operands
    chunk: int  # tokens
    shortest_segment: int  # chunks

    @property
    def per_group(self) -> int:
        return self.nheads // self.ngroups

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.seqlen, self.chunk)

    @property
    def state_block(self) -> tuple[int, int]:
        """d_state and headdim of a state tile: all of d_state, and as many channels as registers hold."""
        n = padded(self.d_state)
        return n, min(padded(self.headdim), 64, max(16, (1024 if self.operand == tl.float32 else 8192) // n))

    @property
    def walking(self) -> dict[str, int]:
        """Options of kernels that walk. Products in float32 are not taken by matrix units: more threads share them."""
        return {"num_warps": 8, "num_stages": 1} if self.operand == tl.float32 else {"num_warps": 4, "num_stages": 2}

    @property
    def walkers(self) -> int:
        """Programs that walk all rows, if each takes all of one."""
        return self.batch * self.nheads * triton.cdiv(self.headdim, self.state_block[1])

    @property
    def segment(self) -> int:
        """Chunks that a program walks."""
        segments = max(1, min(PROGRAMS // max(self.walkers, 1), self.chunks // self.shortest_segment))
        return triton.cdiv(self.chunks, segments)

    @property
    def rows_at_once(self) -> int:
        """Of which backward keeps the states of one direction and their gradients."""
        states = 2 * self.chunks * self.nheads * self.headdim * self.d_state * self.state_dtype.itemsize
        return max(1, STATES_BYTES // max(1, states))

    @property
    def state_dtype(self) -> torch.dtype:
        """Of the states that backward's products take as operands, see `rounded`."""
        return torch.bfloat16 if self.operand == tl.bfloat16 else torch.float32

    @property
    def segments(self) -> int:
        return triton.cdiv(self.chunks, self.segment)

    def split_heads(self) -> tuple[int, int]:
        """Programs that share a chunk's heads of one group, and how many heads each has."""
        programs = max(1, self.batch * self.chunks * self.ngroups)
        per_program = triton.cdiv(self.per_group, max(1, min(self.per_group, PROGRAMS // programs)))
        return triton.cdiv(self.per_group, per_program), per_program


GRADIENT_OPTIONS = {"num_warps": 8, "num_stages": 1}


def shape_of(x: Tensor, BC: tuple[Tensor, ...], chunk: int, shortest_segment: int) -> Shape:
    """The shape of a call. Matrix units take 16-bit operands, if inputs have all the same 16-bit dtype; float32's
    products need most of a thread's registers, so chunks are a quarter as long."""
    dtypes = {t.dtype for t in (x, *BC)}
    sixteen_bits = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    operand = sixteen_bits.get(x.dtype, tl.float32) if len(dtypes) == 1 else tl.float32
    if operand == tl.float32:
        chunk = max(16, chunk // 4)
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = BC[0].shape[2:]
    chunk = max(16, min(chunk, BC_TILE // padded(d_state)))
    return Shape(batch, seqlen, nheads, headdim, ngroups, d_state, operand, chunk, shortest_segment)


def padded(size: int) -> int:
    """The tile that holds `size`: powers of two, and matrix units take 16 at least."""
    return max(16, triton.next_power_of_2(size))


def prepare(shape: Shape, steps: StepSizes, seq_idx: Tensor | None) -> Scan:
    sizes = (shape.batch, shape.chunks, shape.nheads, shape.chunk)
    step, high, low = (steps.A.new_empty(sizes) for _ in range(3))
    runs = None if seq_idx is None else steps.A.new_empty(*sizes[:2], shape.chunk, dtype=torch.int32)
    scan = Scan(step, high, low, runs)
    heads = min(16, triton.next_power_of_2(shape.nheads))
    _prepare[(shape.batch * shape.chunks * triton.cdiv(shape.nheads, heads),)](
        *(strided(steps.dt), steps.A, steps.dt_bias, steps.lowest, steps.highest, strided(seq_idx), scan),
        *(shape.seqlen, shape.nheads),
        **steps.options,
        Q=shape.chunk,
        H=heads,
    )
    return scan


class Walk(NamedTuple):
    """One direction's states through all rows, or their gradients."""

    shape: Shape
    scan: Scan
    u: Tensor  # b l h p: x, or the output's gradient
    v: Tensor  # b l g n: B, or C
    backward: bool = False
    gradient: bool = False
    shifted: bool = False

    def states(self, initial: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        """(b, chunks, h, n, p): the state that enters each chunk, as an operand of backward's products. `initial`
        enters the row, and the one that leaves it is written into `last`: both (b, h, p, n), or None."""
        shape = self.shape
        sizes = (shape.batch, shape.chunks, shape.nheads, shape.d_state, shape.headdim)
        states = self.u.new_empty(sizes, dtype=shape.state_dtype)
        self._launch(self.entering_segments(initial), states, by_segment(last), None)
        return states

    def entering_segments(self, initial: Tensor | None) -> Tensor | None:
        """(b, segments, h, n, p): the state that enters each segment; `initial` (b, h, p, n), or None for zeros."""
        shape, new = self.shape, self.u.new_empty
        if shape.segments == 1:
            return by_segment(initial)
        sizes = (shape.batch, shape.segments, shape.nheads)
        states = new(*sizes, shape.d_state, shape.headdim, dtype=torch.float32)
        across = new(sizes, dtype=torch.float32)
        self._launch(None, None, states, across)
        block = 1024
        _chain[(shape.batch * shape.nheads * triton.cdiv(shape.d_state * shape.headdim, block),)](
            *(states, across, as_it_is(by_segment(initial))),
            *(shape.segments, shape.nheads, shape.headdim, shape.d_state),
            REVERSE=self.backward != self.gradient,
            BLOCK=block,
        )
        return states

    def _launch(self, initial, states, last, across) -> None:
        shape = self.shape
        n, p = shape.state_block
        _walk[(shape.walkers * shape.segments,)](
            *(self.scan, strided(self.u), strided(self.v), as_it_is(initial), states, as_it_is(last), across),
            *(shape.seqlen, shape.segment, shape.segments, shape.nheads, shape.headdim, shape.d_state),
            shape.per_group,
            BACKWARD=self.backward,
            GRADIENT=self.gradient,
            SHIFTED=self.shifted,
            OPERAND=shape.operand,
            Q=shape.chunk,
            N=n,
            P=p,
            **shape.walking,
        )


def by_segment(state: Tensor | None) -> Tensor | None:
    """(b, h, p, n) -> (b, 1, h, n, p)"""
    return None if state is None else state.transpose(2, 3)[:, None]


def read_gradients(walk: Walk, splits: int, per_program: int, states: Tensor, d_leaving: Tensor):
    """`_read_gradients` of a direction whose states and their gradients are given; `walk` is that of the gradients."""
    shape, new = walk.shape, walk.scan.steps.new_empty
    sizes = (shape.batch, shape.chunks)
    d_C = new(splits, *sizes, shape.chunk, shape.ngroups, shape.d_state)
    d_read, d_across = new(*sizes, shape.nheads, shape.chunk), new(*sizes, shape.nheads)
    n, p = shape.state_block
    _read_gradients[(shape.batch * shape.chunks * shape.ngroups * splits,)](
        *(walk.scan, strided(walk.u), strided(walk.v), states, d_leaving, d_C, d_read, d_across),
        *(shape.seqlen, shape.nheads, shape.headdim, shape.d_state, shape.per_group, per_program, splits),
        BACKWARD=walk.backward,
        SHIFTED=walk.shifted,
        OPERAND=shape.operand,
        Q=shape.chunk,
        N=n,
        P=p,
        BLOCKS=triton.cdiv(shape.headdim, p),
        **GRADIENT_OPTIONS,
    )
    return d_C, d_read, d_across
