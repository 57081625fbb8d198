"""Tag every byte of Python source with the lexical type of its token: three models of one size, trained the same way.

    python scripts/tag_python.py                      # minutes on two CPU cores, offline; into runs/tag-python/

The labels are those of the standard library's `tokenize`, the text is the standard library's own source. A block
begins anywhere in a file, so what a byte is can depend on what stands far before it and behind it: whether a quotation
mark opens or closes a string, whether a line ends a statement. The contestants:

    hydra       HydraForTokenClassification
    two-scans   the same with the mixer's matrix replaced by the sum of two Mamba-2 scans, one of them over the
                reversed sequence: "Add" in the paper's comparison of bidirectional mixers (arXiv:2407.09941)
    attention   transformers' ModernBertForTokenClassification: rotary positions, local and global layers, sdpa
"""

import builtins
import io
import json
import keyword
import multiprocessing
import os
import time
import tokenize
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported; see scripts/demo.py

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForTokenClassification, get_cosine_schedule_with_warmup

import hf_ssm
from hf_ssm.data import DataConfig, load_corpus
from hf_ssm.modeling.hydra import modeling_hydra
from hf_ssm.ops import ssd
from hf_ssm.training import parameter_groups, peak_memory_bytes, prepare_folder, write_atomically

LABELS = (
    "space", "keyword", "builtin", "name", "number", "string", "f-string", "comment", "operator",
    "newline",     # the end of a statement
    "line break",  # inside brackets, or of a line without a statement
    "indent",      # deeper than the line before
)  # fmt: skip
KINDS = {
    "NUMBER": "number", "STRING": "string", "FSTRING_START": "f-string", "FSTRING_MIDDLE": "f-string",
    "FSTRING_END": "f-string", "TSTRING_START": "f-string", "TSTRING_MIDDLE": "f-string", "TSTRING_END": "f-string",
    "COMMENT": "comment", "OP": "operator", "NEWLINE": "newline", "NL": "line break", "INDENT": "indent",
}  # fmt: skip
BUILTINS = frozenset(dir(builtins))


# ---------------------------------------------------------------- data


def label_bytes(source: str) -> np.ndarray:
    """(bytes of `source` in UTF-8,) int64, indices into LABELS. Raises SyntaxError or tokenize.TokenError.

    A builtin is a name that `builtins` has, unless it is an attribute. Python before 3.12 has one token for a whole
    f-string, later ones see the expressions inside.
    """
    line_starts = np.cumsum([0, *(len(line) + 1 for line in source.split("\n"))])
    kinds = np.zeros(len(source), dtype=np.int64)  # of characters
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string:
            start, end = (line_starts[line - 1] + column for line, column in (token.start, token.end))
            kinds[start:end] = LABELS.index(lexical_type(token, before))
            before = token.string
    return np.repeat(kinds, [len(character.encode()) for character in source])


def lexical_type(token: tokenize.TokenInfo, before: str) -> str:
    if token.type == tokenize.NAME:
        if keyword.iskeyword(token.string):
            return "keyword"
        return "builtin" if token.string in BUILTINS and before != "." else "name"
    if token.type == tokenize.STRING:
        prefix = token.string[: token.string.index(token.string[-1])]
        return "f-string" if "f" in prefix.lower() else "string"
    return KINDS.get(tokenize.tok_name[token.type], "space")


@dataclass(frozen=True)
class Blocks:
    """input_ids (blocks, seqlen) bytes and labels (blocks, seqlen), int64."""

    input_ids: Tensor
    labels: Tensor


def blocks(texts: Iterable[str], seqlen: int) -> Blocks:
    """Every file cut into blocks; what is left at its end, and files that are no valid Python, are left out."""

    def cut() -> Iterator[np.ndarray]:
        for text in texts:
            try:
                kinds = label_bytes(text)
            except (SyntaxError, tokenize.TokenError):
                continue
            both = np.stack([np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64), kinds])
            for start in range(0, both.shape[1] - seqlen + 1, seqlen):
                yield both[:, start : start + seqlen]

    found = list(cut())
    if not found:
        raise ValueError(f"no file of valid Python has {seqlen} bytes")
    input_ids, labels = torch.from_numpy(np.stack(found, axis=1))
    return Blocks(input_ids, labels)


# ---------------------------------------------------------------- contestants


def two_scans(
    x: Tensor,
    dt_forward: Tensor,
    dt_backward: Tensor,
    A: Tensor,
    B_forward: Tensor,
    C_forward: Tensor,
    B_backward: Tensor,
    C_backward: Tensor,
    diagonal: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    initial_state: None,
    seq_idx: None,
    mask: None,
    **options: Any,
) -> Tensor:
    """In the place of `hf_ssm.ops.quasiseparable`: Mamba-2 over the sequence, plus Mamba-2 over the reversed one.

    Each scan sees its own token and has the skip connection D, as in Mamba-2; Hydra's `diagonal` is not used.
    """
    reversed_inputs = (t.flip(1) for t in (x, dt_backward, B_backward, C_backward))
    x_reversed, dt_backward, B_backward, C_backward = reversed_inputs
    forward, _ = ssd(x, dt_forward, A, B_forward, C_forward, D=D, dt_bias=dt_bias, **options)
    backward, _ = ssd(x_reversed, dt_backward, A, B_backward, C_backward, D=D, dt_bias=dt_bias, **options)
    return forward + backward.flip(1)


def hydra(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "state_size": 32, "head_dim": 64,
        "chunk_size": 64, "is_prenorm": True, "hidden_dropout_prob": 0.0, "num_labels": len(LABELS),
    }  # fmt: skip
    return hf_ssm.HydraForTokenClassification(hf_ssm.HydraConfig(**sizes | changes))


def attention(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 232, "num_labels": len(LABELS), "attn_implementation": "sdpa", "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": None, "cls_token_id": None, "sep_token_id": None,
    }  # fmt: skip
    return ModernBertForTokenClassification(ModernBertConfig(**sizes | changes))


MODELS = {"hydra": hydra, "two-scans": hydra, "attention": attention}
LEARNING_RATE = 4e-3  # the best of 2e-3, 4e-3 and 8e-3 for each of them


def in_use(name: str) -> AbstractContextManager[Any]:
    """Within it, models of this name compute what they should."""
    if name == "two-scans":
        return mock.patch.object(modeling_hydra, "quasiseparable", two_scans)
    return nullcontext()


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class Settings:
    """The same for all contestants. validate_every: steps; validation_blocks: of these checks and of the last one."""

    steps: int = 240
    batch_size: int = 4
    validate_every: int = 40
    weight_decay: float = 0.1
    seed: int = 0


def fit(
    name: str, learning_rate: float, train: Blocks, validation: Blocks, settings: Settings, **sizes: int
) -> dict[str, Any]:
    """Train one contestant and measure it: its entry in results.json."""
    with in_use(name):
        torch.manual_seed(settings.seed)
        model = MODELS[name](**sizes).train()
        optimizer = torch.optim.AdamW(
            parameter_groups(model, settings.weight_decay), lr=learning_rate, betas=(0.9, 0.98)
        )
        warmup = settings.steps // 15
        scheduler = get_cosine_schedule_with_warmup(optimizer, warmup, settings.steps)
        order = torch.Generator().manual_seed(settings.seed)  # the same batches for all
        history, checks, seconds, cpu_seconds = [], [], 0.0, 0.0
        for step in range(1, settings.steps + 1):
            started, cpu_started = time.monotonic(), time.process_time()
            rows = torch.randint(len(train.input_ids), (settings.batch_size,), generator=order)
            loss = model(input_ids=train.input_ids[rows], labels=train.labels[rows]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if step < settings.steps:
                optimizer.zero_grad()
            history.append(loss.item())
            seconds += time.monotonic() - started
            cpu_seconds += time.process_time() - cpu_started
            if step % settings.validate_every == 0 or step == settings.steps:
                measured = evaluate(model, validation)
                checks.append({"step": step, "loss": measured["loss"]})
                print(f"{name}: step {step}, validation loss {measured['loss']:.4f}", flush=True)
        return {
            "parameters": sum(p.numel() for p in model.parameters() if p.grad is not None),
            "learning_rate": learning_rate,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "history": history,
            "validation": checks,
            **measured,
        }


@torch.no_grad()
def evaluate(model: Any, data: Blocks) -> dict[str, Any]:
    """Loss (nats per byte), accuracy, F1 of every label that occurs, and their mean."""
    model.eval()
    loss, confusion = 0.0, np.zeros((len(LABELS), len(LABELS)), dtype=np.int64)  # label x prediction
    for input_ids, labels in zip(data.input_ids.split(8), data.labels.split(8), strict=True):
        logits = model(input_ids=input_ids).logits
        loss += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        np.add.at(confusion, (labels.flatten().numpy(), logits.argmax(-1).flatten().numpy()), 1)
    model.train()
    return {"loss": loss / data.labels.numel(), **scores(confusion)}


def scores(confusion: np.ndarray) -> dict[str, Any]:
    """confusion (labels, labels): how often a label (row) was taken for another (column)."""
    found = confusion.diagonal()
    total = confusion.sum(0) + confusion.sum(1)  # predicted + actual
    f1 = {
        label: float(2 * n / t) for label, n, t, row in zip(LABELS, found, total, confusion, strict=True) if row.sum()
    }
    return {"accuracy": float(found.sum() / confusion.sum()), "macro_f1": float(np.mean(list(f1.values()))), "f1": f1}


# ---------------------------------------------------------------- results


def table(results: dict[str, dict[str, Any]]) -> str:
    def row(name: str, values: Iterable[str]) -> str:
        return f"| {' | '.join([name, *values])} |"

    runs = results.values()
    lines = [
        row("", results),
        row("---", ["---"] * len(results)),
        row("parameters", (f"{run['parameters']:,}" for run in runs)),
        row("learning rate", (f"{run['learning_rate']:g}" for run in runs)),
        row("validation loss, nats per byte", (f"{run['loss']:.4f}" for run in runs)),
        row("accuracy", (f"{run['accuracy']:.2%}" for run in runs)),
        row("mean F1", (f"{run['macro_f1']:.4f}" for run in runs)),
        *(
            row(f"F1: {label}", (f"{run['f1'][label]:.4f}" for run in runs))
            for label in LABELS
            if all(label in run["f1"] for run in runs)
        ),
        row("training, s", (f"{run['seconds']:.0f}" for run in runs)),
        row("training, CPU s", (f"{run['cpu_seconds']:.0f}" for run in runs)),
        row("peak memory of the process, MB", (f"{(run['peak_memory_bytes'] or 0) / 1e6:.0f}" for run in runs)),
    ]
    return "\n".join(lines) + "\n"


def plot(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Loss curves: training, each point the mean of ten steps, and validation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, run) in enumerate(results.items()):
        losses = np.array(run["history"])
        tens = losses[: len(losses) // 10 * 10].reshape(-1, 10).mean(1)
        axes.plot(10 * np.arange(1, len(tens) + 1), tens, f"C{colour}", alpha=0.35)
        checks = run["validation"]
        axes.plot(
            [check["step"] for check in checks], [check["loss"] for check in checks], f"C{colour}o-", ms=3, label=name
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", yscale="log", title="Tagging Python: validation (training)")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120, format="png")


def main(
    output: Annotated[Path, typer.Option(help="Where results.json, results.md and loss.png go.")] = Path(
        "runs/tag-python"
    ),
    steps: Annotated[int, typer.Option(min=10, help="Training steps of each model.")] = Settings.steps,
    seqlen: Annotated[int, typer.Option(min=16, help="Bytes per block.")] = 1024,
    validation_blocks: Annotated[int, typer.Option(min=1, help="Blocks to evaluate on.")] = 64,
    learning_rate: Annotated[
        float, typer.Option(help="Of all contestants; the default is the best found for each.")
    ] = LEARNING_RATE,
) -> None:
    """Train all contestants, one after another, each in a process of its own."""
    prepare_folder(output)
    settings = Settings(steps=steps)
    corpus = load_corpus(DataConfig())
    train = blocks(corpus.train(), seqlen)
    whole = blocks(corpus.validation(), seqlen)
    # Spread over all validation files.
    chosen = torch.linspace(0, len(whole.labels) - 1, min(validation_blocks, len(whole.labels))).long()
    validation = Blocks(whole.input_ids[chosen], whole.labels[chosen])
    print(f"{len(train.labels):,} blocks of {seqlen} bytes to train on, {len(validation.labels)} to validate on")
    results = {}
    for name in MODELS:
        # A fresh process, so that its peak memory is its own.
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
            results[name] = pool.submit(fit, name, learning_rate, train, validation, settings).result()
    write_atomically(output / "results.json", json.dumps(results, indent=1))
    write_atomically(output / "results.md", table(results))
    plot(output / "loss.png", results)
    print(table(results))


if __name__ == "__main__":
    typer.run(main)
