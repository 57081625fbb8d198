"""Our models beside transformers' own and llama.cpp, with random weights, on this machine's CPU.

    python scripts/bench_cpu.py --output benchmarks/results/cpu.md
    python scripts/bench_cpu.py --models mamba --llama-cpp path/to/python   # one that has llama-cpp-python and gguf
    python scripts/bench_cpu.py --memory          # peak memory against sequence length instead
    python scripts/bench_cpu.py --scaling         # time per token against sequence length, and in short rows

All contestants of a row run interleaved in one process (llama.cpp in one of its own, in step); a number is the
median. Where mambapy is installed, transformers' Mamba also runs on its scan. The floor of a prompt and of a training
step is the time of the model's own matrix products alone: every nn.Linear applied to inputs of the right shape (for
training also its two gradients). That of a decoded token is the time in which a large copy moves as many bytes as the
weights have.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_common import DTYPES, ROOT, Job, decoded_token, our_model, prompt, transformers_model
from bench_llama import LlamaCpp
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.import_utils import is_mambapy_available

import hf_ssm
from hf_ssm.ops import cpu, use_backend

SIZES = {"mamba": "mamba-130m", "mamba2": "mamba2-130m", "hydra": "hydra-base", "hymba": "hymba-1.5b"}
# The 1.5B shape, cut to 12 of its 32 layers so that a training step fits into this machine's memory.
CHANGES: dict[str, dict[str, object]] = {
    "hymba": {
        "num_hidden_layers": 12,
        "global_attn_idx": [0, 6, 11],
        "kv_reuse_group": [[1, 2], [3, 4], [7, 8], [9, 10]],
    }
}


def ours(name: str, dtype: torch.dtype, **changes: object) -> nn.Module:
    return our_model(SIZES[name], dtype, **CHANGES.get(name, {}) | changes)


def theirs(name: str, dtype: torch.dtype, **changes: object) -> nn.Module | None:
    return transformers_model(SIZES[name], dtype, **changes)


def matrix_products(model: nn.Module, tokens: int, training: bool) -> Job:
    """Every linear layer of the model, one after the other, on random inputs of as many tokens, and of Hymba's meta
    tokens, which pass through the same layers; lm_head on one token unless training."""
    work = []
    meta = getattr(model.config, "num_memory_tokens", 0)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        rows = tokens + meta if name != "lm_head" else tokens if training else 1
        weight = layer.weight.detach()
        x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
        work.append((x, weight, torch.randn(rows, weight.shape[0]).to(weight.dtype)))

    def run() -> None:
        for x, weight, grad in work:
            F.linear(x, weight)
            if training:
                grad @ weight
                grad.t() @ x

    return run


def copy_of_weights(model: nn.Module) -> Job:
    """A copy of half as many bytes as the linear layers' weights have: copying reads and writes."""
    count = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, nn.Linear)) // 8
    source, target = torch.ones(count), torch.empty(count)
    return lambda: target.copy_(source)


def on_torch(job: Job) -> Job:
    """The job without native kernels."""

    def run() -> None:
        with use_backend("torch"):
            job()

    return run


def training_step(model: nn.Module, ids: Tensor) -> Job:
    model.train()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()

    return run


def interleaved(jobs: dict[Any, Job], repeats: int) -> dict[Any, float]:
    """Median seconds of each job; one warm-up round, then round-robin."""
    times: dict[Any, list[float]] = {name: [] for name in jobs}
    for i in range(repeats + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if i:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def speed(models: list[str], dtypes: list[str], cases: list[str], repeats: int, llama_cpp: str | None) -> list[dict]:
    rows = []
    for name in models:
        for dtype in dtypes:
            mine, other = ours(name, DTYPES[dtype]), theirs(name, DTYPES[dtype])
            ids = torch.randint(0, mine.config.vocab_size, (1, 512))
            for case in cases:
                make, tokens, times = CASES[case]
                if make is decoded_token and not mine.can_generate():
                    continue
                given = ids[:, :tokens]
                with tempfile.TemporaryDirectory() as folder:
                    jobs = {"hf_ssm": make(mine, given)}
                    if cpu.kernels() is not None:
                        jobs["hf_ssm without native kernels"] = on_torch(make(mine, given))
                    if other is not None:
                        jobs["transformers"] = make(other, given)
                    mambapy = name == "mamba" and make is not decoded_token and is_mambapy_available()
                    if mambapy and dtype == "float32":  # transformers cannot call it in another
                        jobs["transformers with mambapy"] = make(theirs(name, DTYPES[dtype], use_mambapy=True), given)
                    if make is decoded_token:
                        floor = copy_of_weights(mine)
                        if llama_cpp is not None and name in ("mamba", "mamba2"):
                            jobs["llama.cpp"] = LlamaCpp(llama_cpp, mine, Path(folder), torch.get_num_threads())
                    else:
                        floor = matrix_products(mine, given.shape[1], make is training_step)
                    seconds = interleaved({"floor": floor, **jobs}, max(1, int(times * repeats)))
                row = {"model": name, "dtype": dtype, "case": case, "seconds": seconds}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
            del mine, other
    return rows


CASES: dict[str, tuple[Callable[[nn.Module, Tensor], Job], int, float]] = {  # how, tokens, share of the repeats
    "prompt of 512 tokens": (prompt, 512, 1),
    "training step of 256 tokens": (training_step, 256, 1),
    "decoded token": (decoded_token, 64, 10),
}


def speed_table(rows: list[dict]) -> str:
    contestants = list(dict.fromkeys(name for row in rows for name in row["seconds"] if name != "floor"))
    lines = [
        "| model | dtype | case | floor | " + " | ".join(contestants) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(contestants),
    ]
    for row in rows:
        floor = row["seconds"]["floor"]
        cells = [
            f"{1e3 * row['seconds'][name]:.1f} ms, {row['seconds'][name] / floor:.2f}"
            if name in row["seconds"]
            else ""
            for name in contestants
        ]
        lines.append(
            f"| {row['model']} | {row['dtype']} | {row['case']} | {1e3 * floor:.1f} ms | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


# Peak memory is a property of a process, so each length gets its own. VmHWM is reset after the weights are there. The
# layers of a prompt run one after the other in the same memory, so four of them show what 24 would need.
_PEAK = """
import sys, torch
sys.path.insert(0, {scripts!r})
from bench_cpu import ours, remove_scans, resident, reset_peak
torch.set_num_threads({threads})
model = ours({name!r}, torch.float32, num_hidden_layers={layers}).eval()
ids = torch.randint(0, 1000, (1, {seqlen}))
with torch.no_grad():
    model(ids[:, :64], use_cache=True, logits_to_keep=1)
if not {scans}:
    remove_scans(model)
before = resident("VmRSS")
reset_peak()
if {training}:
    model.train()
    model(ids, labels=ids).loss.backward()
else:
    with torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1)
print(resident("VmHWM") - before)
"""


def remove_scans(model: nn.Module) -> None:
    """Let every scan of a Mamba or Mamba-2 pass its input on, for the rest of this process."""
    module = sys.modules[type(model.base_model.layers[0].mixer).__module__]
    for name in {"selective_scan", "ssd"} & set(vars(module)):
        setattr(module, name, lambda x, *inputs, **options: (x, None))


def resident(field: str) -> int:
    """A memory figure of this process in bytes, from Linux's /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(models: list[str], lengths: list[int], training_lengths: list[int]) -> list[dict]:
    rows = []
    for name in models:
        cases = [
            ("prompt, 4 layers", False, True, lengths),
            ("training step, 24 layers", True, True, training_lengths),
        ]
        if name in ("mamba", "mamba2"):
            cases.append(("training step without the scans", True, False, training_lengths))
        for what, training, scans, seqlens in cases:
            for seqlen in seqlens:
                code = _PEAK.format(
                    scripts=str(ROOT / "scripts"),
                    threads=torch.get_num_threads(),
                    name=name,
                    layers=24 if training else 4,
                    seqlen=seqlen,
                    training=training,
                    scans=scans,
                )
                done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
                if done.returncode:
                    print(f"{name}, {seqlen} tokens: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                    continue
                row = {"model": name, "what": what, "tokens": seqlen, "bytes": int(done.stdout.split()[-1])}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def memory_table(rows: list[dict]) -> str:
    lines = ["| model | what | tokens | memory beyond the weights | per token |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['what']} | {row['tokens']:,} | {row['bytes'] / 2**20:.0f} MiB "
            f"| {row['bytes'] / row['tokens'] / 1024:.1f} KiB |"
        )
    return "\n".join(lines)


def scaling(models: list[str], lengths: list[int], repeats: int) -> list[dict]:
    """Seconds per token of a prompt through four layers: one row of each length, and the shortest length's tokens in
    rows of 64."""
    rows = []
    for name in models:
        model = ours(name, torch.float32, num_hidden_layers=4, **FOUR_LAYERS.get(name, {}))
        shapes = [(1, length) for length in lengths] + [(max(1, min(lengths) // 64), 64)]
        jobs = {shape: prompt(model, torch.randint(0, 1000, shape)) for shape in shapes}
        for (batch, seqlen), seconds in interleaved(jobs, repeats).items():
            row = {"model": name, "rows": batch, "tokens": seqlen, "seconds": seconds / (batch * seqlen)}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


FOUR_LAYERS: dict[str, dict[str, object]] = {"hymba": {"global_attn_idx": [], "kv_reuse_group": []}}


def scaling_table(rows: list[dict]) -> str:
    lines = ["| model | rows x tokens | time per token |", "| --- | --- | --- |"]
    for row in rows:
        lines.append(f"| {row['model']} | {row['rows']} x {row['tokens']:,} | {1e6 * row['seconds']:.1f} us |")
    return "\n".join(lines)


def header(command: list[str], sizes: str) -> str:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    simd = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else platform.machine()
    return (
        f"`{' '.join(command)}`, {time.strftime('%Y-%m-%d')}. hf_ssm {hf_ssm.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} "
        f"threads, {simd}; native kernels: {cpu.describe()}. {sizes[0].upper()}{sizes[1:]}; random weights, batch 1.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--llama-cpp", metavar="PYTHON", help="a Python with llama-cpp-python and gguf, to compare with"
    )
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--scaling", action="store_true", help="measure time per token against length instead")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--training-lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.memory:
        table = memory_table(memory(arguments.models, arguments.lengths, arguments.training_lengths))
    elif arguments.scaling:
        table = scaling_table(scaling(arguments.models, arguments.lengths, arguments.repeats))
    else:
        rows = speed(arguments.models, arguments.dtypes, arguments.cases, arguments.repeats, arguments.llama_cpp)
        table = speed_table(rows)
    sizes = "; ".join(f"{name}: {SIZES[name]}" for name in arguments.models)
    text = header(["python", "scripts/bench_cpu.py", *sys.argv[1:]], sizes) + "\n" + table + "\n"
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
