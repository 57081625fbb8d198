"""Hymba's configuration: NVIDIA's file as it is, ours for NVIDIA's code, and everything that contradicts itself."""

import copy
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig

import hf_ssm
from hf_ssm import HymbaConfig

from .helpers import TINY, new_cache, random_ids, same_states, tiny, tiny_config

BASE = Path(__file__).parents[1] / "data" / "models" / "hymba_base"
BadConfig = (StrictDataclassClassValidationError, StrictDataclassFieldValidationError)


@pytest.fixture
def published(tmp_path):
    """A folder as NVIDIA's."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(BASE / name, tmp_path)
    generation = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    generation |= {"transformers_version": "4.44.0", "use_cache": False}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def saved(model, folder) -> dict:
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_published_folder_loads_without_a_word(published, caplog):
    logging.getLogger("transformers").propagate = True
    with caplog.at_level(logging.WARNING):
        config = AutoConfig.from_pretrained(published)
        model, info = AutoModelForCausalLM.from_pretrained(published, output_loading_info=True)
    assert type(config) is HymbaConfig and type(model) is hf_ssm.HymbaForCausalLM
    assert not any(info.values()) and not caplog.records, caplog.text
    assert model.config._attn_implementation == "sdpa"
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_published_folder_generates_with_a_cache(published, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(published)
    assert model.config.use_cache and model.generation_config.use_cache
    out = model.generate(random_ids(1, 4), max_new_tokens=2, return_dict_in_generate=True)
    assert type(out.past_key_values) is hf_ssm.HybridMambaAttentionDynamicCache
    (published / "generation_config.json").unlink()
    assert AutoModelForCausalLM.from_pretrained(published).generation_config.use_cache
    # a wish is a wish
    without = AutoModelForCausalLM.from_pretrained(published, use_cache=False)
    assert not without.config.use_cache and not without.generation_config.use_cache
    wish = GenerationConfig(use_cache=False)
    assert not AutoModelForCausalLM.from_pretrained(published, generation_config=wish).generation_config.use_cache
    assert (
        model.generate(random_ids(1, 4), max_new_tokens=2, use_cache=False, return_dict_in_generate=True)[0]
        is not None
    )
    without.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert not again.config.use_cache and not again.generation_config.use_cache


def test_the_saved_file_has_what_both_read(published, tmp_path):
    before = json.loads((published / "config.json").read_text())
    after = saved(AutoModelForCausalLM.from_pretrained(published), tmp_path / "ours")
    assert set(before) - set(after) == {"auto_map", "torch_dtype"}, "no remote code lies beside it; now called dtype"
    changed = {"use_cache", "transformers_version", "auto_map", "torch_dtype"}
    assert {k: v for k, v in after.items() if k in before and k not in changed} == {
        k: v for k, v in before.items() if k not in changed
    }
    once_more = saved(AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), tmp_path / "again")
    assert once_more == after


def test_a_new_configuration_has_all_that_the_original_reads(tmp_path):
    """Its class has other defaults, and none for some fields."""
    before = json.loads((BASE / "config.json").read_text())
    after = saved(tiny("hymba"), tmp_path)
    optional = {"calc_logits_for_entire_prompt", "output_router_logits", "router_aux_loss_coef", "use_mamba_kernels"}
    assert set(before) - set(after) <= optional | {"auto_map", "torch_dtype"}
    assert after["conv_dim"] == {"0": 32, "1": 32, "2": 32} and after["layer_type"] == ["h"] * 3
    assert after["attn_implementation"] == "flex" and after["v_head_dim"] == 8 and after["seq_length"] == 128
    assert after["architectures"] == ["HymbaForCausalLM"]


def test_a_configuration_is_what_its_dictionary_says():
    config = tiny_config("hymba")
    for again in (HymbaConfig(**config.to_dict()), HymbaConfig.from_dict(config.to_dict()), copy.deepcopy(config)):
        assert again.to_dict() == config.to_dict()
        hf_ssm.HymbaForCausalLM(again)


def test_code_of_ours_may_lie_beside_the_file(tmp_path):
    """As transformers saves custom code."""
    model = type("Custom", (hf_ssm.HymbaForCausalLM,), {"_auto_class": "AutoModelForCausalLM"})(tiny_config("hymba"))
    assert "AutoModelForCausalLM" in saved(model, tmp_path)["auto_map"]


# --- contradictions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_reuse_group": [[2, 1]]}, r"\[2, 1\]: the first layer computes keys and values for later ones"),
        ({"kv_reuse_group": [[1, 2], [2]]}, "layer 2 is in groups 0 and 1"),
        ({"kv_reuse_group": [[1, 1]]}, "layer 1 is in groups 0 and 0"),
        ({"kv_reuse_group": [[1, 3]]}, "there is no layer 3 among 3"),
        ({"kv_reuse_group": [[-1, 2]]}, "there is no layer -1 among 3"),
        ({"kv_reuse_group": [[]]}, "group 0 is empty"),
        ({"kv_reuse_group": [[0, 1]]}, "layer 1 sees a window and shares the keys of layer 0, which sees all tokens"),
        ({"global_attn_idx": [2]}, "layer 2 sees all tokens and shares the keys of layer 1, which sees a window"),
        (
            {"kv_reuse_group": None, "kv_reuse_every_i_layer": 2},
            "layer 1 sees a window and shares the keys of layer 0",
        ),
        ({"global_attn_idx": [3]}, "there is no layer 3 among 3"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"sliding_window": -1}, "sliding_window=-1 must be at least 1"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 must divide hidden_size=16"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must divide num_attention_heads=4"),
        ({"mamba_expand": 1.2}, "num_attention_heads=4 must divide mamba_expand"),
        ({"mamba_expand": 0}, "mamba_expand"),
        ({"num_attention_heads": 16, "num_key_value_heads": 16}, "= 1 must be even for a rotation"),
        ({"num_attention_heads": 8}, "needs a head size of at least 4, not 2"),
        ({"mamba_dt_rank": 0}, "mamba_dt_rank"),
        ({"mamba_dt_rank": "some"}, "mamba_dt_rank"),
        ({"num_memory_tokens": -1}, "num_memory_tokens"),
        ({"num_experts": 2}, "num_experts=2: only 1 is supported"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2: only 1 is supported"),
        ({"num_mamba": 2}, "num_mamba=2: only 1 is supported"),
        ({"memory_tokens_interspersed_every": 8}, "memory_tokens_interspersed_every=8: only 0 is supported"),
        ({"kv_weight_reuse": True}, "kv_weight_reuse=True: only False is supported"),
        ({"attn_hidden_size": 8}, "attn_hidden_size=8"),
        ({"kq_head_dim": 8}, "kq_head_dim=8"),
        ({"layer_type": ["h", "m", "h"]}, "all 3 layers must be 'h'"),
        ({"kq_norm": None}, "kq_norm"),
        ({"kq_norm": "layer"}, "kq_norm='layer' must be 'none', 'rms' or 'perhead-rms'"),
        ({"rope_type": "yarn"}, "rope_type='yarn' must be"),
        ({"orig_max_position_embeddings": None}, "rope_type='ntk' needs orig_max_position_embeddings"),
        ({"orig_max_position_embeddings": 256}, "must not be above"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"mlp_hidden_act": "sigmoidal"}, "mlp_hidden_act='sigmoidal'"),
        ({"sliding_window": "wide"}, "sliding_window"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_contradictions(changes, message):
    with pytest.raises(BadConfig, match=message):
        HymbaConfig(**TINY["hymba"] | changes)


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope_type", ["default", "ntk"])
def test_positions_beyond_the_rotation(rope_type):
    model = tiny("hymba", max_position_embeddings=10, orig_max_position_embeddings=10, rope_type=rope_type)
    ids, message = random_ids(1, 11), r"token 10 of a sequence is outside 0 ... 9 \(max_position_embeddings\)"
    with torch.no_grad():
        assert model(ids[:, :10]).logits.shape[1] == 10
        packed = model(torch.cat([ids[:, :10], ids[:, :10]], dim=1), seq_idx=torch.arange(20)[None] // 10)
        assert packed.logits.shape[1] == 20, "a position is one of a sequence"
        for use_cache in (False, True):
            with pytest.raises(ValueError, match=message):
                model(ids, use_cache=use_cache)
        cache = model(ids[:, :10]).past_key_values
        before = copy.deepcopy(cache)
        with pytest.raises(ValueError, match=message):
            model(ids[:, :1], past_key_values=cache)
        same_states(cache, before, 0.0)
        assert cache.get_seq_length() == 10, "a refused call leaves the cache as it was"


@torch.no_grad()
def test_a_cache_of_another_configuration():
    """The layers' kinds, window, heads, meta tokens: each must be the model's."""
    ids, model = random_ids(1, 6), tiny("hymba")
    others = {
        "window": tiny("hymba", sliding_window=5),
        "global layers": tiny("hymba", global_attn_idx=[0, 1, 2]),
        "sharing": tiny("hymba", kv_reuse_group=None),
        "heads": tiny("hymba", num_key_value_heads=1),
        "meta tokens": tiny("hymba", num_memory_tokens=2),
        "no meta tokens": tiny("hymba", num_memory_tokens=0),
        "layers": tiny("hymba", num_hidden_layers=2, kv_reuse_group=None),
        "states": tiny("hymba", mamba_d_state=7),
    }
    for name, other in others.items():
        cache = model(ids).past_key_values
        before = copy.deepcopy(cache)
        with pytest.raises(ValueError, match="belongs to another model"):
            other(ids[:, :1], past_key_values=cache)
            pytest.fail(name)
        same_states(cache, before, 0.0)
        assert cache.get_seq_length() == 6


def test_a_cache_that_transformers_filled():
    model = tiny("hymba")
    cache = DynamicCache(config=model.config)
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(ValueError, match="filled by another implementation"):
        model(random_ids(1, 1), past_key_values=cache)


@torch.no_grad()
def test_a_cache_of_another_batch():
    model = tiny("hymba")
    cache = model(random_ids(2, 5)).past_key_values
    before = copy.deepcopy(cache)
    for rows in (1, 3):
        for mask in (None, torch.tensor([[0, 1]]).repeat(rows, 1)):
            with pytest.raises(ValueError, match=f"holds 2 rows and the input has {rows}"):
                model(random_ids(rows, 2), attention_mask=mask, past_key_values=cache)
    same_states(cache, before, 0.0)
    assert cache.get_seq_length() == 5 and cache.real(5) is None


def test_gradient_checkpointing_with_a_cache():
    model = tiny("hymba").train()
    model.gradient_checkpointing_enable()
    for kwargs in ({"use_cache": True}, {"past_key_values": new_cache(model)}):
        with pytest.raises(ValueError, match="gradient checkpointing"):
            model(random_ids(1, 4), **kwargs)
    assert model(random_ids(1, 4)).past_key_values is None


def test_weights_that_an_attention_does_not_have():
    model = tiny("hymba", attn_implementation="eager")
    ids = random_ids(2, 6)
    with torch.no_grad():
        weights = model(ids, output_attentions=True, use_cache=False).attentions
        assert [tuple(w.shape) for w in weights] == [(2, 4, 6, 9)] * 3
        for w in weights:
            assert (w.sum(-1) - 1).abs().max() < 1e-6
        assert (weights[0][0, 0, 5] > 0).all() and not weights[1][0, 0, 5, 3:5].any(), "the window is 3"
        model.set_attn_implementation("sdpa")
        assert model(ids, output_attentions=True).attentions is None
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="assisted decoding"):
        model.generate(
            ids[:1],
            max_new_tokens=2,
            prompt_lookup_num_tokens=2,
            output_attentions=True,
            return_dict_in_generate=True,
        )
