from collections import defaultdict

import pytest
import torch

from hf_ssm.ops.triton import INTERPRETED


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """In every test `torch.empty` gives NaN, so that a result that was never written cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill


INTERPRETED_CASES = 2  # of one test of one operator


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Triton's interpreter takes seconds for what a compiled kernel does in microseconds: of all cases of a test with
    it a few run by default, the first, the last and some between; the others are slow."""
    if not INTERPRETED:
        return
    cases = defaultdict(list)
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if given.get("backend") == "triton":
            cases[item.path, item.originalname, getattr(given.get("operator"), "name", "")].append(item)
    for several in cases.values():
        last = len(several) - 1
        kept = {round(i * last / (INTERPRETED_CASES - 1)) for i in range(INTERPRETED_CASES)}
        for i, item in enumerate(several):
            if i not in kept:
                item.add_marker(pytest.mark.slow)
