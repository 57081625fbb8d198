"""What the GPU tests share: the device, sizes as models have them, and inputs at those sizes.

HF_SSM_TEST_DEVICE=cpu rehearses them without a GPU, in small sizes, on the backends that are there: it proves the
tests, not the kernels. What only a GPU has is skipped then.
"""

import os
from typing import Any

import pytest
import torch
from op_cases import CENTRED, CONV, QUASISEPARABLE, SCAN, SSD, Operator, cast, error, outputs_and_grads, usable
from torch import Tensor

from hf_ssm.ops import UnsupportedByBackend

REHEARSAL = os.environ.get("HF_SSM_TEST_DEVICE") == "cpu"
DEVICE = "cpu" if REHEARSAL else "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

on_a_gpu = pytest.mark.skipif(REHEARSAL, reason="a rehearsal on the CPU: there is no stream, graph or second device")

# Of the 130M models; 2.8B's have the same states and more channels.
REAL: dict[str, dict[str, int]] = {
    "causal_conv1d": {"channels": 1536 + 256, "width": 4},
    "centred_conv1d": {"channels": 1536 + 256, "width": 7},
    "selective_scan": {"d_inner": 1536, "d_state": 16, "ngroups": 1},
    "ssd": {"nheads": 24, "headdim": 64, "ngroups": 1, "d_state": 128},
    "quasiseparable": {"nheads": 24, "headdim": 64, "ngroups": 1, "d_state": 64},
}
SMALL: dict[str, dict[str, int]] = {
    "causal_conv1d": {"channels": 48, "width": 4},
    "centred_conv1d": {"channels": 48, "width": 7},
    "selective_scan": {"d_inner": 48, "d_state": 16, "ngroups": 1},
    "ssd": {"nheads": 4, "headdim": 16, "ngroups": 1, "d_state": 16},
    "quasiseparable": {"nheads": 4, "headdim": 16, "ngroups": 1, "d_state": 16},
}


def backends(operator: str) -> list[str]:
    """Those that are tried: kernels, ours and other packages'. Not PyTorch's own operations, with which they are
    compared, but in a rehearsal, which has little else."""
    left_out = "triton" if REHEARSAL else "torch"  # interpreted, it would take hours
    return [name for name in usable(operator, DEVICE) if name != left_out] or ["triton"]


OPERATORS = (CONV, CENTRED, SCAN, SSD, QUASISEPARABLE)
CASES = [(operator, backend) for operator in OPERATORS for backend in backends(operator.name)]
every = pytest.mark.parametrize(("operator", "backend"), CASES, ids=[f"{op.name}-{name}" for op, name in CASES])


def size(real: int, rehearsed: int) -> int:
    return rehearsed if REHEARSAL else real


def inputs(operator: Operator, batch: int, seqlen: int, dtype: torch.dtype = torch.float32, **changes: Any) -> dict:
    """On the device, with sizes, decays and steps as a model has them, and outputs of order 1."""
    sizes = (SMALL if REHEARSAL else REAL)[operator.name] | changes
    tensors = {name: t.to(DEVICE) for name, t in operator.inputs(batch, seqlen, **sizes).items()}
    if "A" in tensors:
        tensors["A"] = -1 - 15 * torch.rand_like(tensors["A"])
        tensors["dt_bias"] = tensors["dt_bias"] - 4
        for name in ("C", "C_forward", "C_backward"):
            if name in tensors:
                tensors[name] = tensors[name] * tensors[name].shape[-1] ** -0.5
    return cast(tensors, dtype)


def rows(batch: int, seqlen: int) -> dict[str, Tensor]:
    """Packed sequences of some hundred tokens, and padding on the left of one row and in the middle of another."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.rand(batch, seqlen, generator=generator) < 4 / max(seqlen, 16)
    mask = torch.ones(batch, seqlen, dtype=torch.bool)
    mask[0, : seqlen // 5] = False
    mask[-1, seqlen // 2 : seqlen // 2 + seqlen // 7] = False
    return {"seq_idx": starts.cumsum(dim=1).to(DEVICE), "mask": mask.to(DEVICE)}


def call(operator: Operator, backend: str, **options: Any) -> Any:
    """The operator on a backend; a test of what a foreign package's kernel refuses is skipped."""
    function = operator(backend, **options)

    def run(**tensors: Any) -> Any:
        try:
            return function(**tensors)
        except UnsupportedByBackend as refusal:
            pytest.skip(str(refusal))

    return run


def assert_as_good_as_the_reference(operator: Operator, backend: str, tensors: dict, oracle: str, **options: Any):
    """Against `oracle` in float64: at most twice the error that it makes itself in the tensors' dtype, and 1e-5 of the
    largest value."""
    got = outputs_and_grads(call(operator, backend, **options), tensors)
    exact = outputs_and_grads(operator(oracle, **options), cast(tensors, torch.float64))
    same = outputs_and_grads(operator(oracle, **options), tensors)
    for name, want in exact.items():
        assert got[name].dtype == same[name].dtype, name
        limit = 2 * error(same[name], want) + 1e-5
        assert error(got[name], want) <= limit, f"{name}: {error(got[name], want):.2e}, allowed {limit:.2e}"
