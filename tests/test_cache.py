"""The cache by itself, with states that are only numbers: length, rollback, rows, and what is refused."""

import copy
from functools import partial

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MambaConfig, StaticCache

from hf_ssm import Mamba2Config, RecurrentCache
from hf_ssm.cache import check_states

CONFIG = Mamba2Config(vocab_size=8, hidden_size=8, num_hidden_layers=2, head_dim=4, state_size=3, n_groups=1)
LAYERS = range(2)


def state_after(tokens: int, layer: int = 0, batch: int = 2):
    """States that say which layer they belong to and how many tokens were seen."""
    value = 100.0 * layer + tokens
    return torch.full((batch, 4, 5), value), torch.full((batch, 2, 3), value)


def feed(cache, tokens: int) -> None:
    before = cache.get_seq_length()
    for layer in LAYERS:
        cache.advance(layer, state_after(before + tokens, layer), tokens, partial(replay, layer, before))


def replay(layer: int, before: int, tokens: int):
    return state_after(before + tokens, layer)


def holds(cache, tokens: int) -> None:
    assert cache.get_seq_length() == tokens
    for layer in LAYERS:
        states = cache.states(layer)
        if tokens == 0:
            assert states is None
        else:
            for got, want in zip(states, state_after(tokens, layer), strict=True):
                assert torch.equal(got, want)


def test_length_and_layout():
    cache = RecurrentCache(CONFIG)
    holds(cache, 0)
    assert cache.batch_size == -1
    feed(cache, 5)
    feed(cache, 1)
    holds(cache, 6)
    assert cache.batch_size == 2
    assert cache.get_mask_sizes(3) == (9, 0)
    assert cache.layers[0].conv_states[0].shape == (2, 5, 4)  # (batch, channels, d_conv), as in transformers
    cache.reset()
    holds(cache, 0)
    feed(cache, 2)
    holds(cache, 2)


@pytest.mark.parametrize("calls", [[3], [1, 1, 1], [2, 4, 1], [5, 0, 2]])
def test_rollback_to_every_length(calls):
    for back in range(sum(calls) + 1):
        cache = RecurrentCache(CONFIG)
        feed(cache, 4)
        cache.activate_past_recording()
        for tokens in calls:
            feed(cache, tokens)
        cache.crop(-back)
        holds(cache, 4 + sum(calls) - back)
        if back < sum(calls):
            with pytest.raises(RuntimeError, match="0 were recorded"):
                cache.crop(-1)  # what was recorded has been forgotten
        feed(cache, 1)
        cache.crop(-1)
        holds(cache, 4 + sum(calls) - back)


def test_rollback_to_nothing():
    cache = RecurrentCache(CONFIG)
    cache.activate_past_recording()
    feed(cache, 3)
    cache.crop(-3)
    holds(cache, 0)


def test_rollback_is_refused_where_it_cannot_be_exact():
    cache = RecurrentCache(CONFIG)
    feed(cache, 3)
    with pytest.raises(RuntimeError, match=r"cannot forget 1 tokens: 0 were recorded.*activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    feed(cache, 2)
    with pytest.raises(RuntimeError, match="cannot forget 3 tokens: 2 were recorded"):
        cache.crop(-3)
    with pytest.raises(ValueError, match="negative number"):
        cache.crop(2)
    holds(cache, 5)
    with pytest.raises(RuntimeError, match="no way to replay"):
        cache.advance(0, state_after(6), 1)


def test_recording_ends():
    cache = RecurrentCache(CONFIG)
    cache.activate_past_recording()
    feed(cache, 3)
    cache.stop_recording()
    assert not any(cache.is_recording_past(layer) for layer in LAYERS)
    feed(cache, 1)
    with pytest.raises(RuntimeError, match="0 were recorded"):
        cache.crop(-1)


def test_rows_are_selected_repeated_and_reordered():
    cache = RecurrentCache(CONFIG)
    for layer in LAYERS:
        conv = torch.arange(3.0)[:, None, None].expand(3, 4, 5)
        cache.advance(layer, (conv, conv[:, :2, :3]), 7)
    rows = lambda: cache.states(1)[1][:, 0, 0].tolist()  # noqa: E731
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert rows() == [2, 0]
    cache.batch_repeat_interleave(2)
    assert rows() == [2, 2, 0, 0]
    cache.reorder_cache(torch.tensor([3, 0, 1, 1]))
    assert rows() == [0, 2, 2, 2]
    assert cache.get_seq_length() == 7 and cache.batch_size == 4


def test_selecting_rows_forgets_the_recording():
    cache = RecurrentCache(CONFIG)
    cache.activate_past_recording()
    feed(cache, 3)
    cache.batch_repeat_interleave(2)
    with pytest.raises(RuntimeError, match="0 were recorded"):
        cache.crop(-1)


def test_copies_are_independent():
    cache = RecurrentCache(CONFIG)
    feed(cache, 3)
    other = copy.deepcopy(cache)
    feed(other, 2)
    holds(cache, 3)
    holds(other, 5)


def test_states_keep_their_graph():
    cache = RecurrentCache(CONFIG)
    conv, scan = (state.requires_grad_() for state in state_after(1))
    cache.advance(0, (conv * 2, scan * 3), 1)
    got = cache.states(0)
    (got[0].sum() + got[1].sum()).backward()
    assert (conv.grad == 2).all() and (scan.grad == 3).all()


@pytest.mark.parametrize("make", [lambda: DynamicCache(config=CONFIG), lambda: DynamicCache()], ids=["config", "bare"])
def test_a_new_cache_of_transformers_is_adopted(make):
    cache = make()
    assert RecurrentCache.adopt(cache, CONFIG) is cache
    assert isinstance(cache, RecurrentCache)
    feed(cache, 3)
    holds(cache, 3)
    assert RecurrentCache.adopt(cache, CONFIG) is cache
    holds(cache, 3)


def test_a_cache_that_was_asked_to_record_still_does():
    cache = DynamicCache(config=CONFIG)
    cache.activate_past_recording()
    RecurrentCache.adopt(cache, CONFIG)
    feed(cache, 3)
    cache.crop(-2)
    holds(cache, 1)


def test_caches_of_other_models_are_refused():
    llama = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2)
    with pytest.raises(ValueError, match=r"layer 0 .* another model"):
        RecurrentCache.adopt(DynamicCache(config=llama), CONFIG)
    with pytest.raises(ValueError, match="has 3 layers and this model has 2"):
        RecurrentCache.adopt(RecurrentCache(Mamba2Config(**{**CONFIG.to_dict(), "num_hidden_layers": 3})), CONFIG)
    with pytest.raises(ValueError, match=r"layer 0 .* is a StaticLayer, .* another model"):
        RecurrentCache.adopt(StaticCache(config=llama, max_cache_len=4), CONFIG)
    with pytest.raises(ValueError, match="expected a RecurrentCache"):
        RecurrentCache.adopt((torch.zeros(1),), CONFIG)
    filled = DynamicCache(config=MambaConfig(num_hidden_layers=2))
    filled.layers[0].update_conv_state(torch.ones(1, 5, 4), conv_kernel_size=4)
    with pytest.raises(ValueError, match="filled by another implementation"):
        RecurrentCache.adopt(filled, CONFIG)


def test_states_of_another_shape_are_refused():
    conv, scan = state_after(1)
    device = torch.device("cpu")
    check_states((conv, scan), (2, 4, 5), (2, 2, 3), device)
    with pytest.raises(ValueError, match="holds 2 rows and the input has 3"):
        check_states((conv, scan), (3, 4, 5), (3, 2, 3), device)
    with pytest.raises(ValueError, match=r"scan state has shape \(2, 2, 3\), this model's is \(2, 2, 9\)"):
        check_states((conv, scan), (2, 4, 5), (2, 2, 9), device)
    with pytest.raises(ValueError, match="is on cpu, the input is on meta"):
        check_states((conv, scan), (2, 4, 5), (2, 2, 3), torch.device("meta"))
