"""What kernels of our own have in common where they meet PyTorch's dispatcher."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def unwatched() -> bool:
    """Whether nothing records or transforms what operators do: no torch.compile, no tracing, no dispatch mode, no
    transform of torch.func, no forward-mode differentiation."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def at_once(*tensors: Tensor | None) -> bool:
    """Whether a kernel may be called past PyTorch's dispatcher: the call is `unwatched`, no gradient is wanted, and no
    tensor is of a subclass."""
    grad = torch.is_grad_enabled()
    for t in tensors:  # a loop, not all(...): it is called for every decoded token
        if t is not None and (type(t) not in _PLAIN or (grad and t.requires_grad)):
            return False
    return unwatched()


_PLAIN = (Tensor, torch.nn.Parameter)


def single(t: Any) -> Any:
    """A tensor in a dtype that the kernels have; None stays None."""
    return t.float() if t is not None and t.dtype == torch.float64 else t
