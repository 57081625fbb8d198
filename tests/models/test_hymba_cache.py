"""Hymba's cache: how much it holds, and that it can be rolled back, copied, reordered and begun again."""

import copy

import pytest
import torch

from .helpers import TOLERANCE, assert_near, keys_and_values, new_cache, random_ids, same_states, tiny

EXACT = TOLERANCE[torch.float64]
WINDOW, META = 3, 3  # of the tiny model; layer 0 is global, layer 2 uses the keys of layer 1


@pytest.fixture
def model():
    return tiny("hymba", dtype=torch.float64)


def held(tensor: torch.Tensor) -> int:
    """Bytes kept alive, whatever part of them is shown."""
    return tensor.untyped_storage().nbytes()


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 20])
def test_what_a_cache_holds(model, tokens):
    cache = model(random_ids(2, tokens), use_cache=True).past_key_values
    assert cache.get_seq_length() == tokens and cache.batch_size == 2
    assert [layer.keys.shape for layer in cache.layers[:2]] == [(2, 2, tokens, 4), (2, 2, min(tokens, WINDOW), 4)]
    assert [layer.values.shape[3] for layer in cache.layers[:2]] == [8, 8]
    assert not hasattr(cache.layers[2], "keys")
    assert [meta.keys is not None for meta in cache.meta] == [True, True, False]
    assert cache.meta[1].keys.shape == (1, 2, META, 4), "once for all rows"


@torch.no_grad()
def test_a_long_text_holds_no_more_than_its_window(model):
    ids, cache = random_ids(1, 60), None
    sizes = set()
    for piece in ids.split([20, *[1] * 30, 10], dim=1):
        cache = model(piece, past_key_values=cache, use_cache=True).past_key_values
        sizes.add(cache.layers[1].keys.shape[2])
        # what is held beyond what is shown: the meta tokens, one token, and no more than as much again
        assert held(cache.layers[1].keys) <= (2 * WINDOW + META + 1) * 2 * 4 * 8
    assert sizes == {WINDOW}
    assert cache.layers[0].keys.shape[2] == 60


@torch.no_grad()
@pytest.mark.parametrize("fed", [[5], [1, 4], [1] * 5, [2, 1, 2]])
@pytest.mark.parametrize("forget", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("padding", [0, 2])
def test_a_rollback_is_never_having_seen(model, fed, forget, padding):
    ids, mask = random_ids(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[0, :padding] = 0
    cache = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
    cache.activate_past_recording()
    for piece in ids[:, 6:11].split(fed, dim=1):
        model(piece, past_key_values=cache)
    cache.crop(-forget)
    left = 11 - forget
    want = model(ids[:, :left], attention_mask=mask[:, :left], use_cache=True).past_key_values
    assert cache.get_seq_length() == left
    same_states(cache, want, EXACT)
    cache.stop_recording()
    got, want = (model(ids[:, 11:], past_key_values=c).logits for c in (cache, want))
    assert_near("next logits", got, want, EXACT)


@torch.no_grad()
def test_copies_rows_and_a_new_beginning(model):
    ids, mask = random_ids(3, 8), torch.ones(3, 8, dtype=torch.long)
    mask[1, :3] = 0
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    copied = copy.deepcopy(cache)
    model(random_ids(3, 2, seed=1), past_key_values=copied)
    assert cache.get_seq_length() == 8 and copied.get_seq_length() == 10
    want = model(random_ids(3, 1, seed=2), past_key_values=copy.deepcopy(cache)).logits

    order = torch.tensor([2, 0, 1])
    for change in ("reorder_cache", "batch_select_indices"):
        rows = copy.deepcopy(cache)
        getattr(rows, change)(order)
        got = model(random_ids(3, 1, seed=2)[order], past_key_values=rows).logits
        assert_near(change, got, want[order], EXACT)
    few = copy.deepcopy(cache)
    few.batch_select_indices(torch.tensor([1]))
    assert_near("one row", model(random_ids(3, 1, seed=2)[1:2], past_key_values=few).logits, want[1:2], EXACT)
    many = copy.deepcopy(cache)
    many.batch_repeat_interleave(2)
    got = model(random_ids(3, 1, seed=2).repeat_interleave(2, dim=0), past_key_values=many).logits
    assert_near("every row twice", got, want.repeat_interleave(2, dim=0), EXACT)

    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1 and not keys_and_values(cache)
    again = model(ids[:2], past_key_values=cache).logits
    assert_near("after a reset", again, model(ids[:2], use_cache=False).logits, EXACT)


@torch.no_grad()
def test_meta_tokens_are_computed_once_per_cache(model):
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: calls.append(tuple(args[0].shape[:2])))
    model.generate(random_ids(4, 6), max_new_tokens=3, do_sample=False)
    assert calls == [(1, META), (4, 6), (4, 1), (4, 1)]


@torch.no_grad()
def test_a_change_of_the_weights_reaches_the_meta_tokens(model):
    ids = random_ids(1, 5)
    model(ids)
    for change in (
        lambda w: w.data.mul_(1.5),  # which no version counts
        lambda w: w.mul_(0.5),
    ):
        change(model.model.layers[0].mamba.in_proj.weight)
        assert_near("logits", model(ids, use_cache=True).logits, model(ids, use_cache=False).logits, EXACT)


def test_gradients_reach_the_meta_tokens_through_a_cache(model):
    def gradient(use_cache: bool):
        model.zero_grad()
        model(random_ids(2, 6), use_cache=use_cache).logits.square().sum().backward()
        return model.model.memory_tokens.grad.clone()

    assert_near("gradient", gradient(True), gradient(False), EXACT)


def test_two_conversations_in_one_model_do_not_meet(model):
    ids = random_ids(2, 9)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        caches = [new_cache(model), new_cache(model)]
        pieces: list[list[torch.Tensor]] = [[], []]
        for start in range(0, 9, 3):
            for row, cache in enumerate(caches):
                out = model(ids[row : row + 1, start : start + 3], past_key_values=cache)
                pieces[row].append(out.logits[0])
    assert_near("logits", torch.stack([torch.cat(row) for row in pieces]), want, EXACT)
