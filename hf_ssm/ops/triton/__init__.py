"""The `triton` backend: kernels for CUDA, ROCm and XPU devices, which compile themselves at their first call.

Float32, bfloat16 and float16 in any mixture, with float32 states and decays; products of float32 inputs are taken in
float32, never in TF32. Triton comes with PyTorch where there is such a device, and is imported when a kernel is first
called. With TRITON_INTERPRET=1 in the environment Triton runs the same kernels in Python, on tensors in the CPU's
memory: slowly, for tests, and only when asked for by name.
"""

import os

import torch

from ..backends import Backend, Call

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cuda", "xpu")  # torch calls ROCm's devices "cuda", too

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def backend(impl: str) -> Backend:
    """The `triton` row of an operator's table; `impl` is "module:function" in this package."""
    return Backend(
        "triton",
        f"{__name__}.{impl}",
        needs="triton",
        devices=("cpu", *DEVICES) if INTERPRETED else DEVICES,
        lacks=_lacks,
        automatic=not INTERPRETED,
    )


def _lacks(call: Call) -> str | None:
    return None if call.dtype in DTYPES else f"{call.dtype}, the kernels have float32, bfloat16 and float16"
