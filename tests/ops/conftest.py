import pytest
from op_cases import DEVICE, uninitialised_memory_is_nan  # noqa: F401  (a fixture)

from hf_ssm.ops.triton import INTERPRETED

# What these hold is a matter of the CPU: of its native kernels, of stand-ins that run there, of what is chosen there.
if DEVICE != "cpu":
    collect_ignore = [
        f"test_{name}.py" for name in ("attention", "backends", "cpu", "delegates", "matrices", "triton_compiles")
    ]


# Tests that interpret kernels for thousands of tokens, all in all.
LONG_WHEN_INTERPRETED = {
    "test_any_batch_equals_its_documents",
    "test_any_cut_is_no_cut",
    "test_packing_in_chunks_as_shipped",
    "test_agrees_with_reference_in_chunks_as_shipped",
    "test_two_runs_are_bit_identical",
    "test_padding_of_a_longer_convolution_state",
    "test_autocast_changes_nothing",
    "test_inputs_are_left_as_they_are",
    "test_many_tokens_and_channels",
    "test_memory",
    "test_published_numbers",
    "test_half_precision_is_as_good_as_the_reference",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Triton's interpreter takes seconds for what a compiled kernel does in microseconds: of all cases of a test with
    it, by default only the last runs, or none; the others are slow."""
    if DEVICE != "cpu":
        for item in items:
            if item.name.startswith("test_memory"):
                item.add_marker(pytest.mark.skip(reason="it reads the CPU allocator's record; tests/gpu has its own"))
    if not INTERPRETED:
        return
    cases = {}
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if given.get("backend") == "triton":
            key = item.path, item.originalname, getattr(given.get("operator"), "name", "")
            cases.setdefault(key, []).append(item)
    for (_, name, _), several in cases.items():
        for item in several if name in LONG_WHEN_INTERPRETED else several[:-1]:
            item.add_marker(pytest.mark.slow)
