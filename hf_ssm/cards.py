"""Model cards: the README.md beside saved weights, with the metadata the Hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_ssm.convert import read_config
from hf_ssm.objectives import objective_of
from hf_ssm.recipes import Recipe

PACKAGE = Path(__file__).parent

_TASKS = {  # Auto class -> the Hub's name of the task, and what such a model is called
    "AutoModelForCausalLM": ("text-generation", "language model"),
    "AutoModelForMaskedLM": ("fill-mask", "masked language model"),
    "AutoModelForSequenceClassification": ("text-classification", "text classifier"),
    "AutoModelForTokenClassification": ("token-classification", "token classifier"),
    "AutoModelForQuestionAnswering": ("question-answering", "model that answers questions"),
    "AutoModelForMultipleChoice": ("multiple-choice", "model that chooses answers"),
    "AutoModelForImageClassification": ("image-classification", "image classifier"),
    "AutoModel": ("feature-extraction", "backbone"),
}
_SIZES = {  # field of a configuration -> what it is called in a card
    "num_hidden_layers": "layers",
    "hidden_size": "hidden size",
    "state_size": "state size",
    "mamba_d_state": "state size",
    "vocab_size": "tokens in the vocabulary",
}


def template_path(model_type: str) -> Path:
    """The card template of an architecture; `default.md` for those without one of their own."""
    # Installed, the templates lie in the package; in a checkout, at its top.
    folder = next(f for f in (PACKAGE / "model_cards", PACKAGE.parent / "model_cards") if f.is_dir())
    own = folder / f"{model_type}.md"
    return own if own.exists() else folder / "default.md"


def published_card(
    config: Mapping[str, Any],
    repo_id: str,
    *,
    parameters: int,
    license: str,
    base_model: str | None = None,
    with_code: bool = False,
) -> ModelCard:
    """A card for a model published as `repo_id`, of what its config.json tells."""
    data = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=_TASKS[auto_class(config)][0],
        tags=["hf-ssm", "state-space-model", config["model_type"]],
        base_model=base_model,
        model_name=repo_id.split("/")[-1],
    )
    return ModelCard.from_template(
        data,
        template_path=str(template_path(config["model_type"])),
        title=repo_id.split("/")[-1],
        base=base_model,
        parameters=f"{parameters:,}",
        **_described(config, auto_class(config), f'"{repo_id}"', with_code),
    )


def write_model_card(folder: Path, recipe: Recipe, metrics: Mapping[str, Any]) -> Path:
    """Write `folder`/README.md for the model saved there, trained by `recipe`; `metrics` as in metrics.json. Returns
    its path."""
    base = None if recipe.starts_from_scratch else str(recipe.model)
    on_hub = base is not None and not Path(base).exists()
    objective = objective_of(recipe)
    before, after = (metrics[objective.headline][when] for when in ("before", "after"))
    title = f"{metrics['model_type']} trained with hf-ssm"
    data = ModelCardData(
        license=recipe.license,
        library_name="transformers",
        pipeline_tag=objective.pipeline_tag,
        tags=["hf-ssm", "state-space-model", metrics["model_type"]],
        base_model=base if on_hub else None,
        model_name=title,
        eval_results=[
            EvalResult(
                task_type=objective.pipeline_tag,
                dataset_type=recipe.data.source,
                dataset_name=metrics["data"],
                metric_type=objective.headline,
                metric_value=round(after, 4),
            )
        ],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(template_path(metrics["model_type"])),
        title=title,
        base=base,
        parameters=f"{metrics['parameters']:,}",
        **_described(
            read_config(folder / "config.json"),
            objective.auto_model.__name__,
            '"."  # this folder, or the model\'s name on the Hub',
        ),
        before=f"{before:.3f}",
        after=f"{after:.3f}",
        accuracy=metrics.get("accuracy"),
        masking=recipe.masking,
        training_data=metrics["data"],
        steps=f"{metrics['steps']:,}",
        tokens=f"{metrics['steps'] * metrics['tokens_per_step']:,}",
        block_length=recipe.data.block_length,
    )
    path = folder / "README.md"
    card.save(path)
    return path


def auto_class(config: Mapping[str, Any]) -> str:
    """The Auto class that loads what a config.json says was saved."""
    head = (config.get("architectures") or [""])[0].partition("For")[2]
    return f"AutoModelFor{head}" if f"AutoModelFor{head}" in _TASKS else "AutoModel"


def _described(config: Mapping[str, Any], loader: str, name: str, with_code: bool = False) -> dict[str, str]:
    """What a template says of any model: its kind, its sizes, and how the Auto class `loader` loads it by its `name`,
    which is an expression."""
    sizes = [f"{config[field]:,} {words}" for field, words in _SIZES.items() if isinstance(config.get(field), int)]
    lines = ["import hf_ssm  # pip install hf-ssm; registers the architecture with the Auto classes"]
    if loader == "AutoModelForMaskedLM":
        lines += [
            "from transformers import pipeline",
            "",
            f"name = {name}",
            'fill = pipeline("fill-mask", model=name)',
            'print(fill(f"def {fill.tokenizer.mask_token}(self):"))',
        ]
    elif loader == "AutoModelForCausalLM":
        lines += [
            f"from transformers import {loader}, AutoTokenizer",
            "",
            f"name = {name}",
            "tokenizer = AutoTokenizer.from_pretrained(name)",
            f"model = {loader}.from_pretrained(name)",
            'output = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=50)',
            "print(tokenizer.decode(output[0]))",
        ]
    else:
        lines += [f"from transformers import {loader}", "", f"model = {loader}.from_pretrained({name})"]
    if with_code:
        lines += [
            "",
            "# without the import, trust_remote_code=True does the same; hf-ssm must be installed for it, too",
        ]
    return {"kind": _TASKS[loader][1], "sizes": ", ".join(sizes), "usage": "\n".join(["```python", *lines, "```"])}
