"""torch.export with padding masks and caches: the exported program's outputs are eager's."""

import copy
import io

import pytest
import torch
import torch.utils._pytree as pytree

from hf_ssm.cache import register_cache_export_support

from .helpers import DECODERS, TOLERANCE, assert_near, new_cache, random_ids, same_states, tiny

every_model = pytest.mark.parametrize("model_type", DECODERS)
NEAR = TOLERANCE[torch.float32]
DYNAMIC = torch.export.Dim.DYNAMIC
PROMPT, TOTAL = 7, 12
MASK = torch.tensor([[0, 0, 0, *[1] * 9], [1] * 12, [0, *[1] * 11]])


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_cache_export_support()
    register_cache_export_support()  # once more does no harm


@pytest.fixture
def batch():
    return random_ids(*MASK.shape), MASK


def eager(model, ids, mask, cache=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)


def caches(model):
    return new_cache(model), model.cache_class.static()(model.config, max_cache_len=TOTAL)


@every_model
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_prompt(model_type, batch, strict):
    model, (ids, mask) = tiny(model_type), batch
    sizes = {0: DYNAMIC, 1: DYNAMIC}
    program = torch.export.export(
        model,
        (),
        kwargs={"input_ids": ids[:2, :PROMPT], "attention_mask": mask[:2, :PROMPT], "use_cache": True},
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes, "use_cache": None},
        strict=strict,
    )
    got = program.module()(input_ids=ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
    want = eager(model, ids[:, :9], mask[:, :9])
    real = mask[:, :9].bool()
    assert_near("logits", got.logits[real], want.logits[real], NEAR)
    assert got.past_key_values.get_seq_length() == 9 and type(got.past_key_values) is model.cache_class
    got, want = (eager(model, ids[:, 9:], mask, out.past_key_values) for out in (got, want))
    assert_near("next logits", got.logits, want.logits, NEAR)


@every_model
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_step_with_a_dynamic_cache(model_type, batch, strict):
    """States in, states out; the keys' length may vary, and the count of tokens does."""
    model, (ids, mask) = tiny(model_type), batch
    want = eager(model, ids, mask).logits
    cache = eager(model, ids[:, :PROMPT], mask[:, :PROMPT]).past_key_values
    kwargs = {"input_ids": ids[:, PROMPT : PROMPT + 1], "attention_mask": mask[:, PROMPT : PROMPT + 1]}
    kwargs["past_key_values"] = cache
    sizes = torch.export.ShapesCollection()
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            sizes[layer.keys], sizes[layer.values] = {2: DYNAMIC}, {2: DYNAMIC}
    if model_type == "hymba":
        sizes[cache.real(PROMPT)._base] = {1: DYNAMIC}
    program = torch.export.export(
        model, (), kwargs=kwargs, dynamic_shapes=sizes.dynamic_shapes(model, (), kwargs), strict=strict
    )
    step = program.module()
    for i in range(PROMPT, TOTAL):
        before = copy.deepcopy(cache)
        out = step(input_ids=ids[:, i : i + 1], attention_mask=mask[:, i : i + 1], past_key_values=cache)
        assert_near(f"token {i}", out.logits[:, 0], want[:, i], NEAR)
        same_states(cache, before, 0.0)  # a program changes no dynamic cache: it gives a new one
        cache = out.past_key_values
    assert cache.get_seq_length() == TOTAL


@every_model
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_step_with_a_static_cache(model_type, batch, strict):
    """One program serves every token and any number of rows, also after a file; it writes into the cache given."""
    model, (ids, mask) = tiny(model_type), batch
    want = eager(model, ids, mask).logits
    _, cache = caches(model)
    eager(model, ids[:, :PROMPT], mask[:, :PROMPT], cache)
    example = copy.deepcopy(cache)
    kwargs = {"input_ids": ids[:, :1], "attention_mask": mask[:, :1], "past_key_values": example}
    sizes = torch.export.ShapesCollection()
    for tensor in pytree.tree_leaves(kwargs):
        if tensor.ndim and tensor.shape[0] == len(ids):  # not the meta tokens' and the count of all
            sizes[tensor] = {0: DYNAMIC}
    program = torch.export.export(
        model, (), kwargs=kwargs, dynamic_shapes=sizes.dynamic_shapes(model, (), kwargs), strict=strict
    )
    program.example_inputs = None  # pickled, they would be read with a warning
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    step = torch.export.load(file).module()
    for rows in (3, 2):
        cache.batch_select_indices(torch.arange(rows))
        few = copy.deepcopy(cache)
        for i in range(PROMPT, TOTAL):
            inputs = {"input_ids": ids[:rows, i : i + 1], "attention_mask": mask[:rows, i : i + 1]}
            got = step(**inputs, past_key_values=few).logits
            assert_near(f"token {i} of {rows} rows", got[:, 0], want[:rows, i], NEAR)
        assert few.get_seq_length() == TOTAL


@every_model
@torch.no_grad()
def test_caches_are_trees_of_their_tensors(model_type, batch):
    model, (ids, mask) = tiny(model_type), batch
    want = eager(model, ids, mask).logits
    for cache in caches(model):
        again = pytree.tree_unflatten(*pytree.tree_flatten(cache))  # of a fresh one
        assert type(again) is type(cache) and again.get_seq_length() == 0
        eager(model, ids[:, :PROMPT], mask[:, :PROMPT], again)
        leaves, spec = pytree.tree_flatten(again)
        again = pytree.tree_unflatten(leaves, spec)
        assert again.get_seq_length() == PROMPT
        assert all(a is b for a, b in zip(pytree.tree_leaves(again), leaves, strict=True) if a.ndim), (
            "nothing is copied"
        )
        got = eager(model, ids[:, PROMPT:], mask[:, PROMPT:], again).logits
        assert_near("logits", got, want[:, PROMPT:], NEAR)


@every_model
def test_a_recording_cache_is_refused(model_type):
    model = tiny(model_type)
    cache = new_cache(model)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="records its past is no tree of tensors"):
        pytree.tree_flatten(cache)
