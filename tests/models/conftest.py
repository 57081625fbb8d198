import os

import pytest
import torch
from hypothesis import settings

# The same examples every time: a run that fails can be repeated, and one that passes means the same tomorrow. To look
# for new ones, HYPOTHESIS_PROFILE=search.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("search", derandomize=False, deadline=None, max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models gain nothing from threads, and on a busy machine lose much by waiting for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
