"""The `triton` backend of `hf_ssm.ops.causal_conv1d` and `centred_conv1d`: one kernel computes both.

A program, one warp, has a block of channels of a row's neighbouring tokens in registers, a vector for each: every tap
is there when it is needed, and a token is read once, but for those that the next program sees, too. Backward reads the
tokens around its own as well, recomputes what stood before the activation, and sums the weight's gradient over the
tokens that a program goes through, and then over the programs, always in the same order.

b batch   l seqlen   d channels   w width
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import at_once, single
from .common import begins_sequence, channels_last, on_device_of, silu, silu_slope, strides

FORWARD_BYTES, FEW_BYTES = 16, 8  # that a thread takes of a token; few where the width fills the registers
NARROW = 4  # widths that do not
FORWARD_TOKENS, FEW_TOKENS = 16, 4  # that a program takes; few where there would not be enough programs
ENOUGH_PROGRAMS = 1024

BACKWARD_TOKENS = 8  # that a program takes at a time
BACKWARD_PROGRAMS = 2048  # about as many: each leaves a sum for every tap and channel of its block


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, initial_state: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    return _convolve(x, weight, bias, initial_state, seq_idx, silu, 0)


def centred_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, seq_idx: Tensor | None) -> Tensor:
    return _convolve(x, weight, bias, None, seq_idx, silu, weight.shape[1] // 2)


def _convolve(x, weight, bias, initial_state, seq_idx, silu, ahead):
    inputs = (x, single(weight), single(bias), initial_state, seq_idx, silu, ahead)
    return (forward if at_once(x, weight, bias, initial_state) else _conv1d)(*inputs)


@torch.library.custom_op("hf_ssm::conv1d_triton", mutates_args=())
def _conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
    ahead: int,
) -> Tensor:
    """A token sees `ahead` tokens behind it and width - 1 - ahead before it; a state only with 0 ahead."""
    return forward(x, weight, bias, initial_state, seq_idx, silu, ahead)


@_conv1d.register_fake
def _(x, weight, bias, initial_state, seq_idx, silu, ahead):
    return x.new_empty(x.shape)


@torch.library.custom_op("hf_ssm::conv1d_triton_backward", mutates_args=())
def _conv1d_backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
    ahead: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias, initial_state; empty where the input was None."""
    return backward(d_out, x, weight, bias, initial_state, seq_idx, silu, ahead)


@_conv1d_backward.register_fake
def _(d_out, x, weight, bias, initial_state, seq_idx, silu, ahead):
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, weight, bias, initial_state))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.silu, ctx.ahead = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_out):
    *tensors, seq_idx = ctx.saved_tensors
    grads = _conv1d_backward(d_out, *tensors, seq_idx, ctx.silu, ctx.ahead)
    return *(None if t is None else grad for t, grad in zip(tensors, grads, strict=True)), None, None, None


_conv1d.register_autograd(_backward, setup_context=_setup_context)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
    ahead: int,
) -> Tensor:
    out = x.new_empty(x.shape)
    x, initial_state = channels_last(x), channels_last(initial_state)
    batch, seqlen, channels = x.shape
    block = _block(x, (FORWARD_BYTES if weight.shape[1] <= NARROW else FEW_BYTES) // x.element_size())
    rows = batch * triton.cdiv(channels, block)
    tokens = FORWARD_TOKENS if rows * triton.cdiv(seqlen, FORWARD_TOKENS) >= ENOUGH_PROGRAMS else FEW_TOKENS
    tokens = min(tokens, triton.next_power_of_2(seqlen))
    in_memory = (*strides(x, initial_state, seq_idx), *weight.stride())
    with on_device_of(x):
        _forward_kernel[(rows * triton.cdiv(seqlen, tokens),)](
            x, weight, bias, initial_state, seq_idx, out, seqlen, channels, *in_memory,
            SILU=silu, WIDTH=weight.shape[1], AHEAD=ahead, TOKENS=tokens, BLOCK=block, num_warps=1,
        )  # fmt: skip
    return out


def backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
    ahead: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_x = x.new_empty(x.shape)
    d_state = None if initial_state is None else initial_state.new_empty(initial_state.shape)
    x, initial_state, d_out = (channels_last(t) for t in (x, initial_state, d_out))
    batch, seqlen, channels = x.shape
    width = weight.shape[1]
    of_a_thread = 4 if width <= NARROW else 2 if width <= 2 * NARROW else 1
    block = _block(x, of_a_thread if seq_idx is None else max(1, of_a_thread // 2))
    blocks = triton.cdiv(channels, block)
    tiles = triton.cdiv(seqlen + (0 if initial_state is None else width - 1), BACKWARD_TOKENS)
    parts = max(1, min(triton.cdiv(BACKWARD_PROGRAMS, max(1, batch * blocks)), tiles))  # of a row
    tiles = triton.cdiv(tiles, parts)  # of a part
    sums = torch.empty(batch * parts, width + 1, channels, dtype=torch.float32, device=x.device)
    in_memory = (*strides(x, initial_state, seq_idx, d_out), *weight.stride())
    with on_device_of(x):
        _backward_kernel[(batch * parts * blocks,)](
            x, weight, bias, initial_state, seq_idx, d_out, d_x, d_state, sums,
            seqlen, channels, parts, tiles, *in_memory,
            SILU=silu, WIDTH=width, AHEAD=ahead, TOKENS=BACKWARD_TOKENS, BLOCK=block, num_warps=1,
        )  # fmt: skip
    total = sums.sum(dim=0)
    return (
        d_x,
        total[:width].t().to(weight.dtype, memory_format=torch.contiguous_format, copy=True),
        x.new_empty(0) if bias is None else total[width].to(bias.dtype, copy=True),
        x.new_empty(0) if d_state is None else d_state,
    )


def _block(x: Tensor, of_a_thread: int) -> int:
    return min(32 * of_a_thread, triton.next_power_of_2(x.shape[2]))


# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _load_inputs(
    x, initial_state, x_l, initial_state_l, first, seqlen, given, BACK: tl.constexpr, COUNT: tl.constexpr
):
    """COUNT tokens from `first` on, a tuple of vectors in float32; the state's BACK before token 0, zeros beyond."""
    rows = ()
    for i in tl.static_range(COUNT):
        s = first + i
        row = tl.load(x + s * x_l, mask=given & (s >= 0) & (s < seqlen), other=0.0).to(tl.float32)
        if initial_state is not None:
            before = given & (s < 0) & (s >= -BACK)
            row += tl.load(initial_state + (s + BACK) * initial_state_l, mask=before, other=0.0).to(tl.float32)
        rows += (row,)
    return rows


@triton.jit
def _load_sequences(seq_idx, seq_idx_l, first, seqlen, COUNT: tl.constexpr):
    """In which sequence, counted from the first of them, each of COUNT tokens is; a tuple."""
    sequences = ()
    if seq_idx is not None:
        sequence = 0
        for i in tl.static_range(COUNT):
            s = first + i
            sequence += begins_sequence(seq_idx, s, seq_idx_l, (s >= 0) & (s < seqlen)).to(tl.int32)
            sequences += (sequence,)
    return sequences


@triton.jit
def _load_taps(weight, weight_d, weight_w, channels, given, WIDTH: tl.constexpr):
    taps = ()
    for k in tl.static_range(WIDTH):
        here = weight + channels * weight_d + k * weight_w
        taps += (tl.load(here, mask=given, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _seen(vector, sequences, at: tl.constexpr, by: tl.constexpr, PACKED: tl.constexpr):
    """The vector of token `at`, or zeros where token `by` does not see it."""
    if PACKED:
        vector = tl.where(sequences[at] == sequences[by], vector, 0.0)
    return vector


@triton.jit
def _weighted_sum(
    taps, rows, sequences, bias, oldest: tl.constexpr, by: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr
):
    """What token `by` of `rows` makes of itself and its neighbours, of which `oldest` is the first."""
    total = bias
    for k in tl.static_range(WIDTH):
        total += taps[k] * _seen(rows[oldest + k], sequences, oldest + k, by, PACKED)
    return total


@triton.jit(do_not_specialize=["seqlen"])
def _forward_kernel(
    x, weight, bias, initial_state, seq_idx, out, seqlen, channels,
    x_b, x_l, initial_state_b, initial_state_l, seq_idx_b, seq_idx_l, weight_d, weight_w,
    SILU: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = seq_idx is not None
    BACK: tl.constexpr = WIDTH - 1 - AHEAD
    blocks, tiles = tl.cdiv(channels, BLOCK), tl.cdiv(seqlen, TOKENS)
    program = tl.program_id(0)
    row = (program // (blocks * tiles)).to(tl.int64)
    first = (program // blocks % tiles * TOKENS).to(tl.int64)
    d = program % blocks * BLOCK + tl.arange(0, BLOCK)
    given = d < channels
    x += row * x_b + d
    if initial_state is not None:
        initial_state += row * initial_state_b + d
    if PACKED:
        seq_idx += row * seq_idx_b
    out += row * seqlen * channels + d
    taps = _load_taps(weight, weight_d, weight_w, d, given, WIDTH)
    start = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        start += tl.load(bias + d, mask=given, other=0.0)
    COUNT: tl.constexpr = TOKENS + WIDTH - 1
    rows = _load_inputs(x, initial_state, x_l, initial_state_l, first - BACK, seqlen, given, BACK, COUNT)
    sequences = _load_sequences(seq_idx, seq_idx_l, first - BACK, seqlen, COUNT)
    for j in tl.static_range(TOKENS):
        total = _weighted_sum(taps, rows, sequences, start, j, j + BACK, WIDTH, PACKED)
        if SILU:
            total = silu(total)
        tl.store(out + (first + j) * channels, total, mask=given & (first + j < seqlen))


@triton.jit(do_not_specialize=["seqlen", "parts", "tiles"])
def _backward_kernel(
    x, weight, bias, initial_state, seq_idx, d_out, d_x, d_state, sums, seqlen, channels, parts, tiles,
    x_b, x_l, initial_state_b, initial_state_l, seq_idx_b, seq_idx_l, d_out_b, d_out_l, weight_d, weight_w,
    SILU: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles of a row's tokens, those of the initial state among them; what they add to the gradients of the taps and
    the bias in `sums` (parts of all rows, w + 1, d)."""
    PACKED: tl.constexpr = seq_idx is not None
    BACK: tl.constexpr = WIDTH - 1 - AHEAD
    blocks = tl.cdiv(channels, BLOCK)
    program = tl.program_id(0)
    row = (program // (blocks * parts)).to(tl.int64)
    d = program % blocks * BLOCK + tl.arange(0, BLOCK)
    given = d < channels
    x += row * x_b + d
    d_out += row * d_out_b + d
    d_x += row * seqlen * channels + d
    FIRST: tl.constexpr = 0 if initial_state is None else -BACK
    if initial_state is not None:
        initial_state += row * initial_state_b + d
        d_state += row * BACK * channels + d
    if PACKED:
        seq_idx += row * seq_idx_b
    sums += (program // blocks).to(tl.int64) * (WIDTH + 1) * channels + d
    taps = _load_taps(weight, weight_d, weight_w, d, given, WIDTH)
    start = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        start += tl.load(bias + d, mask=given, other=0.0)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    d_taps = ()
    for _ in tl.static_range(WIDTH):
        d_taps += (tl.zeros((BLOCK,), tl.float32),)

    begin = program // blocks % parts * tiles * TOKENS + FIRST
    for tile in range(tiles):
        first = begin + tl.cast(tile, tl.int64) * TOKENS
        # of the tile's tokens the first is number WIDTH - 1 of `rows` and number AHEAD of `grads`
        COUNT: tl.constexpr = TOKENS + 2 * (WIDTH - 1)
        rows = _load_inputs(x, initial_state, x_l, initial_state_l, first - (WIDTH - 1), seqlen, given, BACK, COUNT)
        sequences = _load_sequences(seq_idx, seq_idx_l, first - (WIDTH - 1), seqlen, COUNT)
        grads = ()
        for i in tl.static_range(TOKENS + WIDTH - 1):
            t = first - AHEAD + i
            grad = tl.load(d_out + t * d_out_l, mask=given & (t >= 0) & (t < seqlen), other=0.0).to(tl.float32)
            if SILU:
                grad *= silu_slope(_weighted_sum(taps, rows, sequences, start, i, i + BACK, WIDTH, PACKED))
            grads += (grad,)
        for j in tl.static_range(TOKENS):
            d_row = tl.zeros((BLOCK,), tl.float32)
            for k in tl.static_range(WIDTH):
                # the token that tap k looks at this one from: number j + WIDTH - 1 - k of `grads`
                grad = grads[j + WIDTH - 1 - k]
                d_row += taps[k] * _seen(grad, sequences, j + WIDTH - 1 - k + BACK, j + WIDTH - 1, PACKED)
            s = first + j
            tl.store(d_x + s * channels, d_row, mask=given & (s >= 0) & (s < seqlen))
            if initial_state is not None:
                tl.store(d_state + (s + BACK) * channels, d_row, mask=given & (s < 0))
            d_bias += grads[j + AHEAD]
        tap_sums = ()
        for k in tl.static_range(WIDTH):
            total = d_taps[k]
            for j in tl.static_range(TOKENS):
                total += grads[j + AHEAD] * _seen(rows[j + AHEAD + k], sequences, j + AHEAD + k, j + WIDTH - 1, PACKED)
            tap_sums += (total,)
        d_taps = tap_sums
    for k in tl.static_range(WIDTH):
        tl.store(sums + k * channels, d_taps[k], mask=given)
    tl.store(sums + WIDTH * channels, d_bias, mask=given)
