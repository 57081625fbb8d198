"""Our Mamba and Mamba-2 beside transformers' own, at 130M size with random weights, on this machine's CPU.

    python scripts/bench_cpu.py --output benchmarks/results/cpu.md
    python scripts/bench_cpu.py --memory          # peak memory against sequence length instead

All contestants of a row run interleaved in one process; a number is the median. The floor is the time of the model's
own matrix products alone: every nn.Linear applied to inputs of the right shape (for training also its two gradients).
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import hf_ssm

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"mamba": "mamba-130m", "mamba2": "mamba2-130m"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Job = Callable[[], object]


def ours(name: str, dtype: torch.dtype, **changes: int) -> nn.Module:
    settings = json.loads((ROOT / "configs" / "models" / f"{SIZES[name]}.json").read_text())
    config = AutoConfig.for_model(**settings | changes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def theirs(name: str, dtype: torch.dtype) -> nn.Module:
    classes = {"mamba": ("MambaConfig", "MambaForCausalLM"), "mamba2": ("Mamba2Config", "Mamba2ForCausalLM")}[name]
    config_class, model_class = (getattr(transformers, attribute) for attribute in classes)
    settings = json.loads((ROOT / "configs" / "models" / f"{SIZES[name]}.json").read_text())
    return model_class(config_class(**settings)).to(dtype)


def matrix_products(model: nn.Module, tokens: int, training: bool) -> Job:
    """Every linear layer of the model, one after the other, on random inputs; lm_head on one token unless training."""
    work = []
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        rows = 1 if name == "lm_head" and not training else tokens
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


def prompt(model: nn.Module, ids: Tensor) -> Job:
    model.eval()

    def run() -> None:
        with torch.no_grad():
            model(ids, use_cache=True, logits_to_keep=1)

    return run


def training_step(model: nn.Module, ids: Tensor) -> Job:
    model.train()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids, use_cache=False).loss.backward()

    return run


def decoded_token(model: nn.Module, ids: Tensor) -> Job:
    model.eval()
    with torch.no_grad():
        cache = model(ids, use_cache=True)[1]  # the second output is the cache in both
    token = ids[:, :1]
    name = "past_key_values" if type(model).__module__.startswith("hf_ssm") else "cache_params"

    def run() -> None:
        with torch.no_grad():
            model(token, use_cache=True, **{name: cache})

    return run


def interleaved(jobs: dict[str, Job], repeats: int) -> dict[str, float]:
    """Median seconds of each job; one warm-up round, then round-robin."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for i in range(repeats + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if i:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def speed(models: list[str], dtypes: list[str], repeats: int) -> list[dict]:
    rows = []
    for name in models:
        for dtype in dtypes:
            mine, other = ours(name, DTYPES[dtype]), theirs(name, DTYPES[dtype])
            prompt_ids = torch.randint(0, mine.config.vocab_size, (1, 512))
            step_ids = prompt_ids[:, :256]
            for case, make, ids, times in (
                ("prompt of 512 tokens", prompt, prompt_ids, repeats),
                ("training step of 256 tokens", training_step, step_ids, max(1, repeats // 3)),
                ("decoded token", decoded_token, prompt_ids[:, :64], 10 * repeats),
            ):
                training = make is training_step
                tokens = 1 if make is decoded_token else ids.shape[1]
                floor = matrix_products(mine, tokens, training)
                jobs = {"floor": floor, "hf_ssm": make(mine, ids), "transformers": make(other, ids)}
                row = {"model": name, "dtype": dtype, "case": case, **interleaved(jobs, times)}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
            del mine, other
    return rows


def speed_table(rows: list[dict]) -> str:
    lines = [
        "| model | dtype | case | matrix products | hf_ssm | transformers | hf_ssm / products "
        "| transformers / products | transformers / hf_ssm |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        floor, mine, other = row["floor"], row["hf_ssm"], row["transformers"]
        lines.append(
            f"| {row['model']} | {row['dtype']} | {row['case']} | {1e3 * floor:.0f} ms | {1e3 * mine:.0f} ms "
            f"| {1e3 * other:.0f} ms | {mine / floor:.2f} | {other / floor:.2f} | {other / mine:.2f} |"
        )
    return "\n".join(lines)


# Peak memory is a property of a process, so each length gets its own. VmHWM is reset after the weights are there. The
# layers of a prompt run one after the other in the same memory, so four of them show what 24 would need.
_PEAK = """
import sys, torch
sys.path.insert(0, {scripts!r})
from bench_cpu import ours, resident, reset_peak
torch.set_num_threads({threads})
model = ours({name!r}, torch.float32, num_hidden_layers={layers}).eval()
ids = torch.randint(0, 1000, (1, {seqlen}))
with torch.no_grad():
    model(ids[:, :64], use_cache=True, logits_to_keep=1)
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
        for training, seqlens in ((False, lengths), (True, training_lengths)):
            for seqlen in seqlens:
                code = _PEAK.format(
                    scripts=str(ROOT / "scripts"),
                    threads=torch.get_num_threads(),
                    name=name,
                    layers=24 if training else 4,
                    seqlen=seqlen,
                    training=training,
                )
                done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
                if done.returncode:
                    print(f"{name}, {seqlen} tokens: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                    continue
                row = {"model": name, "training": training, "tokens": seqlen, "bytes": int(done.stdout.split()[-1])}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def memory_table(rows: list[dict]) -> str:
    lines = ["| model | what | tokens | memory beyond the weights | per token |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        what = "training step, 24 layers" if row["training"] else "prompt, 4 layers"
        lines.append(
            f"| {row['model']} | {what} | {row['tokens']:,} | {row['bytes'] / 2**20:.0f} MiB "
            f"| {row['bytes'] / row['tokens'] / 1024:.1f} KiB |"
        )
    return "\n".join(lines)


def header(command: list[str], sizes: str) -> str:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    simd = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else platform.machine()
    return (
        f"`{' '.join(command)}`, {time.strftime('%Y-%m-%d')}. hf_ssm {hf_ssm.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} "
        f"threads, {simd}. {sizes[0].upper()}{sizes[1:]}, random weights, batch 1.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--training-lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.memory:
        table = memory_table(memory(arguments.models, arguments.lengths, arguments.training_lengths))
    else:
        table = speed_table(speed(arguments.models, arguments.dtypes, arguments.repeats))
    text = header(["python", "scripts/bench_cpu.py", *sys.argv[1:]], "130M sizes") + "\n" + table + "\n"
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
