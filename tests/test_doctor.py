"""The doctor's cache table: what it says is what a filled cache holds."""

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_ssm import HydraConfig, HymbaConfig, HymbaForCausalLM, Mamba2Config, Mamba2ForCausalLM, MambaConfig
from hf_ssm.cli import app
from hf_ssm.doctor import cache_sizes

HYMBA = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_memory_tokens": 3, "sliding_window": 6, "global_attn_idx": [0, 4],
    "kv_reuse_group": [[1, 2]], "mamba_d_state": 4, "max_position_embeddings": 64, "orig_max_position_embeddings": 64,
}  # fmt: skip


def filled(model, context: int):
    with torch.no_grad():
        return model.eval()(torch.ones(1, context, dtype=torch.long), use_cache=True).past_key_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context", [1, 6, 7, 20])
def test_hymba_cache_is_as_large_as_said(context, dtype):
    config = HymbaConfig(**HYMBA, dtype=dtype)
    cache = filled(HymbaForCausalLM(config).to(dtype), context)
    keys = [t for layer in cache.layers if hasattr(layer, "keys") for t in (layer.keys, layer.values)]
    keys += [t for meta in cache.meta if meta.keys is not None for t in (meta.keys, meta.values)]
    states = [t for layer in cache.layers for t in (layer.conv_states[0], layer.recurrent_states[0])]
    sizes, full = cache_sizes(config, context)
    assert sum(size.keys for size in sizes) == sum(t.nbytes for t in keys)
    assert sum(size.states for size in sizes) == sum(t.nbytes for t in states)
    assert [size.layers for size in sizes] == [2, 2, 1]
    assert full == 5 * (context + 3) * (2 * 4 + 2 * 8) * dtype.itemsize


def test_recurrent_cache_does_not_grow():
    config = Mamba2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, head_dim=8, state_size=4, dtype="float32"
    )
    cache = filled(Mamba2ForCausalLM(config), 10)
    held = sum(t.nbytes for layer in cache.layers for t in (layer.conv_states[0], layer.recurrent_states[0]))
    for context in (1, 10_000):
        (size,), full = cache_sizes(config, context)
        assert (size.layers, size.states, size.keys, full) == (3, held, 0, None)


def test_cache_command(tmp_path):
    HymbaConfig(**HYMBA).save_pretrained(tmp_path)
    shown = CliRunner().invoke(app, ["doctor", "--cache", str(tmp_path), "--context", "20"])
    assert shown.exit_code == 0, shown.output
    assert "attention to 6 tokens" in shown.stdout and "times as much" in shown.stdout
    report = CliRunner().invoke(app, ["doctor", "--cache", str(tmp_path / "config.json"), "--context", "20", "--json"])
    found = json.loads(report.stdout)
    assert sum(size["layers"] for size in found["layers"]) == 5
    assert found["full_attention"] == 5 * 23 * 24 * 4


@pytest.mark.parametrize(
    ("config", "context", "message"),
    [
        (HydraConfig(hidden_size=16, head_dim=8, num_hidden_layers=1), 10, "'hydra' has no cache of ours; mamba"),
        (MambaConfig(hidden_size=16, num_hidden_layers=1), 0, "--context 0: give at least one token"),
    ],
)
def test_errors(config, context, message):
    with pytest.raises(ValueError, match=message):
        cache_sizes(config, context)
