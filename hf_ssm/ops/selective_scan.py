"""Mamba-1's selective scan, and its one-token update.

Mamba: Linear-Time Sequence Modeling with Selective State Spaces (arXiv:2312.00752), equation 2 with the discretisation
of section 3.2 as its authors compute it (zero-order hold for A, Euler for B).

b batch   l seqlen   s segment   c chunk   q position inside a chunk   g ngroups   d d_inner   e d_inner / ngroups
n d_state
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import cpu, triton
from .backends import Backend, Call, choose, register
from .discretize import NO_LIMIT, compute_dtype, skip_and_gate, skip_and_gate_backward, step_size, step_size_slope
from .matrices import semiseparable_per_channel
from .rows import check_row_tensor, check_shape, fill_padding, sequence_starts


def selective_scan(
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
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """state[t] = exp(dt[t] A) state[t-1] + dt[t] x[t] B[t];  out[t] = (C[t] . state[t] + D x[t]) silu(z[t]).

    The state and everything that decays it are float32 (float64 for float64 inputs) whatever the input dtype.

    Args:
        x: (batch, seqlen, d_inner), any floating dtype; seqlen may be 0.
        dt: (batch, seqlen, d_inner), as projected; `dt_bias` and softplus are applied here.
        A: (d_inner, d_state), real and negative.
        B, C: (batch, seqlen, d_state) or (batch, seqlen, ngroups, d_state); channel i is in group
            i // (d_inner / ngroups).
        D: (d_inner,), the skip connection.
        z: (batch, seqlen, d_inner), the gate.
        dt_bias: (d_inner,), added to dt before softplus.
        dt_softplus: whether dt is softplus(dt + dt_bias) rather than dt + dt_bias.
        initial_state: (batch, d_inner, d_state), the state before the first token; zeros if None.
        seq_idx: (batch, seqlen) integers; the state restarts from zero where the index changes. The initial state
            belongs to the first sequence of a row.
        mask: (batch, seqlen) bool, False for padding: such a token gives 0 and leaves the state as it is.
        backend: name of a backend; None takes the fastest that can run the call.

    Returns:
        out (batch, seqlen, d_inner) in x's dtype, and the state after the last token, (batch, d_inner, d_state)
        float32 (float64 for float64 inputs). Gradients flow through both states.

    Raises:
        ValueError for shapes that disagree; UnsupportedByBackend, BackendUnavailable for a backend asked for by name.
    """
    if cpu.is_step(x, initial_state, seq_idx, mask, backend):
        results = cpu.step("selective_scan", x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state)
        if results is not None:
            return results
    _check(x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, mask)
    if B.ndim == 3:
        B = B.unsqueeze(2)
    if C.ndim == 3:
        C = C.unsqueeze(2)
    if B.shape[2] != C.shape[2]:
        B, C = _same_groups(B, C)
    dtype = compute_dtype(x)
    if initial_state is not None:
        initial_state = initial_state.to(dtype)
    if x.shape[1] == 0:
        return torch.zeros_like(x), _zero_state(x, A) if initial_state is None else initial_state
    if mask is not None:  # a step of size 0 neither decays the state nor adds to it
        dt = step_size(dt, dt_bias, dt_softplus, NO_LIMIT, dtype).masked_fill(~mask[..., None], 0)
        dt_bias, dt_softplus = None, False
        seq_idx = None if seq_idx is None else fill_padding(seq_idx, mask)

    traits = (
        ("initial_state", initial_state is not None),
        ("packed", seq_idx is not None),
        ("ngroups", B.shape[2]),
        ("d_state", A.shape[1]),
        ("one_token", 1 if x.shape[1] == 1 else 0),
    )
    run = choose(Call("selective_scan", x.device.type, x.dtype, traits), backend)
    out, final_state = run(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, seq_idx)
    if mask is not None:
        out = out.masked_fill(~mask[..., None], 0)
    return out, final_state


def selective_scan_update(
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
) -> tuple[Tensor, Tensor]:
    """One token of `selective_scan`: state (batch, d_inner, d_state); x, dt, z (batch, d_inner); B, C (batch,
    [ngroups,] d_state). Returns out (batch, d_inner) in x's dtype and the new state; the old one is left as it was."""
    token = (x[:, None], dt[:, None], A, B[:, None], C[:, None], D, None if z is None else z[:, None], dt_bias)
    out, state = selective_scan(*token, dt_softplus=dt_softplus, initial_state=state)
    return out[:, 0], state


def selective_scan_reference(
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
    """The recurrence itself, one token per step. Every backend answers to it."""
    with torch.autocast(x.device.type, enabled=False):
        dtype = compute_dtype(x)
        per_group = x.shape[2] // B.shape[2]
        B, C = (t.to(dtype).repeat_interleave(per_group, dim=2) for t in (B, C))  # b l d n
        dt = step_size(dt, dt_bias, dt_softplus, NO_LIMIT, dtype)
        A, xs = A.to(dtype), x.to(dtype)
        state = _zero_state(x, A) if initial_state is None else initial_state
        starts = None if seq_idx is None else sequence_starts(seq_idx)
        ys = []
        for t in range(x.shape[1]):
            if starts is not None:
                state = state.masked_fill(starts[:, t, None, None], 0)
            decay = torch.exp(dt[:, t, :, None] * A)  # b d n
            state = decay * state + (dt[:, t] * xs[:, t])[..., None] * B[:, t]
            ys.append(torch.einsum("bdn,bdn->bd", C[:, t], state))
        y = torch.stack(ys, dim=1)
        if D is not None:
            y = y + D.to(dtype) * xs
        if z is not None:
            y = y * torch.nn.functional.silu(z.to(dtype))
        return y.to(x.dtype), state


def selective_scan_matrix(
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The semiseparable matrix M of `selective_scan`, per row and channel: without initial state and gate, out = M x.

    M[t, s] = sum_n C[t, n] B[s, n] exp(A[n] (dt[s+1] + ... + dt[t])) dt[s] for s <= t, 0 above the diagonal and across
    sequences, and D is added on the diagonal. Source: arXiv:2405.21060, equation 3. Memory grows with seqlen^2.

    Args: as those of `selective_scan`.

    Returns (batch, d_inner, seqlen, seqlen), float32 (float64 for float64 inputs), differentiable.
    """
    _check(dt, dt, A, B, C, D, None, dt_bias, None, seq_idx, None)
    if B.ndim == 3:
        B, C = B[:, :, None], C[:, :, None]
    dtype = compute_dtype(dt)
    steps = step_size(dt, dt_bias, dt_softplus, NO_LIMIT, dtype)
    matrix = semiseparable_per_channel(steps, A.to(dtype), B.to(dtype), C.to(dtype), seq_idx)
    return matrix if D is None else matrix + torch.diag_embed(D.to(dtype)[:, None].expand(-1, dt.shape[1]))


# --- the `torch` backend -------------------------------------------------------------------------------------------
#
# The sequence is cut into segments, and a segment into chunks of a few tokens. All chunks of a segment take their
# q-th step together, from zero; then the chunks' states are chained; then they step again from the right states.
# Only the state before each segment is kept for backward, which recomputes the rest: memory is
# O(segment * d_inner * d_state) whatever the sequence length.
# Inside, channels come last, (g, n, e), so that every elementwise step runs over contiguous memory.

_CHUNK = 16  # tokens that are stepped through one by one
_SEGMENT_ELEMENTS = 1 << 22  # target size of a segment's states, b * s * d * n


def selective_scan_torch(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, seq_idx):
    if x.shape[1] == 1:  # the recurrence is its own fastest form, and differentiable as it is
        return selective_scan_reference(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, seq_idx)
    out, final_state, _ = _selective_scan(x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, dt_softplus)
    return out, final_state


@torch.library.custom_op("hf_ssm::selective_scan", mutates_args=())
def _selective_scan(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, the state before each segment (b, segments, g, n, e))."""
    with torch.autocast(x.device.type, enabled=False):
        scan = _Scan(x, A, B)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        state = scan.initial(initial_state)
        before_segment = []
        for tokens in scan.segments():
            before_segment.append(state)
            part = scan.load(tokens, x, dt, B, C, dt_bias, dt_softplus, seq_idx)
            chunk_states = scan.chunk_states(part, state)
            y, state = scan.outputs(part, chunk_states)
            out[:, tokens] = skip_and_gate(y, x[:, tokens], D, None if z is None else z[:, tokens])
        return out, scan.export(state), torch.stack(before_segment, dim=1)


@_selective_scan.register_fake
def _(x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, dt_softplus):
    scan = _Scan(x, A, B)
    dtype = compute_dtype(x)
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(x.shape[0], *A.shape, dtype=dtype),
        x.new_empty(x.shape[0], -(-x.shape[1] // scan.segment), *scan.state_shape, dtype=dtype),
    )


@torch.library.custom_op("hf_ssm::selective_scan_backward", mutates_args=())
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
    before_segment: Tensor,
    seq_idx: Tensor | None,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C, D, z, dt_bias, initial_state; empty where the input was None."""
    with torch.autocast(x.device.type, enabled=False):
        scan = _Scan(x, A, B)
        dtype = compute_dtype(x)
        d_x, d_dt, d_B, d_C = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, dt, B, C))
        d_z = torch.empty(x.shape if z is not None else (0,), dtype=x.dtype if z is None else z.dtype, device=x.device)
        d_A = torch.zeros_like(scan.A)
        d_D = torch.zeros(x.shape[2] if D is not None else 0, dtype=dtype, device=x.device)
        d_bias = torch.zeros(x.shape[2] if dt_bias is not None else 0, dtype=dtype, device=x.device)
        d_state = scan.initial(d_final)
        for i, tokens in reversed(list(enumerate(scan.segments()))):
            part = scan.load(tokens, x, dt, B, C, dt_bias, dt_softplus, seq_idx)
            states = scan.all_states(part, scan.chunk_states(part, before_segment[:, i]))
            grad = d_out[:, tokens].to(dtype)
            if z is not None or D is not None:
                y = scan.read_out(part, states) if z is not None else grad
                xs = x[:, tokens].to(dtype)
                grad, skip_grad, gate_grad = skip_and_gate_backward(
                    grad, y, xs, D, None if z is None else z[:, tokens]
                )
                if D is not None and skip_grad is not None:
                    d_D += skip_grad.sum(dim=(0, 1))
                    d_skip = grad * D.to(dtype)
                if gate_grad is not None:
                    d_z[:, tokens] = gate_grad
            d_step, d_input, d_b, d_c, d_state = scan.backward(part, states, grad, d_state, d_A)
            xs = x[:, tokens].to(dtype)
            step = part.dt_rows
            d_step.addcmul_(d_input, xs)
            d_xs = d_input.mul_(step)
            if D is not None:
                d_xs += d_skip
            d_x[:, tokens] = d_xs
            slope = step_size_slope(dt[:, tokens], dt_bias, dt_softplus, NO_LIMIT, dtype)
            if slope is not None:
                d_step.mul_(slope)
            if dt_bias is not None:
                d_bias += d_step.sum(dim=(0, 1))
            d_dt[:, tokens], d_B[:, tokens], d_C[:, tokens] = d_step, d_b, d_c
        return (
            d_x,
            d_dt,
            scan.export(d_A[None])[0].to(A.dtype),
            d_B,
            d_C,
            d_D.to((x if D is None else D).dtype),
            d_z,
            d_bias.to((x if dt_bias is None else dt_bias).dtype),
            scan.export(d_state),
        )


@_selective_scan_backward.register_fake
def _(d_out, d_final, x, dt, A, B, C, D, z, dt_bias, before_segment, seq_idx, dt_softplus):
    def like(t):
        return x.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)

    d_state = x.new_empty(x.shape[0], *A.shape, dtype=compute_dtype(x))
    return (*(like(t) for t in (x, dt, A, B, C, D, z, dt_bias)), d_state)


def _setup_context(ctx, inputs, output):
    x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, ctx.dt_softplus = inputs
    ctx.has_initial_state = initial_state is not None
    ctx.save_for_backward(x, dt, A, B, C, D, z, dt_bias, output[2], seq_idx)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_final, _):
    x, dt, A, B, C, D, z, dt_bias, before_segment, seq_idx = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(x)
    grads = _selective_scan_backward(
        d_out, d_final, x, dt, A, B, C, D, z, dt_bias, before_segment, seq_idx, ctx.dt_softplus
    )
    given = (x, dt, A, B, C, D, z, dt_bias, before_segment if ctx.has_initial_state else None)
    return (*(None if t is None else grad for t, grad in zip(given, grads, strict=True)), None, None)


_selective_scan.register_autograd(_backward, setup_context=_setup_context)


@dataclass
class _Segment:
    """One segment's tensors in float, cut into chunks of q tokens."""

    dt: Tensor  # b c q g 1 e, the step size
    inputs: Tensor  # b c q g 1 e, dt x
    B: Tensor  # b c q g n 1
    C: Tensor  # b c q g n 1
    keep: Tensor | None  # b c q 1 1 1, 0 where the state restarts; None if it never does
    dt_rows: Tensor  # b s d, the step size again, not cut

    def without_chunk(self, chunk: int) -> "_Segment":
        """All chunks but the first (0) or the last (-1)."""
        rest = slice(1, None) if chunk == 0 else slice(None, -1)
        keep = None if self.keep is None else self.keep[:, rest]
        return _Segment(self.dt[:, rest], self.inputs[:, rest], self.B[:, rest], self.C[:, rest], keep, self.dt_rows)


class _Scan:
    """The shapes of one call and the steps of its forward and backward."""

    def __init__(self, x: Tensor, A: Tensor, B: Tensor):
        self.batch, self.seqlen, d_inner = x.shape
        self.ngroups, self.d_state = B.shape[2], A.shape[1]
        self.state_shape = (self.ngroups, self.d_state, d_inner // self.ngroups)  # g n e
        self.dtype = compute_dtype(x)
        self.A = A.to(self.dtype).view(self.ngroups, -1, self.d_state).transpose(1, 2).contiguous()  # g n e
        budget = _SEGMENT_ELEMENTS // max(1, self.batch * d_inner * self.d_state)
        self.segment = max(_CHUNK, budget // _CHUNK * _CHUNK)
        self.new = x.new_empty

    def segments(self) -> list[slice]:
        return [slice(i, min(i + self.segment, self.seqlen)) for i in range(0, self.seqlen, self.segment)]

    def initial(self, state: Tensor | None) -> Tensor:
        """(b, d, n) -> (b, g, n, e)"""
        if state is None:
            return self.new(self.batch, *self.state_shape, dtype=self.dtype).zero_()
        return (
            state.to(self.dtype)
            .view(self.batch, self.ngroups, self.state_shape[2], self.d_state)
            .transpose(2, 3)
            .contiguous()
        )

    def export(self, state: Tensor) -> Tensor:
        """(b, g, n, e) -> (b, d, n)"""
        return state.transpose(-1, -2).flatten(1, 2).contiguous()

    def load(self, tokens, x, dt, B, C, dt_bias, dt_softplus, seq_idx) -> _Segment:
        dt_rows = step_size(dt[:, tokens], dt_bias, dt_softplus, NO_LIMIT, self.dtype)
        inputs = dt_rows * x[:, tokens]
        keep = None
        if seq_idx is not None:
            starts = sequence_starts(seq_idx)[:, tokens]
            if starts.any():
                keep = self._chunks((~starts).to(self.dtype)[..., None, None], pad_with=1)[..., None]
        return _Segment(
            dt=self._chunks(dt_rows.unflatten(2, (self.ngroups, 1, -1))),
            inputs=self._chunks(inputs.unflatten(2, (self.ngroups, 1, -1))),
            B=self._chunks(B[:, tokens].to(self.dtype)[..., None]),
            C=self._chunks(C[:, tokens].to(self.dtype)[..., None]),
            keep=keep,
            dt_rows=dt_rows,
        )

    def _chunks(self, rows: Tensor, pad_with: float = 0) -> Tensor:
        """(b, s, ...) -> (b, c, q, ...), padded behind: a step of size 0 leaves the state as it is."""
        chunk = min(_CHUNK, rows.shape[1])
        missing = -rows.shape[1] % chunk
        if missing:
            rows = torch.cat([rows, rows.new_full((rows.shape[0], missing, *rows.shape[2:]), pad_with)], dim=1)
        return rows.unflatten(1, (-1, chunk))

    def _decay(self, part: _Segment, q: int, out: Tensor | None = None) -> Tensor:
        decay = torch.mul(part.dt[:, :, q], self.A, out=out).exp_()  # b c g n e
        return decay if part.keep is None else decay.mul_(part.keep[:, :, q])

    def _total_decay(self, part: _Segment) -> Tensor:
        decay = (part.dt.sum(dim=2) * self.A).exp_()
        return decay if part.keep is None else decay.mul_(part.keep.amin(dim=2))

    def chunk_states(self, part: _Segment, state: Tensor) -> Tensor:
        """The state before each chunk, (b, c, g, n, e)."""
        chunks, length = part.dt.shape[1:3]
        if chunks == 1:
            return state[:, None]
        gained = torch.zeros(self.batch, chunks - 1, *self.state_shape, dtype=self.dtype, device=state.device)
        buffer = torch.empty_like(gained)
        head = part.without_chunk(-1)
        for q in range(length):
            gained.mul_(self._decay(head, q, buffer)).addcmul_(head.inputs[:, :, q], head.B[:, :, q])
        total = self._total_decay(head)
        states = [state]
        for c in range(chunks - 1):
            states.append(torch.addcmul(gained[:, c], total[:, c], states[-1]))
        return torch.stack(states, dim=1)

    def outputs(self, part: _Segment, chunk_states: Tensor) -> tuple[Tensor, Tensor]:
        """y (b, s, d) and the state after the segment."""
        state = chunk_states.clone()
        buffer = torch.empty_like(state)
        y = torch.empty_like(part.dt)
        for q in range(part.dt.shape[2]):
            state.mul_(self._decay(part, q, buffer)).addcmul_(part.inputs[:, :, q], part.B[:, :, q])
            y[:, :, q] = torch.matmul(part.C[:, :, q].transpose(-1, -2), state)
        return self._rows(y, part), state[:, -1].clone()  # a view would keep all chunks' states alive

    def _rows(self, chunks: Tensor, part: _Segment) -> Tensor:
        """(b, c, q, g, 1, e) -> (b, s, d)"""
        return chunks.flatten(1, 2).flatten(2)[:, : part.dt_rows.shape[1]]

    def all_states(self, part: _Segment, chunk_states: Tensor) -> Tensor:
        """The state before and after every step, (q + 1, b, c, g, n, e)."""
        length = part.dt.shape[2]
        states = torch.empty(length + 1, *chunk_states.shape, dtype=self.dtype, device=chunk_states.device)
        states[0] = chunk_states
        buffer = torch.empty_like(chunk_states)
        for q in range(length):
            torch.mul(states[q], self._decay(part, q, buffer), out=states[q + 1])
            states[q + 1].addcmul_(part.inputs[:, :, q], part.B[:, :, q])
        return states

    def read_out(self, part: _Segment, states: Tensor) -> Tensor:
        y = torch.empty_like(part.dt)
        for q in range(part.dt.shape[2]):
            y[:, :, q] = torch.matmul(part.C[:, :, q].transpose(-1, -2), states[q + 1])
        return self._rows(y, part)

    def backward(
        self, part: _Segment, states: Tensor, d_y: Tensor, d_state: Tensor, d_A: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of dt (through the decay), of the inputs dt x, of B, C and of the state before the segment.

        Adds to d_A (g, n, e). `d_state` is the gradient of the state after the segment.
        """
        d_y = self._chunks(d_y.unflatten(2, (self.ngroups, 1, -1)))  # b c q g 1 e
        chunks, length = part.dt.shape[1:3]
        buffer = torch.empty_like(states[0])
        d_states = torch.zeros_like(states[0])  # the gradient that reaches each chunk from behind
        d_states[:, -1] = d_state
        if chunks > 1:
            tail = part.without_chunk(0)
            gained = torch.zeros_like(states[0][:, 1:])
            tail_buffer = torch.empty_like(gained)
            for q in reversed(range(length)):
                gained.addcmul_(tail.C[:, :, q], d_y[:, 1:, q]).mul_(self._decay(tail, q, tail_buffer))
            total = self._total_decay(tail)
            for c in reversed(range(chunks - 1)):
                d_states[:, c] = torch.addcmul(gained[:, c], total[:, c], d_states[:, c + 1])
        d_dt, d_inputs = torch.empty_like(part.dt), torch.empty_like(part.dt)
        d_B, d_C = torch.empty_like(part.B), torch.empty_like(part.C)
        for q in reversed(range(length)):
            d_states.addcmul_(part.C[:, :, q], d_y[:, :, q])
            d_C[:, :, q] = torch.matmul(states[q + 1], d_y[:, :, q].transpose(-1, -2))
            d_B[:, :, q] = torch.matmul(d_states, part.inputs[:, :, q].transpose(-1, -2))
            d_inputs[:, :, q] = torch.matmul(part.B[:, :, q].transpose(-1, -2), d_states)
            d_states.mul_(self._decay(part, q, buffer))
            d_exponent = torch.mul(d_states, states[q], out=states[q + 1])  # of dt A; states[q + 1] is free by now
            d_A += torch.mul(d_exponent, part.dt[:, :, q], out=buffer).sum(dim=(0, 1))
            d_dt[:, :, q] = d_exponent.mul_(self.A).sum(dim=-2, keepdim=True)
        length = part.dt_rows.shape[1]
        d_B, d_C = (t.flatten(1, 2).squeeze(-1)[:, :length] for t in (d_B, d_C))
        return self._rows(d_dt, part), self._rows(d_inputs, part), d_B, d_C, d_states[:, 0].contiguous()


# --- checks --------------------------------------------------------------------------------------------------------


def _zero_state(x: Tensor, A: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], *A.shape, dtype=compute_dtype(x), device=x.device)


def _same_groups(B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """One of them may have a single group that serves all groups of the other."""
    ngroups = max(B.shape[2], C.shape[2])
    return B.expand(-1, -1, ngroups, -1), C.expand(-1, -1, ngroups, -1)


def _check(x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, mask) -> None:
    name = "selective_scan"
    if x.ndim != 3:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (batch, seqlen, d_inner)")
    batch, seqlen, d_inner = x.shape
    check_shape(name, "dt", dt, (batch, seqlen, d_inner), "(batch, seqlen, d_inner)")
    if A.ndim != 2 or A.shape[0] != d_inner:
        raise ValueError(f"{name}: A has shape {tuple(A.shape)}, expected (d_inner, d_state) with d_inner={d_inner}")
    d_state = A.shape[1]
    for label, t in (("B", B), ("C", C)):
        if t.ndim == 3:
            check_shape(name, label, t, (batch, seqlen, d_state), "(batch, seqlen, d_state)")
            continue
        if t.ndim != 4 or t.shape[:2] != x.shape[:2] or t.shape[3] != d_state:
            raise ValueError(
                f"{name}: {label} has shape {tuple(t.shape)}, expected (batch, seqlen, [ngroups,] d_state) = "
                f"({batch}, {seqlen}, [ngroups,] {d_state})"
            )
        if t.shape[2] == 0 or d_inner % t.shape[2]:
            raise ValueError(f"{name}: ngroups={t.shape[2]} ({label}) does not divide d_inner={d_inner} (x)")
    if B.ndim == 4 and C.ndim == 4 and B.shape[2] != C.shape[2] and 1 not in (B.shape[2], C.shape[2]):
        raise ValueError(f"{name}: B has {B.shape[2]} groups and C has {C.shape[2]}")
    for label, vector in (("D", D), ("dt_bias", dt_bias)):
        if vector is not None:
            check_shape(name, label, vector, (d_inner,), "(d_inner,)")
    if z is not None:
        check_shape(name, "z", z, (batch, seqlen, d_inner), "(batch, seqlen, d_inner)")
    if initial_state is not None:
        check_shape(name, "initial_state", initial_state, (batch, d_inner, d_state), "(batch, d_inner, d_state)")
    if seq_idx is not None:
        check_row_tensor(name, "seq_idx", seq_idx, x)
    if mask is not None:
        check_row_tensor(name, "mask", mask, x)


# --- the table -----------------------------------------------------------------------------------------------------

register(
    "selective_scan",
    Backend(
        "mamba_ssm",
        "hf_ssm.ops.delegates:selective_scan",
        needs="selective_scan_cuda",  # the compiled part of mamba_ssm, which may be installed without it
        devices=("cuda",),
        lacks=lambda call: (
            "the kernel has no initial state"
            if call["initial_state"]
            else "the kernel knows no packed sequences (seq_idx)"
            if call["packed"]
            else f"d_state={call['d_state']}, the kernel has at most 256"
            if call["d_state"] > 256
            else f"{call.dtype}, the kernel has float32, float16 and bfloat16"
            if call.dtype not in (torch.float32, torch.float16, torch.bfloat16)
            else None
        ),
    ),
    triton.backend("selective_scan:selective_scan"),
    cpu.backend("selective_scan:selective_scan_cpu"),
    Backend("torch", "hf_ssm.ops.selective_scan:selective_scan_torch"),
    Backend("reference", "hf_ssm.ops.selective_scan:selective_scan_reference", automatic=False),
)
