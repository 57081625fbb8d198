"""Caches as files: what comes back goes on with the same bits, and what belongs to something else is refused."""

import copy
import json
import time

import pytest
import torch
from models.helpers import DECODERS, random_ids, tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_ssm
from hf_ssm.cache import RecurrentStaticCache
from hf_ssm.state_files import prefill, weights_fingerprint

DTYPES = [torch.float32, torch.bfloat16]


def read(model, batch: int = 1, seqlen: int = 50, **how):
    return prefill(model, random_ids(batch, seqlen), piece=16, **how)


@torch.no_grad()
def logits_after(model, cache, ids):
    """Of new tokens, first several at once, then one by one."""
    out = [model(ids[:, :5], past_key_values=cache).logits]
    out += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(5, ids.shape[1])]
    return torch.cat(out, dim=1)


def rewrite(path, **changes) -> None:
    """The same file with other metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, metadata | changes)


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", DECODERS)
def test_a_loaded_cache_goes_on_with_the_same_bits(tmp_path, model_type, dtype):
    model = tiny(model_type, dtype=dtype)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, :7] = 0
    cache = read(model, batch=2, attention_mask=mask)
    hf_ssm.save_cache(cache, tmp_path / "doc.safetensors", model)
    loaded = hf_ssm.load_cache(tmp_path / "doc.safetensors", model)

    assert type(loaded) is type(cache) and loaded.get_seq_length() == 50 and loaded.batch_size == 2
    held, want = loaded._tensors(), cache._tensors()
    assert held.keys() == want.keys()
    for name, tensor in held.items():
        assert tensor.dtype == want[name].dtype and torch.equal(tensor, want[name]), name
    ids = random_ids(2, 12, seed=1)
    assert torch.equal(logits_after(model, loaded, ids), logits_after(model, cache, ids))
    assert [path.name for path in tmp_path.iterdir()] == ["doc.safetensors"]


@pytest.mark.parametrize("model_type", DECODERS)
def test_prefill_in_pieces_is_one_pass(model_type):
    model = tiny(model_type, dtype=torch.float64)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, :7], mask[1, 20:40] = 0, 0
    ids = random_ids(2, 53)
    with torch.no_grad():
        cache = prefill(model, ids[:, :50], mask, piece=16)
        got = model(ids[:, 50:], past_key_values=cache).logits
        want = model(ids, attention_mask=torch.nn.functional.pad(mask, (0, 3), value=1)).logits[:, 50:]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("model_type", DECODERS)
def test_generate_reads_only_what_is_new(tmp_path, model_type):
    model, document, question = tiny(model_type), random_ids(1, 50), random_ids(1, 6, seed=1)
    hf_ssm.save_cache(read(model), tmp_path / "doc.safetensors", model)
    want = model.generate(torch.cat([document, question], dim=1), max_new_tokens=8, do_sample=False)[:, 56:]

    cache = hf_ssm.load_cache(tmp_path / "doc.safetensors", model)
    got = model.generate(question, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(got[:, 6:], want) and torch.equal(got[:, :6], question)


@pytest.mark.parametrize("model_type", DECODERS)
def test_branches_and_rows(tmp_path, model_type):
    model, questions = tiny(model_type), random_ids(3, 6, seed=1)
    hf_ssm.save_cache(read(model, batch=2), tmp_path / "two.safetensors", model)
    cache = hf_ssm.load_cache(tmp_path / "two.safetensors", model)
    cache.batch_select_indices(torch.tensor([1]))
    alone = [logits_after(model, copy.deepcopy(cache), question[None]) for question in questions]
    cache.batch_repeat_interleave(3)
    torch.testing.assert_close(logits_after(model, cache, questions), torch.cat(alone))


@pytest.mark.parametrize("model_type", DECODERS)
def test_the_backbone_and_its_heads_share_files(tmp_path, model_type):
    model = tiny(model_type)
    hf_ssm.save_cache(read(model), tmp_path / "doc.safetensors", model.base_model)
    assert hf_ssm.load_cache(tmp_path / "doc.safetensors", model).get_seq_length() == 50


def test_a_saved_and_loaded_model_takes_its_state(tmp_path):
    model = tiny("mamba")
    hf_ssm.save_cache(read(model), tmp_path / "doc.safetensors", model)
    model.save_pretrained(tmp_path / "model")
    again = hf_ssm.MambaForCausalLM.from_pretrained(tmp_path / "model")
    assert hf_ssm.load_cache(tmp_path / "doc.safetensors", again).get_seq_length() == 50


def test_a_long_text_is_a_small_file_that_loads_in_milliseconds(tmp_path):
    config = hf_ssm.Mamba2Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, head_dim=32, state_size=64, n_groups=1, chunk_size=128
    )
    model = hf_ssm.Mamba2ForCausalLM(config).eval()
    path = tmp_path / "doc.safetensors"
    hf_ssm.save_cache(prefill(model, random_ids(1, 100_000, vocab_size=64)), path, model)
    assert path.stat().st_size < 2e5
    hf_ssm.load_cache(path, model)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        cache = hf_ssm.load_cache(path, model)
        times.append(time.perf_counter() - start)
    assert cache.get_seq_length() == 100_000
    assert min(times) < 0.1


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    model = tiny("mamba")
    path = tmp_path / "doc.safetensors"
    hf_ssm.save_cache(read(model), path, model)
    before = path.read_bytes()

    def full_disk(tensors, temporary, metadata):
        temporary.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_ssm.state_files.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        hf_ssm.save_cache(read(model), path, model)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def saved(tmp_path):
    model = tiny("mamba2")
    path = tmp_path / "doc.safetensors"
    hf_ssm.save_cache(read(model), path, model)
    return model, path


def test_files_of_other_models_are_refused(saved):
    _, path = saved
    with pytest.raises(ValueError, match=r"is the state of a mamba2 model, this one is mamba$"):
        hf_ssm.load_cache(path, tiny("mamba"))
    with pytest.raises(ValueError, match=r"another model: state_size \d+, here 24"):
        hf_ssm.load_cache(path, tiny("mamba2", state_size=24))
    with pytest.raises(ValueError, match="another model: norm_before_gate False, here True"):
        hf_ssm.load_cache(path, tiny("mamba2", norm_before_gate=True))  # which no weight shows
    with pytest.raises(ValueError, match="of the same shape with other weights"):
        hf_ssm.load_cache(path, tiny("mamba2", seed=1))
    with pytest.raises(ValueError, match=r"in float32, and this one is in bfloat16.*dtype=float32"):
        hf_ssm.load_cache(path, tiny("mamba2").to(torch.bfloat16))
    assert hf_ssm.load_cache(path, tiny("mamba2", chunk_size=8)).get_seq_length() == 50  # a matter of speed


def test_training_changes_the_fingerprint():
    model = tiny("hymba")
    before = weights_fingerprint(model)
    assert weights_fingerprint(copy.deepcopy(model)) == before == weights_fingerprint(model.base_model)
    model(random_ids(1, 8), labels=random_ids(1, 8)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert weights_fingerprint(model) != before


def test_adapters_count(tmp_path):
    peft = pytest.importorskip("peft")
    model, plain, adapted = tiny("mamba2"), tmp_path / "plain.safetensors", tmp_path / "adapted.safetensors"
    hf_ssm.save_cache(read(model), plain, model)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["in_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, lora).eval()
    cache = read(model)
    hf_ssm.save_cache(cache, adapted, model)
    ids = random_ids(1, 12, seed=1)
    assert torch.equal(logits_after(model, hf_ssm.load_cache(adapted, model), ids), logits_after(model, cache, ids))
    with pytest.raises(ValueError, match="with other weights"):
        hf_ssm.load_cache(plain, model)
    with pytest.raises(ValueError, match="with other weights"):
        hf_ssm.load_cache(plain, model.merge_and_unload())


def test_files_that_are_no_states_are_refused(saved, tmp_path):
    model, path = saved
    with pytest.raises(FileNotFoundError, match=r"no such file: .*missing"):
        hf_ssm.load_cache(tmp_path / "missing.safetensors", model)
    with pytest.raises(FileNotFoundError, match="no such file"):
        hf_ssm.load_cache(tmp_path, model)
    whole = path.read_bytes()
    for size in (0, 4, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is no state file, or is not whole"):
            hf_ssm.load_cache(path, model)
    path.write_text("a text, not tensors" * 100)
    with pytest.raises(ValueError, match="is no state file"):
        hf_ssm.load_cache(path, model)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="safetensors, but not of a cache"):
        hf_ssm.load_cache(tmp_path / "model" / "model.safetensors", model)


def test_other_versions_are_refused(saved):
    model, path = saved
    rewrite(path, hf_ssm_state="2")
    with pytest.raises(ValueError, match=r"has version 2 of the state format, and this hf-ssm reads version 1"):
        hf_ssm.load_cache(path, model)


def test_metadata_say_what_the_file_is(saved):
    with safe_open(saved[1], framework="pt") as file:
        metadata = file.metadata()
    assert metadata["hf_ssm_state"] == "1" and metadata["model_type"] == "mamba2" and metadata["dtype"] == "float32"
    fields = json.loads(metadata["config"])
    assert {"hidden_size", "state_size", "head_dim", "num_hidden_layers", "norm_before_gate"} <= set(fields)
    assert not {"initializer_range", "use_cache", "architectures"} & set(fields)


def test_what_cannot_be_saved(tmp_path):
    model, path = tiny("mamba"), tmp_path / "doc.safetensors"
    with pytest.raises(ValueError, match="the cache is empty"):
        hf_ssm.save_cache(hf_ssm.RecurrentCache(model.config), path, model)
    with pytest.raises(ValueError, match="a static cache is a place in memory"):
        hf_ssm.save_cache(RecurrentStaticCache(model.config, 8), path, model)
    with pytest.raises(ValueError, match="it belongs to another model"):
        hf_ssm.save_cache(read(tiny("mamba", state_size=24)), path, model)
    with pytest.raises(ValueError, match="it belongs to another model"):
        hf_ssm.save_cache(read(tiny("hymba")), path, model)
    encoder = hf_ssm.HydraModel(hf_ssm.HydraConfig(vocab_size=8, hidden_size=8, head_dim=8, num_hidden_layers=1))
    with pytest.raises(ValueError, match="HydraModel is not one of hf-ssm's models that generate"):
        hf_ssm.load_cache(path, encoder)
    with torch.device("meta"):
        elsewhere = hf_ssm.MambaForCausalLM(model.config)
    with pytest.raises(ValueError, match="is not in memory"):
        hf_ssm.save_cache(read(model), path, elsewhere)
    with pytest.raises(OSError, match=r"cannot write .*missing/doc.safetensors"):
        hf_ssm.save_cache(read(model), tmp_path / "missing" / "doc.safetensors", model)
    assert not path.exists()
