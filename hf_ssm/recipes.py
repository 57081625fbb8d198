"""Recipes: the YAML files that say what to train. Schema, reading, overriding, checking.

Every key is a field of a dataclass here, or of transformers' `TrainingArguments` (section `training`), or of the
model's configuration class; anything else is refused, with the nearest valid key suggested.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hf_ssm.data import DataConfig

T = TypeVar("T")

# What a run decides itself; in a recipe they would contradict the folder layout, or the promise to resume exactly.
FIXED_TRAINING_ARGUMENTS = {
    "output_dir", "seed", "data_seed", "resume_from_checkpoint", "ignore_data_skip", "save_only_model",
    "remove_unused_columns", "load_best_model_at_end", "push_to_hub", "save_total_limit",
}  # fmt: skip


class RecipeError(ValueError):
    """A recipe that cannot be read or contradicts itself. The message names the key and what would be valid."""


@dataclass(frozen=True)
class SamplesConfig:
    """What the reloaded model is asked to continue. temperature 0 is greedy; max_new_tokens counts tokens."""

    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 96
    temperature: float = 0.8
    top_p: float = 0.95

    def __post_init__(self) -> None:
        if "" in self.prompts:
            raise RecipeError("samples.prompts: a prompt is empty; the model needs at least one token to start from")
        if self.max_new_tokens < 1:
            raise RecipeError(f"samples.max_new_tokens must be at least 1, not {self.max_new_tokens}")


@dataclass(frozen=True)
class FilledSamplesConfig:
    """What the reloaded masked model is asked to fill in: texts with mask tokens; top_k answers are shown for each."""

    prompts: tuple[str, ...] = ()
    top_k: int = 5

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise RecipeError(f"samples.top_k must be at least 1, not {self.top_k}")


@dataclass(frozen=True)
class MaskingConfig:
    """Which tokens a masked language model must find. The `masking:` section, of `objective: masked_lm` alone.

    mlm_probability, eval_mlm_probability   in (0, 1): share of the tokens chosen in training and in evaluation, which
                                            keeps BERT's 15 % so that runs can be compared
    mask_replace_prob, random_replace_prob  of those chosen, the share replaced by the mask token and by a random
                                            token; the rest stays as it is
    """

    mlm_probability: float = 0.30
    eval_mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1

    def __post_init__(self) -> None:
        for name in ("mlm_probability", "eval_mlm_probability"):
            if not 0 < getattr(self, name) < 1:
                raise RecipeError(f"masking.{name} must lie between 0 and 1, not {getattr(self, name)}")
        shares = (self.mask_replace_prob, self.random_replace_prob)
        if min(shares) < 0 or sum(shares) > 1:
            raise RecipeError(
                "masking.mask_replace_prob and random_replace_prob are shares of the tokens chosen and together at "
                f"most 1, not {shares[0]} and {shares[1]}"
            )


# What a run can teach a model, and what it then shows: see hf_ssm.objectives.
SAMPLES: dict[str, type[Any]] = {"causal_lm": SamplesConfig, "masked_lm": FilledSamplesConfig}


@dataclass(frozen=True)
class Recipe:
    """One training run.

    output_dir        the run's folder: checkpoints, the final model, report
    objective         causal_lm: predict each token from those before it; masked_lm: find masked tokens
    masking           see MaskingConfig; None in causal_lm
    model             a configuration to start from scratch (a .json path, or a mapping with `model_type`), or a
                      pretrained model (a folder, or a name on the Hub)
    tokenizer         {"vocab_size": n} trains one on the training text; or a folder or name; without it, the
                      pretrained model's own
    data              see DataConfig
    training          fields of transformers' TrainingArguments
    samples           see SamplesConfig (causal_lm), FilledSamplesConfig (masked_lm)
    keep_checkpoints  how many of the newest checkpoints stay, >= 1
    seed              initial weights, order of the data, samples
    license           of the trained weights, for the model card; only who chose the text knows it
    """

    output_dir: str
    model: str | Mapping[str, Any]
    tokenizer: str | Mapping[str, Any] | None = None
    objective: str = "causal_lm"
    masking: MaskingConfig | None = None
    data: DataConfig = field(default_factory=DataConfig)
    training: Mapping[str, Any] = field(default_factory=dict)
    samples: SamplesConfig | FilledSamplesConfig = field(default_factory=SamplesConfig)
    keep_checkpoints: int = 2
    seed: int = 0
    license: str = "other"

    def __post_init__(self) -> None:
        if self.keep_checkpoints < 1:
            raise RecipeError(f"keep_checkpoints must be at least 1, not {self.keep_checkpoints}")
        if isinstance(self.tokenizer, Mapping) and set(self.tokenizer) != {"vocab_size"}:
            raise RecipeError(f"tokenizer: a mapping holds vocab_size alone, found {sorted(self.tokenizer)}")
        if self.tokenizer is None and self.starts_from_scratch:
            raise RecipeError("tokenizer: a new model needs one, such as {vocab_size: 4096}, or a folder")
        if isinstance(self.tokenizer, Mapping) and not self.starts_from_scratch:
            raise RecipeError(f"tokenizer: {self.model} was trained with its own, a new one would not fit its weights")
        check_training_arguments(self.training)
        if self.data.streaming and self.training.get("max_steps", -1) < 1:
            raise RecipeError("training.max_steps: a stream has no known length, say how many steps to train")

    @property
    def starts_from_scratch(self) -> bool:
        return isinstance(self.model, Mapping) or self.model.endswith(".json")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they would be written in YAML."""
        return json.loads(json.dumps(asdict(self)))


class _Loader(yaml.SafeLoader):
    """YAML with numbers as YAML 1.2 has them: PyYAML reads 3e-4 as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    """Raises RecipeError naming the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: not valid YAML: {error}") from None


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe. Each override is `dotted.key=value`, its value parsed as YAML, and wins over the file.

    Raises RecipeError (unknown keys, wrong types, contradictions), DataError (impossible `data` settings) or OSError.
    """
    path = Path(path)
    content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values")
    for override in overrides:
        _override(content, override)
    return recipe_from_dict(content, where=str(path))


def recipe_from_dict(content: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Check `content` against the schema. Raises RecipeError or DataError."""
    content = dict(content)
    objective = content.get("objective", "causal_lm")
    check_key(str(objective), SAMPLES, f"{where}: unknown objective {objective!r}")
    sections: dict[str, type[Any]] = {"data": DataConfig, "samples": SAMPLES[objective]}
    if objective == "masked_lm":
        sections["masking"] = MaskingConfig
    elif content.get("masking") is not None:
        raise RecipeError(f"{where}: masking belongs to objective: masked_lm")
    for section, schema in sections.items():
        values = content.get(section, {})
        if not isinstance(values, Mapping):
            raise RecipeError(f"{where}: {section} is a mapping of keys to values")
        content[section] = _build(schema, values, where, prefix=f"{section}.")
    return _build(Recipe, content, where)


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {override}: expected key=value, such as training.max_steps=100")
    *sections, last = key.split(".")
    place = content
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise RecipeError(f"--set {override}: {section!r} is a value, it has no keys of its own")
    place[last] = parse_yaml(value, f"--set {override}")


def _build(schema: type[T], content: Mapping[str, Any], where: str, prefix: str = "") -> T:
    """An instance of the dataclass `schema` from plain values, refusing unknown, missing and mistyped keys."""
    hints = typing.get_type_hints(schema)
    known = {f.name: f for f in fields(schema)}  # type: ignore[arg-type]
    for key in content:
        check_key(str(key), known, f"{where}: unknown key '{prefix}{key}'", prefix)
    values: dict[str, Any] = {}
    for name, f in known.items():
        if name not in content:
            if f.default is MISSING and f.default_factory is MISSING:
                raise RecipeError(f"{where}: key '{prefix}{name}' is missing")
            continue
        value = content[name]
        if isinstance(value, int) and not isinstance(value, bool) and hints[name] is float:
            value = float(value)
        if hints[name] == tuple[str, ...] and isinstance(value, list | tuple):
            if not all(isinstance(item, str) for item in value):
                raise RecipeError(f"{where}: {prefix}{name} must be a list of texts, found {value!r}")
            value = tuple(value)
        elif not _is_instance(value, hints[name]):
            raise RecipeError(f"{where}: {prefix}{name} must be {_in_words(hints[name])}, found {value!r}")
        values[name] = value
    return schema(**values)


def _is_instance(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_is_instance(value, option) for option in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _in_words(hint: Any) -> str:
    """The type as a reader of YAML would say it."""
    words = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
    if isinstance(hint, types.UnionType):
        return " or ".join(_in_words(option) for option in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    return words.get(kind) or ("a list of texts" if kind is tuple else "a mapping")


def check_key(key: str, known: Iterable[str], complaint: str, prefix: str = "") -> None:
    """Raise RecipeError(complaint) unless `key` is known; the message ends with the nearest known key."""
    known = list(known)
    if key in known:
        return
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean '{prefix}{nearest[0]}'?" if nearest else f"valid keys: {', '.join(sorted(known)[:40])}"
    raise RecipeError(f"{complaint}; {hint}")


def check_training_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise RecipeError for a key that is no field of TrainingArguments, or that a run decides itself."""
    from transformers import TrainingArguments

    known = {f.name for f in fields(TrainingArguments) if f.init} - FIXED_TRAINING_ARGUMENTS
    for key in arguments:
        if key in FIXED_TRAINING_ARGUMENTS:
            raise RecipeError(
                f"training.{key} is decided by the run; see the recipe's own output_dir, seed and keep_checkpoints"
            )
        check_key(key, known, f"unknown key 'training.{key}'", "training.")


def model_config(model: str | Mapping[str, Any]) -> Any:
    """The configuration that a recipe's `model` describes: a .json path, or a mapping with `model_type`.

    Raises RecipeError for unknown types or keys, and for values that contradict each other.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    where, content = "model", model
    if isinstance(model, str):
        where = model
        try:
            content = json.loads(Path(model).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RecipeError(f"model: {model} does not exist (current folder: {Path.cwd()})") from None
        except json.JSONDecodeError as error:
            raise RecipeError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(content, Mapping) or "model_type" not in content:
        raise RecipeError(f"{where}: a model configuration is a mapping with the key model_type, such as mamba2")
    values = dict(content)
    model_type = values.pop("model_type")
    check_key(str(model_type), CONFIG_MAPPING, f"{where}: unknown model_type {model_type!r}")
    config_class = CONFIG_MAPPING[model_type]
    for key in values:
        check_key(key, {f.name for f in fields(config_class)}, f"{where}: {model_type} has no setting {key!r}")
    try:
        return config_class(**values)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise RecipeError(f"{where}: {error}") from error
