"""What a run teaches a model, how that is measured, and what the trained model is asked to show.

`CausalLM` predicts each token from those before it, `MaskedLM` finds masked tokens. Both are an `Objective`, and
`hf_ssm.training` knows nothing else of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_ssm.data import IGNORED_LABEL, MaskedLMCollator, PackedCollator, end_token_id, token_byte_lengths
from hf_ssm.recipes import FilledSamplesConfig, Recipe, RecipeError, SamplesConfig

Collator = Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]


class Objective(ABC):
    """What differs between objectives; a run is otherwise the same.

    auto_model     the Auto class that builds, loads and saves the model
    pipeline_tag   the Hub's name of the task
    masked         whether texts are framed by special tokens, as an encoder expects it, and there is a mask among them
    measured       name in metrics.json -> what the trainer's `evaluate` calls it; a report leads with the first
    unit           of that first one
    loss_unit      of the loss, in training and evaluation
    """

    auto_model: ClassVar[Any]
    pipeline_tag: ClassVar[str]
    masked: ClassVar[bool]
    measured: ClassVar[Mapping[str, str]]
    unit: ClassVar[str]
    loss_unit: ClassVar[str]

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    @property
    def headline(self) -> str:
        """The number a report leads with, as metrics.json calls it; lower is better."""
        return next(iter(self.measured))

    def results(self, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Two evaluations as metrics.json has them."""
        return {name: {"before": before[key], "after": after[key]} for name, key in self.measured.items()}

    def summary(self, metrics: Mapping[str, Any]) -> str:
        """One line on a finished run."""
        before, after = (metrics[self.headline][when] for when in ("before", "after"))
        return f"{self.unit}: {before:.3f} before, {after:.3f} after training"

    @abstractmethod
    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise RecipeError or DataError if the recipe cannot be carried out with this tokenizer."""

    @abstractmethod
    def collators(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Collator, Collator]:
        """Blocks to a batch, in training and in evaluation."""

    @abstractmethod
    def evaluation(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Callable[..., Any]]:
        """Arguments of a `Trainer` that make its `evaluate` report what is `measured`."""

    @abstractmethod
    def report_rows(self, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What was measured, as rows (name, value) of a report."""

    @abstractmethod
    def samples(self, folder: Path) -> str:
        """Load the model saved in `folder` as anyone would, and let it answer the recipe's prompts. Markdown."""


class CausalLM(Objective):
    auto_model = AutoModelForCausalLM
    pipeline_tag = "text-generation"
    masked = False
    measured = {"bits_per_byte": "eval_bits_per_byte", "loss": "eval_loss_per_token"}
    unit = "bits per byte"
    loss_unit = "nats per token"

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        end_token_id(tokenizer)

    def collators(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Collator, Collator]:
        collator = PackedCollator(end_token_id(tokenizer))
        return collator, collator

    def evaluation(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Callable[..., Any]]:
        return bits_per_byte(token_byte_lengths(tokenizer))

    def report_rows(self, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
        bits, loss = metrics["bits_per_byte"], metrics["loss"]
        return [
            ("bits per byte before", f"{bits['before']:.3f}"),
            ("bits per byte after", f"{bits['after']:.3f}"),
            ("loss per token before / after", f"{loss['before']:.3f} / {loss['after']:.3f} nats"),
        ]

    def samples(self, folder: Path) -> str:
        how = self.recipe.samples
        assert isinstance(how, SamplesConfig)
        lines = [
            "# Samples",
            "",
            f"The saved model, loaded back with `AutoModelForCausalLM.from_pretrained`; temperature "
            f"{how.temperature:g}, top-p {how.top_p:g}, at most {how.max_new_tokens} new tokens. What the model wrote "
            "begins after `⟶`.",
        ]
        for prompt, continuation in continue_prompts(folder, how, self.recipe.seed):
            lines += ["", "````text", f"{prompt}⟶{continuation}", "````"]
        return "\n".join(lines) + "\n"


class MaskedLM(Objective):
    auto_model = AutoModelForMaskedLM
    pipeline_tag = "fill-mask"
    masked = True
    measured = {"loss": "eval_loss_per_token", "accuracy": "eval_accuracy"}
    unit = "nats per masked token"
    loss_unit = unit

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.collators(tokenizer)
        end_token_id(tokenizer, framed=True)
        for prompt in self.recipe.samples.prompts:
            if str(tokenizer.mask_token) not in prompt:
                raise RecipeError(f"samples.prompts: {prompt!r} holds no {tokenizer.mask_token}, nothing to fill in")

    def collators(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Collator, Collator]:
        assert self.recipe.masking is not None
        masking = asdict(self.recipe.masking)
        evaluated = masking.pop("eval_mlm_probability")
        training = MaskedLMCollator(tokenizer, **masking, seed=self.recipe.seed)
        return training, MaskedLMCollator(tokenizer, **masking | {"mlm_probability": evaluated}, fixed=True)

    def evaluation(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Callable[..., Any]]:
        return masked_accuracy()

    def report_rows(self, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
        loss, found = metrics["loss"], metrics["accuracy"]
        masking = self.recipe.masking
        assert masking is not None
        return [
            ("loss per masked token before / after", f"{loss['before']:.3f} / {loss['after']:.3f} nats"),
            ("masked tokens found before / after", f"{found['before']:.1%} / {found['after']:.1%}"),
            ("masked", f"{masking.mlm_probability:.0%} in training, {masking.eval_mlm_probability:.0%} in evaluation"),
        ]

    def samples(self, folder: Path) -> str:
        from transformers import pipeline  # takes seconds

        how = self.recipe.samples
        assert isinstance(how, FilledSamplesConfig)
        lines = [
            "# Samples",
            "",
            'The saved model, loaded back with `pipeline("fill-mask")`. After each `⟶`, the likeliest tokens for one '
            "mask and their probabilities.",
        ]
        fill = pipeline("fill-mask", model=str(folder))
        for prompt in how.prompts:
            found = fill(prompt, top_k=min(how.top_k, fill.model.config.vocab_size))
            masks = found if isinstance(found[0], list) else [found]  # a list of answers, or one for each mask
            answers = (
                "   ".join(f"{answer['token_str']!r} {answer['score']:.2f}" for answer in mask) for mask in masks
            )
            lines += ["", "````text", prompt, *(f"⟶ {answer}" for answer in answers), "````"]
        return "\n".join(lines) + "\n"


OBJECTIVES: dict[str, type[Objective]] = {"causal_lm": CausalLM, "masked_lm": MaskedLM}  # as recipes.SAMPLES


def objective_of(recipe: Recipe) -> Objective:
    return OBJECTIVES[recipe.objective](recipe)


# ---------------------------------------------------------------- evaluation


def bits_per_byte(token_bytes: Tensor) -> dict[str, Callable[..., Any]]:
    """Arguments of a `Trainer` for causal models: `evaluate` reports bits_per_byte and loss_per_token.

    token_bytes (vocab_size,) int64 from `hf_ssm.data.token_byte_lengths`. bits_per_byte is the negative
    log2-likelihood of all predicted tokens over the bytes they stand for.
    """

    def sums(logits: Tensor, labels: Tensor) -> Tensor:
        """(batch, 3) float64 per row: summed loss in nats, predicted tokens, bytes these stand for."""
        logits, labels = logits[:, :-1], labels[:, 1:]
        predicted = labels != IGNORED_LABEL
        covered = token_bytes.to(labels.device)[labels.where(predicted, 0)] * predicted
        return _row_sums(_losses(logits, labels), predicted, covered)

    def ratios(prediction: Any) -> dict[str, float]:
        loss, tokens, covered = prediction.predictions.astype(np.float64).sum(0)
        return {"bits_per_byte": loss / math.log(2) / max(covered, 1), "loss_per_token": loss / max(tokens, 1)}

    return {"preprocess_logits_for_metrics": sums, "compute_metrics": ratios}


def masked_accuracy() -> dict[str, Callable[..., Any]]:
    """Arguments of a `Trainer` for masked models: `evaluate` reports loss_per_token (nats) and accuracy, both over
    all masked tokens, whatever batch they are in."""

    def sums(logits: Tensor, labels: Tensor) -> Tensor:
        """(batch, 3) float64 per row: summed loss in nats, masked tokens, those of them found."""
        return _row_sums(_losses(logits, labels), labels != IGNORED_LABEL, logits.argmax(-1) == labels)

    def ratios(prediction: Any) -> dict[str, float]:
        loss, tokens, found = prediction.predictions.astype(np.float64).sum(0)
        return {"loss_per_token": loss / max(tokens, 1), "accuracy": found / max(tokens, 1)}

    return {"preprocess_logits_for_metrics": sums, "compute_metrics": ratios}


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(batch, seqlen) float32 nats; 0 where the label is ignored."""
    flat = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return flat.view_as(labels)


def _row_sums(*terms: Tensor) -> Tensor:
    return torch.stack([term.double().sum(1) for term in terms], dim=1)


# ---------------------------------------------------------------- samples


def continue_prompts(folder: Path, how: SamplesConfig, seed: int) -> list[tuple[str, str]]:
    """(prompt, continuation) pairs of the causal model saved in `folder`."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.to(torch.accelerator.current_accelerator() or "cpu").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"do_sample": how.temperature > 0, "max_new_tokens": how.max_new_tokens}
    if options["do_sample"]:
        options |= {"temperature": how.temperature, "top_p": how.top_p}
    pairs = []
    set_seed(seed)  # once: with the same draws for each prompt, similar prompts get equal continuations
    for prompt in how.prompts:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        output = model.generate(**inputs, **options)
        continuation = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        pairs.append((prompt, continuation))
    return pairs
