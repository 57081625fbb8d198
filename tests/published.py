"""Numbers of the original implementations, in tests/data/ops: state-spaces/mamba 2.3.2.post1 and
Dao-AILab/causal-conv1d 1.6.1, their published reference functions in float32 on a CPU.

A case is a .safetensors file with `in.*`, `out.*`, `cot.*` (cotangents) and `grad.*`; index.json holds the arguments
and, for most tensors, by how much the stored float32 number differs from the same code in float64.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import DEVICE
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent / "data" / "ops"


@dataclass
class Case:
    arguments: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    cotangents: dict[str, Tensor]
    grads: dict[str, Tensor]
    rounding: dict[str, float]  # of "out.*" and "grad.*": max |stored float32 - float64|


def cases(operator: str, *without: str) -> list:
    """Every case of an operator whose name contains none of `without`, as test parameters."""
    index = json.loads((FOLDER / operator / "index.json").read_text())
    names = [name for name in index if not any(word in name for word in without)]
    return [pytest.param(_load(operator, name, index[name]), id=name) for name in names]


def _load(operator: str, name: str, entry: dict) -> Case:
    tensors = load_file(FOLDER / operator / f"{name}.safetensors", device=DEVICE)

    def part(prefix):
        return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}

    rounding = entry.get("float32_rounding [max|f32-f64|, max|value|]", {})
    return Case(
        entry["arguments"],
        part("in."),
        part("out."),
        part("cot."),
        part("grad."),
        {key: difference for key, (difference, _) in rounding.items()},
    )


def assert_as_published(
    case: Case,
    function: Callable[..., dict[str, Tensor]],
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32),
) -> None:
    """`function` takes the published inputs and returns the published outputs, in the published layouts.

    In float64 the only difference left is the rounding of the stored numbers, which index.json gives with three
    digits: limit 1.01 times that (and 1e-9 where it is 0). In float32 ours rounds too: the limits are those suggested
    with the data, 2e-5 for outputs, and for a gradient 2e-5 times its largest value, at least 2e-5.
    """
    for dtype in dtypes:
        leaves = {
            name: t.to(dtype).requires_grad_() if t.is_floating_point() else t for name, t in case.inputs.items()
        }
        outputs = function(**leaves)
        loss = sum((outputs[name] * cotangent.to(dtype)).sum() for name, cotangent in case.cotangents.items())
        grads = torch.autograd.grad(loss, [leaves[name] for name in case.grads])
        compared = {f"out.{name}": (outputs[name], want) for name, want in case.outputs.items()}
        compared |= {f"grad.{name}": (g, case.grads[name]) for name, g in zip(case.grads, grads, strict=True)}
        for name, (got, want) in compared.items():
            difference = (got.double() - want.double()).abs().max().item()
            if dtype == torch.float64:
                limit = 1.01 * case.rounding[name] + 1e-9
            else:
                limit = 2e-5 * (max(1.0, want.abs().max().item()) if name.startswith("grad.") else 1.0)
            assert difference <= limit, f"{name} in {dtype}: {difference} > {limit}"
