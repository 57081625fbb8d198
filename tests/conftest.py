import importlib.util
import os

import torch
from hypothesis import settings

settings.register_profile("default", deadline=None)  # machines are shared, and torch is slow the first time
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):  # they share the cores
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))

# Where no GPU is, Triton runs our kernels in Python. It and hf_ssm look at this when they are imported.
if importlib.util.find_spec("triton") and not (torch.cuda.is_available() or torch.xpu.is_available()):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def mend_interpreter():
    """Triton 3.6 reads the bounds of a loop that it interprets as NumPy 2.4 refuses, by int() of an array of one
    number. It cuts float32 to bfloat16 where GPUs round to the nearest. And every function that a kernel calls patches
    triton.language again, which takes a third of the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, patch, patch_tensor = interpreter._convert_float, interpreter._patch_lang, interpreter._patch_lang_tensor
    patched = set()  # by the launch that is being interpreted

    def patch_tensor_and_mend(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_and_round(data, given, wanted, rounding_mode):
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return convert(data, given, wanted, rounding_mode)
        return torch.from_numpy(data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()

    def patch_once(function):
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        is_launch = not patched
        patched.add(module)
        scope = patch(function)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._convert_float = convert_and_round
    interpreter._patch_lang, interpreter._patch_lang_tensor = patch_once, patch_tensor_and_mend


if os.environ.get("TRITON_INTERPRET") == "1":
    mend_interpreter()
