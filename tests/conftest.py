import importlib.util
import os

import torch
from hypothesis import settings

settings.register_profile("default", deadline=None)  # machines are shared, and torch is slow the first time
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# Where no GPU is, Triton runs our kernels in Python. It and hf_ssm look at this when they are imported.
if importlib.util.find_spec("triton") and not (torch.cuda.is_available() or torch.xpu.is_available()):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def let_interpreted_loops_end():
    """Triton 3.6 reads the bounds of a loop that it interprets as NumPy 2.4 refuses: int() of an array of one number."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_repair(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_repair


def let_interpreted_numbers_round():
    """Triton 3.6 cuts off what of a float32 does not fit into a bfloat16 when it interprets; a GPU rounds to nearest."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_as_a_gpu(numbers, from_dtype, to_dtype, rounding_mode):
        if (from_dtype, to_dtype) == (tl.float32, tl.bfloat16):
            bits = numbers.view(np.uint32).astype(np.uint64)
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)
        if (from_dtype, to_dtype) == (tl.bfloat16, tl.float32):
            return numbers.view(np.uint16).astype(np.uint32) << 16
        return convert(numbers, from_dtype, to_dtype, rounding_mode)

    interpreter._convert_float = convert_as_a_gpu


if os.environ.get("TRITON_INTERPRET") == "1":
    let_interpreted_loops_end()
    let_interpreted_numbers_round()
