"""Bad input gets an error that says what to do, or a result that is documented."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_ssm
from hf_ssm.convert import UnknownCheckpoint, convert

from .helpers import (
    DECODERS,
    named,
    new_cache,
    one_layer,
    random_ids,
    same_states,
    states,
    tiny,
    tiny_config,
    transformers_class,
)

DATA = Path(__file__).parents[1] / "data" / "models"
every_model = pytest.mark.parametrize("model_type", DECODERS)
BadConfig = (StrictDataclassClassValidationError, StrictDataclassFieldValidationError)


# --- configurations --------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "state_size", "num_hidden_layers", "conv_kernel"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_are_at_least_one(model_type, field, value):
    with pytest.raises(BadConfig, match=named(model_type, field)):
        tiny_config(model_type, **{field: value})


@every_model
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", "many"),
        ("hidden_size", 12.5),
        ("num_hidden_layers", None),
        ("use_bias", "yes"),
        ("layer_norm_epsilon", "small"),
        ("hidden_act", "gelu"),
        ("mlp_intermediate_size", -1),
        ("eos_token_id", "end"),
    ],
)
def test_odd_values_are_named(model_type, field, value):
    with pytest.raises(BadConfig, match=named(model_type, field)):
        tiny_config(model_type, **{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 7}, "expand \\* hidden_size = 24 must equal num_heads \\* head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": -6}, "head_dim"),
        ({"num_heads": 3}, "must equal num_heads"),
        ({"n_groups": 3}, "n_groups=3 must divide num_heads=4"),
        ({"n_groups": 0}, "n_groups"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"expand": -2}, "num_heads"),
        ({"expand": 1.3}, "expand"),
        ({"time_step_limit": (1.0,)}, "time_step_limit"),
        ({"time_step_limit": (2.0, 1.0)}, "time_step_limit"),
        ({"time_step_limit": (-1.0, 1.0)}, "time_step_limit"),
    ],
)
def test_mamba2_contradictions(changes, message):
    with pytest.raises(BadConfig, match=message):
        tiny_config("mamba2", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_step_rank": 0}, "time_step_rank"),
        ({"time_step_rank": "some"}, "time_step_rank"),
        ({"intermediate_size": -1}, "intermediate_size"),
        ({"expand": 0}, "intermediate_size"),
        ({"time_step_init_scheme": "zero"}, "time_step_init_scheme"),
    ],
)
def test_mamba_contradictions(changes, message):
    with pytest.raises(BadConfig, match=message):
        tiny_config("mamba", **changes)


@every_model
def test_unknown_fields_are_kept_as_everywhere_in_transformers(model_type):
    assert tiny_config(model_type, my_own_note="kept").to_dict()["my_own_note"] == "kept"


# --- calls -----------------------------------------------------------------------------------------------------------


@every_model
def test_ids_outside_the_vocabulary(model_type):
    model = tiny(model_type)
    for bad in (41, 10**6, -1):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 41"):
            model(torch.tensor([[1, bad, 2]]))
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 41"):
            model.generate(torch.tensor([[1, bad, 2]]), max_new_tokens=2)


@every_model
def test_ids_of_another_shape(model_type):
    model = tiny(model_type)
    with pytest.raises(ValueError, match=r"input_ids has shape \(3,\), expected \(batch, seqlen\)"):
        model(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(torch.ones(1, 2, dtype=torch.long), inputs_embeds=torch.ones(1, 2, model.config.hidden_size))


@every_model
@pytest.mark.parametrize("chunk", [None, 4])
def test_an_empty_prompt(model_type, chunk):
    with pytest.raises(ValueError, match="the prompt is empty: give at least one token"):
        tiny(model_type).generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2, prefill_chunk_size=chunk)


@every_model
@pytest.mark.parametrize("way", ["assisted", "lookup", "beams"])
def test_an_empty_prompt_in_every_way_of_decoding(model_type, way):
    model = tiny(model_type)
    kwargs = {
        "assisted": {"assistant_model": tiny(model_type)},
        "lookup": {"prompt_lookup_num_tokens": 2},
        "beams": {"num_beams": 2},
    }[way]
    with pytest.raises(ValueError, match="the prompt is empty: give at least one token"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2, **kwargs)


@every_model
@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (1, 5), (3, 5), (5,), (2, 1, 5), (2, 1, 5, 5)], ids=str)
@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_masks_of_a_wrong_shape(model_type, shape, auto_class):
    with pytest.raises(ValueError, match=r"attention_mask has shape .*, expected \(batch, seqlen\) = \(2, 5\)"):
        tiny(model_type, auto_class)(random_ids(2, 5), attention_mask=torch.ones(shape))


@every_model
def test_masks_of_a_wrong_shape_with_a_cache(model_type):
    model = tiny(model_type)
    cache = model(random_ids(2, 5)).past_key_values
    with pytest.raises(ValueError, match=r"expected .* \(2, 3\) or \(2, 8\), with the 5 tokens in the cache"):
        model(random_ids(2, 3), past_key_values=cache, attention_mask=torch.ones(2, 7))


@every_model
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32, torch.int8], ids=str)
def test_a_mask_of_any_type(model_type, dtype):
    model, ids = tiny(model_type), random_ids(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]])
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits, model(ids, attention_mask=mask).logits)


@every_model
def test_rows_of_a_wrong_shape(model_type):
    model, ids = tiny(model_type), random_ids(2, 5)
    with pytest.raises(ValueError, match="seq_idx has shape"):
        model(ids, seq_idx=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="position_ids has shape"):
        model(ids, position_ids=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"seq_idx is .*, expected an integer type"):
        model(ids, seq_idx=torch.zeros(2, 5))


@every_model
def test_a_cache_of_another_batch_or_model(model_type):
    model, ids = tiny(model_type), random_ids(2, 5)
    cache = model(ids).past_key_values
    before = [state.clone() for state in states(cache)]
    with pytest.raises(ValueError, match="holds 2 rows and the input has 3"):
        model(random_ids(3, 1), past_key_values=cache)
    for other in (tiny(model_type, state_size=7), tiny(model_type, conv_kernel=3)):
        with pytest.raises(ValueError, match="belongs to another model"):
            other(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=rf"has {model.config.num_hidden_layers} layers and this model has 1"):
        tiny(model_type, **one_layer(model_type))(ids, past_key_values=cache)
    for other_type in DECODERS:
        if other_type != model_type:
            with pytest.raises(ValueError, match="belongs to another model"):
                tiny(other_type)(ids, past_key_values=cache)
    assert cache.get_seq_length() == 5
    for state, was in zip(states(cache), before, strict=True):
        assert torch.equal(state, was), "a refused call leaves the cache as it was"


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])  # transformers has no Hymba
def test_a_cache_that_transformers_filled(model_type, tmp_path):
    model = tiny(model_type, use_bias=False)
    model.save_pretrained(tmp_path)
    theirs = transformers_class(model_type).from_pretrained(tmp_path)
    with torch.no_grad():
        cache = theirs(random_ids(1, 5), use_cache=True).cache_params
    with pytest.raises(ValueError, match="filled by another implementation"):
        model(random_ids(1, 1), past_key_values=cache)


@every_model
def test_what_is_no_cache(model_type):
    with pytest.raises(ValueError, match=r"past_key_values is a tuple, expected a \w+Cache\(config\)"):
        tiny(model_type)(random_ids(1, 3), past_key_values=((torch.zeros(1), torch.zeros(1)),))


@every_model
def test_assisted_decoding_of_padded_new_ids_is_refused(model_type):
    model = tiny(model_type)
    cache = new_cache(model)
    model(random_ids(1, 6), past_key_values=cache)
    mask = torch.tensor([[1] * 6 + [0, 1, 1]])
    with pytest.raises(ValueError, match="give the ids of the whole conversation"):
        model.generate(
            random_ids(1, 3), attention_mask=mask, past_key_values=cache, max_new_tokens=2, prompt_lookup_num_tokens=2
        )


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(model_type, tmp_path):
    folder = tmp_path / "saved"
    tiny(model_type).save_pretrained(folder)
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)


@every_model
@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_truncated_safetensors(saved, keep):
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match=r"safetensors file cannot be read .*truncated"):
        load(saved)


@every_model
def test_foreign_files_in_the_place_of_weights(saved):
    file = saved / "model.safetensors"
    file.write_text("<html>404 not found</html>")
    with pytest.raises(ValueError, match="safetensors file cannot be read"):
        load(saved)
    save_file({"something": torch.zeros(3)}, file, metadata={"format": "pt"})
    _, info = load(saved)
    assert "something" in info["unexpected_keys"] and len(info["missing_keys"]) > 10
    with pytest.raises(UnknownCheckpoint, match=r"the weights do not fit .*missing keys: .* and \d+ more"):
        convert(saved, saved.parent / "converted")
    assert not (saved.parent / "converted").exists()


@every_model
def test_missing_and_unexpected_keys_are_told(saved):
    file = saved / "model.safetensors"
    weights = load_file(file)
    dropped = next(name for name in weights if "A_log" in name)
    del weights[dropped]
    weights["extra.weight"] = torch.zeros(2)
    save_file(weights, file, metadata={"format": "pt"})
    model, info = load(saved)
    assert set(info["missing_keys"]) == {dropped} and set(info["unexpected_keys"]) == {"extra.weight"}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@every_model
def test_weights_of_another_size(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {named(config["model_type"], "state_size"): 6}))
    with pytest.raises(RuntimeError, match=r"size mismatch|ignore_mismatched_sizes"):
        load(saved)


@every_model
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_weights(saved, bad):
    file = saved / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "out_proj.weight" in name)
    weights[name][0, 1] = bad
    if bad == float("inf"):
        weights[name][0, 2] = -bad  # whose sum is NaN
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} holds NaN: this checkpoint is broken"):
        load(saved)


@every_model
def test_a_configuration_that_does_not_hold(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {named(config["model_type"], "state_size"): -4}))
    with pytest.raises(BadConfig, match=named(config["model_type"], "state_size")):
        load(saved)


@every_model
def test_saving_where_it_is_not_possible(model_type, tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises((OSError, AssertionError, ValueError)):
        tiny(model_type).save_pretrained(file / "folder")
    assert file.read_text() == "in the way"


def test_original_folders_of_the_other_architecture():
    with pytest.raises(UnknownCheckpoint, match="model type 'mamba2', not 'mamba'"):
        hf_ssm.MambaForCausalLM.from_pretrained(DATA / "mamba2_ngroups1")
    with pytest.raises(UnknownCheckpoint, match="model type 'mamba', not 'mamba2'"):
        hf_ssm.Mamba2ForCausalLM.from_pretrained(DATA / "mamba1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_layer_idx": [1]}, "hybrids with attention layers are not supported"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer='Mamba3'"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 16}}, "only a scan over all channels"),
        ({"ssm_cfg": {"layer": "Mamba2", "surprise": 1}}, "surprise"),
    ],
)
def test_original_folders_that_these_models_cannot_be(change, message, tmp_path):
    folder = tmp_path / "original"
    shutil.copytree(DATA / "mamba2_ngroups1", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnknownCheckpoint, match=message):
        hf_ssm.Mamba2ForCausalLM.from_pretrained(folder)
    with pytest.raises(UnknownCheckpoint, match=message):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_conversion_of_what_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(UnknownCheckpoint, match="not valid JSON"):
        convert(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnknownCheckpoint, match="model_type is 'llama', expected one of"):
        convert(tmp_path, tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists already"):
        convert(DATA / "mamba1", DATA / "mamba2_options")
    with pytest.raises(ValueError, match="no torch dtype"):
        convert(DATA / "mamba1", tmp_path / "out", dtype="float31")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_classifier_has_no_original_format(tmp_path):
    tiny("mamba", "AutoModelForSequenceClassification").save_pretrained(tmp_path / "classifier")
    with pytest.raises(UnknownCheckpoint, match="language models only"):
        convert(tmp_path / "classifier", tmp_path / "out", to="original")
    assert [path.name for path in tmp_path.iterdir()] == ["classifier"]


@every_model
def test_no_tokens_in_a_classifier(model_type):
    with pytest.raises(ValueError, match="cannot classify a sequence of length 0"):
        tiny(model_type, "AutoModelForSequenceClassification")(torch.zeros(1, 0, dtype=torch.long))


@every_model
def test_generation_after_a_refusal_still_works(model_type):
    model, ids = tiny(model_type), random_ids(1, 4)
    cache = new_cache(model)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model.generate(torch.tensor([[1, 99]]), max_new_tokens=2, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model(ids, past_key_values=cache)
    same_states(cache, model(ids).past_key_values, 0.0)
