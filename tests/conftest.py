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
