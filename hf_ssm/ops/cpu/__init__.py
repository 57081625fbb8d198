"""The `cpu` backend: native kernels for float32, bfloat16 and float16, with float32 states.

The kernels (`src/`, C++) are built when the package is installed, for several instruction sets at once; the best one
that the machine has is used, or the one that HF_SSM_CPU names (avx512, avx2, plain). They share PyTorch's own thread
pool and know nothing of its C++ interface, so one build serves every version of it. Where no compiler was found at
installation there are none, and the operators run on their `torch` backend.
"""

import importlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends import Backend, Call, allows
from ..library import unwatched

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def kernels() -> Any:
    """The module of built kernels, ready to be called; None if there are none. A kernel takes tensors, None for a
    missing one, and last the number of threads.

    Raises:
        ValueError: HF_SSM_CPU names an instruction set that the build or the machine does not have.
    """
    try:
        _native = importlib.import_module(f"{__name__}._native")
    except ImportError:
        return None
    library = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    library_path = Path(torch.__file__).parent / "lib" / library
    _native.set_up(Tensor, torch.nn.Parameter, {"dtype": torch.float32}, str(library_path))
    if wanted := os.environ.get("HF_SSM_CPU"):
        available = _native.instruction_sets()
        if wanted not in available:
            raise ValueError(f"HF_SSM_CPU={wanted}: this machine has {', '.join(available)}")
        _native.use(wanted)
    return _native


def describe() -> str:
    """The kernels in a line, for a report."""
    native = kernels()
    if native is None:
        return "none: " + NOT_BUILT
    others = [name for name in native.instruction_sets() if name != native.in_use()]
    threads = "PyTorch's threads" if native.pool() else "one thread: PyTorch's were not found"
    return (
        f"{native.in_use()} (also {', '.join(others)}), on {threads}" if others else f"{native.in_use()}, on {threads}"
    )


NOT_BUILT = "the native kernels were not built, which takes a C++ compiler when hf-ssm is installed"


def backend(impl: str) -> Backend:
    """The `cpu` row of an operator's table; `impl` is "module:function" in this package."""
    return Backend("cpu", f"{__name__}.{impl}", missing=_not_built, devices=("cpu",), lacks=_lacks)


def _not_built() -> str | None:
    return NOT_BUILT if kernels() is None else None


def _lacks(call: Call) -> str | None:
    return None if call.dtype in DTYPES else f"{call.dtype}, the kernels have float32, bfloat16 and float16"


def is_step(
    x: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None, mask: Tensor | None, backend: str | None
) -> bool:
    """Whether a call decodes one token of plain rows, so that `step` should be tried."""
    return x.shape[1:2] == (1,) and initial_state is not None and seq_idx is mask is None and backend in (None, "cpu")


def step(operator: str, *inputs: Any) -> Any:
    """The results of an operator's `_step` kernel, called past PyTorch's dispatcher and past our own checks: what a
    decoded token can afford. None where the call is out of the ordinary and has to go the ordinary way: it is watched
    (`unwatched`), a gradient is wanted, another backend is asked for, a tensor is of a subclass, on another device, of
    another dtype or shape than the kernel expects."""
    if (
        not unwatched()
        or not allows("cpu")
        or (torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs))
    ):
        return None
    native = kernels()
    return None if native is None else getattr(native, operator + "_step")(*inputs, torch.get_num_threads())
