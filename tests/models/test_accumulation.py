"""A step of the Trainer on several small batches is the step on one large batch."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_ssm import registry

from .helpers import TOLERANCE, assert_near, random_ids, tiny

LABELS = {
    "AutoModelForMaskedLM": lambda ids: ids,
    "AutoModelForSequenceClassification": lambda ids: ids[:, 0] % 3,
    "AutoModelForTokenClassification": lambda ids: ids % 3,
}


@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [
        (model_type, auto)
        for model_type, known in registry.ARCHITECTURES.items()
        for auto in LABELS
        if auto in known.models
    ],
)
def test_accumulated_gradients_are_those_of_the_whole_batch(model_type, auto_class, tmp_path):
    ids = random_ids(4, 7)
    labels = LABELS[auto_class](ids).clone()
    if labels.ndim == 2:
        labels[0, 2:] = -100  # rows with unlike numbers of labels
    rows = [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": n} for i, n in zip(ids, labels, strict=True)
    ]
    trained = []
    for size in (4, 1):
        no_dropout = {"classifier_dropout": 0.0} | ({"hidden_dropout_prob": 0.0} if model_type == "hydra" else {})
        model = tiny(model_type, auto_class, dtype=torch.float64, num_labels=3, **no_dropout)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(size)),
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=4 // size,
            max_grad_norm=0.0,
            optim="sgd",
            learning_rate=0.1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        Trainer(model, arguments, train_dataset=rows).train()
        trained.append(model.state_dict())
    for name, value in trained[0].items():
        assert_near(name, trained[1][name], value, TOLERANCE[torch.float64])
