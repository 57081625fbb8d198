"""What `hf-ssm doctor` finds out: versions, devices, and the backend of every operator."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Read from the packages' metadata and never imported: importing a kernel package that was built for another torch
# can end the process.
PACKAGES = (
    "hf-ssm", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "datasets", "peft",
    "triton", "mamba-ssm", "causal-conv1d", "flash-attn",
)  # fmt: skip


def examine() -> dict[str, Any]:
    """python, packages {name: version or None}, devices [name], operators [row of `ops.backend_report`]."""
    from hf_ssm.ops import backend_report

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _installed(name) for name in PACKAGES},
        "devices": _devices(),
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


def show(report: dict[str, Any]) -> None:
    """Print the report as two tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"Python {report['python']} on {report['platform']}", highlight=False)
    for device in report["devices"]:
        console.print(f"device: {device}", highlight=False)
    packages = Table("package", "version", title="Installed", title_justify="left")
    for name, found in report["packages"].items():
        packages.add_row(name, found or "[dim]not installed[/dim]")
    operators = Table("operator", "backend", "", "why", title="Operators", title_justify="left")
    for row in report["operators"]:
        mark = "[green]used[/green]" if row["chosen"] else "available" if row["available"] else "[dim]no[/dim]"
        operators.add_row(row["operator"], row["backend"], mark, row["reason"])
    console.print(packages, operators)
