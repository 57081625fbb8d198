"""What the operator tests share: random inputs, gradients of everything, and each tolerance with its reason.

Inputs are dictionaries of float64 tensors named as the operators name them; a test casts them to what it needs.
"""

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_ssm.ops import causal_conv1d, centred_conv1d, quasiseparable, selective_scan, ssd
from hf_ssm.ops.backends import OPERATORS
from hf_ssm.ops.triton import INTERPRETED

# Where the inputs are, and which backends are tried: HF_SSM_TEST_DEVICE=cuda runs the same tests on a GPU.
DEVICE = os.environ.get("HF_SSM_TEST_DEVICE") or "cpu"

# Largest |got - want| allowed, as a fraction of max(1, max |want|).
# float64: sums of at most a few thousand terms of order 1 in another order, 2e-16 each.
# float32: three times the worst error seen in 180 random draws, 3.1e-6, ssd's d_A: a sum over tokens, channels and
# states that cancels; the reference's own error there is 1.7e-6 in float32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

WITHOUT_FLOAT64 = ("cpu", "triton")  # backends whose kernels have float32 at most


@dataclass(frozen=True)
class Operator:
    """An operator as the tests see it: how to call it, how to make inputs, which axes its inputs have."""

    name: str
    function: Callable[..., Any]  # returns (out, final_state) if the operator is causal, else out
    inputs: Callable[..., dict[str, Tensor]]
    per_token: tuple[str, ...]  # inputs that are (batch, seqlen, ...)
    options: dict[str, Any] = field(default_factory=dict)
    causal: bool = True  # `initial_state` is (batch, ...) and that of a row's first sequence; else it is one for all

    def __call__(self, backend: str, **options: Any) -> Callable[..., Any]:
        call = partial(self.function, backend=backend, **{**self.options, **options})
        return in_float32(call) if backend in WITHOUT_FLOAT64 else call

    def tokens(self, tensors: dict[str, Tensor], index: Any) -> dict[str, Tensor]:
        """`tensors` with only the tokens `index` of every row."""
        return {name: t[:, index] if name in self.per_token else t for name, t in tensors.items()}

    def row(self, tensors: dict[str, Tensor], row: int) -> dict[str, Tensor]:
        rows = (*self.per_token, "initial_state") if self.causal else self.per_token
        return {name: t[row : row + 1] if name in rows else t for name, t in tensors.items()}


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    """In which numbers can be compared that were published in float32."""
    return (torch.float32,) if backend in WITHOUT_FLOAT64 else (torch.float64, torch.float32)


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a backend without float64, given float32 in its place."""

    def run(**tensors: Any) -> Any:
        return function(
            **{
                name: t.float() if torch.is_tensor(t) and t.dtype == torch.float64 else t
                for name, t in tensors.items()
            }
        )

    return run


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal float64 values that depend on the seed and the shape only."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)


def conv_inputs(
    batch=2, seqlen=23, channels=6, width=4, *, bias=True, initial_state: bool | int = True, seed=0
) -> dict[str, Tensor]:
    """`initial_state`: whether there is one, or how many tokens it has."""
    g = torch.Generator().manual_seed(seed)
    tensors = {"x": draw(g, batch, seqlen, channels), "weight": draw(g, channels, width)}
    if bias:
        tensors["bias"] = draw(g, channels)
    if initial_state:
        state_len = width - 1 if initial_state is True else initial_state
        tensors["initial_state"] = draw(g, batch, state_len, channels)
    return tensors


def scan_inputs(
    batch=2,
    seqlen=23,
    d_inner=6,
    d_state=3,
    ngroups: int | None = 2,
    *,
    D=True,
    z=True,
    dt_bias=True,
    initial_state=True,
    seed=0,
) -> dict[str, Tensor]:
    """`ngroups=None`: B and C without a group axis."""
    g = torch.Generator().manual_seed(seed)
    groups = () if ngroups is None else (ngroups,)
    tensors = {
        "x": draw(g, batch, seqlen, d_inner),
        "dt": draw(g, batch, seqlen, d_inner),
        "A": -torch.exp(draw(g, d_inner, d_state)),
        "B": draw(g, batch, seqlen, *groups, d_state),
        "C": draw(g, batch, seqlen, *groups, d_state),
    }
    if D:
        tensors["D"] = draw(g, d_inner)
    if z:
        tensors["z"] = draw(g, batch, seqlen, d_inner)
    if dt_bias:
        tensors["dt_bias"] = draw(g, d_inner)
    if initial_state:
        tensors["initial_state"] = draw(g, batch, d_inner, d_state)
    return tensors


def ssd_inputs(
    batch=2,
    seqlen=23,
    nheads=4,
    headdim=3,
    ngroups=2,
    d_state=5,
    *,
    D: str | None = "head",
    z=True,
    dt_bias=True,
    initial_state=True,
    seed=0,
) -> dict[str, Tensor]:
    """`D`: "head", "channel" or None."""
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "x": draw(g, batch, seqlen, nheads, headdim),
        "dt": draw(g, batch, seqlen, nheads),
        "A": -torch.exp(draw(g, nheads)),
        "B": draw(g, batch, seqlen, ngroups, d_state),
        "C": draw(g, batch, seqlen, ngroups, d_state),
    }
    if D is not None:
        tensors["D"] = draw(g, *((nheads,) if D == "head" else (nheads, headdim)))
    if z:
        tensors["z"] = draw(g, batch, seqlen, nheads, headdim)
    if dt_bias:
        tensors["dt_bias"] = draw(g, nheads)
    if initial_state:
        tensors["initial_state"] = draw(g, batch, nheads, headdim, d_state)
    return tensors


def centred_inputs(
    batch=2, seqlen=23, channels=6, width=5, *, bias=True, initial_state=False, seed=0
) -> dict[str, Tensor]:
    """There is no state, whatever `initial_state` says."""
    return conv_inputs(batch, seqlen, channels, width, bias=bias, initial_state=False, seed=seed)


def quasiseparable_inputs(
    batch=2,
    seqlen=23,
    nheads=4,
    headdim=3,
    ngroups=2,
    d_state=5,
    *,
    diagonal=True,
    D=True,
    dt_bias=True,
    initial_state=True,
    seed=0,
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    tensors = {"x": draw(g, batch, seqlen, nheads, headdim)}
    tensors |= {f"dt_{side}": draw(g, batch, seqlen, nheads) for side in ("forward", "backward")}
    tensors["A"] = -torch.exp(draw(g, nheads))
    for side in ("forward", "backward"):
        tensors |= {f"{name}_{side}": draw(g, batch, seqlen, ngroups, d_state) for name in "BC"}
    if diagonal:
        tensors["diagonal"] = draw(g, batch, seqlen, nheads)
    if D:
        tensors["D"] = draw(g, nheads)
    if dt_bias:
        tensors["dt_bias"] = draw(g, nheads)
    if initial_state:
        tensors["initial_state"] = draw(g, nheads, headdim, d_state)
    return tensors


def positive_steps(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """For calls without softplus: a negative step lets the state grow beyond what a tolerance can tell apart."""
    return {name: t.abs() if name.startswith("dt") else t for name, t in tensors.items()}


CONV = Operator("causal_conv1d", causal_conv1d, conv_inputs, ("x",), {"activation": "silu"})
SCAN = Operator("selective_scan", selective_scan, scan_inputs, ("x", "dt", "B", "C", "z"), {"dt_softplus": True})
SSD = Operator("ssd", ssd, ssd_inputs, ("x", "dt", "B", "C", "z"), {"dt_softplus": True})
CENTRED = Operator("centred_conv1d", centred_conv1d, centred_inputs, ("x",), {"activation": "silu"}, causal=False)
QUASISEPARABLE = Operator(
    "quasiseparable",
    quasiseparable,
    quasiseparable_inputs,
    ("x", "dt_forward", "dt_backward", "B_forward", "C_forward", "B_backward", "C_backward", "diagonal"),
    {"dt_softplus": True},
    causal=False,
)
CAUSAL = (CONV, SCAN, SSD)
ALL = (*CAUSAL, CENTRED, QUASISEPARABLE)


def usable(operator: str, device: str = DEVICE) -> list[str]:
    """The backends of `operator` that run here and are not the reference itself."""
    rows = OPERATORS[operator]
    return [
        row.name
        for row in rows
        if row.name != "reference" and row.obstacle() is None and (row.devices is None or device in row.devices)
    ]


EVERY = [(operator, backend) for operator in ALL for backend in (*usable(operator.name), "reference")]
EVERY_IDS = [f"{operator.name}-{backend}" for operator, backend in EVERY]


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "inner axes swapped": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else t,
    "every other": lambda t: torch.stack([t, -t], dim=-1)[..., 0],
    "slice of a projection": lambda t: torch.cat([t, t], dim=-1)[..., t.shape[-1] :],
    "storage offset": lambda t: torch.cat([t, t], dim=0)[t.shape[0] :],
}

# Constants of a `triton` kernel's module and the values that make sequences of a few tokens cross its boundaries.
TRITON_PARTS: dict[str, dict[str, int]] = {
    "ssd": {"CHUNK": 16, "SHORTEST_SEGMENT": 1},
    "quasiseparable": {"CHUNK": 16, "SHORTEST_SEGMENT": 1},
    "selective_scan": {"FORWARD_TOKENS": 4, "BACKWARD_TOKENS": 2, "SEGMENT": 4, "SHORTEST_CHUNK": 16},
}


def set_chunks(monkeypatch, operator: str, tensors: dict[str, Tensor], chunk: int, per_segment: int) -> None:
    """Make the `torch` backend work in chunks of `chunk` tokens and segments of `per_segment` chunks, and the `triton`
    backend in parts that are as short as its kernels can have them."""
    if operator in TRITON_PARTS and INTERPRETED:
        module = importlib.import_module(f"hf_ssm.ops.triton.{operator}")
        for name, size in TRITON_PARTS[operator].items():
            monkeypatch.setattr(module, name, size)
    if operator.endswith("conv1d"):  # has no chunks
        return
    batch = max(1, tensors["x"].shape[0])
    if operator == "selective_scan":
        module, elements = "selective_scan", batch * chunk * tensors["A"].numel()
    else:
        module, elements = "chunks", batch * chunk**2 * tensors["x"].shape[2]
    module = importlib.import_module(f"hf_ssm.ops.{module}")
    monkeypatch.setattr(module, "_CHUNK", chunk)
    monkeypatch.setattr(module, "_SEGMENT_ELEMENTS", elements * per_segment)


def cast(tensors: dict[str, Tensor], dtype: torch.dtype | dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Every floating tensor in `dtype`, or each in its own."""
    wanted = dtype if isinstance(dtype, dict) else dict.fromkeys(tensors, dtype)
    return {name: t.to(wanted[name]) if t.is_floating_point() else t for name, t in tensors.items()}


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """(out, final_state) of a causal operator's result, (out,) of another's."""
    return result if isinstance(result, tuple) else (result,)


def outputs_and_grads(
    function: Callable[..., Any], tensors: dict[str, Tensor], through: str = "both"
) -> dict[str, Tensor]:
    """`out`, `final_state` if there is one, and `d_<input>` of every floating input, for random cotangents drawn from
    shapes alone.

    `through`: whether the loss depends on "out", on the final "state" or on "both".
    """
    leaves = {name: t.detach().clone().requires_grad_() if t.is_floating_point() else t for name, t in tensors.items()}
    outputs = dict(zip(("out", "final_state"), tensors_of(function(**leaves)), strict=False))
    g = torch.Generator().manual_seed(1)
    cotangents = {name: draw(g, *value.shape) for name, value in outputs.items()}
    loss = sum(
        (value * cotangents[name].to(value)).sum()
        for name, value in outputs.items()
        if through == "both" or name.endswith(through)
    )
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    grads = [None] * len(wanted)  # nothing but padding leads to no input
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    results = {name: value.detach() for name, value in outputs.items()}
    for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
        results[f"d_{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def error(got: Tensor, want: Tensor) -> float:
    """max |got - want| as a fraction of max(1, max |want|); NaN and inf count as infinite."""
    assert got.shape == want.shape, f"{tuple(got.shape)} instead of {tuple(want.shape)}"
    if want.numel() == 0:
        return 0.0
    difference = (got.double() - want.double()).abs().max().item() / max(1.0, want.double().abs().max().item())
    return difference if math.isfinite(difference) else math.inf


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float | None = None) -> None:
    """Equal to within `tolerance`, by default that of the dtype in which `got` was computed."""
    assert got.keys() == want.keys()
    tolerance = TOLERANCE[got["out"].dtype] if tolerance is None else tolerance
    errors = {name: error(got[name], want[name]) for name in want}
    too_large = {name: value for name, value in errors.items() if not value <= tolerance}
    assert not too_large, f"beyond {tolerance}: {too_large}"


def documents_alone(
    operator: Operator, documents: list[list[list[int]]], backend: str = "reference", **options: Any
) -> Callable[..., Any]:
    """The meaning of `seq_idx` and `mask`: every document of every row run by itself, without padding.

    `documents[row][i]` lists the positions of the row's i-th document; positions in none are padding. The initial
    state of a causal operator belongs to a row's first document, the final state is that of its last.
    """

    def run(**tensors: Tensor) -> Any:
        outs, states = [], []
        call = operator(backend, **options)
        for row, row_documents in enumerate(documents):
            given = operator.row(tensors, row)
            out = torch.zeros_like(given["x"])
            state = tensors_of(call(**operator.tokens(given, slice(0, 0))))[1:]  # what a row without tokens ends in
            for i, positions in enumerate(row_documents):
                document = operator.tokens(given, positions)
                if operator.causal and i > 0 and "initial_state" in document:
                    document["initial_state"] = torch.zeros_like(document["initial_state"])
                part, *state = tensors_of(call(**document))
                out = out.index_copy(1, torch.tensor(positions, device=out.device), part)
            outs.append(out)
            states.extend(state)
        return (torch.cat(outs), torch.cat(states)) if operator.causal else torch.cat(outs)

    return run


def packed_rows(
    documents: list[list[list[int]]], seqlen: int, ids: list[list[int]] | None = None
) -> dict[str, Tensor]:
    """`seq_idx` and `mask` of `documents`; padding gets an id of its own at every position, which must not matter."""
    seq_idx = torch.arange(1000, 1000 + seqlen).repeat(len(documents), 1)
    mask = torch.zeros(len(documents), seqlen, dtype=torch.bool)
    for row, row_documents in enumerate(documents):
        for i, positions in enumerate(row_documents):
            seq_idx[row, positions] = i if ids is None else ids[row][i]
            mask[row, positions] = True
    return {"seq_idx": seq_idx.to(DEVICE), "mask": mask.to(DEVICE)}


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """In every test `torch.empty` gives NaN, so that a result that was never written cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill
