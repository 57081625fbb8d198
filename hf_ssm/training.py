"""Train what a recipe says, with transformers' `Trainer`, and leave a folder that explains itself.

<output_dir>/recipe.yaml            what was asked for, with every default spelled out
             tokenizer/             the tokenizer trained for this run, if it was
             before.json            evaluation before the first step
             checkpoints/checkpoint-N/    complete once complete.json is in it
             model/                 the final model: safetensors, tokenizer, model card
             loss.png samples.md report.md
             metrics.json           everything measured; written last, so its presence means the run is finished
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from hf_ssm import cards
from hf_ssm.data import Corpus, PackedBlocks, PackedData, load_corpus, pack_corpus, train_tokenizer
from hf_ssm.objectives import Collator, Objective, objective_of
from hf_ssm.recipes import Recipe, RecipeError, model_config

COMPLETE = "complete.json"
BYTES_PER_PARAMETER = 12  # of a checkpoint: float32 weight and Adam's two moments


class OutputError(OSError):
    """The run's folder cannot be written, lacks space, or holds another run. The message says what to do."""


# ---------------------------------------------------------------- optimiser


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay may shrink: weights of projections, convolutions and embeddings.

    Left out are A_log, D and the dt bias (decay would pull the dynamics of the state towards one time scale), every
    bias, every weight of a norm, and whatever carries `_no_weight_decay = True`, as the original Mamba marks it.
    """
    undecayed = {"A_log", "D", "dt_bias"}
    names = []
    for module_name, module in model.named_modules(remove_duplicate=False):
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            path = f"{module_name}.{name}" if module_name else name  # Hymba's A_log is a list of one: A_log.0
            exempt = not undecayed.isdisjoint(path.split(".")) or name.endswith("bias") or is_norm
            if not exempt and not getattr(parameter, "_no_weight_decay", False):
                names.append(path)
    return names


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for any torch optimizer: one with `weight_decay`, one that is never decayed.

    Only parameters that require gradients; a tied one appears once. See `decay_parameter_names`. With a plain
    `Trainer`: `Trainer(..., optimizers=(torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3), None))`.
    """
    decayed = set(decay_parameter_names(model))
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trainable if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trainable if name not in decayed], "weight_decay": 0.0},
    ]


class SSMTrainer(Trainer):
    """`Trainer` with the parameter groups state-space models need, and, if given, an own collator for evaluation."""

    data_collator: Any

    def __init__(self, *args: Any, eval_collator: Collator | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.eval_collator = eval_collator or self.data_collator

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decay_parameter_names(model)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        training, self.data_collator = self.data_collator, self.eval_collator
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = training

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        # Without this the recurrent state of every batch would be gathered along with the logits.
        ignore_keys = ignore_keys if ignore_keys is not None else ["past_key_values", "cache_params"]
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)


# ---------------------------------------------------------------- checkpoints


class CompleteCheckpoints(TrainerCallback):
    """Makes checkpoints safe to resume from, with any `Trainer`.

    `Trainer` writes a checkpoint file by file: killed half-way, it leaves a folder that looks like a checkpoint. Once
    all is written this callback adds complete.json, with the size of every file; `last_complete_checkpoint` accepts
    no folder without it. Only then are older checkpoints deleted, so `save_total_limit` of the training arguments
    stays None. It also logs at every save: the running mean of the loss starts afresh there, in a resumed run and in
    an uninterrupted one alike.
    """

    def __init__(self, keep: int):
        self.keep = keep

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_log |= control.should_save
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        mark_complete(folder / f"checkpoint-{state.global_step}")
        for _, old in _complete_checkpoints(folder)[: -self.keep]:
            delete_checkpoint(old)


def mark_complete(checkpoint: Path) -> None:
    """Declare every file now in `checkpoint` to be all of it, after making sure that they have reached the disk."""
    sizes = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file()):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        sizes[path.relative_to(checkpoint).as_posix()] = path.stat().st_size
    write_atomically(checkpoint / COMPLETE, json.dumps({"files": sizes}, indent=1))


def is_complete(checkpoint: Path) -> bool:
    """Whether `mark_complete` was called for this folder and its files still have the sizes they had then."""
    try:
        sizes = json.loads((checkpoint / COMPLETE).read_text())["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint so that it is incomplete from the first moment on."""
    (checkpoint / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps, or None."""
    found = _complete_checkpoints(folder)
    return found[-1][1] if found else None


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    steps = ((path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return sorted((int(step), path) for step, path in steps if step.isdigit())


def _complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    return [(step, path) for step, path in _checkpoints(folder) if is_complete(path)]


# ---------------------------------------------------------------- files


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either its old content or all of the new, never a part."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
    ) as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.chmod(f.name, 0o644)  # temporary files are private
    os.replace(f.name, path)


@contextmanager
def folder_in_one_step(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` at the end, replacing what was there; on an error, nothing changes."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)


def prepare_folder(folder: Path) -> None:
    """Create `folder` and see that files can be written in it. Raises OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(b"x")
    except OSError as error:
        raise OutputError(
            f"output_dir: cannot write in {folder}: {error.strerror}; choose another with --set output_dir=PATH"
        ) from error


def check_space(folder: Path, model: nn.Module, keep_checkpoints: int) -> None:
    """Raise OutputError unless the disk has room for the checkpoints that will exist at a time and the final model."""
    parameters = sum(p.numel() for p in model.parameters())
    needed = parameters * (BYTES_PER_PARAMETER * (keep_checkpoints + 1) + 4) + 10_000_000
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"output_dir: {folder} has {free / 1e6:,.0f} MB free, this run needs about {needed / 1e6:,.0f} MB "
            f"for {keep_checkpoints + 1} checkpoints and the model; free some, or lower keep_checkpoints"
        )


@contextmanager
def _explain_full_disk(folder: Path) -> Iterator[None]:
    """A full disk as OutputError: safetensors, torch.save and the system each report it in their own way."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, OutputError):
            raise
        # The second and third are all that torch.save tells when a write fails.
        signs = ("no space left", "pytorchstreamwriter", "unexpected pos")
        if getattr(error, "errno", None) == errno.ENOSPC or any(sign in str(error).lower() for sign in signs):
            raise OutputError(
                f"the disk of {folder} is full. Nothing half-written will be used: make room and run the same "
                "command again, it goes on from the last complete checkpoint"
            ) from error
        raise


# ---------------------------------------------------------------- parts of a run


def build_tokenizer(recipe: Recipe, objective: Objective, corpus: Corpus, run: Path) -> PreTrainedTokenizerBase:
    """The tokenizer the recipe asks for; one trained for this run is kept in `run`/tokenizer and used again."""
    if isinstance(recipe.tokenizer, Mapping):
        cached = run / "tokenizer"
        if not cached.exists():
            vocab_size = recipe.tokenizer["vocab_size"]
            tokenizer = train_tokenizer(corpus.train(), vocab_size, masked=objective.masked)
            with folder_in_one_step(cached) as partial:
                tokenizer.save_pretrained(partial)
        return AutoTokenizer.from_pretrained(cached)
    name = recipe.tokenizer if recipe.tokenizer is not None else recipe.model
    assert isinstance(name, str)  # Recipe requires a tokenizer for a new model
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RecipeError(f"tokenizer: cannot load one from {name!r}: {error}") from error


def build_model(recipe: Recipe, objective: Objective, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A new model, its vocabulary and special tokens taken from the tokenizer; or the pretrained one.

    The new vocabulary is rounded up to a multiple of 8, which matrix units want; the published models do so too.
    """
    if recipe.starts_from_scratch:
        config = model_config(recipe.model)
        config.vocab_size = math.ceil(len(tokenizer) / 8) * 8
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
        set_seed(recipe.seed)
        return objective.auto_model.from_config(config)
    assert isinstance(recipe.model, str)
    try:
        model = objective.auto_model.from_pretrained(recipe.model)
    except (OSError, ValueError) as error:
        raise RecipeError(f"model: cannot load {recipe.model!r}: {error}") from error
    rows = len(model.get_input_embeddings().state_dict()["weight"])
    if rows < len(tokenizer):
        raise RecipeError(f"tokenizer: has {len(tokenizer)} tokens, {recipe.model} has embeddings for {rows}")
    return model


def build_trainer(
    recipe: Recipe,
    objective: Objective,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: PackedData,
    run: Path,
) -> SSMTrainer:
    """Raises RecipeError if the training arguments contradict each other."""
    defaults: dict[str, Any] = {
        "report_to": "none",
        "logging_steps": 10,
        "save_steps": 100,
        # Pinning is for copies to an accelerator, and warns without one.
        "dataloader_pin_memory": torch.accelerator.is_available(),
    }
    try:
        arguments = TrainingArguments(
            **(defaults | dict(recipe.training)),
            output_dir=str(run / "checkpoints"),
            seed=recipe.seed,
            data_seed=recipe.seed,
        )
    except (TypeError, ValueError) as error:
        raise RecipeError(f"training: {error}") from error
    collator, eval_collator = objective.collators(tokenizer)
    return SSMTrainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=collator,
        eval_collator=eval_collator,
        processing_class=tokenizer,
        callbacks=[CompleteCheckpoints(recipe.keep_checkpoints)],
        **objective.evaluation(tokenizer),
    )


def peak_memory_bytes() -> int | None:
    """The most memory this process has held so far, or None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# ---------------------------------------------------------------- a run


@dataclass(frozen=True)
class RunResult:
    """What a finished run measured; `metrics` is the content of metrics.json."""

    folder: Path
    metrics: dict[str, Any]

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"


def train(recipe: Recipe, *, restart: bool = False) -> RunResult:
    """Do what the recipe says, going on from the last complete checkpoint if the run was interrupted.

    A run that is already finished is not repeated: its result is returned. `restart` deletes what a former run left
    in the folder and begins anew. A resumed run has the same losses as one never interrupted, on the same machine.

    Raises RecipeError, DataError or OutputError with a message for the user.
    """
    started = time.monotonic()
    _require_packages()
    run = Path(recipe.output_dir)
    prepare_folder(run)
    if restart:
        _clear(run)
    finished = _claim(run, recipe)
    if finished is not None:
        return RunResult(run, finished)

    with _explain_full_disk(run):
        objective = objective_of(recipe)
        corpus = load_corpus(recipe.data)
        tokenizer = build_tokenizer(recipe, objective, corpus, run)
        objective.check(tokenizer)
        data = pack_corpus(corpus, tokenizer, recipe.data, framed=objective.masked)
        model = build_model(recipe, objective, tokenizer)
        check_space(run, model, recipe.keep_checkpoints)
        trainer = build_trainer(recipe, objective, model, tokenizer, data, run)

        before = _evaluation_before(trainer, data, run)
        seconds, state = _train_or_resume(trainer, objective, model, recipe.seed, run / "checkpoints")
        after = trainer.evaluate()

        history = [entry for entry in state.log_history if "loss" in entry]
        metrics: dict[str, Any] = {
            **objective.results(before, after),
            "parameters": model.num_parameters(),
            "model_type": model.config.model_type,
            "steps": state.global_step,
            "tokens_per_step": _tokens_per_step(trainer, recipe),
            "train_blocks": len(data.train) if isinstance(data.train, PackedBlocks) else None,
            "validation_blocks": len(data.validation),
            "data": data.description,
            "device": str(trainer.args.device),
            "training_seconds": seconds,
            "history": [{key: entry[key] for key in ("step", "loss", "learning_rate")} for entry in history],
        }
        with folder_in_one_step(run / "model") as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            cards.write_model_card(partial, recipe, metrics)
        samples = objective.samples(run / "model")
        metrics |= {"total_seconds": time.monotonic() - started, "peak_memory_bytes": peak_memory_bytes()}
        _write_report(run, objective, metrics, samples)
        write_atomically(run / "metrics.json", json.dumps(metrics, indent=1))
    return RunResult(run, metrics)


def _require_packages() -> None:
    """Say at the start what would otherwise be missing at the end."""
    missing = [name for name in ("accelerate", "matplotlib") if find_spec(name) is None]
    if missing:
        raise RecipeError(f"training needs {' and '.join(missing)}: pip install 'hf-ssm[train]'")


def _clear(run: Path) -> None:
    """Delete what `train` writes, and nothing else: the folder may hold files of the user's."""
    (run / "metrics.json").unlink(missing_ok=True)
    for name in ("checkpoints", "model", "tokenizer"):
        shutil.rmtree(run / name, ignore_errors=True)
    for name in ("recipe.yaml", "before.json", "loss.png", "samples.md", "report.md"):
        (run / name).unlink(missing_ok=True)


def _claim(run: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Write the recipe into the folder, or see that it is the one found there. Returns a finished run's metrics."""
    wanted = replace(recipe, output_dir=".").to_dict()  # the folder may have been moved
    if recipe.starts_from_scratch:
        model_config(recipe.model)  # refuses what is no configuration, before anything is written
        if isinstance(recipe.model, str):
            wanted["model"] = json.loads(Path(recipe.model).read_text(encoding="utf-8"))
    path = run / "recipe.yaml"
    if not (run / "before.json").exists():  # nothing was measured or trained here yet
        _clear(run)
        write_atomically(path, yaml.safe_dump(wanted, sort_keys=False))
        return None
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    different = sorted(_flat(found).items() ^ _flat(wanted).items())
    if different:
        keys = sorted({key for key, _ in different})
        raise OutputError(
            f"output_dir: {run} holds a run of another recipe (different: {', '.join(keys)}); "
            "choose another folder, or delete that run with --restart"
        )
    metrics = run / "metrics.json"
    return json.loads(metrics.read_text()) if metrics.exists() else None


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): json.dumps(value)}


def _evaluation_before(trainer: SSMTrainer, data: PackedData, run: Path) -> dict[str, float]:
    """Evaluate the untrained model; a resumed run reads it back and checks that its data is still the same."""
    path = run / "before.json"
    if path.exists():
        before = json.loads(path.read_text())
        if before["data"] != data.fingerprint:
            raise OutputError(f"output_dir: the data has changed since {run} was started; begin anew with --restart")
        return before
    before = trainer.evaluate() | {"data": data.fingerprint}
    write_atomically(path, json.dumps(before, indent=1))
    return before


def _train_or_resume(
    trainer: SSMTrainer, objective: Objective, model: PreTrainedModel, seed: int, checkpoints: Path
) -> tuple[float, TrainerState]:
    """Seconds this call has trained, and the state at the end."""
    for _, checkpoint in _checkpoints(checkpoints):
        if not is_complete(checkpoint):
            delete_checkpoint(checkpoint)
    last = last_complete_checkpoint(checkpoints)
    if last is not None:
        state = TrainerState.load_from_json(str(last / "trainer_state.json"))
        if state.global_step >= state.max_steps:  # killed after the last step: Trainer would take one step too many
            model.load_state_dict(objective.auto_model.from_pretrained(last).state_dict())
            return 0.0, state
    set_seed(seed)
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    return time.monotonic() - started, trainer.state


def _tokens_per_step(trainer: SSMTrainer, recipe: Recipe) -> int:
    args = trainer.args
    blocks = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return blocks * recipe.data.block_length


def _write_report(run: Path, objective: Objective, metrics: dict[str, Any], samples: str) -> None:
    plot_losses(run / "loss.png", {"training": metrics}, objective.loss_unit)
    write_atomically(run / "samples.md", samples)
    write_atomically(run / "report.md", _report_markdown(objective, metrics))


def plot_losses(path: Path, runs: Mapping[str, Mapping[str, Any]], unit: str) -> None:
    """Draw the loss of every run, given by its metrics, and its validation before and after, into a PNG file."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, metrics in runs.items():
        history, loss = metrics["history"], metrics["loss"]
        (line,) = axes.plot([entry["step"] for entry in history], [entry["loss"] for entry in history], label=name)
        label = "validation, before and after" if len(runs) == 1 else f"{name}: validation"
        axes.plot([0, metrics["steps"]], [loss["before"], loss["after"]], "o", color=line.get_color(), label=label)
    axes.set(xlabel="step", ylabel=f"loss ({unit})", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, format="png")


def _report_markdown(objective: Objective, metrics: dict[str, Any]) -> str:
    before, after = (metrics[objective.headline][when] for when in ("before", "after"))
    peak = metrics["peak_memory_bytes"]
    rows = [
        *objective.report_rows(metrics),
        ("parameters", f"{metrics['parameters']:,} ({metrics['model_type']})"),
        ("trained on", metrics["data"]),
        ("steps", f"{metrics['steps']:,} of {metrics['tokens_per_step']:,} tokens"),
        ("validated on", f"{metrics['validation_blocks']:,} blocks of text not trained on"),
        ("device", metrics["device"]),
        ("time", f"{metrics['total_seconds']:.0f} s, {metrics['training_seconds']:.0f} s of it training"),
        ("peak memory", f"{peak / 1e6:,.0f} MB" if peak else "not measured on this system"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        f"# Training report\n\nThe validation loss fell by {before - after:.3f} {objective.unit}, from {before:.3f} "
        f"to {after:.3f} ({1 - after / before:.0%}).\n\n| | |\n| --- | --- |\n{table}\n\n![Loss](loss.png)\n\n"
        "The model is in `model/`, what it writes in `samples.md`, every number in `metrics.json`.\n"
    )
