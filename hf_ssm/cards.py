"""Model cards: the README.md beside saved weights, with the metadata the Hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_ssm.objectives import objective_of
from hf_ssm.recipes import Recipe

PACKAGE = Path(__file__).parent


def template_path(model_type: str) -> Path:
    """The card template of an architecture; `default.md` for those without one of their own."""
    # Installed, the templates lie in the package; in a checkout, at its top.
    folder = next(f for f in (PACKAGE / "model_cards", PACKAGE.parent / "model_cards") if f.is_dir())
    own = folder / f"{model_type}.md"
    return own if own.exists() else folder / "default.md"


def write_model_card(folder: Path, recipe: Recipe, metrics: Mapping[str, Any]) -> Path:
    """Write `folder`/README.md for a model trained by `recipe`; `metrics` as in metrics.json. Returns its path."""
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
        before=f"{before:.3f}",
        after=f"{after:.3f}",
        accuracy=metrics.get("accuracy"),
        masking=recipe.masking,
        parameters=f"{metrics['parameters']:,}",
        training_data=metrics["data"],
        steps=f"{metrics['steps']:,}",
        tokens=f"{metrics['steps'] * metrics['tokens_per_step']:,}",
        block_length=recipe.data.block_length,
    )
    path = folder / "README.md"
    card.save(path)
    return path
