import pytest
import torch
from gpu_cases import DEVICE, REHEARSAL
from op_cases import uninitialised_memory_is_nan  # noqa: F401  (a fixture)

MISSING = None if REHEARSAL or torch.cuda.is_available() else "needs a CUDA device; torch sees none"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.gpu)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_float32():
    """PyTorch's own products, with which the kernels are compared, are in float32 too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def memory_given_back():
    yield
    if DEVICE == "cuda" and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**33:
        torch.cuda.empty_cache()  # several processes may share the device
