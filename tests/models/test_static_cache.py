"""Static caches: what they hold is written in place, they give what one uncached pass does, and one compiled step
serves every token."""

import copy

import pytest
import torch
from transformers import StaticCache
from transformers.generation import CompileConfig

from hf_ssm.ops import backends

from .helpers import (
    DECODERS,
    TOLERANCE,
    assert_near,
    keys_and_values,
    new_cache,
    random_ids,
    states,
    tiny,
)

every_model = pytest.mark.parametrize("model_type", DECODERS)
EXACT = TOLERANCE[torch.float64]
GREEDY = {"max_new_tokens": 8, "do_sample": False}
ROOM = 16


@pytest.fixture
def model(model_type):
    return tiny(model_type, dtype=torch.float64)


@pytest.fixture
def new_process():
    """As in a process that has neither compiled nor run anything yet: no backend has been chosen."""
    torch.compiler.reset()
    for loaded in backends._LOADED.values():
        loaded.clear()


def static_cache(model, room: int = ROOM):
    return model.cache_class.static()(model.config, max_cache_len=room)


def held(cache) -> list[torch.Tensor]:
    return states(cache) + keys_and_values(cache)


def mask_of(rows: list[str]) -> torch.Tensor:
    return torch.tensor([[letter != "." for letter in row] for row in rows]).long()


PADDED = {
    "no padding": ["aaaaaaaaaaaa", "aaaaaaaaaaaa"],
    "left": ["....aaaaaaaa", ".aaaaaaaaaaa", "........aaaa"],
    "anywhere": ["..aa..a.aaaa", "aaaaaa....a.", "a.a.a.a.a.a."],
}
# The window reaches 3 tokens back: below, at and beyond it, by one token and by several.
PIECES = [[12], [1] * 12, [2, 1, 1, 1, 1, 6], [3, 4, 5], [5, 1, 1, 5], [0, 7, 0, 5]]


@every_model
@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@torch.no_grad()
def test_static_is_dynamic_is_uncached(model, padding, pieces):
    mask = mask_of(PADDED[padding])
    ids = random_ids(*mask.shape)
    want = model(ids, attention_mask=mask, use_cache=False).logits
    static, dynamic, outs = static_cache(model, 12), new_cache(model), []
    for piece, mask_piece in zip(ids.split(pieces, dim=1), mask.split(pieces, dim=1), strict=True):
        outs.append(model(piece, attention_mask=mask_piece, past_key_values=static).logits)
        model(piece, attention_mask=mask_piece, past_key_values=dynamic)
    real = mask.bool()
    assert_near("logits", torch.cat(outs, dim=1)[real], want[real], EXACT)
    assert static.get_seq_length() == 12
    for i, (got, state) in enumerate(zip(states(static), states(dynamic), strict=True)):
        assert_near(f"state {i}", got, state, EXACT)


@every_model
@torch.no_grad()
def test_addresses_stay(model):
    mask = mask_of(PADDED["left"])
    ids = random_ids(*mask.shape)
    cache = static_cache(model)
    model(ids[:, :0], past_key_values=cache)
    before = [(t.data_ptr(), t.shape) for t in held(cache)]
    for piece, mask_piece in zip(ids.split([7, 1, 4], dim=1), mask.split([7, 1, 4], dim=1), strict=True):
        model(piece, attention_mask=mask_piece, past_key_values=cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert [(t.data_ptr(), t.shape) for t in held(cache)] == before


@torch.no_grad()
def test_what_a_static_cache_holds():
    model = tiny("hymba")
    cache = static_cache(model)
    model(random_ids(2, 5), past_key_values=cache)
    assert [layer.keys.shape for layer in cache.layers[:2]] == [(2, 2, 3 + ROOM, 4), (2, 2, 3, 4)]
    assert not hasattr(cache.layers[2], "keys"), "it uses those of another layer"
    assert cache.get_max_length() == ROOM and cache.is_compileable and not cache.is_croppable


# --- generate() ------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_generation(model, padding, chunk):
    mask = mask_of(PADDED[padding])
    ids = random_ids(*mask.shape)
    want = model.generate(ids, attention_mask=mask, **GREEDY, use_cache=False)
    got = model.generate(
        ids, attention_mask=mask, **GREEDY, cache_implementation="static", prefill_chunk_size=chunk,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(got.sequences, want)
    assert type(got.past_key_values) is model.cache_class.static()


@every_model
def test_beams(model):
    mask = mask_of(PADDED["left"])
    ids = random_ids(*mask.shape)
    kwargs = {**GREEDY, "attention_mask": mask, "num_beams": 3, "num_return_sequences": 2}
    want = model.generate(ids, **kwargs, use_cache=False)
    assert torch.equal(model.generate(ids, **kwargs, cache_implementation="static"), want)


@every_model
@pytest.mark.parametrize("transformers_own", [False, True])
def test_a_second_turn(model, transformers_own):
    ids, turn = random_ids(2, 6), random_ids(2, 3, seed=1)
    cache = StaticCache(config=model.config, max_cache_len=30) if transformers_own else static_cache(model, 30)
    first = model.generate(ids, **GREEDY, past_key_values=cache)
    whole = torch.cat([first, turn], dim=1)
    mask = torch.ones_like(whole)  # the padding token, where it was generated, is a token
    got = model.generate(whole, attention_mask=mask, **GREEDY, past_key_values=cache)
    assert torch.equal(got, model.generate(whole, attention_mask=mask, **GREEDY, use_cache=False))
    assert type(cache) is model.cache_class.static() and cache.get_seq_length() == 17 + 8 - 1


def test_a_larger_cache_than_asked_for():
    model = tiny("hymba")
    got = model.generate(
        random_ids(1, 4), **GREEDY, cache_implementation="static", max_cache_len=50, return_dict_in_generate=True
    )
    assert got.past_key_values.get_max_length() == 50


# --- rows ------------------------------------------------------------------------------------------------------------


@every_model
@torch.no_grad()
def test_rows_copies_and_a_new_beginning(model):
    mask = mask_of(PADDED["left"])
    ids, last = random_ids(*mask.shape), random_ids(3, 1, seed=2)
    cache = static_cache(model)
    model(ids, attention_mask=mask, past_key_values=cache)
    want = model(last, past_key_values=copy.deepcopy(cache)).logits
    assert cache.get_seq_length() == 12, "a copy is a copy"
    order = torch.tensor([2, 0, 0])
    rows, few, many = (copy.deepcopy(cache) for _ in range(3))
    rows.reorder_cache(order)
    few.batch_select_indices(order[:2])
    many.batch_repeat_interleave(2)
    assert_near("reordered", model(last[order], past_key_values=rows).logits, want[order], EXACT)
    assert_near("selected", model(last[order[:2]], past_key_values=few).logits, want[order[:2]], EXACT)
    twice = model(last.repeat_interleave(2, dim=0), past_key_values=many).logits
    assert_near("repeated", twice, want.repeat_interleave(2, dim=0), EXACT)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    again = model(ids[:2], past_key_values=cache).logits
    assert_near("after a reset", again, model(ids[:2], use_cache=False).logits, EXACT)


# --- compilation -----------------------------------------------------------------------------------------------------


@every_model
@torch.no_grad()
def test_one_compiled_step_serves_every_token(model_type, new_process):
    model = tiny(model_type)
    mask = mask_of(["..aaaaaaaaaa", "aaaaaaaaaaaa"])
    ids = random_ids(*mask.shape)
    want = model(ids, attention_mask=mask, use_cache=False).logits
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled = False
    for prompt in (4, 2, 9):  # three conversations
        cache = static_cache(model)
        model(ids[:, :prompt], attention_mask=mask[:, :prompt], past_key_values=cache)
        for i in range(prompt, 12):
            with torch._dynamo.config.patch(error_on_recompile=compiled):
                got = step(ids[:, i : i + 1], past_key_values=cache).logits
            compiled = True
            assert_near(f"token {i}", got[:, 0], want[:, i], TOLERANCE[torch.float32])
        assert cache.get_seq_length() == 12


@every_model
def test_generation_compiles_its_step_once(model, new_process):
    """As transformers does of itself on accelerators."""
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True
    kwargs = {"cache_implementation": "static", "max_cache_len": 32, "compile_config": compile_config}
    mask = mask_of(PADDED["left"])
    ids = random_ids(*mask.shape)
    want = model.generate(ids, attention_mask=mask, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY, **kwargs), want)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY, **kwargs), want)
        beams = {**GREEDY, "num_beams": 3, **kwargs}
        got = model.generate(ids[1:2, 1:], **beams)
    assert torch.equal(got, model.generate(ids[1:2, 1:], **GREEDY, num_beams=3, use_cache=False))


# --- refusals --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_more_tokens_than_there_is_room_for():
    model = tiny("hymba")
    cache = static_cache(model, 6)
    model(random_ids(2, 5), past_key_values=cache)
    before = [t.clone() for t in held(cache)]
    with pytest.raises(ValueError, match=r"room for 6 tokens, holds 5, and 2 come: .* larger max_cache_len"):
        model(random_ids(2, 2), past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(held(cache), before, strict=True))
    model(random_ids(2, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="room for 6 tokens and 11 may come"):
        model.generate(random_ids(2, 4), **GREEDY, past_key_values=static_cache(model, 6))
    with pytest.raises(ValueError, match="max_cache_len=0 must be at least 1"):
        static_cache(model, 0)


@pytest.mark.parametrize(
    ("model_type", "changes"), [("mamba", {}), ("mamba2", {}), ("hymba", {"global_attn_idx": []})]
)
@torch.no_grad()
def test_where_nothing_grows_there_is_no_limit(model_type, changes):
    model, ids = tiny(model_type, **changes), random_ids(2, 12)
    cache = static_cache(model, 3)
    outs = [model(piece, past_key_values=cache).logits for piece in ids.split(5, dim=1)]
    want = model(ids, use_cache=False).logits
    assert_near("logits", torch.cat(outs, dim=1), want, TOLERANCE[torch.float32])


@every_model
@torch.no_grad()
def test_a_static_cache_is_not_rolled_back(model):
    cache = static_cache(model)
    model(random_ids(1, 5), past_key_values=cache)
    for refused in (cache.activate_past_recording, lambda: cache.crop(-1)):
        with pytest.raises(ValueError, match="cannot be rolled back"):
            refused()
    cache.crop(0)
    assert cache.get_seq_length() == 5
    for kwargs in ({"cache_implementation": "static"}, {"past_key_values": static_cache(model)}):
        with pytest.raises(ValueError, match=r"Static cache|rolled back"):
            model.generate(random_ids(1, 5), **GREEDY, **kwargs, prompt_lookup_num_tokens=2)


def test_packed_rows_are_refused():
    model, ids = tiny("hymba"), random_ids(1, 4)
    with pytest.raises(ValueError, match="one sequence per row"):
        model(ids, seq_idx=torch.tensor([[0, 0, 1, 1]]), past_key_values=static_cache(model))


@torch.no_grad()
def test_static_caches_of_other_models_are_refused():
    model, ids = tiny("hymba"), random_ids(1, 4)
    for changes, message in (
        ({"sliding_window": 2}, "another window"),
        ({"global_attn_idx": []}, "another window"),
        ({"kv_reuse_group": None}, "layer 2 of past_key_values"),
    ):
        with pytest.raises(ValueError, match=f"{message}.* another model"):
            model(ids, past_key_values=static_cache(tiny("hymba", **changes)))
    with pytest.raises(ValueError, match="another model"):
        model(ids, past_key_values=static_cache(tiny("mamba", num_hidden_layers=3)))
    filled = StaticCache(config=model.config, max_cache_len=8)
    filled.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 8), layer_idx=0)
    with pytest.raises(ValueError, match="filled by another implementation"):
        model(ids, past_key_values=filled)
