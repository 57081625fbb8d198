"""What a decoded token of Hymba costs behind a long context, and the 1.5B model on this machine's CPU; random weights.

    python scripts/bench_hymba.py --output benchmarks/results/hymba.md
    python scripts/bench_hymba.py --large          # hymba-1.5b: loading, memory, prompt, tokens per second

Contestants run interleaved in one process; a number is the median. A context is not computed but made up: keys, values
and states of the right shapes, which is all that the time depends on.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_cpu import DTYPES, ROOT, Job, header, interleaved, reset_peak, resident
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


def hymba(size: str, dtype: torch.dtype, **changes: object) -> nn.Module:
    settings = json.loads((ROOT / "configs" / "models" / f"hymba-{size}.json").read_text())
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings | changes), dtype=dtype).eval()


def decoded_token(model: nn.Module, context: int) -> Job:
    """One token behind `context` others; the same one every time, so the cache is put back behind each call."""
    token = torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad():
        cache = model(token, use_cache=True).past_key_values
    held = {}
    for i, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None:
            window = model.model.windows[i]
            count = context if window is None else min(context, window)
            keys, values = (
                torch.randn(1, t.shape[1], count, t.shape[3]).to(t.dtype) for t in (layer.keys, layer.values)
            )
            held[i] = keys, values

    def run() -> None:
        for i, (keys, values) in held.items():
            cache.layers[i].keys, cache.layers[i].values = keys, values
        cache._tokens = [context] * len(cache.layers)
        with torch.no_grad():
            model(token, past_key_values=cache)

    return run


def contexts(lengths: list[int], dtypes: list[str], repeats: int) -> str:
    lines = [
        "| dtype | context | Hymba | the same with attention to all tokens in every layer | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for dtype in dtypes:
        limits = {"max_position_embeddings": max(lengths) + 1}
        models = {
            "hymba": hymba("100m", DTYPES[dtype], **limits),
            "full": hymba("100m", DTYPES[dtype], **limits, sliding_window=None, kv_reuse_group=None),
        }
        for length in lengths:
            times = interleaved({name: decoded_token(model, length) for name, model in models.items()}, repeats)
            lines.append(
                f"| {dtype} | {length:,} | {1e3 * times['hymba']:.1f} ms | {1e3 * times['full']:.1f} ms "
                f"| {times['full'] / times['hymba']:.2f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def large(prompt: int, tokens: int) -> str:
    """hymba-1.5b in bfloat16: saved and loaded, then a prompt and greedy decoding."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        torch.set_default_dtype(torch.bfloat16)
        model = hymba("1.5b", torch.bfloat16)
        torch.set_default_dtype(torch.float32)
        rows.append(("parameters", f"{model.num_parameters():,}"))
        model.save_pretrained(folder)
        del model
        gc.collect()
        before = resident("VmRSS")
        reset_peak()
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        rows.append(("from_pretrained, files in the page cache", f"{time.perf_counter() - start:.1f} s"))
        rows.append(("peak memory of loading", f"{(resident('VmHWM') - before) / 1e9:.2f} GB"))
    ids = torch.randint(3, 32000, (1, prompt))
    how = {"do_sample": False, "use_cache": True, "eos_token_id": None}
    model.generate(ids[:, :8], max_new_tokens=2, **how)
    reset_peak()
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **how)
    seconds = time.perf_counter() - start
    rows.append((f"prompt of {prompt:,} tokens", f"{seconds:.1f} s, {prompt / seconds:.0f} tokens/s"))
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=1 + tokens, **how)
    each = (time.perf_counter() - start - seconds) / tokens
    rows.append((f"each of {tokens} tokens behind it", f"{1e3 * each:.0f} ms, {1 / each:.2f} tokens/s"))
    rows.append(("peak memory of the whole process", f"{resident('VmHWM') / 1e9:.2f} GB"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"| hymba-1.5b, bfloat16 | |\n| --- | --- |\n{table}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--large", action="store_true", help="the 1.5B model instead")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.large:
        sizes, table = "1.5B size", large(arguments.prompt, arguments.tokens)
    else:
        sizes, table = "100M size", contexts(arguments.contexts, arguments.dtypes, arguments.repeats)
    text = header(["python", "scripts/bench_hymba.py", *sys.argv[1:]], sizes) + "\n" + table + "\n"
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
