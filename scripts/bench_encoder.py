"""Hydra base beside BERT base, both as masked language models with random weights, on this machine's CPU.

    python scripts/bench_encoder.py --output benchmarks/results/encoder.md
    python scripts/bench_encoder.py --memory      # peak memory of a forward pass against sequence length instead

All contestants of a row run interleaved in one process; a number is the median. The floor is the time of a model's own
matrix products alone: every nn.Linear applied to inputs of the right shape (for training also its two gradients).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from bench_cpu import DTYPES, ROOT, Job, header, interleaved, matrix_products
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, BertForMaskedLM


def hydra(dtype: torch.dtype, **changes: int) -> nn.Module:
    settings = json.loads((ROOT / "configs" / "models" / "hydra-base.json").read_text())
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(**settings | changes), dtype=dtype)


def bert(dtype: torch.dtype, length: int, **changes: int) -> nn.Module:
    """BERT base with as many positions as the row asks for; attention by scaled_dot_product_attention."""
    return BertForMaskedLM(BertConfig(max_position_embeddings=length, **changes)).to(dtype)


def forward(model: nn.Module, ids: Tensor) -> Job:
    model.eval()

    def run() -> None:
        with torch.no_grad():
            model(ids)

    return run


def training_step(model: nn.Module, ids: Tensor) -> Job:
    model.train()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()

    return run


def speed(dtypes: list[str], lengths: list[int], training_lengths: list[int], repeats: int) -> list[dict]:
    rows = []
    for dtype in dtypes:
        mine, theirs = hydra(DTYPES[dtype]), bert(DTYPES[dtype], max(lengths))
        for make, tokens in ((forward, lengths), (training_step, training_lengths)):
            for length in tokens:
                ids = torch.randint(0, 30000, (1, length))
                training = make is training_step
                jobs = {
                    "products": matrix_products(mine, length, training),
                    "hydra": make(mine, ids),
                    "bert products": matrix_products(theirs, length, training),
                    "bert": make(theirs, ids),
                }
                row = {"dtype": dtype, "case": make.__name__, "tokens": length, **interleaved(jobs, repeats)}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def speed_table(rows: list[dict]) -> str:
    lines = [
        "| dtype | case | tokens | Hydra's products | Hydra | Hydra / its products | BERT | BERT / its products "
        "| BERT / Hydra |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        mine, theirs = row["hydra"] / row["products"], row["bert"] / row["bert products"]
        lines.append(
            f"| {row['dtype']} | {row['case'].replace('_', ' ')} | {row['tokens']:,} | {1e3 * row['products']:.0f} ms "
            f"| {1e3 * row['hydra']:.0f} ms | {mine:.2f} | {1e3 * row['bert']:.0f} ms | {theirs:.2f} "
            f"| {row['bert'] / row['hydra']:.2f} |"
        )
    return "\n".join(lines)


# Peak memory is a property of a process, so each length gets its own. The layers of a forward pass run one after the
# other in the same memory, so four of them show what 23 would need. The encoder alone: logits of a whole vocabulary
# for every token would hide it.
_PEAK = """
import sys, torch
sys.path.insert(0, {scripts!r})
from bench_cpu import resident, reset_peak
from bench_encoder import bert, hydra
torch.set_num_threads({threads})
build = {{"hydra": lambda: hydra(torch.float32, num_hidden_layers=4),
          "bert": lambda: bert(torch.float32, {seqlen}, num_hidden_layers=4)}}
model = build[{name!r}]().base_model.eval()
ids = torch.randint(0, 1000, (1, {seqlen}))
with torch.no_grad():
    model(ids[:, :64])
    before = resident("VmRSS")
    reset_peak()
    model(ids)
print(resident("VmHWM") - before)
"""


def memory(lengths: list[int]) -> list[dict]:
    rows = []
    for name in ("hydra", "bert"):
        for seqlen in lengths:
            code = _PEAK.format(
                scripts=str(ROOT / "scripts"), threads=torch.get_num_threads(), name=name, seqlen=seqlen
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if done.returncode:
                print(f"{name}, {seqlen} tokens: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            rows.append({"model": name, "tokens": seqlen, "bytes": int(done.stdout.split()[-1])})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def memory_table(rows: list[dict]) -> str:
    lines = ["| model | tokens | memory beyond the weights | per token |", "| --- | --- | --- | --- |"]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['tokens']:,} | {row['bytes'] / 2**20:.0f} MiB "
            f"| {row['bytes'] / row['tokens'] / 1024:.1f} KiB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--lengths", type=int, nargs="+", help="default 128 512 2048 4096; 1024 4096 16384 32768")
    parser.add_argument("--training-lengths", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.memory:
        table = memory_table(memory(arguments.lengths or [1024, 4096, 16384, 32768]))
    else:
        lengths = arguments.lengths or [128, 512, 2048, 4096]
        table = speed_table(speed(arguments.dtypes, lengths, arguments.training_lengths, arguments.repeats))
    text = header(["python", "scripts/bench_encoder.py", *sys.argv[1:]], "base sizes") + "\n" + table + "\n"
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
