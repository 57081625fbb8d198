"""Mamba-2's scan, state space duality, and its one-token update.

Transformers are SSMs (arXiv:2405.21060): the recurrence is equation 1 with a scalar decay per head; the chunked
algorithm of the `torch` backend is that of section 6 (see `chunks`, and there for the letters of the axes).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import cpu, triton
from .backends import Backend, Call, choose, register
from .chunks import Chunks, Direction
from .discretize import NO_LIMIT, compute_dtype, skip_and_gate, skip_and_gate_backward, step_size, step_size_slope
from .matrices import semiseparable
from .rows import check_row_tensor, check_shape, fill_padding, one_of, sequence_starts


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    chunk_size: int = 256,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """state[t] = exp(dt[t] A) state[t-1] + dt[t] x[t] B[t]^T;  out[t] = (state[t] C[t] + D x[t]) silu(z[t]), per head.

    The state and everything that decays it are float32 (float64 for float64 inputs) whatever the input dtype.

    Args:
        x: (batch, seqlen, nheads, headdim), any floating dtype; seqlen may be 0.
        dt: (batch, seqlen, nheads), as projected; `dt_bias`, softplus and `dt_limit` are applied here.
        A: (nheads,), real and negative.
        B, C: (batch, seqlen, ngroups, d_state); head i is in group i // (nheads / ngroups).
        D: (nheads,) or (nheads, headdim), the skip connection.
        z: (batch, seqlen, nheads, headdim), the gate.
        dt_bias: (nheads,), added to dt before softplus.
        dt_softplus: whether dt is softplus(dt + dt_bias) rather than dt + dt_bias.
        dt_limit: (smallest, largest) step size, applied last; its gradient outside is zero. By default no step is
            negative, which matters only without softplus.
        chunk_size: tokens that are computed as one matrix; at most a matter of speed, never of the result.
        initial_state: (batch, nheads, headdim, d_state), the state before the first token; zeros if None.
        seq_idx: (batch, seqlen) integers; the state restarts from zero where the index changes. The initial state
            belongs to the first sequence of a row.
        mask: (batch, seqlen) bool, False for padding: such a token gives 0 and leaves the state as it is.
        backend: name of a backend; None takes the fastest that can run the call.

    Returns:
        out (batch, seqlen, nheads, headdim) in x's dtype, and the state after the last token, (batch, nheads, headdim,
        d_state) float32 (float64 for float64 inputs). Gradients flow through both states.

    Raises:
        ValueError for shapes that disagree; UnsupportedByBackend, BackendUnavailable for a backend asked for by name.
    """
    if cpu.is_step(x, initial_state, seq_idx, mask, backend) and chunk_size > 0:
        results = cpu.step("ssd", x, dt, A, B, C, D, z, dt_bias, dt_softplus, *dt_limit, initial_state)
        if results is not None:
            return results
    dt_limit = (float(dt_limit[0]), float(dt_limit[1]))
    _check(x, dt, A, B, C, D, z, dt_bias, dt_limit, chunk_size, initial_state, seq_idx, mask)
    dtype = compute_dtype(x)
    if initial_state is not None:
        initial_state = initial_state.to(dtype)
    if x.shape[1] == 0:
        return torch.zeros_like(x), _zero_state(x, B) if initial_state is None else initial_state
    if mask is not None:  # a step of size 0 neither decays the state nor adds to it
        dt = step_size(dt, dt_bias, dt_softplus, dt_limit, dtype).masked_fill(~mask[..., None], 0)
        dt_bias, dt_softplus, dt_limit = None, False, NO_LIMIT
        seq_idx = None if seq_idx is None else fill_padding(seq_idx, mask)

    traits = (
        ("initial_state", initial_state is not None),
        ("packed", seq_idx is not None),
        ("headdim", x.shape[3]),
        ("d_state", B.shape[3]),
        ("one_token", 1 if x.shape[1] == 1 else 0),
    )
    run = choose(Call("ssd", x.device.type, x.dtype, traits), backend)
    out, final_state = run(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, chunk_size, initial_state, seq_idx)
    if mask is not None:
        out = out.masked_fill(~mask[..., None, None], 0)
    return out, final_state


def ssd_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """One token of `ssd`: state (batch, nheads, headdim, d_state); x, z (batch, nheads, headdim); dt (batch, nheads);
    B, C (batch, ngroups, d_state). Returns out (batch, nheads, headdim) in x's dtype and the new state; the old one is
    left as it was."""
    token = (x[:, None], dt[:, None], A, B[:, None], C[:, None], D, None if z is None else z[:, None], dt_bias)
    out, state = ssd(*token, dt_softplus=dt_softplus, dt_limit=dt_limit, initial_state=state)
    return out[:, 0], state


def ssd_reference(
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
    """The recurrence itself, one token per step, no chunks. Every backend answers to it."""
    with torch.autocast(x.device.type, enabled=False):
        dtype = compute_dtype(x)
        per_group = x.shape[2] // B.shape[2]
        B, C = (t.to(dtype).repeat_interleave(per_group, dim=2) for t in (B, C))  # b l h n
        dt = step_size(dt, dt_bias, dt_softplus, dt_limit, dtype)
        A, xs = A.to(dtype), x.to(dtype)
        state = xs.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[3]) if initial_state is None else initial_state
        starts = None if seq_idx is None else sequence_starts(seq_idx)
        ys = []
        for t in range(x.shape[1]):
            if starts is not None:
                state = state.masked_fill(starts[:, t, None, None, None], 0)
            decay = torch.exp(dt[:, t] * A)[..., None, None]  # b h 1 1
            state = decay * state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], xs[:, t], B[:, t])
            ys.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
        y = torch.stack(ys, dim=1)
        if D is not None:
            y = y + _per_channel(D).to(dtype) * xs
        if z is not None:
            y = y * torch.nn.functional.silu(z.to(dtype))
        return y.to(x.dtype), state


def ssd_matrix(
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The semiseparable matrix M of `ssd`, per row and head: without initial state and gate, out = M x.

    M[t, s] = C[t]^T B[s] exp(A (dt[s+1] + ... + dt[t])) dt[s] for s <= t, 0 above the diagonal and across sequences,
    and D is added on the diagonal. Source: arXiv:2405.21060, section 3, definition 3.2. Memory grows with seqlen^2.

    Args: as those of `ssd`; D (nheads,).

    Returns (batch, nheads, seqlen, seqlen), float32 (float64 for float64 inputs), differentiable.
    """
    x = dt[..., None]  # one channel per head stands for all
    _check(x, dt, A, B, C, D, None, dt_bias, dt_limit, 1, None, seq_idx, None)
    dtype = compute_dtype(dt)
    steps = step_size(dt, dt_bias, dt_softplus, dt_limit, dtype)
    matrix = semiseparable(steps, A.to(dtype), B.to(dtype), C.to(dtype), seq_idx)
    return matrix if D is None else matrix + torch.diag_embed(D.to(dtype)[:, None].expand(-1, dt.shape[1]))


# --- the `torch` backend -------------------------------------------------------------------------------------------


def ssd_torch(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, chunk_size, initial_state, seq_idx):
    if x.shape[1] == 1:  # the recurrence is its own fastest form, and differentiable as it is
        return ssd_reference(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, chunk_size, initial_state, seq_idx)
    out, final_state, _ = _ssd(
        x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, dt_softplus, *dt_limit, chunk_size
    )
    return out, final_state


@torch.library.custom_op("hf_ssm::ssd", mutates_args=())
def _ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, the state before each segment (b, segments, g, n, r p))."""
    with torch.autocast(x.device.type, enabled=False):
        scan = _Scan(x, A, B, chunk_size)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        state = scan.initial(initial_state)
        before_segment = []
        for tokens in scan.segments():
            before_segment.append(state)
            part = scan.load(tokens, x, dt, B, C, dt_bias, dt_softplus, (dt_min, dt_max), seq_idx)
            entering, state = part.scan.states(state)
            y = scan.outputs(part, entering)
            out[:, tokens] = skip_and_gate(y, x[:, tokens], _per_channel(D), None if z is None else z[:, tokens])
        return out, scan.export(state), torch.stack(before_segment, dim=1)


@_ssd.register_fake
def _(x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, dt_softplus, dt_min, dt_max, chunk_size):
    scan = _Scan(x, A, B, chunk_size)
    dtype = compute_dtype(x)
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(x.shape[0], x.shape[2], x.shape[3], B.shape[3], dtype=dtype),
        x.new_empty(x.shape[0], scan.segment_count, *scan.state_shape, dtype=dtype),
    )


@torch.library.custom_op("hf_ssm::ssd_backward", mutates_args=())
def _ssd_backward(
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
    before_segment: Tensor,
    seq_idx: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C, D, z, dt_bias, initial_state; empty where the input was None."""
    with torch.autocast(x.device.type, enabled=False):
        scan = _Scan(x, A, B, chunk_size)
        dtype, limit = compute_dtype(x), (dt_min, dt_max)
        d_x, d_dt, d_B, d_C = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, dt, B, C))
        d_z = torch.empty(x.shape if z is not None else (0,), dtype=x.dtype if z is None else z.dtype, device=x.device)
        d_A = torch.zeros(A.shape, dtype=dtype, device=x.device)
        d_D = torch.zeros(x.shape[2:] if D is not None else (0,), dtype=dtype, device=x.device)
        d_bias = torch.zeros(A.shape if dt_bias is not None else (0,), dtype=dtype, device=x.device)
        d_state = scan.initial(d_final)
        for i, tokens in reversed(list(enumerate(scan.segments()))):
            part = scan.load(tokens, x, dt, B, C, dt_bias, dt_softplus, limit, seq_idx)
            entering, _ = part.scan.states(before_segment[:, i])
            grad = d_out[:, tokens].to(dtype)
            d_skip = None
            if z is not None or D is not None:
                y = scan.outputs(part, entering) if z is not None else grad
                grad, skip_grad, gate_grad = skip_and_gate_backward(
                    grad, y, x[:, tokens].to(dtype), _per_channel(D), None if z is None else z[:, tokens]
                )
                if D is not None and skip_grad is not None:
                    d_D += skip_grad.sum(dim=(0, 1))
                    d_skip = grad * _per_channel(D).to(dtype)
                if gate_grad is not None:
                    d_z[:, tokens] = gate_grad
            d_xs, d_step, d_log_decay, d_b, d_c, d_state = scan.backward(part, entering, grad, d_state)
            d_x[:, tokens] = d_xs if d_skip is None else d_xs + d_skip
            step = scan.rows(part.scan.dt, part.tokens)
            d_A += (d_log_decay * step).sum(dim=(0, 1))
            d_step = d_step.addcmul(d_log_decay, A.to(dtype))
            slope = step_size_slope(dt[:, tokens], dt_bias, dt_softplus, limit, dtype)
            if slope is not None:
                d_step *= slope
            if dt_bias is not None:
                d_bias += d_step.sum(dim=(0, 1))
            d_dt[:, tokens], d_B[:, tokens], d_C[:, tokens] = d_step, d_b, d_c
        if D is not None and D.ndim == 1:
            d_D = d_D.sum(dim=1)
        d_D = d_D.to((x if D is None else D).dtype)
        d_bias = d_bias.to((x if dt_bias is None else dt_bias).dtype)
        return d_x, d_dt, d_A.to(A.dtype), d_B, d_C, d_D, d_z, d_bias, scan.export(d_state)


@_ssd_backward.register_fake
def _(d_out, d_final, x, dt, A, B, C, D, z, dt_bias, before_segment, seq_idx, dt_softplus, dt_min, dt_max, chunk_size):
    def like(t):
        return x.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)

    d_state = x.new_empty(x.shape[0], x.shape[2], x.shape[3], B.shape[3], dtype=compute_dtype(x))
    return (*(like(t) for t in (x, dt, A, B, C, D, z, dt_bias)), d_state)


def _setup_context(ctx, inputs, output):
    x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, *ctx.options = inputs
    ctx.has_initial_state = initial_state is not None
    ctx.save_for_backward(x, dt, A, B, C, D, z, dt_bias, output[2], seq_idx)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_final, _):
    x, dt, A, B, C, D, z, dt_bias, before_segment, seq_idx = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(x)
    grads = _ssd_backward(d_out, d_final, x, dt, A, B, C, D, z, dt_bias, before_segment, seq_idx, *ctx.options)
    given = (x, dt, A, B, C, D, z, dt_bias, before_segment if ctx.has_initial_state else None)
    return (*(None if t is None else grad for t, grad in zip(given, grads, strict=True)), None, *[None] * 4)


_ssd.register_autograd(_backward, setup_context=_setup_context)


class _Scan(Chunks):
    """The steps of one call's forward and backward."""

    def __init__(self, x: Tensor, A: Tensor, B: Tensor, chunk_size: int):
        super().__init__(x, B, chunk_size)
        self.A = A.to(self.dtype)

    def initial(self, state: Tensor | None) -> Tensor:
        """(b, h, p, n) -> (b, g, n, rp)"""
        if state is None:
            return self.no_state()
        return (
            state.to(self.dtype)
            .reshape(self.batch, self.ngroups, self.state_shape[2], self.d_state)
            .transpose(2, 3)
            .contiguous()
        )

    def export(self, state: Tensor) -> Tensor:
        """(b, g, n, rp) -> (b, h, p, n)"""
        return state.transpose(2, 3).reshape(self.batch, self.nheads, self.headdim, self.d_state).contiguous()

    def load(self, tokens, x, dt, B, C, dt_bias, dt_softplus, dt_limit, seq_idx) -> "_Segment":
        dt = self.cut(step_size(dt[:, tokens], dt_bias, dt_softplus, dt_limit, self.dtype))
        total = torch.cumsum((dt * self.A).to(self.exact), dim=2).transpose(2, 3)  # b c h q, from the chunk's start
        length = total.shape[-1]
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        read, keep, across = total, total[..., -1:] - total, total[..., -1]
        if seq_idx is not None:
            starts = sequence_starts(seq_idx)[:, tokens]
            run = self.cut(starts.int().cumsum(dim=1), repeat_last=True)[:, :, None]  # b c 1 q
            first = run[..., :1] - self.cut(starts.int())[:, :, None, :1]  # the run the chunk continues
            seen = seen & (run[..., :, None] == run[..., None, :])
            read = read.masked_fill(run != first, -torch.inf)
            keep = keep.masked_fill(run != run[..., -1:], -torch.inf)
            across = across.masked_fill(run[..., -1] != first[..., 0], -torch.inf)
        scan = Direction(
            chunks=self,
            x=self.cut(x[:, tokens].to(self.dtype)),
            dt=dt,
            B=self.cut_by_group(B[:, tokens]),
            C=self.cut_by_group(C[:, tokens]),
            read=read.to(self.dtype).exp().transpose(2, 3),
            keep=keep.to(self.dtype).exp().transpose(2, 3),
            across=across.to(self.dtype).exp(),
            backward=False,
        )
        decay = (total[..., :, None] - total[..., None, :]).to(self.dtype).masked_fill_(~seen, -torch.inf).exp_()
        return _Segment(tokens.stop - tokens.start, scan, decay, scan.C @ scan.B.transpose(-1, -2))

    def _attention(self, part: "_Segment") -> Tensor:
        """(b, c, h, q, k): the weight of token k's dt x in the output of token q."""
        return (part.decay.unflatten(2, (self.ngroups, -1)) * self.per_head(part.scores)).flatten(2, 3)

    def outputs(self, part: "_Segment", entering: Tensor) -> Tensor:
        """y (b, s, h, p), before the skip connection and the gate."""
        scan = part.scan
        x = (scan.x * scan.dt[..., None]).transpose(2, 3)  # b c h k p
        y = (self._attention(part) @ x).transpose(2, 3)
        return self.rows(y + scan.outputs(entering), part.tokens)

    def backward(
        self, part: "_Segment", entering: Tensor, d_y: Tensor, d_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x, of dt as a factor of x, of the log decay dt A, of B, C and of the state before the segment.

        `d_state` is the gradient of the state after the segment.
        """
        scan = part.scan
        d_y = self.cut(d_y)  # b c q h p
        d_leaving, d_state = scan.state_gradients(d_y, d_state)
        through_states = scan.gradients(d_y, entering, d_leaving)
        # through the chunk's own matrix
        attention = self._attention(part)
        d_y, weighted_x = d_y.transpose(2, 3), (scan.x * scan.dt[..., None]).transpose(2, 3)  # b c h q p
        d_weighted_x = (attention.transpose(-1, -2) @ d_y).transpose(2, 3)
        d_attention = d_y @ weighted_x.transpose(-1, -2)  # b c h q k
        d_exponent = attention.mul_(d_attention)
        d_scores = d_attention.mul_(part.decay).unflatten(2, (self.ngroups, self.per_group)).sum(dim=3)
        d_total = (d_exponent.sum(dim=-1) - d_exponent.sum(dim=-2)).transpose(2, 3)
        d_total += through_states.log_read - through_states.log_keep
        d_total[:, :, -1] += through_states.log_keep.sum(dim=2) + through_states.log_across
        grads = (
            (d_weighted_x * scan.dt[..., None]).add_(through_states.x),
            (d_weighted_x * scan.x).sum(dim=-1).add_(through_states.dt),
            d_total.flip(2).cumsum(dim=2).flip(2),  # the total is a sum over all tokens before
            (d_scores.transpose(-1, -2) @ scan.C).add_(through_states.B).transpose(2, 3),
            (d_scores @ scan.B).add_(through_states.C).transpose(2, 3),
        )
        d_x, d_dt, d_log_decay, d_B, d_C = (self.rows(t, part.tokens) for t in grads)
        return d_x, d_dt, d_log_decay, d_B, d_C, d_state


@dataclass
class _Segment:
    """One segment's tensors in float, cut into chunks."""

    tokens: int
    scan: Direction
    decay: Tensor  # b c h q k, 0 above the diagonal and across sequences
    scores: Tensor  # b c g q k, C B^T


# --- checks --------------------------------------------------------------------------------------------------------


def _per_channel(D):
    """D as (nheads, 1 or headdim); None stays None."""
    return D if D is None or D.ndim == 2 else D[:, None]


def _zero_state(x: Tensor, B: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], *x.shape[2:], B.shape[3], dtype=compute_dtype(x), device=x.device)


def _check(x, dt, A, B, C, D, z, dt_bias, dt_limit, chunk_size, initial_state, seq_idx, mask) -> None:
    name = "ssd"
    if x.ndim != 4:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (batch, seqlen, nheads, headdim)")
    batch, seqlen, nheads, headdim = x.shape
    check_shape(name, "dt", dt, (batch, seqlen, nheads), "(batch, seqlen, nheads)")
    check_shape(name, "A", A, (nheads,), "(nheads,)")
    if B.ndim != 4 or B.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"{name}: B has shape {tuple(B.shape)}, expected (batch, seqlen, ngroups, d_state) with "
            f"batch={batch}, seqlen={seqlen}"
        )
    check_shape(name, "C", C, tuple(B.shape), "(batch, seqlen, ngroups, d_state)")
    if B.shape[2] == 0 or nheads % B.shape[2]:
        raise ValueError(f"{name}: ngroups={B.shape[2]} (B) does not divide nheads={nheads} (x)")
    if D is not None and not one_of(tuple(D.shape), [(nheads,), (nheads, headdim)]):
        raise ValueError(
            f"{name}: D has shape {tuple(D.shape)}, expected (nheads,) or (nheads, headdim) = ({nheads}, {headdim})"
        )
    if z is not None:
        check_shape(name, "z", z, (batch, seqlen, nheads, headdim), "(batch, seqlen, nheads, headdim)")
    if dt_bias is not None:
        check_shape(name, "dt_bias", dt_bias, (nheads,), "(nheads,)")
    if not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"{name}: dt_limit={dt_limit}, expected (smallest, largest)")
    if chunk_size < 1:
        raise ValueError(f"{name}: chunk_size={chunk_size}, expected at least 1")
    if initial_state is not None:
        expected = (batch, nheads, headdim, B.shape[3])
        check_shape(name, "initial_state", initial_state, expected, "(batch, nheads, headdim, d_state)")
    if seq_idx is not None:
        check_row_tensor(name, "seq_idx", seq_idx, x)
    if mask is not None:
        check_row_tensor(name, "mask", mask, x)


# --- the table -----------------------------------------------------------------------------------------------------

register(
    "ssd",
    Backend(
        "mamba_ssm",
        "hf_ssm.ops.delegates:ssd",
        needs=("mamba_ssm", "selective_scan_cuda"),  # it cannot be imported without its compiled part
        devices=("cuda",),
        lacks=lambda call: (
            f"{call.dtype}, the kernel has float32, float16 and bfloat16"
            if call.dtype not in (torch.float32, torch.float16, torch.bfloat16)
            else None
        ),
    ),
    triton.backend("ssd:ssd_triton"),
    cpu.backend("ssd:ssd_cpu"),
    Backend("torch", "hf_ssm.ops.ssd:ssd_torch"),
    Backend("reference", "hf_ssm.ops.ssd:ssd_reference", automatic=False),
)
