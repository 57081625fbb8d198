"""The `triton` backend of `hf_ssm.ops.selective_scan`.

A program, one warp, has a block of channels of a row and goes through its tokens a tile at a time. Of a tile it holds
the tokens' vectors, steps, inputs and outputs, in registers, and for one entry n of the states after the other runs
through the tile's tokens; what it reads and writes for every n, the state before the tile, is one vector per tile. So
one exponential per token, channel and n is all that the recurrence costs beside four products. B and C of a token are
numbers to a program; a first, small kernel puts those of neighbouring tokens side by side, as they will be read.

Where rows and channels make too few programs to fill a GPU, rows are cut into chunks of tokens: the chunks' states
from zero, the chain of the chunks, then every chunk again from the right state. Backward does the same from the other
end, recomputing a segment's states from the one that forward kept, and sums B's and C's gradients over the channels
of a block; those of the blocks are added afterwards, always in the same order.

b batch   l seqlen   c chunk   s segment   g ngroups   d d_inner   n d_state
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import at_once, single
from .common import (
    LOG2_E,
    begins_sequence,
    channels_last,
    exp,
    load_tokens,
    on_device_of,
    sigmoid,
    silu,
    silu_slope,
    softplus,
    strides,
)

LN_2 = tl.constexpr(0.6931471805599453)

# What a program takes at a time: so many that a thread has 32 (forward) and 16 (backward) numbers of every vector.
FORWARD_CHANNELS, FORWARD_TOKENS = 64, 16
BACKWARD_CHANNELS, BACKWARD_TOKENS = 64, 8
SEGMENT = 32  # tokens between the states that forward keeps for backward: 4 n / SEGMENT bytes per token and channel

# Two programs on each of the four schedulers of each of 132 multiprocessors are what registers allow and what keeps
# the units for exponentials at work. Cutting rows into chunks costs most exponentials a second time, so it is done
# where otherwise not every scheduler would have a program.
ENOUGH_PROGRAMS = 512
WANTED_PROGRAMS = 1056
SHORTEST_CHUNK = 32

UPDATED_STATES = 256  # that a program takes of the states that one token updates: one warp, 8 of a thread


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dt, B, C, D, z, dt_bias = (single(t) for t in (dt, B, C, D, z, dt_bias))
    inputs = (x, dt, A.float(), B, C, D, z, dt_bias, dt_softplus, initial_state, seq_idx)
    if at_once(x, dt, A, B, C, D, z, dt_bias, initial_state):
        out, final_state, _ = forward(*inputs, keep=False)
        return out, final_state
    out, final_state, _ = _selective_scan(*inputs)
    return out, final_state


@torch.library.custom_op("hf_ssm::selective_scan_triton", mutates_args=())
def _selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, the state before each segment (b, s, n, d))."""
    return forward(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, seq_idx, keep=True)


@_selective_scan.register_fake
def _(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, seq_idx):
    return _results(x, A, keep=True)


def _results(x: Tensor, A: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, seqlen, d_inner = x.shape
    d_state = A.shape[1]
    segments = -(-seqlen // SEGMENT) if keep else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(batch, d_inner, d_state, dtype=torch.float32),
        x.new_empty(batch, segments, d_state, d_inner, dtype=torch.float32),
    )


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, the state before each segment (b, s, n, d)); without `keep` there are no segments."""
    out, final_state, kept = results = _results(x, A, keep)
    x, dt, z = (channels_last(t) for t in (x, dt, z))
    initial_state = None if initial_state is None else initial_state.contiguous()
    with on_device_of(x):
        if x.shape[1] == 1:
            _update(
                x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, out, final_state, kept if keep else None
            )
            return results
        cut = _Cut(x, A, B, FORWARD_CHANNELS)
        A = A.t().contiguous()
        B, C = cut.side_by_side(B, C)
        states = cut.states()
        shared = (x, dt, A, B, C, D, z, dt_bias, seq_idx)
        sizes = (*cut.sizes, *strides(x, dt, z, seq_idx))
        options = {"SOFTPLUS": dt_softplus, "TOKENS": FORWARD_TOKENS, "BLOCK": cut.block, "num_warps": 1}
        if cut.chunks > 1:
            totals = cut.totals()
            given = (*shared, None, None, None, states, None, totals)
            _forward_kernel[cut.grid](*given, *sizes, SEGMENT=SEGMENT, CHAINED=False, **options)
            _chain(cut, A, states, totals, initial_state, backwards=False)
        given = (*shared, initial_state, out, final_state, states, kept if keep else None, None)
        _forward_kernel[cut.grid](*given, *sizes, SEGMENT=SEGMENT, CHAINED=cut.chunks > 1, **options)
    return results


class _Cut:
    """How the work on a call is cut into programs."""

    def __init__(self, x: Tensor, A: Tensor, B: Tensor, channels: int):
        self.batch, self.seqlen, self.d_inner = x.shape
        self.d_state, self.ngroups = A.shape[1], B.shape[2]
        per_group = self.d_inner // self.ngroups
        self.block = min(channels, triton.next_power_of_2(per_group))
        self.blocks = triton.cdiv(per_group, self.block)  # of a group
        rows = self.batch * self.ngroups * self.blocks
        chunks = 1 if rows >= ENOUGH_PROGRAMS else max(1, WANTED_PROGRAMS // max(rows, 1))
        chunk = max(triton.cdiv(self.seqlen, chunks), SHORTEST_CHUNK)
        self.chunk = SEGMENT * triton.cdiv(chunk, SEGMENT)
        self.chunks = triton.cdiv(self.seqlen, self.chunk)
        self.grid = (rows * self.chunks,)
        self.pairs = SEGMENT // 2 * triton.cdiv(self.seqlen, SEGMENT)  # of neighbouring tokens
        self.sizes = (
            self.seqlen, self.chunk, self.chunks, self.d_state, per_group, self.ngroups, self.blocks, self.pairs
        )  # fmt: skip
        self.like = x

    def side_by_side(self, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        """B and C as (b, g, n, pairs), two tokens' float32 numbers in each int64, zeros behind the last token."""
        tokens = triton.next_power_of_2(min(self.seqlen, 64))
        states = triton.next_power_of_2(min(self.d_state, 32))
        rows = self.batch * self.ngroups
        grid = (rows * triton.cdiv(2 * self.pairs, tokens), triton.cdiv(self.d_state, states), 2)
        results = self._empty(2, self.batch, self.ngroups, self.d_state, 2 * self.pairs)
        sizes = (self.seqlen, 2 * self.pairs, self.ngroups, self.d_state)
        _side_by_side_kernel[grid](
            B, C, results, *sizes, rows, *B.stride(), *C.stride(), TOKENS=tokens, STATES=states, num_warps=4
        )
        by_pairs = results.view(torch.int64)
        return by_pairs[0], by_pairs[1]

    def gradient_like(self, of_blocks: Tensor, t: Tensor) -> Tensor:
        """The sum over blocks of (b, block, g, n, pairs) as (b, l, g, n) in t's dtype."""
        of_tokens = of_blocks.view(torch.float32)[..., : self.seqlen]
        total = of_tokens.squeeze(1) if self.blocks == 1 else of_tokens.sum(dim=1)
        return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(total.permute(0, 3, 1, 2))

    def states(self) -> Tensor:
        """Of each chunk a state that its program works on, (b, c, n, d)."""
        return self._empty(self.batch, self.chunks, self.d_state, self.d_inner)

    def totals(self) -> Tensor:
        """Of each chunk the sum of its steps, (b, c, d)."""
        return self._empty(self.batch, self.chunks, self.d_inner)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.like.device)


def _chain(cut: _Cut, A: Tensor, states: Tensor, totals: Tensor, first: Tensor | None, backwards: bool) -> None:
    """`states` (b, c, n, d), in place: what every chunk makes of zero -> what it begins with. `first` (b, d, n): what
    the first one does, zeros if None."""
    block = min(128, triton.next_power_of_2(cut.d_inner))
    grid = (cut.batch * cut.d_state * triton.cdiv(cut.d_inner, block),)
    sizes = (cut.chunks, cut.d_state, cut.d_inner)
    _chain_kernel[grid](states, totals, A, first, *sizes, BACKWARDS=backwards, BLOCK=block, num_warps=1)


def _update(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, out, final_state, kept) -> None:
    """One token: `out` and `final_state`, and the state before it in `kept`, if given."""
    batch, _, d_inner = x.shape
    d_state, ngroups = A.shape[1], B.shape[2]
    states = triton.next_power_of_2(d_state)
    block = min(max(1, UPDATED_STATES // states), triton.next_power_of_2(d_inner))
    grid = (batch * triton.cdiv(d_inner, block),)
    rows = strides(x, dt, z)[::2]
    B_strides, C_strides = ((t.stride(0), t.stride(2), t.stride(3)) for t in (B, C))
    _update_kernel[grid](
        x, dt, A, B, C, D, z, dt_bias, initial_state, out, final_state, kept,
        d_inner, d_state, d_inner // ngroups, *rows, *A.stride(), *B_strides, *C_strides,
        SOFTPLUS=dt_softplus, BLOCK=block, STATES=states, num_warps=1,
    )  # fmt: skip


# --- backward ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("hf_ssm::selective_scan_triton_backward", mutates_args=())
def _selective_scan_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C, D, z, dt_bias, initial_state; empty where the input was None."""
    return backward(d_out, d_final, x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, seq_idx, kept)


@_selective_scan_backward.register_fake
def _(d_out, d_final, x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, seq_idx, kept):
    return tuple(
        x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, dt, A, B, C, D, z, dt_bias, initial_state)
    )


def _setup_context(ctx, inputs, output):
    *tensors, ctx.dt_softplus, initial_state, seq_idx = inputs
    ctx.save_for_backward(*tensors, initial_state, seq_idx, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_final, _):
    *tensors, initial_state, seq_idx, kept = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(tensors[0])
    grads = _selective_scan_backward(d_out, d_final, *tensors, ctx.dt_softplus, initial_state, seq_idx, kept)
    *grads, d_state = (None if t is None else grad for t, grad in zip((*tensors, initial_state), grads, strict=True))
    return *grads, None, d_state, None


_selective_scan.register_autograd(_backward, setup_context=_setup_context)


def backward(
    d_out: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_x, d_dt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    d_z, d_state = (None if t is None else t.new_empty(t.shape) for t in (z, initial_state))
    x, dt, z, d_out = (channels_last(t) for t in (x, dt, z, d_out))
    d_final = None if d_final is None else d_final.contiguous()
    cut = _Cut(x, A, B, BACKWARD_CHANNELS)
    A = A.t().contiguous()
    Bs, Cs = cut.side_by_side(B, C)
    carry = cut.states()
    d_A, d_D, d_bias = cut.states(), cut.totals(), cut.totals()
    of_blocks = (cut.batch, cut.blocks, *Bs.shape[1:])
    d_Bs, d_Cs = (torch.empty(of_blocks, dtype=torch.int64, device=x.device) for _ in range(2))
    tiles = (cut.grid[0], SEGMENT // BACKWARD_TOKENS - 1, cut.d_state, cut.block)
    scratch = torch.empty(tiles, dtype=torch.float32, device=x.device)
    sizes = (*cut.sizes, *strides(x, dt, z, seq_idx, d_out))
    options = {"SOFTPLUS": dt_softplus, "TOKENS": BACKWARD_TOKENS, "BLOCK": cut.block, "num_warps": 1}
    with on_device_of(x):
        if cut.chunks > 1:
            totals = cut.totals()
            _carry_kernel[cut.grid](dt, A, Cs, z, dt_bias, seq_idx, d_out, carry, totals, *sizes, **options)
            _chain(cut, A, carry, totals, d_final, backwards=True)
        _backward_kernel[cut.grid](
            x, dt, A, Bs, Cs, D, z, dt_bias, seq_idx, kept, d_out, d_final, carry, scratch,
            d_x, d_dt, d_z, d_A, d_Bs, d_Cs, d_D, d_bias, d_state, *sizes,
            CHAINED=cut.chunks > 1, SEGMENT=SEGMENT, **options,
        )  # fmt: skip
    return (
        d_x,
        d_dt,
        d_A.sum(dim=(0, 1)).t().contiguous(),
        cut.gradient_like(d_Bs, B),
        cut.gradient_like(d_Cs, C),
        x.new_empty(0) if D is None else d_D.sum(dim=(0, 1)).to(D.dtype),
        x.new_empty(0) if d_z is None else d_z,
        x.new_empty(0) if dt_bias is None else d_bias.sum(dim=(0, 1)).to(dt_bias.dtype),
        x.new_empty(0) if d_state is None else d_state,
    )


# --- forward's kernels ---------------------------------------------------------------------------------------------


@triton.jit
def _place(program, chunks, per_group, ngroups, blocks, BLOCK: tl.constexpr):
    """A program's row, chunk, group, block of that group; its channels, and which of them there are."""
    block = program % blocks
    group = program // blocks % ngroups
    chunk = program // (blocks * ngroups) % chunks
    row = (program // (blocks * ngroups * chunks)).to(tl.int64)
    inside = block * BLOCK + tl.arange(0, BLOCK)
    return row, chunk, group, block, group * per_group + inside, inside < per_group


@triton.jit
def _steps(rows, bias, count, SOFTPLUS: tl.constexpr, TOKENS: tl.constexpr):
    """Projected dt, a tuple of vectors -> the steps; 0 from the `count`-th on, which leaves the state as it is."""
    steps = ()
    for j in tl.static_range(TOKENS):
        step = rows[j] + bias
        if SOFTPLUS:
            step = softplus(step)
        steps += (tl.where(j < count, step, 0.0),)
    return steps


@triton.jit
def _products(first, second, TOKENS: tl.constexpr):
    """Of two tuples of vectors, one by one."""
    products = ()
    for j in tl.static_range(TOKENS):
        products += (first[j] * second[j],)
    return products


@triton.jit
def _nothing(like, TOKENS: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(TOKENS):
        zeros += (tl.zeros_like(like),)
    return zeros


@triton.jit
def _restarts(seq_idx, token, stride, count, TOKENS: tl.constexpr):
    """Whether the state restarts before each token of a tile, a tuple; an empty one without `seq_idx`."""
    restarts = ()
    if seq_idx is not None:
        for j in tl.static_range(TOKENS):
            restarts += (begins_sequence(seq_idx, token + j, stride, j < count),)
    return restarts


@triton.jit
def _decay(step, a, restarts, j: tl.constexpr, PACKED: tl.constexpr):
    decay = tl.exp2(step * a)
    if PACKED:
        decay = tl.where(restarts[j], 0.0, decay)
    return decay


@triton.jit
def _numbers(pairs, TOKENS: tl.constexpr):
    """TOKENS tokens' numbers, a tuple, from where their pairs begin: two are one load."""
    numbers = ()
    for j in tl.static_range(TOKENS // 2):
        pair = tl.load(pairs + j)
        numbers += (pair.to(tl.int32).to(tl.float32, bitcast=True),)
        numbers += ((pair >> 32).to(tl.int32).to(tl.float32, bitcast=True),)
    return numbers


@triton.jit
def _store_numbers(pairs, numbers, TOKENS: tl.constexpr):
    for j in tl.static_range(TOKENS // 2):
        low = numbers[2 * j].to(tl.uint32, bitcast=True).to(tl.int64)
        high = numbers[2 * j + 1].to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(pairs + j, low | (high << 32))


@triton.jit
def _vector(pointer, channels, given):
    """Of every channel a number, in float32; zeros if there are none."""
    if pointer is None:
        return tl.zeros(channels.shape, tl.float32)
    return tl.load(pointer + channels, mask=given, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["seqlen", "padded", "ngroups", "d_state", "rows"])
def _side_by_side_kernel(
    B, C, results, seqlen, padded, ngroups, d_state, rows, B_b, B_l, B_g, B_n, C_b, C_l, C_g, C_n,
    TOKENS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """B and C (b, l, g, n) -> results (2, b, g, n, l) in float32, zeros from seqlen on."""
    tiles = tl.cdiv(padded, TOKENS)
    of_row = tl.program_id(0) // tiles
    row, group = (of_row // ngroups).to(tl.int64), of_row % ngroups
    tokens = (tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    n = tl.program_id(1) * STATES + tl.arange(0, STATES)
    given = (tokens < seqlen)[:, None] & (n < d_state)[None, :]
    if tl.program_id(2) == 0:
        here = B + row * B_b + group * B_g + tokens[:, None] * B_l + n[None, :] * B_n
        values = tl.load(here, mask=given, other=0.0).to(tl.float32)
    else:
        here = C + row * C_b + group * C_g + tokens[:, None] * C_l + n[None, :] * C_n
        values = tl.load(here, mask=given, other=0.0).to(tl.float32)
    there = (tl.program_id(2) * rows + of_row).to(tl.int64) * d_state + n[:, None]
    fits = (n < d_state)[:, None] & (tokens < padded)[None, :]
    tl.store(results + there * padded + tokens[None, :], tl.trans(values), mask=fits)


@triton.jit(do_not_specialize=["seqlen", "chunk", "chunks", "d_state", "blocks", "ngroups", "pairs"])
def _forward_kernel(
    x, dt, A, B, C, D, z, dt_bias, seq_idx, initial_state, out, final_state, states, kept, totals,
    seqlen, chunk, chunks, d_state, per_group, ngroups, blocks, pairs,
    x_b, x_l, dt_b, dt_l, z_b, z_l, seq_idx_b, seq_idx_l,
    SOFTPLUS: tl.constexpr, CHAINED: tl.constexpr, SEGMENT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A (n, d), states (b, c, n, d). With `out` a chunk's outputs, from the state in `states` if CHAINED, else from
    the initial one; without, what a chunk makes of a state of zero, in `states`, and the sum of its steps in `totals`,
    inf if the state restarts in it."""
    PACKED: tl.constexpr = seq_idx is not None
    d_inner = per_group * ngroups
    row, chunk_index, group, _, channels, given = _place(tl.program_id(0), chunks, per_group, ngroups, blocks, BLOCK)
    start = chunk_index * chunk
    end = tl.minimum(start + chunk, seqlen)
    x += row * x_b + channels
    dt += row * dt_b + channels
    B += (row * ngroups + group) * d_state * pairs
    C += (row * ngroups + group) * d_state * pairs
    states += (row * chunks + chunk_index) * d_state * d_inner + channels
    bias = _vector(dt_bias, channels, given)
    if out is not None:
        skip = _vector(D, channels, given)
        out += row * seqlen * d_inner + channels
        if z is not None:
            z += row * z_b + channels
        if kept is not None:
            kept += row * tl.cdiv(seqlen, SEGMENT) * d_state * d_inner + channels
    if PACKED:
        seq_idx += row * seq_idx_b
    if not CHAINED:
        for n in range(d_state):
            h = tl.zeros((BLOCK,), tl.float32)
            if initial_state is not None:
                h = tl.load(initial_state + (row * d_inner + channels) * d_state + n, mask=given, other=0.0)
            tl.store(states + n * d_inner, h, mask=given)
    total = tl.zeros((BLOCK,), tl.float32)

    for first in range(start, end, TOKENS):
        count = end - first
        token = tl.cast(first, tl.int64)
        steps = _steps(load_tokens(dt + token * dt_l, dt_l, count, given, TOKENS), bias, count, SOFTPLUS, TOKENS)
        xs = load_tokens(x + token * x_l, x_l, count, given, TOKENS)
        inputs = _products(steps, xs, TOKENS)
        restarts = _restarts(seq_idx, token, seq_idx_l, count, TOKENS)
        ys = ()
        if out is not None:
            for j in tl.static_range(TOKENS):
                ys += (skip * xs[j],)
        else:
            for j in tl.static_range(TOKENS):
                total += steps[j]
                if PACKED:
                    total = tl.where(restarts[j], float("inf"), total)
        tl.debug_barrier()  # the tile before has written its states
        for n in range(d_state):
            a = tl.load(A + n * d_inner + channels, mask=given, other=0.0) * LOG2_E
            h = tl.load(states + n * d_inner, mask=given, other=0.0)
            if kept is not None:
                segment = token // SEGMENT
                begins = first % SEGMENT == 0
                tl.store(kept + (segment * d_state + n) * d_inner, h, mask=given & begins)
            sums = ()
            bs = _numbers(B + n * pairs + token // 2, TOKENS)
            if out is not None:
                cs = _numbers(C + n * pairs + token // 2, TOKENS)
            for j in tl.static_range(TOKENS):
                h = _decay(steps[j], a, restarts, j, PACKED) * h + inputs[j] * bs[j]
                if out is not None:
                    sums += (ys[j] + cs[j] * h,)
            ys = sums
            tl.store(states + n * d_inner, h, mask=given)
        if out is not None:
            for j in tl.static_range(TOKENS):
                y = ys[j]
                here = given & (j < count)
                if z is not None:
                    gate = tl.load(z + (token + j) * z_l, mask=here, other=0.0).to(tl.float32)
                    y *= silu(gate)
                tl.store(out + (token + j) * d_inner, y, mask=here)

    if out is None:
        tl.store(totals + (row * chunks + chunk_index) * d_inner + channels, total, mask=given)
    else:
        tl.debug_barrier()
        last = given & (chunk_index == chunks - 1)
        for n in range(d_state):
            h = tl.load(states + n * d_inner, mask=last, other=0.0)
            tl.store(final_state + (row * d_inner + channels) * d_state + n, h, mask=last)


@triton.jit(do_not_specialize=["chunks", "d_state"])
def _chain_kernel(
    states, totals, A, first, chunks, d_state, d_inner,
    BACKWARDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(d_inner, BLOCK)
    program = tl.program_id(0)
    channels = program % blocks * BLOCK + tl.arange(0, BLOCK)
    n = program // blocks % d_state
    row = (program // (blocks * d_state)).to(tl.int64)
    given = channels < d_inner
    a = tl.load(A + n * d_inner + channels, mask=given, other=0.0) * LOG2_E
    states += (row * chunks * d_state + n) * d_inner + channels
    totals += row * chunks * d_inner + channels
    h = tl.zeros((BLOCK,), tl.float32)
    if first is not None:
        h = tl.load(first + (row * d_inner + channels) * d_state + n, mask=given, other=0.0)
    for i in range(chunks):
        c = chunks - 1 - i if BACKWARDS else i
        here = states + tl.cast(c, tl.int64) * d_state * d_inner
        total = tl.load(totals + tl.cast(c, tl.int64) * d_inner, mask=given, other=0.0)
        gained = tl.load(here, mask=given, other=0.0)
        tl.store(here, h, mask=given)
        h = tl.where(total == float("inf"), 0.0, tl.exp2(total * a)) * h + gained


@triton.jit
def _update_kernel(
    x, dt, A, B, C, D, z, dt_bias, initial_state, out, final_state, kept,
    d_inner, d_state, per_group, x_b, dt_b, z_b, A_d, A_n, B_b, B_g, B_n, C_b, C_g, C_n,
    SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """A (d, n), states (b, d, n)."""
    blocks = tl.cdiv(d_inner, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channels = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, STATES)[None, :]
    given = channels < d_inner
    entries = given[:, None] & (n < d_state)
    group = (channels // per_group)[:, None]
    place = (row * d_inner + channels[:, None]) * d_state + n

    h = tl.zeros((BLOCK, STATES), tl.float32)
    if initial_state is not None:
        h = tl.load(initial_state + place, mask=entries, other=0.0)
    if kept is not None:
        tl.store(kept + (row * d_state + n) * d_inner + channels[:, None], h, mask=entries)
    step = _vector(dt + row * dt_b, channels, given) + _vector(dt_bias, channels, given)
    if SOFTPLUS:
        step = softplus(step)
    x_here = _vector(x + row * x_b, channels, given)
    a = tl.load(A + channels[:, None] * A_d + n * A_n, mask=entries, other=0.0)
    b = tl.load(B + row * B_b + group * B_g + n * B_n, mask=entries, other=0.0).to(tl.float32)
    c = tl.load(C + row * C_b + group * C_g + n * C_n, mask=entries, other=0.0).to(tl.float32)
    h = exp(step[:, None] * a) * h + (step * x_here)[:, None] * b
    tl.store(final_state + place, h, mask=entries)
    y = tl.sum(c * h, axis=1) + _vector(D, channels, given) * x_here
    if z is not None:
        y *= silu(_vector(z + row * z_b, channels, given))
    tl.store(out + row * d_inner + channels, y, mask=given)


# --- backward's kernels --------------------------------------------------------------------------------------------


@triton.jit
def _through_gate(d_out, z, TOKENS: tl.constexpr):
    """The gradients of y; `z` None: there is no gate."""
    d_ys = ()
    for j in tl.static_range(TOKENS):
        d_ys += (d_out[j] if z is None else d_out[j] * silu(z[j]),)
    return d_ys


@triton.jit(do_not_specialize=["seqlen", "chunk", "chunks", "d_state", "blocks", "ngroups", "pairs"])
def _carry_kernel(
    dt, A, C, z, dt_bias, seq_idx, d_out, carry, totals,
    seqlen, chunk, chunks, d_state, per_group, ngroups, blocks, pairs,
    x_b, x_l, dt_b, dt_l, z_b, z_l, seq_idx_b, seq_idx_l, d_out_b, d_out_l,
    SOFTPLUS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the gradient of the state before it, in `carry` (b, c, n, d), and the sum of its steps in
    `totals`, inf if the state restarts in it."""
    PACKED: tl.constexpr = seq_idx is not None
    d_inner = per_group * ngroups
    row, chunk_index, group, _, channels, given = _place(tl.program_id(0), chunks, per_group, ngroups, blocks, BLOCK)
    start = chunk_index * chunk
    end = tl.minimum(start + chunk, seqlen)
    dt += row * dt_b + channels
    C += (row * ngroups + group) * d_state * pairs
    d_out += row * d_out_b + channels
    carry += (row * chunks + chunk_index) * d_state * d_inner + channels
    bias = _vector(dt_bias, channels, given)
    if z is not None:
        z += row * z_b + channels
    if PACKED:
        seq_idx += row * seq_idx_b
    for n in range(d_state):
        tl.store(carry + n * d_inner, tl.zeros((BLOCK,), tl.float32), mask=given)
    total = tl.zeros((BLOCK,), tl.float32)

    tiles = tl.cdiv(end - start, TOKENS)
    for i in range(tiles):
        first = start + (tiles - 1 - i) * TOKENS
        count = end - first
        token = tl.cast(first, tl.int64)
        steps = _steps(load_tokens(dt + token * dt_l, dt_l, count, given, TOKENS), bias, count, SOFTPLUS, TOKENS)
        restarts = _restarts(seq_idx, token, seq_idx_l, count, TOKENS)
        d_outs = load_tokens(d_out + token * d_out_l, d_out_l, count, given, TOKENS)
        gates = load_tokens(z + token * z_l, z_l, count, given, TOKENS) if z is not None else None
        d_ys = _through_gate(d_outs, gates, TOKENS)
        for j in tl.static_range(TOKENS):
            total += steps[j]
            if PACKED:
                total = tl.where(restarts[j], float("inf"), total)
        tl.debug_barrier()
        for n in range(d_state):
            a = tl.load(A + n * d_inner + channels, mask=given, other=0.0) * LOG2_E
            e = tl.load(carry + n * d_inner, mask=given, other=0.0)
            cs = _numbers(C + n * pairs + token // 2, TOKENS)
            for j in tl.static_range(TOKENS - 1, -1, -1):
                e = _decay(steps[j], a, restarts, j, PACKED) * (cs[j] * d_ys[j] + e)
            tl.store(carry + n * d_inner, e, mask=given)
    tl.store(totals + (row * chunks + chunk_index) * d_inner + channels, total, mask=given)


@triton.jit
def _turned(last_first, TOKENS: tl.constexpr):
    first_first = ()
    for j in tl.static_range(TOKENS):
        first_first += (last_first[TOKENS - 1 - j],)
    return first_first


@triton.jit
def _state_before_tile(kept, scratch, tile, given):
    """`kept` before a segment's first tile, `scratch` before the others. Both point to a vector of the state's."""
    from_forward = tl.load(kept, mask=given & (tile == 0), other=0.0)
    return from_forward + tl.load(scratch, mask=given & (tile > 0), other=0.0)


@triton.jit(do_not_specialize=["seqlen", "chunk", "chunks", "d_state", "blocks", "ngroups", "pairs"])
def _backward_kernel(
    x, dt, A, B, C, D, z, dt_bias, seq_idx, kept, d_out, d_final, carry, scratch,
    d_x, d_dt, d_z, d_A, d_B, d_C, d_D, d_bias, d_initial,
    seqlen, chunk, chunks, d_state, per_group, ngroups, blocks, pairs,
    x_b, x_l, dt_b, dt_l, z_b, z_l, seq_idx_b, seq_idx_l, d_out_b, d_out_l,
    SOFTPLUS: tl.constexpr, CHAINED: tl.constexpr, SEGMENT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk, its last token first, from the gradient of the state behind it: in `carry` (b, c, n, d) if CHAINED,
    else `d_final`. d_A (b, c, n, d), d_D, d_bias (b, c, d); d_B, d_C (b, block, g, n, pairs)."""
    PACKED: tl.constexpr = seq_idx is not None
    TILES: tl.constexpr = SEGMENT // TOKENS
    d_inner = per_group * ngroups
    program = tl.program_id(0)
    row, chunk_index, group, block, channels, given = _place(program, chunks, per_group, ngroups, blocks, BLOCK)
    start = chunk_index * chunk
    end = tl.minimum(start + chunk, seqlen)
    x += row * x_b + channels
    dt += row * dt_b + channels
    B += (row * ngroups + group) * d_state * pairs
    C += (row * ngroups + group) * d_state * pairs
    kept += row * tl.cdiv(seqlen, SEGMENT) * d_state * d_inner + channels
    d_out += row * d_out_b + channels
    rows_before = row * seqlen * d_inner + channels
    d_x += rows_before
    d_dt += rows_before
    place = (row * chunks + chunk_index) * d_inner
    carry += place * d_state + channels
    d_A += place * d_state + channels
    of_block = ((row * blocks + block) * ngroups + group) * d_state * pairs
    d_B += of_block
    d_C += of_block
    scratch += program.to(tl.int64) * (TILES - 1) * d_state * BLOCK + tl.arange(0, BLOCK)
    bias = _vector(dt_bias, channels, given)
    skip = _vector(D, channels, given)
    if z is not None:
        z += row * z_b + channels
        d_z += rows_before
    if PACKED:
        seq_idx += row * seq_idx_b
    for n in range(d_state):
        tl.store(d_A + n * d_inner, tl.zeros((BLOCK,), tl.float32), mask=given)
        if not CHAINED:
            e = tl.zeros((BLOCK,), tl.float32)
            if d_final is not None:
                e = tl.load(d_final + (row * d_inner + channels) * d_state + n, mask=given, other=0.0)
            tl.store(carry + n * d_inner, e, mask=given)
    sum_D = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)

    segments = tl.cdiv(end - start, SEGMENT)
    for i in range(segments):
        begin = start + (segments - 1 - i) * SEGMENT
        kept_here = kept + tl.cast(begin // SEGMENT, tl.int64) * d_state * d_inner
        for tile in range(TILES - 1):  # the states before the tiles behind the first
            first = begin + tile * TOKENS
            count = end - first
            token = tl.cast(first, tl.int64)
            steps = _steps(load_tokens(dt + token * dt_l, dt_l, count, given, TOKENS), bias, count, SOFTPLUS, TOKENS)
            inputs = _products(steps, load_tokens(x + token * x_l, x_l, count, given, TOKENS), TOKENS)
            restarts = _restarts(seq_idx, token, seq_idx_l, count, TOKENS)
            tl.debug_barrier()
            for n in range(d_state):
                a = tl.load(A + n * d_inner + channels, mask=given, other=0.0) * LOG2_E
                here = scratch + (tile * d_state + n) * BLOCK
                h = _state_before_tile(kept_here + n * d_inner, here - d_state * BLOCK, tile, given)
                bs = _numbers(B + n * pairs + token // 2, TOKENS)
                for j in tl.static_range(TOKENS):
                    h = _decay(steps[j], a, restarts, j, PACKED) * h + inputs[j] * bs[j]
                tl.store(here, h, mask=given)

        for tiles_behind in range(TILES):
            tile = TILES - 1 - tiles_behind
            first = begin + tile * TOKENS
            count = end - first
            token = tl.cast(first, tl.int64)
            steps = _steps(load_tokens(dt + token * dt_l, dt_l, count, given, TOKENS), bias, count, SOFTPLUS, TOKENS)
            inputs = _products(steps, load_tokens(x + token * x_l, x_l, count, given, TOKENS), TOKENS)
            restarts = _restarts(seq_idx, token, seq_idx_l, count, TOKENS)
            d_outs = load_tokens(d_out + token * d_out_l, d_out_l, count, given, TOKENS)
            gates = load_tokens(z + token * z_l, z_l, count, given, TOKENS) if z is not None else None
            d_ys = _through_gate(d_outs, gates, TOKENS)
            ys = _nothing(bias, TOKENS)
            d_inputs = _nothing(bias, TOKENS)
            d_steps = _nothing(bias, TOKENS)
            tl.debug_barrier()
            for n in range(d_state):
                a = tl.load(A + n * d_inner + channels, mask=given, other=0.0) * LOG2_E
                at = scratch + ((tile - 1) * d_state + n) * BLOCK
                h = _state_before_tile(kept_here + n * d_inner, at, tile, given)
                states = (h,)
                decays = ()
                sums = ()
                bs = _numbers(B + n * pairs + token // 2, TOKENS)
                cs = _numbers(C + n * pairs + token // 2, TOKENS)
                for j in tl.static_range(TOKENS):
                    decays += (_decay(steps[j], a, restarts, j, PACKED),)
                    h = decays[j] * h + inputs[j] * bs[j]
                    states += (h,)
                    sums += (ys[j] + cs[j] * h,) if z is not None else (ys[j],)
                ys = sums
                e = tl.load(carry + n * d_inner, mask=given, other=0.0)
                d_a = tl.load(d_A + n * d_inner, mask=given, other=0.0)
                input_sums = ()
                step_sums = ()
                d_bs = ()
                d_cs = ()
                for j in tl.static_range(TOKENS - 1, -1, -1):
                    d_h = cs[j] * d_ys[j] + e
                    d_bs += (tl.sum(d_h * inputs[j], axis=0),)
                    d_cs += (tl.sum(states[j + 1] * d_ys[j], axis=0),)
                    input_sums += (d_inputs[j] + bs[j] * d_h,)
                    d_exponent = d_h * (decays[j] * states[j])  # of steps[j] A
                    step_sums += (d_steps[j] + d_exponent * a,)
                    d_a += d_exponent * steps[j]
                    e = decays[j] * d_h
                d_inputs = _turned(input_sums, TOKENS)
                d_steps = _turned(step_sums, TOKENS)
                tl.store(carry + n * d_inner, e, mask=given)
                tl.store(d_A + n * d_inner, d_a, mask=given)
                _store_numbers(d_B + n * pairs + token // 2, _turned(d_bs, TOKENS), TOKENS)
                _store_numbers(d_C + n * pairs + token // 2, _turned(d_cs, TOKENS), TOKENS)
            for j in tl.static_range(TOKENS):
                here = given & (j < count)
                there = (token + j) * d_inner
                x_here = tl.load(x + (token + j) * x_l, mask=here, other=0.0).to(tl.float32)
                d_step = d_steps[j] * LN_2 + d_inputs[j] * x_here  # a is A / ln 2
                if SOFTPLUS:
                    raw = tl.load(dt + (token + j) * dt_l, mask=here, other=0.0).to(tl.float32)
                    d_step *= sigmoid(raw + bias)
                d_step = tl.where(here, d_step, 0.0)
                tl.store(d_dt + there, d_step, mask=here)
                tl.store(d_x + there, d_inputs[j] * steps[j] + skip * d_ys[j], mask=here)
                sum_bias += d_step
                sum_D += d_ys[j] * x_here
                if z is not None:
                    gate = tl.load(z + (token + j) * z_l, mask=here, other=0.0).to(tl.float32)
                    d_gated = tl.load(d_out + (token + j) * d_out_l, mask=here, other=0.0).to(tl.float32)
                    tl.store(d_z + there, d_gated * (ys[j] + skip * x_here) * silu_slope(gate), mask=here)

    tl.store(d_D + place + channels, sum_D, mask=given)
    tl.store(d_bias + place + channels, sum_bias, mask=given)
    if d_initial is not None:
        tl.debug_barrier()
        is_first = given & (chunk_index == 0)
        for n in range(d_state):
            e = tl.load(carry + n * d_inner, mask=is_first, other=0.0)
            tl.store(d_initial + (row * d_inner + channels) * d_state + n, e, mask=is_first)
