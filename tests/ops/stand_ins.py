"""Stand-ins for mamba_ssm (2.3.2) and causal_conv1d (1.6.1): their published signatures, the checks that their
wrappers and C++ code make, their meaning of every argument, and the recurrences written out. They run on a CPU.

Sources: mamba_ssm/ops/selective_scan_interface.py, csrc/selective_scan/selective_scan.cpp,
mamba_ssm/ops/triton/ssd_combined.py and ssd_state_passing.py; causal_conv1d/causal_conv1d_interface.py and
csrc/causal_conv1d.cpp.
"""

import dataclasses
import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from hf_ssm.ops import backends

CALLS: Counter = Counter()
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(condition: bool, message: str = "") -> None:
    """TORCH_CHECK, which raises RuntimeError."""
    if not condition:
        raise RuntimeError(message or "TORCH_CHECK failed")


class _Kernel(torch.autograd.Function):
    """Outputs of a kernel: its backward checks `dout`, and takes a gradient of the second output or drops it."""

    @staticmethod
    def forward(ctx, out, state, dout_check, state_has_gradient):
        ctx.dout_check, ctx.state_has_gradient = dout_check, state_has_gradient
        return out.clone(memory_format=torch.preserve_format), state.clone()

    @staticmethod
    def backward(ctx, dout, dstate):
        ctx.dout_check(dout)
        return dout, dstate if ctx.state_has_gradient else None, None, None


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    CALLS["causal_conv1d_fn"] += 1
    if activation not in [None, "silu", "swish"]:
        raise NotImplementedError("activation must be None, silu, or swish")
    if x.stride(2) != 1 and x.stride(1) != 1:
        x = x.contiguous()
    if seq_idx is not None:
        assert initial_states is None, "initial_states must be None if seq_idx is not None"
        assert not return_final_states, "If seq_idx is not None, we don't return final_states_out"
    if initial_states is not None and initial_states.stride(2) != 1 and initial_states.stride(1) != 1:
        initial_states = initial_states.contiguous()
    assert not return_final_states and final_states_out is None, "the adapter has no use for these"
    check(x.dtype in KERNEL_DTYPES and weight.dtype in KERNEL_DTYPES)
    batch, dim, seqlen = x.shape
    width = weight.shape[-1]
    check(tuple(weight.shape) == (dim, width))
    channel_last = x.stride(1) == 1 and x.stride(2) > 1
    if channel_last:
        check(dim % 8 == 0, "causal_conv1d only supports channel dimension divisible by 8 for now")
        check(x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0, "strides must be multiples of 8")
    check(2 <= width <= 4, "causal_conv1d only supports width between 2 and 4")
    if bias is not None:
        check(bias.dtype == weight.dtype and bias.stride(-1) == 1 and tuple(bias.shape) == (dim,))
    if seq_idx is not None:
        check(channel_last, "seq_idx is only supported for channel last layout")
        check(seq_idx.dtype == torch.int32 and tuple(seq_idx.shape) == (batch, seqlen))
    if initial_states is not None:
        check(channel_last, "initial_states is only supported for channel last layout")
        check(initial_states.dtype == x.dtype)
        check(tuple(initial_states.shape) == (batch, dim, width - 1))
        check(initial_states.stride(1) == 1)

    before = torch.zeros(batch, dim, width - 1) if initial_states is None else initial_states
    inputs = torch.cat([before.float(), x.float()], dim=2)
    ids = torch.zeros(batch, seqlen, dtype=torch.int32) if seq_idx is None else seq_idx
    # the first width - 1 inputs are the initial state's, or zeros, which every sequence may see
    out = torch.zeros(batch, dim, seqlen) if bias is None else bias.float()[:, None].expand(batch, dim, seqlen)
    for k in range(width):
        distance = width - 1 - k
        same = torch.ones(batch, seqlen, dtype=torch.bool)
        if distance:
            same[:, distance:] = ids[:, distance:] == ids[:, :-distance]
        out = out + weight[:, k, None].float() * inputs[:, :, k : k + seqlen] * same[:, None]
    out = (F.silu(out) if activation else out).to(x.dtype)

    def dout_check(dout):
        if dout.stride(2) != 1 and dout.stride(1) != 1:
            dout = dout.contiguous()
        if channel_last and dout.stride(1) != 1:
            dout = dout.mT.contiguous().mT
        check(tuple(dout.shape) == (batch, dim, seqlen))
        if channel_last:
            check(dout.stride(2) % 8 == 0 and dout.stride(0) % 8 == 0, "dout strides must be multiples of 8")

    return _Kernel.apply(out, out.new_empty(0), dout_check, False)[0]


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    CALLS["selective_scan_fn"] += 1
    u, delta, B, C = (t if t.stride(-1) == 1 else t.contiguous() for t in (u, delta, B, C))
    check(u.dtype in KERNEL_DTYPES)
    check(A.dtype == torch.float32)
    check(B.ndim >= 3 and C.ndim >= 3, "constant B and C are not used by the adapter")
    B, C = (t[:, None] if t.ndim == 3 else t for t in (B, C))
    check(delta.dtype == B.dtype == C.dtype == u.dtype, "delta, B and C have u's dtype")
    batch, dim, seqlen = u.shape
    dstate, groups = A.shape[1], B.shape[1]
    check(dstate <= 256, "selective_scan only supports state dimension <= 256")
    check(tuple(delta.shape) == (batch, dim, seqlen) and tuple(A.shape) == (dim, dstate))
    for t in (B, C):
        check(tuple(t.shape) == (batch, groups, dstate, seqlen))
    for t in (D, delta_bias):
        check(t is None or (t.dtype == torch.float32 and tuple(t.shape) == (dim,)), "D and delta_bias are float32")
    if z is not None:
        check(z.dtype == u.dtype and tuple(z.shape) == (batch, dim, seqlen))

    dtype, u = u.dtype, u.float()
    step = delta.float() + (0 if delta_bias is None else delta_bias[:, None])
    step = F.softplus(step) if delta_softplus else step
    B, C = (t.float().repeat_interleave(dim // groups, dim=1) for t in (B, C))  # b d n l
    state = torch.zeros(batch, dim, dstate)
    ys = []
    for t in range(seqlen):
        state = torch.exp(step[..., t, None] * A) * state + (step[..., t] * u[..., t])[..., None] * B[..., t]
        ys.append((state * C[..., t]).sum(dim=-1))
    out = torch.stack(ys, dim=-1)
    out = out if D is None else out + D[:, None] * u
    out = (out if z is None else out * F.silu(z.float())).to(dtype)
    out, state = _Kernel.apply(out, state, lambda dout: check(dout.dtype == dtype), False)
    return (out, state) if return_last_state else out


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
):
    CALLS["mamba_chunk_scan_combined"] += 1
    assert cu_seqlens is None and not return_varlen_states, "the adapter has no use for these"
    check(all(t.dtype in KERNEL_DTYPES for t in (x, dt, B, C)), "no kernel for this dtype")
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    assert nheads % ngroups == 0
    assert B.shape == (batch, seqlen, ngroups, dstate) and C.shape == B.shape
    assert dt.shape == (batch, seqlen, nheads) and A.shape == (nheads,)
    assert z is None or z.shape == x.shape
    assert D is None or D.shape in ((nheads, headdim), (nheads,))
    assert dt_bias is None or dt_bias.shape == (nheads,)
    assert initial_states is None or initial_states.shape == (batch, nheads, headdim, dstate)
    assert isinstance(chunk_size, int)
    if seq_idx is not None:
        assert seq_idx.shape == (batch, seqlen)
        check(seq_idx.dtype == torch.int32)
    ids = torch.zeros(batch, seqlen, dtype=torch.int32) if seq_idx is None else seq_idx

    dtype, x = x.dtype, x.float()
    step = dt.float() + (0 if dt_bias is None else dt_bias.float())
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    B, C = (t.float().repeat_interleave(nheads // ngroups, dim=2) for t in (B, C))
    total = torch.cumsum(step * A.float(), dim=1).transpose(1, 2)  # b h l
    seen = torch.ones(seqlen, seqlen, dtype=torch.bool).tril() & (ids[:, :, None] == ids[:, None])[:, None]
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()  # b h q k
    weighted = x * step[..., None]
    y = torch.einsum("bqhn,bkhn,bhqk,bkhp->bqhp", C, B, decay, weighted)
    state = torch.einsum("bhk,bkhn,bkhp->bhpn", decay[:, :, -1], B, weighted)
    if initial_states is not None:  # it reaches the tokens whose index is 0
        reach = total.exp() * (ids == 0)[:, None]
        y = y + torch.einsum("bhq,bqhn,bhpn->bqhp", reach, C, initial_states.float())
        state = state + reach[:, :, -1, None, None] * initial_states
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]).float() * x
    y = (y if z is None else y * F.silu(z.float())).to(dtype)
    y, state = _Kernel.apply(y, state, lambda dout: check(dout.shape == x.shape), True)
    return (y, state) if return_final_states else y


MODULES = {
    "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
    "mamba_ssm": {},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.selective_scan_interface": {"selective_scan_fn": selective_scan_fn},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba_chunk_scan_combined},
    "selective_scan_cuda": {},
}


def forget_choices() -> None:
    backends._installed.cache_clear()
    backends._choose_row.cache_clear()


@pytest.fixture
def stand_ins(monkeypatch):
    """Both packages look installed, their rows run on a CPU, and `CALLS` counts."""
    for name, contents in MODULES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None)
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    for operator, rows in backends.OPERATORS.items():
        changed = tuple(
            dataclasses.replace(row, devices=("cpu",)) if row.devices == ("cuda",) else row for row in rows
        )
        monkeypatch.setitem(backends.OPERATORS, operator, changed)
    forget_choices()
    CALLS.clear()
    yield CALLS
    monkeypatch.undo()
    forget_choices()
