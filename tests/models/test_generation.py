"""generate(): every way of decoding gives what the whole conversation in one pass does, and feeds what is new."""

import copy

import pytest
import torch
from transformers import DynamicCache, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from .helpers import (
    DECODERS,
    TOLERANCE,
    assert_near,
    new_cache,
    one_layer,
    random_ids,
    same_states,
    tiny,
    tokens_fed,
)

every_model = pytest.mark.parametrize("model_type", DECODERS)

NEW = 8
# Greedy decoding in float64: the logits of the two best tokens are never as near as rounding there.
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def model(model_type):
    return tiny(model_type, dtype=torch.float64)


def greedy(model, ids, new: int = NEW):
    """The answer: every token read off one uncached pass over all before it, a row at a time."""
    rows = []
    for row in ids:
        row = row[None]
        for _ in range(new):
            with torch.no_grad():
                row = torch.cat([row, model(row, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        rows.append(row)
    return torch.cat(rows)


def padded(rows, side: str):
    """Rows of several lengths in one batch: ids, attention mask."""
    seqlen = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), seqlen, dtype=torch.long), torch.zeros(len(rows), seqlen, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(seqlen - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


@pytest.fixture
def rows():
    return [random_ids(1, length, seed=length)[0] for length in (9, 2, 6)]


# --- greedy ----------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_is_argmax_of_the_full_pass(model, use_cache):
    ids = random_ids(2, 7)
    with tokens_fed(model) as fed:
        got = model.generate(ids, **GREEDY, use_cache=use_cache)
    assert fed == ([7] + [1] * (NEW - 1) if use_cache else list(range(7, 7 + NEW)))
    assert torch.equal(got, greedy(model, ids))


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", [None, 1, 2, 4, 9, 20])
@pytest.mark.parametrize("use_cache", [True, False])
def test_padded_prompts_generate_as_single_rows(model, rows, side, chunk, use_cache):
    if chunk and not use_cache:
        pytest.skip("a prompt is fed in chunks only through a cache")
    ids, mask = padded(rows, side)
    got = model.generate(ids, attention_mask=mask, **GREEDY, prefill_chunk_size=chunk, use_cache=use_cache)
    for row, out in zip(rows, got, strict=True):
        assert torch.equal(out[ids.shape[1] :], greedy(model, row[None])[0, len(row) :])


@every_model
def test_holes_in_a_prompt_are_skipped(model):
    ids, mask = random_ids(1, 9), torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 1]])
    want = greedy(model, ids[mask.bool()][None])[:, -NEW:]
    for chunk in (None, 2):
        got = model.generate(ids, attention_mask=mask, **GREEDY, prefill_chunk_size=chunk)
        assert torch.equal(got[:, -NEW:], want)


@every_model
@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_prefill_in_chunks_is_the_same_prefill(model, chunk):
    ids = random_ids(2, 11)
    with tokens_fed(model) as fed:
        got = model.generate(ids, **GREEDY, prefill_chunk_size=chunk)
    assert sum(fed) == 11 + NEW - 1 and max(fed) <= chunk
    assert torch.equal(got, greedy(model, ids))


@every_model
def test_inputs_embeds(model, rows):
    ids = random_ids(2, 7)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), greedy(model, ids)[:, 7:])
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        got = model.generate(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, **GREEDY)
        for row, out in zip(rows, got, strict=True):
            assert torch.equal(out, greedy(model, row[None])[0, len(row) :])


@every_model
def test_eos_ends_each_row_by_itself(model):
    ids = random_ids(3, 5)
    full = greedy(model, ids)
    eos = int(full[0, 5 + 2])  # the third new token of row 0
    got = model.generate(ids, **GREEDY, eos_token_id=eos, pad_token_id=0)
    for out, want in zip(got, full, strict=True):
        new = want[5:].tolist()
        kept = new[: new.index(eos) + 1] if eos in new else new
        assert out[5:].tolist() == kept + [0] * (got.shape[1] - 5 - len(kept))


@every_model
def test_max_length_counts_the_prompt(model):
    ids = random_ids(2, 5)
    assert torch.equal(model.generate(ids, max_length=9, do_sample=False), greedy(model, ids, 4))


# --- other ways of decoding ------------------------------------------------------------------------------------------


@every_model
def test_sampling_is_reproducible_and_needs_no_cache(model):
    ids = random_ids(2, 6)
    outs = []
    for use_cache in (True, True, False):
        torch.manual_seed(3)
        outs.append(model.generate(ids, max_new_tokens=NEW, do_sample=True, top_k=20, use_cache=use_cache))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], greedy(model, ids))
    torch.manual_seed(3)
    several = model.generate(ids, max_new_tokens=NEW, do_sample=True, num_return_sequences=3)
    assert several.shape == (6, 6 + NEW)
    assert len({tuple(row.tolist()) for row in several[:3]}) > 1


@every_model
def test_beams_do_not_depend_on_the_cache(model, rows):
    ids, mask = padded(rows, "left")
    kwargs = {"attention_mask": mask, "max_new_tokens": NEW, "num_beams": 3, "num_return_sequences": 2}
    want = model.generate(ids, **kwargs, do_sample=False, use_cache=False)
    with tokens_fed(model) as fed:
        got = model.generate(ids, **kwargs, do_sample=False)
    assert fed == [9] + [1] * (NEW - 1)
    assert torch.equal(got, want)
    single = model.generate(rows[1][None], max_new_tokens=NEW, num_beams=3, do_sample=False)
    assert torch.equal(got[2, 9:], single[0, 2:])


@every_model
def test_streamers_see_every_token(model):
    class Collect(BaseStreamer):
        tokens, ended = (), False

        def put(self, value):
            self.tokens += tuple(value.flatten().tolist())

        def end(self):
            self.ended = True

    assert TextIteratorStreamer.__mro__.index(BaseStreamer)  # the kind that users bring
    ids, streamer = random_ids(1, 5), Collect()
    out = model.generate(ids, **GREEDY, streamer=streamer)
    assert streamer.ended and list(streamer.tokens) == out[0].tolist()


@every_model
@pytest.mark.parametrize(
    "schedule", ["constant", "heuristic", pytest.param("heuristic_transient", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("assistant", ["itself", "another size", "right half of the time"])
@pytest.mark.parametrize("count", [1, 5])
def test_assisted_decoding_is_greedy_decoding(model_type, model, assistant, schedule, count):
    helper = {
        "itself": lambda: tiny(model_type, dtype=torch.float64),
        "another size": lambda: tiny(model_type, dtype=torch.float64, state_size=3, seed=1, **one_layer(model_type)),
        "right half of the time": lambda: nearly(model),
    }[assistant]()
    helper.generation_config.num_assistant_tokens = count
    helper.generation_config.num_assistant_tokens_schedule = schedule
    helper.generation_config.assistant_confidence_threshold = 0.0
    for seed in range(2):
        ids = random_ids(1, 6, seed=seed)
        got = model.generate(ids, **GREEDY | {"max_new_tokens": 14}, assistant_model=helper)
        assert torch.equal(got, greedy(model, ids, 14))


def nearly(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.05 * noise
    return other


@pytest.mark.parametrize("model_type", DECODERS)
def test_an_assistant_of_another_architecture(model_type, model):
    other = tiny(DECODERS[DECODERS.index(model_type) - 1], dtype=torch.float64, seed=5)
    ids = random_ids(1, 6)
    assert torch.equal(model.generate(ids, **GREEDY, assistant_model=other), greedy(model, ids))


@every_model
@pytest.mark.parametrize("lookup", [1, 3, 10])
def test_prompt_lookup_is_greedy_decoding(model, lookup):
    for seed in range(3):
        ids = random_ids(1, 4, seed=seed).repeat(1, 4)  # something to look up
        got = model.generate(ids, **GREEDY | {"max_new_tokens": 14}, prompt_lookup_num_tokens=lookup)
        assert torch.equal(got, greedy(model, ids, 14))


@every_model
@pytest.mark.parametrize("way", ["all ids", "new ids, full mask", "new ids"])
@pytest.mark.parametrize("helper", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("first_assisted", [False, True])
def test_assisted_decoding_goes_on_from_a_cache(model, way, helper, first_assisted):
    ids = random_ids(1, 6)
    assisted = {"prompt_lookup_num_tokens": 3} if helper == "prompt lookup" else {"assistant_model": nearly(model)}
    cache = new_cache(model)
    first = model.generate(ids, **GREEDY, past_key_values=cache, **(assisted if first_assisted else {}))
    seen = cache.get_seq_length()
    whole = torch.cat([first, random_ids(1, 3, seed=8)], dim=1)
    assert not any(layer.record_past for layer in cache.layers), "a recording is memory"
    kwargs = {
        "all ids": {"input_ids": whole},
        "new ids, full mask": {"input_ids": whole[:, seen:], "attention_mask": torch.ones_like(whole)},
        "new ids": {"input_ids": whole[:, seen:]},
    }[way]
    with tokens_fed(model) as fed:
        got = model.generate(**kwargs, **GREEDY, past_key_values=cache, **assisted)
    assert fed[0] <= whole.shape[1] - seen + 20 and fed[0] < whole.shape[1], "only what is new is fed"
    assert torch.equal(got[:, -NEW:], greedy(model, whole)[:, -NEW:])


@every_model
def test_assisted_sampling_runs(model):
    ids = random_ids(1, 6)
    out = model.generate(ids, max_new_tokens=NEW, do_sample=True, assistant_model=nearly(model))
    assert out.shape == (1, 6 + NEW)


# --- a cache brought along -------------------------------------------------------------------------------------------


CACHES = {
    "ours": new_cache,
    "DynamicCache(config=...)": lambda model: DynamicCache(config=model.config),
    "DynamicCache()": lambda model: DynamicCache(),
}


@every_model
@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("name", ["past_key_values", pytest.param("cache_params", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["all ids", "new ids, full mask", "new ids"])
@pytest.mark.parametrize("new", [1, 2, 20])
def test_a_second_turn_is_the_whole_conversation(model, cache_kind, name, way, new):
    ids = random_ids(2, 6)
    cache = CACHES[cache_kind](model)
    first = model.generate(ids, **GREEDY, **{name: cache})
    assert torch.equal(first, greedy(model, ids))
    seen = cache.get_seq_length()
    assert seen == 6 + NEW - 1  # the last token was not fed
    turn = random_ids(2, new, seed=3)
    whole = torch.cat([first, turn], dim=1)
    fresh = whole[:, seen:]
    kwargs = {
        "all ids": {"input_ids": whole},
        "new ids, full mask": {"input_ids": fresh, "attention_mask": torch.ones_like(whole)},
        "new ids": {"input_ids": fresh},
    }[way]
    if way == "new ids" and fresh.shape[1] > seen:
        pytest.skip("as many ids as the cache has seen, or more, are taken for the whole conversation")
    with tokens_fed(model) as fed:
        got = model.generate(**kwargs, **GREEDY, **{name: cache})
    assert fed == [new + 1] + [1] * (NEW - 1), "only what is new is fed"
    assert torch.equal(got[:, -NEW:], greedy(model, whole)[:, -NEW:])


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_second_turn_of_padded_rows(model, rows, side, chunk):
    """Each row's conversation goes on as if it were alone, padding of both turns in between."""
    ids, mask = padded(rows, side)
    cache = new_cache(model)
    first = model.generate(ids, attention_mask=mask, **GREEDY, past_key_values=cache)
    turns = [random_ids(1, length, seed=20 + length)[0] for length in (1, 4, 3)]
    turn_ids, turn_mask = padded(turns, side)
    whole = torch.cat([first, turn_ids], dim=1)
    whole_mask = torch.cat([mask, torch.ones_like(first[:, ids.shape[1] :]), turn_mask], dim=1)
    got = model.generate(whole, attention_mask=whole_mask, **GREEDY, past_key_values=cache, prefill_chunk_size=chunk)
    for row, mask_row, out in zip(whole, whole_mask, got, strict=True):
        alone = row[mask_row.bool()][None]
        assert torch.equal(out[-NEW:], greedy(model, alone)[0, -NEW:])


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_generation_goes_on_from_a_padded_manual_prefill(model, rows, side):
    ids, mask = padded(rows, side)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    turn = random_ids(3, 2, seed=4)
    whole, whole_mask = torch.cat([ids, turn], dim=1), torch.cat([mask, torch.ones_like(turn)], dim=1)
    got = model.generate(whole, attention_mask=whole_mask, **GREEDY, past_key_values=cache)
    for row, new, out in zip(rows, turn, got, strict=True):
        assert torch.equal(out[-NEW:], greedy(model, torch.cat([row, new])[None])[0, -NEW:])


@every_model
def test_step_by_step_by_hand(model, rows):
    """The loop that people write themselves, from a right-padded batch."""
    ids, mask = padded(rows, "right")
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=True)
        token = out.logits[torch.arange(3), mask.sum(1) - 1].argmax(-1, keepdim=True)
        tokens = [token]
        for _ in range(NEW - 1):
            mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
            out = model(token, attention_mask=mask, past_key_values=out.past_key_values)
            token = out.logits[:, -1:].argmax(-1)
            tokens.append(token)
    for row, new in zip(rows, torch.cat(tokens, dim=1), strict=True):
        assert torch.equal(new, greedy(model, row[None])[0, -NEW:])


@every_model
def test_cache_of_one_prompt_serves_many(model):
    ids = random_ids(1, 7)
    with torch.no_grad():
        prefix = model(ids, use_cache=True).past_key_values
    before = copy.deepcopy(prefix)
    ends = random_ids(3, 2, seed=9)
    whole = torch.cat([ids.repeat(3, 1), ends], dim=1)
    many = copy.deepcopy(prefix)
    many.batch_repeat_interleave(3)
    assert torch.equal(model.generate(whole, **GREEDY, past_key_values=many), greedy(model, whole))
    same_states(prefix, before, 0.0)  # a copy is a copy
    with torch.no_grad():
        cache = model(whole, use_cache=True).past_key_values
    cache.batch_select_indices(torch.tensor([2, 0]))
    turn = torch.cat([whole[[2, 0]], random_ids(2, 2, seed=4)], dim=1)
    assert torch.equal(model.generate(turn, **GREEDY, past_key_values=cache), greedy(model, turn))


@every_model
def test_cache_params_names_the_same_cache(model):
    ids = random_ids(2, 5)
    with torch.no_grad():
        out = model(ids, use_cache=True)
        assert out.cache_params is out.past_key_values
        again = model(ids, cache_params=out.cache_params)
        assert again.past_key_values is out.past_key_values
        same = model(ids, past_key_values=out.past_key_values, cache_params=out.past_key_values)
        assert same.past_key_values.get_seq_length() == 15
        assert model.base_model(ids, cache_params=new_cache(model)).cache_params.get_seq_length() == 5
        with pytest.raises(ValueError, match="two names for one cache"):
            model(ids, past_key_values=out.past_key_values, cache_params=new_cache(model))


# --- what comes back -------------------------------------------------------------------------------------------------


@every_model
def test_scores_and_hidden_states_of_generation(model):
    ids = random_ids(2, 5)
    out = model.generate(
        ids,
        **GREEDY,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    with torch.no_grad():
        want = model(out.sequences, use_cache=False).logits[:, 4:-1]
    assert_near("scores", torch.stack(out.scores, dim=1), want, 1e-6)  # generate() keeps scores in float32
    assert_near("logits", torch.stack(out.logits, dim=1), want, 1e-6)
    assert type(out.past_key_values) is model.cache_class
    assert out.past_key_values.get_seq_length() == 5 + NEW - 1
    assert len(out.hidden_states) == NEW
    assert [h.shape[1] for h in out.hidden_states[0]] == [5] * (model.config.num_hidden_layers + 1)
    transition = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert transition.shape == (2, NEW)


@every_model
def test_logits_to_keep(model):
    ids = random_ids(2, 9)
    with torch.no_grad():
        full = model(ids).logits
        for keep, want in (
            (0, full),
            (1, full[:, -1:]),
            (4, full[:, -4:]),
            (torch.tensor([0, 3, 8]), full[:, [0, 3, 8]]),
        ):
            assert_near(
                f"logits_to_keep={keep}", model(ids, logits_to_keep=keep).logits, want, TOLERANCE[torch.float64]
            )
    with pytest.raises(ValueError, match="labels need the logits of every position"):
        model(ids, labels=ids, logits_to_keep=1)


@every_model
def test_generation_computes_one_rows_logits_only(model):
    shapes = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: shapes.append(out.shape[1]))
    model.generate(random_ids(2, 9), **GREEDY)
    hook.remove()
    assert set(shapes) == {1}


@every_model
def test_hidden_states(model):
    ids, inputs = random_ids(2, 6), []
    for layer in model.base_model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0][:, -6:]))
    with torch.no_grad():
        out = model.base_model(ids, output_hidden_states=True, use_cache=False)
        assert len(out.hidden_states) == model.config.num_hidden_layers + 1
        assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(ids))
        assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
        assert all(torch.equal(a, b) for a, b in zip(inputs, out.hidden_states, strict=False))
        assert model(ids, output_hidden_states=True, return_dict=False)[-1][0].shape == (
            2,
            6,
            model.config.hidden_size,
        )


@every_model
def test_training_mode_and_no_grad_make_no_difference_to_decoding(model):
    ids = random_ids(1, 5)
    model.train()
    got = model.generate(ids, **GREEDY)
    model.eval()
    assert torch.equal(got, greedy(model, ids))


@every_model
@pytest.mark.parametrize("kind", ["dynamic", "quantized", "offloaded", "offloaded_static"])
def test_kinds_of_caches(model, kind):
    """What cannot be done is refused; "static" has tests of its own."""
    ids = random_ids(1, 4)
    if kind == "dynamic":
        assert torch.equal(model.generate(ids, **GREEDY, cache_implementation=kind), greedy(model, ids))
        return
    with pytest.raises(ValueError, match=f"cache_implementation='{kind}': this model's states are kept by a "):
        model.generate(ids, **GREEDY, cache_implementation=kind)
    with pytest.raises(ValueError, match="cache_implementation='dynamic' and past_key_values: give one of them"):
        model.generate(ids, **GREEDY, cache_implementation="dynamic", past_key_values=new_cache(model))
