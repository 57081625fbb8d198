"""A long prompt is prefilled in memory that does not grow with it."""

import subprocess
import sys
import textwrap

import pytest

from .helpers import DECODERS

CHUNK = 512
SIZES = {  # Hymba without its global layers, whose keys and values are all kept
    "hymba": {
        "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 128, "sliding_window": 64,
        "num_memory_tokens": 8, "max_position_embeddings": 32768, "mamba_d_state": 16,
    },
    "mamba": {"state_size": 16},
    "mamba2": {"state_size": 16, "head_dim": 32, "n_groups": 1},
}  # fmt: skip
# Above what a prompt of a few chunks needs. One prompt token costs 24 bytes in ids and masks; a single layer's
# activations for the whole long prompt would be some 100 MB at this size, and the logits 200 MB.
ALLOWED_MB = 24


def peak_mb(model_type: str, tokens: int) -> float:
    code = f"""
        import resource, sys, torch
        torch.set_num_threads(1)
        import hf_ssm
        from hf_ssm import registry
        sizes = dict(hidden_size=128, num_hidden_layers=2, vocab_size=2048) | {SIZES[model_type]!r}
        architecture = registry.ARCHITECTURES["{model_type}"]
        config = registry.load(architecture.config)(**sizes)
        model = registry.load(architecture.models["AutoModelForCausalLM"])(config).eval()
        ids = torch.randint(1, 2048, (1, {tokens}))
        out = model.generate(ids, max_new_tokens=2, do_sample=False, prefill_chunk_size={CHUNK}, eos_token_id=None)
        assert out.shape[1] == {tokens} + 2
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_long_prompt_in_chunks(model_type):
    pytest.importorskip("resource")
    short, long = peak_mb(model_type, 4 * CHUNK), peak_mb(model_type, 20_000)
    assert long - short < ALLOWED_MB, f"{long:.0f} MB, against {short:.0f} MB for four chunks"
