"""NVIDIA's compute-sanitizer over every operator, forward and backward, on small shapes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_cases import on_a_gpu

# Runs in a process of its own: compute-sanitizer starts what it looks at.
CALLS = """
import torch
from gpu_cases import OPERATORS, inputs, rows
from op_cases import outputs_and_grads

CHANNELS, HEADS = {"channels": 37}, {"nheads": 3, "headdim": 20, "d_state": 24}
SMALL = [CHANNELS, CHANNELS, {"d_inner": 37, "d_state": 5}, HEADS, HEADS]
for operator, sizes in zip(OPERATORS, SMALL, strict=True):
    for seqlen, dtype, options in ((1, torch.float32, {}), (71, torch.bfloat16, rows(2, 71))):
        outputs_and_grads(operator("triton", **options), inputs(operator, 2, seqlen, dtype, **sizes))
        torch.cuda.synchronize()
        print(operator.name, seqlen, "done")
"""


@on_a_gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH")
def test_memcheck():
    here = Path(__file__).parent
    # PyTorch's allocator hands out parts of large blocks, beyond whose ends the tool would see nothing wrong.
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "ops"), str(here.parents[1])]),
    }
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", CALLS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.count("done") == 10
