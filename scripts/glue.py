"""Fine-tune a saved encoder on GLUE with the settings of the Hydra paper, one task after another.

    python scripts/glue.py runs/hydra-base/model                # all tasks, data from nyu-mll/glue
    python scripts/glue.py runs/hydra-base/model --task rte --task cola
    python scripts/glue.py runs/hydra-base/model --data DIR     # DIR/rte/train.jsonl, DIR/rte/validation.jsonl, ...

Any model that AutoModelForSequenceClassification can load will do. WNLI is left out, as in the paper. Results are in
OUTPUT/results.json and glue.md; a task that is already there is not repeated.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import datasets
import numpy as np
import torch
import typer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
    set_seed,
)

import hf_ssm  # noqa: F401  registers the architectures
from hf_ssm.training import OutputError, SSMTrainer, folder_in_one_step, prepare_folder, write_atomically

MAX_LENGTH = 256  # tokens; longer texts are cut
MNLI_FIRST = ("rte", "mrpc", "stsb")  # small tasks that may start from the model fine-tuned on MNLI
READERS = {  # suffix of a local file -> how it is read
    ".jsonl": datasets.Dataset.from_json,
    ".json": datasets.Dataset.from_json,
    ".csv": datasets.Dataset.from_csv,
    ".parquet": datasets.Dataset.from_parquet,
}


class GlueError(ValueError):
    """Data or a model that a task cannot be run with. The message names the task and what is missing."""


# ---------------------------------------------------------------- metrics
# predicted and labels: (examples,), classes or, in a regression, values. All are shares of 1.


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    return float((predicted == labels).mean())


def f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Of class 1; 0 if it neither occurs nor is predicted."""
    found = ((predicted == 1) & (labels == 1)).sum()
    return float(2 * found / max((predicted == 1).sum() + (labels == 1).sum(), 1))


def matthews(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Matthews' correlation of two classes: Pearson's, of zeros and ones."""
    return pearson(predicted, labels)


def pearson(predicted: np.ndarray, labels: np.ndarray) -> float:
    """0 if either is constant."""
    x, y = (values - values.mean() for values in (predicted.astype(float), labels.astype(float)))
    scale = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / scale) if scale > 0 else 0.0


def spearman(predicted: np.ndarray, labels: np.ndarray) -> float:
    return pearson(ranks(predicted), ranks(labels))


def ranks(values: np.ndarray) -> np.ndarray:
    """From 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


# ---------------------------------------------------------------- tasks

Metric = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Task:
    """columns: the one or two texts; num_labels: classes, 1 for values from 0 to 5; weight_decay: decoupled, see
    `arguments`."""

    columns: tuple[str, ...]
    num_labels: int
    metrics: tuple[Metric, ...]
    learning_rate: float
    weight_decay: float
    epochs: int
    batch_size: int
    validation: tuple[str, ...] = ("validation",)


SENTENCES = ("sentence1", "sentence2")
# The settings of hydra/bert/yamls/finetune/hydra.yaml, batch sizes of hydra/bert/src/glue/finetuning_jobs.py,
# in github.com/goombalab/hydra, 55bef74.
TASKS = {
    "mnli": Task(
        ("premise", "hypothesis"), 3, (accuracy,), 1e-4, 5e-6, 2, 48, ("validation_matched", "validation_mismatched")
    ),
    "rte": Task(SENTENCES, 2, (accuracy,), 1e-5, 1e-6, 3, 16),
    "qqp": Task(("question1", "question2"), 2, (accuracy, f1), 5e-5, 3e-6, 3, 16),
    "qnli": Task(("question", "sentence"), 2, (accuracy,), 5e-5, 1e-6, 7, 16),
    "sst2": Task(("sentence",), 2, (accuracy,), 5e-5, 3e-6, 2, 16),
    "stsb": Task(SENTENCES, 1, (pearson, spearman), 3e-5, 3e-6, 10, 32),
    "mrpc": Task(SENTENCES, 2, (accuracy, f1), 8e-5, 8e-6, 10, 32),
    "cola": Task(("sentence",), 2, (matthews,), 1e-4, 5e-6, 10, 32),
}


def arguments(task: Task, folder: Path, seed: int) -> TrainingArguments:
    """The paper's optimiser and schedule: AdamW, 6 % warm-up, linear decay to 0."""
    gpu = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=task.epochs,
        per_device_train_batch_size=task.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=task.learning_rate,
        # The original's DecoupledAdamW shrinks weights by weight_decay * lr / (peak lr), torch's AdamW by
        # weight_decay * lr.
        weight_decay=task.weight_decay / task.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        lr_scheduler_type="linear",
        warmup_steps=0.06,  # below 1: a share of all steps
        bf16=gpu and torch.cuda.is_bf16_supported(),
        save_strategy="no",
        report_to="none",
        seed=seed,
        dataloader_pin_memory=gpu,
    )


def load_split(data: str, name: str, split: str) -> datasets.Dataset:
    """A split of a task with its columns checked. `data`: a dataset's name on the Hub, or a folder that holds for each
    task what `save_to_disk` writes, or one file per split. Raises GlueError."""
    task, where = TASKS[name], f"{name}, {split}"
    folder = Path(data) / name
    if not Path(data).exists():
        try:
            found = datasets.load_dataset(data, name, split=split)
        except (OSError, ValueError) as error:
            raise GlueError(
                f"{where}: {data!r} is no folder here and cannot be loaded as a dataset: {error}"
            ) from error
    elif (folder / "dataset_dict.json").exists():
        splits = datasets.load_from_disk(folder)
        if split not in splits:
            raise GlueError(f"{where}: {folder} has no such split, only {sorted(splits)}")
        found = splits[split]
    else:
        files = [folder / f"{split}{suffix}" for suffix in READERS if (folder / f"{split}{suffix}").exists()]
        if not files:
            raise GlueError(f"{where}: {folder} holds no {split} with one of the suffixes {', '.join(READERS)}")
        if not files[0].stat().st_size:
            raise GlueError(f"{where}: {files[0]} is empty")
        try:
            found = READERS[files[0].suffix](str(files[0]))
        except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
            raise GlueError(f"{where}: {files[0]} cannot be read: {error.__cause__ or error}") from error
    for column in (*task.columns, "label"):
        if column not in found.column_names:
            raise GlueError(f"{where}: no column {column!r} among {found.column_names}")
    for column in task.columns:
        if any(not isinstance(text, str) for text in found[column]):
            raise GlueError(f"{where}: column {column!r} must hold text")
    check_labels(np.array(found["label"], dtype=object), task.num_labels, where)
    if task.num_labels == 1:
        found = found.cast_column("label", datasets.Value("float32"))
    return found.select_columns([*task.columns, "label"])


def check_labels(labels: np.ndarray, num_labels: int, where: str) -> None:
    if len(labels) == 0:
        raise GlueError(f"{where}: no examples")
    if num_labels == 1:
        wrong = [x for x in labels if type(x) not in (int, float) or not 0 <= x <= 5]
        expected = "a number from 0 to 5"
    else:
        wrong = [x for x in labels if type(x) is not int or not 0 <= x < num_labels]
        expected = f"an integer from 0 to {num_labels - 1}"
    if wrong:
        raise GlueError(f"{where}: label {wrong[0]!r}, where {expected} is expected (test sets have no labels)")


def run_task(name: str, model: str, data: str, output: Path, seed: int, *, start: str, keep: bool) -> dict[str, Any]:
    """Fine-tune `start` on one task, with the tokenizer of `model`, and evaluate it: the task's entry in results.json.
    `keep` saves the model in `output`/`name`/model."""
    task, started = TASKS[name], time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token_id is None:
        raise GlueError(f"{name}: the tokenizer of {model} has no padding token; set its pad_token")

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return tokenizer(*(batch[column] for column in task.columns), truncation=True, max_length=MAX_LENGTH)

    splits = {
        split: load_split(data, name, split).map(encode, batched=True, remove_columns=list(task.columns))
        for split in ("train", *task.validation)
    }
    set_seed(seed)  # of the new classifier, too
    network = AutoModelForSequenceClassification.from_pretrained(
        start,
        num_labels=task.num_labels,
        problem_type="regression" if task.num_labels == 1 else "single_label_classification",
        ignore_mismatched_sizes=True,  # a classifier of another task, such as MNLI's, gives way to a new one
    )
    trainer = SSMTrainer(
        model=network,
        args=arguments(task, output / name, seed),
        train_dataset=splits["train"],
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()

    metrics = {}
    for split in task.validation:
        prediction = trainer.predict(splits[split], ignore_keys=["past_key_values", "cache_params"])
        logits, labels = prediction.predictions, prediction.label_ids
        predicted = logits[:, 0] if task.num_labels == 1 else logits.argmax(-1)
        suffix = split.removeprefix("validation").replace("_", " ")
        metrics |= {metric.__name__ + suffix: metric(predicted, labels) for metric in task.metrics}
    if keep:
        with folder_in_one_step(output / name / "model") as partial:
            trainer.save_model(str(partial))
            tokenizer.save_pretrained(partial)
    return {
        "metrics": metrics,
        "score": float(np.mean(list(metrics.values()))),
        "started_from": start,
        "steps": trainer.state.global_step,
        "training_examples": len(splits["train"]),
        "validation_examples": sum(len(splits[split]) for split in task.validation),
        "seconds": time.monotonic() - started,
    }


# ---------------------------------------------------------------- results


def open_results(output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What is already in `output`. Raises OutputError if that cannot be read, or was done with other settings."""
    prepare_folder(output)
    path = output / "results.json"
    if not path.exists():
        return {"settings": settings, "tasks": {}}
    try:
        results = json.loads(path.read_text())
    except ValueError as error:
        raise OutputError(f"{path} is not valid JSON ({error}); delete it, or choose another --output") from error
    ours = isinstance(results, dict) and all(isinstance(results.get(part), dict) for part in ("settings", "tasks"))
    if not ours:
        raise OutputError(f"{path} holds no results of this script; delete it, or choose another --output")
    different = sorted(key for key in settings if results["settings"].get(key) != settings[key])
    if different:
        raise OutputError(
            f"{output} holds results with other settings ({', '.join(different)}); choose another --output"
        )
    return results


def table(results: dict[str, Any]) -> str:
    """Markdown. The average is that of the tasks, and a task with several metrics counts with their mean."""
    tasks = {name: results["tasks"][name] for name in TASKS if name in results["tasks"]}
    lines = ["| task | metrics | score |", "| --- | --- | --- |"]
    for name, task in tasks.items():
        metrics = ", ".join(f"{metric} {100 * value:.1f}" for metric, value in task["metrics"].items())
        lines.append(f"| {name} | {metrics} | {100 * task['score']:.1f} |")
    average = np.mean([task["score"] for task in tasks.values()])
    of = "" if len(tasks) == len(TASKS) else f", {len(tasks)} of {len(TASKS)} tasks"
    return "\n".join([*lines, f"| **average{of}** | | **{100 * average:.1f}** |"]) + "\n"


def run(model: str, tasks: list[str], data: str, output: Path, *, from_mnli: bool, seed: int) -> dict[str, Any]:
    """Run those of `tasks` that `output` does not hold yet, MNLI first; the content of results.json."""
    for name in tasks:
        if name not in TASKS:
            raise GlueError(f"unknown task {name!r}; there are {', '.join(TASKS)}")
    results = open_results(output, {"model": model, "data": data, "from_mnli": from_mnli, "seed": seed})
    for name in (name for name in TASKS if name in tasks and name not in results["tasks"]):
        start = model
        if from_mnli and name in MNLI_FIRST:
            start = str(output / "mnli" / "model")
            if "mnli" not in results["tasks"]:
                raise GlueError(f"{name}: with --from-mnli it starts from the model of mnli; run that task, too")
        results["tasks"][name] = run_task(
            name, model, data, output, seed, start=start, keep=from_mnli and name == "mnli"
        )
        write_atomically(output / "glue.md", table(results))
        write_atomically(output / "results.json", json.dumps(results, indent=1))
    return results


def main(
    model: Annotated[str, typer.Argument(help="Folder of a saved model with its tokenizer, or its name on the Hub.")],
    task: Annotated[list[str] | None, typer.Option(help="A task; may be given repeatedly. All by default.")] = None,
    data: Annotated[
        str, typer.Option(help="Name of the dataset, or a folder with the same columns.")
    ] = "nyu-mll/glue",
    output: Annotated[Path, typer.Option(help="Where the results are, and are looked for.")] = Path("runs/glue"),
    from_mnli: Annotated[
        bool, typer.Option("--from-mnli", help="Start RTE, MRPC and STS-B from the model fine-tuned on MNLI.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the new classifier and the order of the data.")] = 0,
) -> None:
    """Fine-tune MODEL on GLUE with the settings of the Hydra paper."""
    try:
        results = run(model, task or list(TASKS), data, output, from_mnli=from_mnli, seed=seed)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(table(results))


if __name__ == "__main__":
    typer.run(main)
