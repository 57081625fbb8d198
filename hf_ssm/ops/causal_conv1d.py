"""Short depthwise convolutions: causal, with its one-token update, and centred.

The causal one stands in front of the scan of Mamba (arXiv:2312.00752, section 3.4) and Mamba-2 (arXiv:2405.21060,
section 7), the centred one in front of Hydra's (arXiv:2407.09941, section 3.3).

b batch   l seqlen   d channels   w width   s state_len >= w - 1
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu, triton
from .backends import Backend, Call, choose, register
from .discretize import compute_dtype
from .rows import (
    check_row_tensor,
    check_shape,
    padding_last,
    put_tokens_back,
    real_tokens_first,
    sequence_starts,
    shifted,
    take_tokens,
)

_ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """out[t] = activation(bias + sum_k weight[:, k] x[t - (width - 1) + k]), each channel by itself.

    Inputs before the first token are those of `initial_state`, zeros without one.

    Args:
        x: (batch, seqlen, channels), any floating dtype; seqlen may be 0.
        weight: (channels, width); the last tap multiplies the current token.
        bias: (channels,).
        activation: None, "silu" or its other name "swish".
        initial_state: (batch, state_len, channels), state_len >= width - 1: the inputs before x, oldest first.
        seq_idx: (batch, seqlen) integers; where the index changes a new sequence begins and no tap reaches across.
            The initial state belongs to the first sequence of a row.
        mask: (batch, seqlen) bool, False for padding. A padded token is skipped: it gives 0, and its neighbours see
            past it, so a row equals the same row without its padding, wherever that is.
        backend: name of a backend; None takes the fastest that can run the call.

    Returns:
        out (batch, seqlen, channels) in x's dtype, and the final state, the last state_len (width - 1 without an
        initial state) inputs of each row's last sequence, oldest first, zeros in front if there were fewer.

    Raises:
        ValueError for shapes that disagree; UnsupportedByBackend, BackendUnavailable for a backend asked for by name.
    """
    if cpu.is_step(x, initial_state, seq_idx, mask, backend) and activation in _ACTIVATIONS:
        results = cpu.step("conv1d", x, weight, bias, initial_state, activation is not None)
        if results is not None:
            return results
    _check("causal_conv1d", x, weight, bias, activation, initial_state, seq_idx, mask)
    batch, seqlen, channels = x.shape
    width = weight.shape[1]
    if initial_state is None:
        state = x.new_zeros(batch, width - 1, channels)
    else:
        state = initial_state if initial_state.dtype == x.dtype else initial_state.to(x.dtype)
    if seqlen == 0:
        return torch.zeros_like(x), state

    order = None
    lengths = None
    if mask is not None:  # run the rows without their padding, then put every token back into its place
        order = real_tokens_first(mask)
        lengths = mask.sum(dim=1)
        x = take_tokens(x, order)
        if seq_idx is not None:
            seq_idx = seq_idx.gather(1, order)

    traits = (
        ("width", width),
        ("channels", channels),
        ("initial_state", initial_state is not None),
        ("packed", seq_idx is not None),
        ("one_token", 1 if x.shape[1] == 1 else 0),
    )
    run = choose(Call("causal_conv1d", x.device.type, x.dtype, traits), backend)
    before = None if initial_state is None else state
    if before is not None and before.shape[1] != width - 1:
        before = before[:, before.shape[1] - (width - 1) :]
    out = run(x, weight, bias, activation is not None, before, seq_idx)
    final_state = _final_state(x, state, seq_idx, lengths)

    if order is not None and mask is not None:
        out = put_tokens_back(out, order).masked_fill(~mask[..., None], 0)
    return out, final_state


def causal_conv1d_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """One token of `causal_conv1d`: x (batch, channels), state (batch, state_len >= width - 1, channels).

    Returns out (batch, channels) in x's dtype and the new state, the old one shifted by one token.
    """
    out, state = causal_conv1d(x.unsqueeze(1), weight, bias, activation=activation, initial_state=state)
    return out.squeeze(1), state


def centred_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """out[t] = activation(bias + sum_k weight[:, k] x[t - width // 2 + k]), each channel by itself; inputs before the
    first and behind the last token are zeros.

    Args: as those of `causal_conv1d`; weight (channels, width) with an odd width. There is no state: a token sees as
    far ahead as back.

    Returns:
        out (batch, seqlen, channels) in x's dtype.

    Raises:
        ValueError for shapes that disagree; UnsupportedByBackend, BackendUnavailable for a backend asked for by name.
    """
    _check("centred_conv1d", x, weight, bias, activation, None, seq_idx, mask)
    if weight.shape[1] % 2 == 0:
        raise ValueError(
            f"centred_conv1d: width={weight.shape[1]} (weight), expected an odd number: a token is in the middle"
        )
    if x.shape[1] == 0:
        return torch.zeros_like(x)
    order = None
    if mask is not None:
        order, seq_idx = padding_last(mask, seq_idx)
        x = take_tokens(x, order)
    traits = (("width", weight.shape[1]), ("channels", x.shape[2]), ("packed", seq_idx is not None))
    run = choose(Call("centred_conv1d", x.device.type, x.dtype, traits), backend)
    out = run(x, weight, bias, activation is not None, seq_idx)
    if order is not None and mask is not None:
        out = put_tokens_back(out, order).masked_fill(~mask[..., None], 0)
    return out


def causal_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, initial_state: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    """The definition, one token per step: every tap looks up its own input. Every backend answers to it."""
    return _reference(x, weight, bias, silu, initial_state, seq_idx, ahead=0)


def centred_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, seq_idx: Tensor | None
) -> Tensor:
    """The definition, one token per step. Every backend answers to it."""
    return _reference(x, weight, bias, silu, None, seq_idx, ahead=weight.shape[1] // 2)


def _reference(x, weight, bias, silu, initial_state, seq_idx, ahead: int) -> Tensor:
    """A token sees `ahead` tokens behind it and width - 1 - ahead before it."""
    batch, seqlen, channels = x.shape
    width = weight.shape[1]
    back = width - 1 - ahead
    dtype = compute_dtype(x)
    before = x.new_zeros(batch, back, channels) if initial_state is None else initial_state
    inputs = torch.cat([before, x, x.new_zeros(batch, ahead, channels)], dim=1).to(dtype)
    if seq_idx is None:
        seq_idx = torch.zeros(batch, seqlen, dtype=torch.int64, device=x.device)
    run = sequence_starts(seq_idx).cumsum(dim=1)
    # the initial state belongs to the first sequence
    run = torch.cat([run.new_zeros(batch, back), run, run[:, -1:].expand(-1, ahead)], dim=1)
    outs = []
    for t in range(seqlen):
        total = inputs.new_zeros(batch, channels) if bias is None else bias.to(dtype).expand(batch, channels)
        for k in range(width):
            same_sequence = (run[:, t + k] == run[:, t + back])[:, None]
            total = total + weight[:, k].to(dtype) * inputs[:, t + k] * same_sequence
        outs.append(F.silu(total) if silu else total)
    return torch.stack(outs, dim=1).to(x.dtype)


# --- the `torch` backend -------------------------------------------------------------------------------------------


def causal_conv1d_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, initial_state: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    if x.shape[1] == 1:  # one token is one weighted sum, and differentiable as it is
        dtype = compute_dtype(x)
        width = weight.shape[1]
        out = (_inputs(x, initial_state, width, 0, dtype) * weight.to(dtype).t()).sum(dim=1, keepdim=True)
        out = out if bias is None else out + bias.to(dtype)
        return (F.silu(out) if silu else out).to(x.dtype)
    return _conv1d(x, weight, bias, initial_state, seq_idx, silu, 0)


def centred_conv1d_torch(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, seq_idx: Tensor | None) -> Tensor:
    return _conv1d(x, weight, bias, None, seq_idx, silu, weight.shape[1] // 2)


@torch.library.custom_op("hf_ssm::conv1d", mutates_args=())
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
    with torch.autocast(x.device.type, enabled=False):
        out = _weighted_taps(x, weight, bias, initial_state, seq_idx, ahead)
        return (F.silu(out, inplace=True) if silu else out).to(x.dtype, copy=False).contiguous()


@_conv1d.register_fake
def _(x, weight, bias, initial_state, seq_idx, silu, ahead):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_ssm::conv1d_backward", mutates_args=())
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
    """Gradients of x, weight, bias (float accumulators; empty without bias) and initial_state (empty without)."""
    with torch.autocast(x.device.type, enabled=False):
        batch, seqlen, channels = x.shape
        width = weight.shape[1]
        dtype = compute_dtype(x)
        grad = d_out.to(dtype)
        if silu:
            before = _weighted_taps(x, weight, bias, initial_state, seq_idx, ahead)
            gate = torch.sigmoid(before)
            grad = grad * (gate * (1 + before * (1 - gate)))
        d_inputs = grad.new_zeros(batch, seqlen + width - 1, channels)
        d_weight = grad.new_empty(channels, width)
        back = width - 1 - ahead
        inputs = _inputs(x, initial_state, width, ahead, dtype)
        for k in range(width):
            seen = _tap_reaches(seq_idx, back - k)
            reached = grad if seen is None else grad * seen
            d_inputs[:, k : k + seqlen].addcmul_(reached, weight[:, k].to(dtype))
            d_weight[:, k] = (reached * inputs[:, k : k + seqlen]).sum(dim=(0, 1))
        d_bias = grad.sum(dim=(0, 1)) if bias is not None else grad.new_empty(0)
        d_state = d_inputs[:, :back].to(initial_state.dtype) if initial_state is not None else grad.new_empty(0)
        return (
            d_inputs[:, back : back + seqlen].to(x.dtype).contiguous(),
            d_weight.to(weight.dtype),
            d_bias.to(bias.dtype) if bias is not None else d_bias,
            d_state.clone(memory_format=torch.contiguous_format),
        )


@_conv1d_backward.register_fake
def _(d_out, x, weight, bias, initial_state, seq_idx, silu, ahead):
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weight, memory_format=torch.contiguous_format),
        torch.empty_like(bias) if bias is not None else x.new_empty(0, dtype=compute_dtype(x)),
        torch.empty_like(initial_state, memory_format=torch.contiguous_format)
        if initial_state is not None
        else x.new_empty(0, dtype=compute_dtype(x)),
    )


def _setup_context(ctx, inputs, output):
    x, weight, bias, initial_state, seq_idx, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias, initial_state, seq_idx)


def _backward(ctx, d_out):
    x, weight, bias, initial_state, seq_idx = ctx.saved_tensors
    d_x, d_weight, d_bias, d_state = _conv1d_backward(d_out, x, weight, bias, initial_state, seq_idx, *ctx.options)
    return (
        d_x,
        d_weight,
        None if bias is None else d_bias,
        None if initial_state is None else d_state,
        None,
        None,
        None,
    )


_conv1d.register_autograd(_backward, setup_context=_setup_context)


def _weighted_taps(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, seq_idx: Tensor | None, ahead: int
) -> Tensor:
    """bias + the sum over taps, (b, l, d) in the compute dtype: one pass over the tokens per tap, no transposes."""
    width = weight.shape[1]
    dtype = compute_dtype(x)
    seqlen = x.shape[1]
    inputs = _inputs(x, initial_state, width, ahead, dtype)
    taps = weight.to(dtype).t().contiguous()  # w d
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    if bias is not None:
        out += bias
    for k in range(width):
        tap = inputs[:, k : k + seqlen]
        seen = _tap_reaches(seq_idx, width - 1 - ahead - k)
        out.addcmul_(tap if seen is None else tap * seen, taps[k])
    return out


def _inputs(x: Tensor, initial_state: Tensor | None, width: int, ahead: int, dtype: torch.dtype) -> Tensor:
    if initial_state is None:
        return F.pad(x.to(dtype), (0, 0, width - 1 - ahead, ahead))
    return torch.cat([initial_state.to(dtype), x.to(dtype)], dim=1)


def _tap_reaches(seq_idx: Tensor | None, distance: int) -> Tensor | None:
    """(b, l, 1) bool: the token `distance` before (behind, if negative) is of the same sequence. None if it always
    is; beyond the row's ends, where all inputs are zeros or the state's, it does not matter."""
    if seq_idx is None or distance == 0:
        return None
    run = sequence_starts(seq_idx).cumsum(dim=1)
    return (shifted(run, distance) == run)[..., None]


# --- rows ----------------------------------------------------------------------------------------------------------


def _final_state(x: Tensor, state: Tensor, seq_idx: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The last state_len inputs of each row's last sequence; `lengths` (b,) counts the real tokens, in front."""
    seqlen, state_len = x.shape[1], state.shape[1]
    if lengths is None and seq_idx is None:
        return torch.cat([state[:, seqlen:], x], dim=1) if seqlen < state_len else x[:, seqlen - state_len :].clone()
    inputs = torch.cat([state, x], dim=1)
    if lengths is None:
        lengths = torch.full((x.shape[0],), seqlen, device=x.device)
    positions = lengths[:, None] + torch.arange(state_len, device=x.device)  # b s
    final = take_tokens(inputs, positions)
    if seq_idx is not None and state_len:  # inputs of earlier sequences are none of the last one's business
        run = F.pad(sequence_starts(seq_idx).cumsum(dim=1), (state_len, 0))
        final = final * (run.gather(1, positions) == run.gather(1, positions[:, -1:]))[..., None]
    return final


def _check(name, x, weight, bias, activation, initial_state, seq_idx, mask) -> None:
    if x.ndim != 3:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (batch, seqlen, channels)")
    if weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}, expected (channels, width) with channels={x.shape[2]}"
        )
    if bias is not None:
        check_shape(name, "bias", bias, (x.shape[2],), "(channels,)")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{name}: activation={activation!r}, expected None, 'silu' or 'swish'")
    if initial_state is not None and (
        initial_state.ndim != 3
        or initial_state.shape[0] != x.shape[0]
        or initial_state.shape[1] < weight.shape[1] - 1
        or initial_state.shape[2] != x.shape[2]
    ):
        raise ValueError(
            f"{name}: initial_state has shape {tuple(initial_state.shape)}, expected (batch, state_len, channels) = "
            f"({x.shape[0]}, >= {weight.shape[1] - 1}, {x.shape[2]})"
        )
    if seq_idx is not None:
        check_row_tensor(name, "seq_idx", seq_idx, x)
    if mask is not None:
        check_row_tensor(name, "mask", mask, x)


# --- the table -----------------------------------------------------------------------------------------------------

register(
    "causal_conv1d",
    Backend(
        "causal_conv1d",
        "hf_ssm.ops.delegates:causal_conv1d",
        needs="causal_conv1d",
        devices=("cuda",),
        lacks=lambda call: (
            f"width={call['width']}, the kernel has 2 to 4"
            if call["width"] not in (2, 3, 4)
            else f"channels={call['channels']}, the kernel has multiples of 8"
            if call["channels"] % 8
            else f"{call.dtype}, the kernel has float32, float16 and bfloat16"
            if call.dtype not in (torch.float32, torch.float16, torch.bfloat16)
            else "seq_idx together with an initial state"
            if call["packed"] and call["initial_state"]
            else None
        ),
    ),
    triton.backend("causal_conv1d:causal_conv1d"),
    cpu.backend("causal_conv1d:causal_conv1d_cpu"),
    Backend("torch", "hf_ssm.ops.causal_conv1d:causal_conv1d_torch"),
    Backend("reference", "hf_ssm.ops.causal_conv1d:causal_conv1d_reference", automatic=False),
)

register(
    "centred_conv1d",
    triton.backend("causal_conv1d:centred_conv1d"),
    cpu.backend("causal_conv1d:centred_conv1d_cpu"),
    Backend("torch", "hf_ssm.ops.causal_conv1d:centred_conv1d_torch"),
    Backend("reference", "hf_ssm.ops.causal_conv1d:centred_conv1d_reference", automatic=False),
)
