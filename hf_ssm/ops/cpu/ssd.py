"""The `cpu` backend of `hf_ssm.ops.ssd`."""

import torch

from ..rows import sequence_starts
from . import at_once, kernels, single


def ssd_cpu(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, chunk_size, initial_state, seq_idx):
    if not at_once(x, dt, A, B, C, D, z, dt_bias, initial_state):  # backward is not native yet
        from ..ssd import ssd_torch

        return ssd_torch(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, chunk_size, initial_state, seq_idx)
    dt, B, C, D, z, dt_bias = (single(t) for t in (dt, B, C, D, z, dt_bias))
    A = A.float()
    if D is not None and D.ndim == 1:
        D = D[:, None].expand(x.shape[2:])
    starts = None if seq_idx is None else sequence_starts(seq_idx)
    return _run(x, dt, A, B, C, dt_bias, dt_softplus, *dt_limit, starts, D, z, initial_state, None)


def _run(x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, starts, D, z, initial_state, checkpoints):
    out = x.new_empty(x.shape)
    final_state = x.new_empty(x.shape[0], *x.shape[2:], B.shape[3], dtype=torch.float32)
    scan = (x, dt, A, B, C, dt_bias, dt_softplus, dt_min, dt_max, starts)
    kernels().ssd(*scan, D, z, initial_state, out, final_state, checkpoints, torch.get_num_threads())
    return out, final_state
