"""Small things that transformers' models do and users count on, for every architecture alike."""

import pytest
import torch

from hf_ssm import registry

from .helpers import DECODERS, random_ids, tiny, tiny_config

peft = pytest.importorskip("peft")

HEADS = [
    (model_type, auto_class)
    for model_type, known in registry.ARCHITECTURES.items()
    for auto_class in known.models
    if not auto_class.endswith(("ImageClassification", "MultipleChoice"))
]
LANGUAGE_MODELS = [*((name, "AutoModelForCausalLM") for name in DECODERS), ("hydra", "AutoModelForMaskedLM")]
every_head = pytest.mark.parametrize(("model_type", "auto_class"), HEADS)
every_language_model = pytest.mark.parametrize(("model_type", "auto_class"), LANGUAGE_MODELS)


@every_head
def test_tuples_where_the_configuration_says_so(model_type, auto_class):
    ids = random_ids(2, 5)
    with torch.no_grad():
        want = next(iter(tiny(model_type, auto_class)(ids).values()))
        got = tiny(model_type, auto_class, return_dict=False)(ids)
    assert isinstance(got, tuple)
    assert torch.equal(got[0], want)


@every_language_model
def test_lora_on_embeddings(model_type, auto_class):
    model, ids = tiny(model_type, auto_class), random_ids(2, 5)
    (name,) = [name for name, module in model.named_modules() if module is model.get_input_embeddings()]
    with torch.no_grad():
        want = model(ids).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[name.rpartition(".")[2]]))
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, want)
    adapted(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


@every_language_model
def test_a_batch_without_labels_has_no_loss_and_no_gradient(model_type, auto_class):
    model, ids = tiny(model_type, auto_class), random_ids(2, 5)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@every_language_model
def test_labels_of_any_integer_type(model_type, auto_class):
    model, ids = tiny(model_type, auto_class), random_ids(2, 5)
    with torch.no_grad():
        assert model(ids, labels=ids.int()).loss == model(ids, labels=ids).loss


@pytest.mark.parametrize("shape", [(5, 12), (2, 5, 1), (2, 5, 11)], ids=str)
@every_language_model
def test_embeddings_of_another_shape(model_type, auto_class, shape):
    model = tiny(model_type, auto_class)
    with pytest.raises(ValueError, match=r"inputs_embeds has shape .* expected \(batch, seqlen, hidden_size\)"):
        model(inputs_embeds=torch.zeros(shape))


@pytest.mark.parametrize("model_type", list(registry.ARCHITECTURES))
def test_whole_numbers_where_a_fraction_would_do(model_type):
    fields = {"classifier_dropout": 0, "initializer_range": 1}
    config = tiny_config(model_type, **fields)
    assert type(config).from_dict(config.to_dict()).classifier_dropout == 0


def test_token_types_of_another_shape():
    model = tiny("hydra", "AutoModelForMaskedLM")
    with pytest.raises(ValueError, match=r"token_type_ids has shape \(3, 5\), expected .* = \(1, 5\)"):
        model(random_ids(1, 5), token_type_ids=torch.zeros(3, 5, dtype=torch.long))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_norm_epsilon", -1.0),
        ("embedding_norm_epsilon", float("nan")),
        ("time_step_min", 0.0),
        ("time_step_max", 1e-9),
    ],
)
def test_sizes_that_give_no_numbers(field, value):
    with pytest.raises(Exception, match=field.replace("time_step_max", "time_step_min")):
        tiny_config("hydra", **{field: value})
