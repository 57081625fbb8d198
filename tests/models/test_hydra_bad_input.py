"""Bad input for Hydra gets an error that says what to do."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file

import hf_ssm
from hf_ssm.convert import UnknownCheckpoint

from .helpers import random_ids, tiny, tiny_config

BadConfig = (StrictDataclassClassValidationError, StrictDataclassFieldValidationError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel": 6}, "conv_kernel=6 must be odd"),
        ({"conv_kernel": 0}, "conv_kernel=0 must be at least 1"),
        ({"head_dim": 7}, r"expand \* hidden_size = 24 must be a multiple of head_dim = 7"),
        ({"head_dim": 0}, "head_dim"),
        ({"expand": 0}, r"expand \* hidden_size = 0"),
        ({"expand": 1.3}, "expand"),
        ({"n_groups": 3}, "n_groups=3 must divide the number of heads, 4"),
        ({"n_groups": -1}, "n_groups"),
        ({"pooling": "last"}, "pooling='last' must be 'first' or 'mean'"),
        ({"hidden_act": "gelub"}, "hidden_act='gelub'"),
        ({"image_size": 9}, "image_size=9 must be a multiple of patch_size=2"),
        ({"image_size": (8, 8)}, "image_size"),
        ({"time_step_limit": (2.0, 1.0)}, "time_step_limit"),
        ({"time_step_limit": (1.0,)}, "time_step_limit"),
        ({"pad_token_id": 41}, "pad_token_id=41 is outside the vocabulary of 41"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"is_prenorm": "yes"}, "is_prenorm"),
        *(
            ({name: 0}, name)
            for name in ("vocab_size", "hidden_size", "num_hidden_layers", "state_size", "chunk_size")
        ),
        *(({name: -1}, name) for name in ("type_vocab_size", "max_position_embeddings", "patch_size", "num_channels")),
    ],
    ids=str,
)
def test_contradictions(changes, message):
    with pytest.raises(BadConfig, match=message):
        tiny_config("hydra", **changes)


def test_derived_sizes_are_not_fields():
    config = tiny_config("hydra")
    assert (config.intermediate_size, config.num_heads) == (24, 4)
    assert not {"intermediate_size", "num_heads"} & set(config.to_dict())
    with pytest.raises(AttributeError, match="num_heads"):
        tiny_config("hydra", num_heads=8)


# --- calls -----------------------------------------------------------------------------------------------------------


def masked_lm(**changes):
    return tiny("hydra", "AutoModelForMaskedLM", **changes)


def test_ids():
    model = masked_lm()
    for bad in (41, -1):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 41"):
            model(torch.tensor([[1, bad, 2]]))
    with pytest.raises(ValueError, match=r"token type 2 is outside 0 ... 1 \(type_vocab_size = 2\)"):
        model(random_ids(1, 3), token_type_ids=torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match=r"input_ids has shape \(3,\), expected \(batch, seqlen\)"):
        model(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


@pytest.mark.parametrize("bad", [41, -1, -101])
def test_labels_outside_the_vocabulary(bad):
    labels = torch.tensor([[1, bad, -100]])
    with pytest.raises(ValueError, match=rf"label {bad} is outside 0 ... 40 \(the vocabulary = 41\); -100 leaves"):
        masked_lm()(random_ids(1, 3), labels=labels)


def test_a_choice_that_is_not_there():
    model = tiny("hydra", "AutoModelForMultipleChoice")
    with pytest.raises(ValueError, match=r"label 2 is outside 0 ... 1 \(choices = 2\)"):
        model(random_ids(2, 5)[None], labels=torch.tensor([2]))
    with pytest.raises(ValueError, match=r"input_ids \(batch, choices, seqlen\)"):
        model(random_ids(2, 5))
    losses = [model(random_ids(2, 5)[None], labels=torch.tensor([1], dtype=d)).loss for d in (torch.long, torch.int)]
    assert torch.equal(*losses)


def test_labels_of_another_shape():
    with pytest.raises(ValueError, match=r"labels has shape \(2, 4\), expected \(2, 5\)"):
        masked_lm()(random_ids(2, 5), labels=random_ids(2, 4))


def test_masks():
    model, ids = masked_lm(), random_ids(2, 5)
    with pytest.raises(ValueError, match="attention_mask is 0 everywhere: the batch has no tokens"):
        model(ids, attention_mask=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 4\), expected \(batch, seqlen\) = \(2, 5\)"):
        model(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="seq_idx has shape"):
        model(ids, seq_idx=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"position_ids has shape \(2, 4\)"):
        model(ids, position_ids=torch.zeros(2, 4, dtype=torch.long))


def test_positions_behind_the_last():
    model, ids = masked_lm(use_position_embeddings=True, max_position_embeddings=4), random_ids(1, 5)
    with pytest.raises(ValueError, match=r"position 4 is outside 0 ... 3 \(max_position_embeddings = 4\): shorten"):
        model(ids)
    with pytest.raises(ValueError, match="position 9 is outside"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 9, 3]]))
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    assert model(ids, attention_mask=mask).logits.shape == (1, 5, 41), "four tokens have positions"
    assert masked_lm(max_position_embeddings=4)(ids).logits.shape == (1, 5, 41), "without positions there is no limit"


def test_no_tokens():
    nothing = torch.zeros(2, 0, dtype=torch.long)
    assert masked_lm()(nothing).logits.shape == (2, 0, 41)
    with pytest.raises(ValueError, match="cannot pool a sequence of length 0"):
        tiny("hydra", "AutoModel")(nothing)


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (1, 2, 8, 10), (1, 2, 16, 16), (2, 8, 8)], ids=str)
def test_images_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"pixel_values has shape .*, expected .* with \(2, 8, 8\): use the model's"):
        tiny("hydra", "AutoModelForImageClassification")(torch.zeros(shape))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    masked_lm().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("keep", [0, 100, 0.5])
def test_truncated_safetensors(saved, keep):
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match=r"safetensors file cannot be read .*truncated"):
        hf_ssm.HydraForMaskedLM.from_pretrained(saved)


def test_broken_weights(saved):
    weights = load_file(saved / "model.safetensors")
    name = next(name for name in weights if "fc_D.weight" in name)
    weights[name][0, 1] = float("nan")
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} holds NaN: this checkpoint is broken"):
        hf_ssm.HydraForMaskedLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert", "hidden_size": 8}, "the configuration of a BERT, not of a Hydra"),
        ({"model_type": "bert", "matrix_mixer_type": "attention"}, "matrix_mixer_type='attention'"),
    ],
    ids=str,
)
def test_configurations_of_other_models(config, message, saved):
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownCheckpoint, match=message):
        hf_ssm.HydraForMaskedLM.from_pretrained(saved)
    with pytest.raises(UnknownCheckpoint, match=message):
        hf_ssm.HydraConfig.from_dict(config)
