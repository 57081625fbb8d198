"""What `hf-ssm doctor` finds out: versions, devices, the backend of every operator; and how large a cache becomes."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Read from the packages' metadata and never imported: importing a kernel package that was built for another torch
# can end the process.
PACKAGES = (
    "hf-ssm", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "datasets", "peft",
    "triton", "mamba-ssm", "causal-conv1d", "flash-attn",
)  # fmt: skip


def examine() -> dict[str, Any]:
    """python, packages {name: version or None}, devices [name], native_kernels, operators [row of
    `ops.backend_report`]."""
    from hf_ssm.ops import backend_report, cpu

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _installed(name) for name in PACKAGES},
        "devices": _devices(),
        "native_kernels": cpu.describe(),
        "operators": backend_report(),
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    devices = [f"cpu ({torch.get_num_threads()} threads)"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        for index in range(torch.accelerator.device_count()):
            name = module.get_device_name(index) if hasattr(module, "get_device_name") else ""
            devices.append(f"{accelerator.type}:{index} {name}".strip())
    return devices


@dataclass(frozen=True)
class CacheSize:
    """Bytes that one sequence holds, of a kind of layer."""

    layers: int
    kind: str
    states: int  # of the convolution and the scan
    keys: int  # keys and values, meta tokens among them

    @property
    def total(self) -> int:
        return self.states + self.keys


def cache_sizes(config: Any, context: int) -> tuple[list[CacheSize], int | None]:
    """How large the cache of one sequence is behind `context` tokens, by kinds of layers; and the bytes of keys and
    values if every layer attended to all tokens with its own, None for models without attention.

    In the configuration's dtype; the scan's states are float32. Raises ValueError for a context below 1 and for models
    that do not generate.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from hf_ssm import registry

    known = [name for name, known in registry.ARCHITECTURES.items() if "AutoModelForCausalLM" in known.models]
    if config.model_type not in known:
        raise ValueError(f"--cache: model type {config.model_type!r} has no cache of ours; {', '.join(known)} have")
    if context < 1:
        raise ValueError(f"--context {context}: give at least one token")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = torch.empty(0, dtype=config.dtype or torch.float32).element_size()
    kinds: dict[tuple[str, int, int], int] = {}
    full = 0
    for kind, states, width, kept in _layers(model.base_model, context):
        meta = getattr(config, "num_memory_tokens", 0)
        full += width * (context + meta) * size
        keys = (kept + meta) * width * size if kept else 0
        key = (kind, states[0] * size + states[1] * 4, keys)
        kinds[key] = kinds.get(key, 0) + 1
    sizes = [CacheSize(count, kind, count * states, count * keys) for (kind, states, keys), count in kinds.items()]
    return sizes, full or None


def _layers(backbone: Any, context: int) -> Iterator[tuple[str, tuple[int, int], int, int]]:
    """Of every layer: what it is; the size of its two states; that of a token's keys and values; how many it keeps."""
    windows = getattr(backbone, "windows", None)
    for i, layer in enumerate(backbone.layers):
        mixer = layer.mixer if hasattr(layer, "mixer") else layer.mamba
        states = math.prod(mixer.conv_state_shape), math.prod(mixer.ssm_state_shape)
        if windows is None:
            yield "recurrent", states, 0, 0
            continue
        owner = backbone.layers[backbone.producers[i]].mamba
        width = sum(owner.in_proj_sizes[1:3])
        if not mixer.owns_keys:
            yield "recurrent, with another layer's keys and values", states, width, 0
        elif windows[i] is None:
            yield "recurrent and attention to all tokens", states, width, context
        else:
            yield f"recurrent and attention to {windows[i]:,} tokens", states, width, min(context, windows[i])


def show_cache(sizes: list[CacheSize], full: int | None, context: int) -> None:
    """Print what `cache_sizes` found as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        "layers", "", "states", "keys and values", title=f"Cache of one sequence behind {context:,} tokens",
        title_justify="left",
    )  # fmt: skip
    for row in sizes:
        table.add_row(str(row.layers), row.kind, f"{row.states / 1e6:,.2f} MB", f"{row.keys / 1e6:,.2f} MB")
    states, keys = sum(row.states for row in sizes), sum(row.keys for row in sizes)
    table.add_row(str(sum(row.layers for row in sizes)), "all", f"{states / 1e6:,.2f} MB", f"{keys / 1e6:,.2f} MB")
    console.print(table)
    if full is not None:
        console.print(
            f"With attention to all tokens and keys and values of its own in every layer: {full / 1e6:,.2f} MB, "
            f"{full / keys:.2f} times as much; with the states, {(full + states) / (keys + states):.2f} times.",
            highlight=False,
        )


def show(report: dict[str, Any]) -> None:
    """Print the report as two tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"Python {report['python']} on {report['platform']}", highlight=False)
    for device in report["devices"]:
        console.print(f"device: {device}", highlight=False)
    console.print(f"native CPU kernels: {report['native_kernels']}", highlight=False)
    packages = Table("package", "version", title="Installed", title_justify="left")
    for name, found in report["packages"].items():
        packages.add_row(name, found or "[dim]not installed[/dim]")
    operators = Table("operator", "backend", "", "why", title="Operators", title_justify="left")
    for row in report["operators"]:
        mark = "[green]used[/green]" if row["chosen"] else "available" if row["available"] else "[dim]no[/dim]"
        operators.add_row(row["operator"], row["backend"], mark, row["reason"])
    console.print(packages, operators)
