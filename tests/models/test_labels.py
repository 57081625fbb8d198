"""Labels of the sequence and token classifiers of every architecture: what they may be, and what is refused."""

import re

import pytest
import torch
import torch.nn.functional as F

from .helpers import DECODERS, TOLERANCE, assert_near, random_ids, tiny

SEQUENCE, TOKEN = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
every_model = pytest.mark.parametrize("model_type", [*DECODERS, "hydra"])
every_classifier = pytest.mark.parametrize("auto_class", [SEQUENCE, TOKEN])
IDS = random_ids(2, 4)


def labels_for(auto_class: str) -> torch.Tensor:
    return IDS % 3 if auto_class == TOKEN else IDS[:, 0] % 3


@every_model
@every_classifier
@pytest.mark.parametrize("bad", [3, -1, -101])
def test_outside_the_classes(model_type, auto_class, bad):
    labels = labels_for(auto_class)
    labels.view(-1)[-1] = bad
    with pytest.raises(ValueError, match=rf"label {bad} is outside 0 ... 2 \(num_labels = 3\); -100 leaves"):
        tiny(model_type, auto_class, num_labels=3)(IDS, labels=labels)


@every_model
@pytest.mark.parametrize(
    ("auto_class", "shape", "expected"),
    [(SEQUENCE, (2, 3), "(2,)"), (SEQUENCE, (3,), "(2,)"), (TOKEN, (2, 3), "(2, 4)"), (TOKEN, (8,), "(2, 4)")],
)
def test_of_another_shape(model_type, auto_class, shape, expected):
    with pytest.raises(ValueError, match=re.escape(f"labels has shape {shape}, expected {expected}")):
        tiny(model_type, auto_class, num_labels=3)(IDS, labels=torch.zeros(shape, dtype=torch.long))


@every_model
@every_classifier
def test_fractions_are_no_class_indices(model_type, auto_class):
    model = tiny(model_type, auto_class, num_labels=3, problem_type="single_label_classification")
    with pytest.raises(ValueError, match=r"labels is torch.float32, expected an integer type"):
        model(IDS, labels=labels_for(auto_class) + 0.5)


@every_model
@every_classifier
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_class_indices_of_any_integer_type(model_type, auto_class, dtype):
    model, labels = tiny(model_type, auto_class, num_labels=3), labels_for(auto_class)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    want = model(IDS, attention_mask=mask, labels=labels).loss
    assert torch.equal(model(IDS, attention_mask=mask, labels=labels.to(dtype)).loss, want)


@every_model
def test_class_indices_in_a_column(model_type):
    model, labels = tiny(model_type, SEQUENCE, num_labels=3), labels_for(SEQUENCE)
    assert torch.equal(model(IDS, labels=labels[:, None]).loss, model(IDS, labels=labels).loss)


@every_model
def test_at_padding_they_may_be_anything(model_type):
    model, labels = tiny(model_type, TOKEN, num_labels=3), labels_for(TOKEN)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    want = model(IDS, attention_mask=mask, labels=labels.masked_fill(mask == 0, -100)).loss
    assert torch.equal(model(IDS, attention_mask=mask, labels=labels.masked_fill(mask == 0, 99)).loss, want)


@every_model
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.long, torch.float64], ids=str)
def test_zeros_and_ones_of_any_type(model_type, dtype):
    model = tiny(model_type, SEQUENCE, num_labels=3, problem_type="multi_label_classification")
    targets = torch.tensor([[1, 0, 1], [0, 0, 1]])
    out = model(IDS, labels=targets.to(dtype))
    want = F.binary_cross_entropy_with_logits(out.logits, targets.float())
    assert_near("loss", out.loss, want, TOLERANCE[torch.float32])


@every_model
@pytest.mark.parametrize("labels", [torch.tensor([2, 4]), torch.tensor([0.3, -1.7])], ids=["integers", "fractions"])
def test_the_loss_of_a_bfloat16_model_is_not_rounded(model_type, labels):
    out = tiny(model_type, SEQUENCE, num_labels=1, dtype=torch.bfloat16)(IDS, labels=labels)
    want = (out.logits[:, 0].float() - labels).square().mean()
    assert_near("loss", out.loss, want, TOLERANCE[torch.float32])
    out.loss.backward()
