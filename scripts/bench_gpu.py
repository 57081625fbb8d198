"""Our operators and models beside their peers', on one GPU.

    python scripts/bench_gpu.py --output benchmarks/results/gpu.md            # everything, in less than 8 minutes
    python scripts/bench_gpu.py --parts scan ssd --models 130m --minutes 3    # a part
    python scripts/bench_gpu.py --warm-up                                     # only compile, for a run that follows
    python scripts/bench_gpu.py --device cpu --tiny                           # does it run at all? no numbers of worth

Peers take part where they can be imported: mamba_ssm, causal_conv1d, goombalab's hydra, transformers. All contestants
of a row run in turns, timed with CUDA events; a number is the median of its turns. A kernel is timed with a cold cache
and behind work that hides its launch: what the GPU takes. Training steps and decoded tokens are timed as they are
called: what a user waits for. The bound is the time in which a copy, one of the contestants, moves as many bytes as
the operator must read and write at least.

Rows are written to a .jsonl file beside --output as they are measured; when time is up, or at a signal to end, the
tables are written with the rows that are there.
"""

import os

os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # mamba_ssm's kernels: what was tuned once stays tuned

import argparse
import importlib.metadata
import json
import math
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_ssm import ops
from hf_ssm.ops.backends import OPERATORS, PREFERENCES_FILE, architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PACKAGES = ("hf-ssm", "torch", "triton", "transformers", "mamba-ssm", "causal-conv1d")
Tensors = dict[str, Tensor]
Job = Callable[[], object]

WIDTHS = {"130m": 1536, "370m": 2048, "790m": 3072, "1.4b": 4096, "2.8b": 5120}  # d_inner of Mamba and Mamba-2
SHAPES = ((8, 2048), (1, 512), (64, 512), (1, 4096), (1, 32768), (1, 131072))  # batch, seqlen; the likeliest first


class TimeUp(BaseException):
    """Past everything that catches what goes wrong with one contestant."""


@dataclass
class Contestant:
    """`prepare` lays our inputs out as `run` wants them, which is not timed; `run` returns the output."""

    run: Callable[..., Tensor]
    prepare: Callable[[Tensors], Tensors] = dict
    backend: str | None = None  # its name, if this is what our operator runs on that backend


@dataclass
class Case:
    """What is measured with the same inputs."""

    part: str
    label: dict[str, Any]  # what stands in the table: model, shape, dtype
    contestants: Callable[[], dict[str, Contestant]]
    inputs: Callable[[], Tensors]
    operator: str | None = None  # None for a whole mixer, whose matrix products no bandwidth bounds
    passes: tuple[str, ...] = ("forward", "forward and backward")


@dataclass
class Setting:
    device: str
    tiny: bool
    widths: dict[str, int]
    shapes: tuple[tuple[int, int], ...]
    dtypes: list[str]
    absent: dict[str, str] = field(default_factory=dict)  # peers that take no part, and why

    def peer(self, name: str, load: Callable[[], Any]) -> Any:
        """What `load` imports, or None. Importing a package built for another torch can raise anything."""
        if self.device == "cpu" or name in self.absent:
            return None
        try:
            return load()
        except Exception as error:
            self.absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            return None

    def ours(self, operator: str, run: Callable[..., Tensor]) -> dict[str, Contestant]:
        """One for each backend; `run` takes tensors and the backend's name."""
        return {
            f"hf_ssm {row.name}": Contestant(partial(run, backend=row.name), backend=row.name)
            for row in OPERATORS[operator]
            if row.name != "reference"
            and row.obstacle() is None
            and (row.automatic or self.device != "cpu")
            and (row.devices is None or self.device in row.devices)
        }


# --- operators -----------------------------------------------------------------------------------------------------


def random(setting: Setting, dtype: str, **shapes: tuple[int, ...]) -> Tensors:
    return {name: torch.randn(shape, device=setting.device).to(DTYPES[dtype]) for name, shape in shapes.items()}


def parameters(setting: Setting, *, A: tuple[int, ...], channels: int) -> Tensors:
    """In float32, as models keep them."""
    return {
        "A": -1 - 15 * torch.rand(A, device=setting.device),
        "D": torch.ones(channels, device=setting.device),
        "dt_bias": torch.rand(channels, device=setting.device) - 5,
    }


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def labelled(setting: Setting) -> Iterator[tuple[dict[str, Any], int, int, int, str]]:
    """(label, d_inner, batch, seqlen, dtype): all shapes of the first width, then the widest, then the rest; the
    shortest and the middle ones in float32 too."""
    names = list(setting.widths)
    order = dict.fromkeys([names[0], names[-1], *names])
    for name in order:
        for batch, seqlen in setting.shapes:
            for dtype in setting.dtypes:
                if dtype == "float32" and (name != names[0] or batch * seqlen > 2**14):
                    continue
                label = {"model": name, "batch x seqlen": f"{batch} x {seqlen}", "dtype": dtype}
                yield label, setting.widths[name], batch, seqlen, dtype


def not_too_slow(contestants: dict[str, Contestant], batch: int, seqlen: int, setting: Setting):
    """PyTorch's own operations only where they do not take the time of all others."""
    if batch * seqlen > 2**13 and setting.device != "cpu":
        contestants.pop("hf_ssm torch", None)
    return contestants


def scan_cases(setting: Setting) -> Iterator[Case]:
    def load():
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        return selective_scan_fn

    def channels_first(tensors: Tensors) -> Tensors:
        per_token = {name: tensors[name].mT.contiguous() for name in ("x", "dt", "z", "B", "C")}
        return tensors | per_token

    def contestants(batch: int, seqlen: int) -> dict[str, Contestant]:
        found = setting.ours("selective_scan", lambda backend, **t: first(
            ops.selective_scan(**t, dt_softplus=True, backend=backend)
        ))  # fmt: skip
        if (theirs := setting.peer("mamba_ssm's selective_scan_cuda", load)) is not None:
            found["mamba_ssm"] = Contestant(
                lambda x, dt, A, B, C, D, z, dt_bias: theirs(x, dt, A, B, C, D, z, dt_bias, True), channels_first
            )
        return not_too_slow(found, batch, seqlen, setting)

    for label, d_inner, batch, seqlen, dtype in labelled(setting):
        wide, narrow = (batch, seqlen, d_inner), (batch, seqlen, 16)

        def inputs(wide=wide, narrow=narrow, dtype=dtype) -> Tensors:
            given = random(setting, dtype, x=wide, dt=wide, B=narrow, C=narrow, z=wide)
            return given | parameters(setting, A=(wide[2], 16), channels=wide[2])

        yield Case("scan", label, partial(contestants, batch, seqlen), inputs, "selective_scan")


def ssd_cases(setting: Setting) -> Iterator[Case]:
    def load():
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return mamba_chunk_scan_combined

    def contestants(batch: int, seqlen: int) -> dict[str, Contestant]:
        found = setting.ours("ssd", lambda backend, **t: first(ops.ssd(**t, dt_softplus=True, backend=backend)))
        if (theirs := setting.peer("mamba_ssm's SSD kernels", load)) is not None:
            found["mamba_ssm"] = Contestant(
                lambda x, dt, A, B, C, D, z, dt_bias: theirs(
                    x, dt, A, B, C, chunk_size=256, D=D, z=z, dt_bias=dt_bias, dt_softplus=True
                )
            )
        return not_too_slow(found, batch, seqlen, setting)

    for label, d_inner, batch, seqlen, dtype in labelled(setting):
        heads, state = (batch, seqlen, d_inner // 64), (batch, seqlen, 1, 16 if setting.tiny else 128)

        def inputs(heads=heads, state=state, dtype=dtype) -> Tensors:
            given = random(setting, dtype, x=(*heads, 64), dt=heads, B=state, C=state, z=(*heads, 64))
            return given | parameters(setting, A=heads[2:], channels=heads[2])

        yield Case("ssd", label, partial(contestants, batch, seqlen), inputs, "ssd")


def quasiseparable_cases(setting: Setting) -> Iterator[Case]:
    """The operator, and the whole mixer around it: the original's fused path is one function from in_proj's output to
    out_proj's."""

    def load():
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return mamba_chunk_scan_combined

    def both_ways(
        scan, x, dt_forward, dt_backward, A, B_forward, C_forward, B_backward, C_backward, diagonal, D, dt_bias
    ):
        """One scan over the rows and the flipped rows, each output moved on by one token, and the diagonal."""

        def doubled(there: Tensor, back: Tensor) -> Tensor:
            return torch.cat([there, back.flip(1)])

        y = scan(
            doubled(x, x), doubled(dt_forward, dt_backward), A, doubled(B_forward, B_backward),
            doubled(C_forward, C_backward), chunk_size=256, dt_bias=dt_bias, dt_softplus=True,
        )  # fmt: skip
        there, back = F.pad(y[:, :-1], (0, 0, 0, 0, 1, 0)).chunk(2)
        return there + back.flip(1) + x * (diagonal + D)[..., None].to(x.dtype)

    def contestants(batch: int, seqlen: int) -> dict[str, Contestant]:
        found = setting.ours(
            "quasiseparable", lambda backend, **t: ops.quasiseparable(**t, dt_softplus=True, backend=backend)
        )
        if (theirs := setting.peer("mamba_ssm's SSD kernels", load)) is not None:
            found["mamba_ssm, both ways"] = Contestant(partial(both_ways, theirs))
        return not_too_slow(found, batch, seqlen, setting)

    for label, d_inner, batch, seqlen, dtype in labelled(setting):
        heads, state = (batch, seqlen, d_inner // 64), (batch, seqlen, 1, 16 if setting.tiny else 64)

        def inputs(heads=heads, state=state, dtype=dtype) -> Tensors:
            given = random(
                setting, dtype, x=(*heads, 64), dt_forward=heads, dt_backward=heads, B_forward=state, C_forward=state,
                B_backward=state, C_backward=state, diagonal=heads,
            )  # fmt: skip
            return given | parameters(setting, A=heads[2:], channels=heads[2])

        yield Case("quasiseparable", label, partial(contestants, batch, seqlen), inputs, "quasiseparable")


def mixer_cases(setting: Setting) -> Iterator[Case]:
    """Hydra's mixer from hidden states to hidden states, ours and the original's fused path, with gradients of all its
    parameters; both read a bfloat16 module."""

    def load():
        from hydra.modules.hydra import Hydra

        return Hydra

    def ours(d_model: int, dtype: torch.dtype) -> nn.Module:
        from hf_ssm import HydraConfig
        from hf_ssm.modeling.hydra.modeling_hydra import HydraMixer

        with torch.device(setting.device):
            mixer = HydraMixer(HydraConfig(hidden_size=d_model, state_size=64))
            for parameter in mixer.parameters():  # its model initialises what is empty
                nn.init.normal_(parameter, std=0.02)
        return mixer.to(dtype)

    def contestants(d_model: int, dtype: torch.dtype) -> dict[str, Contestant]:
        found = {}
        if setting.peer("hf_ssm's models", lambda: __import__("hf_ssm").HydraConfig) or setting.device == "cpu":
            mixer = ours(d_model, dtype)
            found["hf_ssm"] = Contestant(mixer)
        if (theirs := setting.peer("goombalab's hydra", load)) is not None:
            found["hydra, fused"] = Contestant(
                theirs(d_model, use_mem_eff_path=True, device=setting.device, dtype=dtype)
            )
        return {name: Contestant(partial(lambda mixer, u: mixer(u), each.run)) for name, each in found.items()}

    for label, d_inner, batch, seqlen, dtype in labelled(setting):
        if dtype == "float32" and not setting.tiny:
            continue

        def inputs(shape=(batch, seqlen, d_inner // 2), dtype=dtype) -> Tensors:
            return random(setting, dtype, u=shape)

        yield Case("mixer", label, partial(contestants, d_inner // 2, DTYPES[dtype]), inputs)


def conv_cases(setting: Setting) -> Iterator[Case]:
    def load():
        from causal_conv1d import causal_conv1d_fn

        return causal_conv1d_fn

    def causal() -> dict[str, Contestant]:
        found = setting.ours(
            "causal_conv1d", lambda backend, **t: first(ops.causal_conv1d(**t, activation="silu", backend=backend))
        )
        if (theirs := setting.peer("causal_conv1d", load)) is not None:
            found["causal_conv1d"] = Contestant(
                lambda x, weight, bias: theirs(x.mT, weight, bias, activation="silu").mT
            )
        return found

    def centred() -> dict[str, Contestant]:
        return setting.ours(
            "centred_conv1d", lambda backend, **t: ops.centred_conv1d(**t, activation="silu", backend=backend)
        )

    for operator, width, contestants in (("causal_conv1d", 4, causal), ("centred_conv1d", 7, centred)):
        for label, d_inner, batch, seqlen, dtype in labelled(setting):

            def inputs(shape=(batch, seqlen, d_inner + 256), width=width, dtype=dtype) -> Tensors:
                return random(setting, dtype, x=shape, weight=(shape[2], width), bias=shape[2:])

            yield Case("conv", {"operator": operator} | label, contestants, inputs, operator)


def norm_cases(setting: Setting) -> Iterator[Case]:
    def load():
        from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

        return rmsnorm_fn

    def contestants() -> dict[str, Contestant]:
        found = setting.ours(
            "gated_rms_norm",
            lambda backend, **t: ops.gated_rms_norm(**t, eps=1e-5, norm_before_gate=False, backend=backend),
        )
        if (theirs := setting.peer("mamba_ssm's gated norm", load)) is not None:
            found["mamba_ssm"] = Contestant(
                lambda x, weight, gate: theirs(x, weight, None, z=gate, eps=1e-5, norm_before_gate=False)
            )
        return found

    for label, d_inner, batch, seqlen, dtype in labelled(setting):

        def inputs(shape=(batch, seqlen, d_inner), dtype=dtype) -> Tensors:
            return random(setting, dtype, x=shape, weight=shape[2:], gate=shape)

        yield Case("norm", label, contestants, inputs, "gated_rms_norm")


def step_cases(setting: Setting) -> Iterator[Case]:
    """One token of decoding: of an operator, from a state to the next. The peers' kernels write to the old state."""

    def load():
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        return selective_state_update

    def scan() -> dict[str, Contestant]:
        def run(backend: str, **t: Tensor) -> Tensor:
            with ops.use_backend(backend):
                return first(ops.selective_scan_update(**t, dt_softplus=True))

        found = setting.ours("selective_scan", run)
        found.pop("hf_ssm mamba_ssm", None)  # it takes no state
        if (theirs := setting.peer("mamba_ssm's selective_state_update", load)) is not None:
            found["mamba_ssm"] = Contestant(lambda **t: theirs(**t, dt_softplus=True))
        return found

    def ssd() -> dict[str, Contestant]:
        def run(backend: str, **t: Tensor) -> Tensor:
            with ops.use_backend(backend):
                return first(ops.ssd_update(**t, dt_softplus=True))

        def per_channel(t: Tensors) -> Tensors:
            headdim, d_state = t["state"].shape[2:]
            spread = {name: t[name][..., None].expand(*t[name].shape, headdim) for name in ("dt", "D", "dt_bias")}
            return t | spread | {"A": t["A"][:, None, None].expand(-1, headdim, d_state)}

        found = setting.ours("ssd", run)
        if (theirs := setting.peer("mamba_ssm's selective_state_update", load)) is not None:
            found["mamba_ssm"] = Contestant(lambda **t: theirs(**t, dt_softplus=True), per_channel)
        return found

    n = 16 if setting.tiny else 128
    for name, d_inner in setting.widths.items():
        for batch in (1, 64):
            label = {"model": name, "batch": batch, "dtype": "bfloat16"}
            heads = (batch, d_inner // 64)

            def of_scan(batch=batch, d=d_inner) -> Tensors:
                given = random(setting, "bfloat16", x=(batch, d), dt=(batch, d), B=(batch, 16), C=(batch, 16))
                return (
                    {"state": torch.randn(batch, d, 16, device=setting.device)}
                    | given
                    | parameters(setting, A=(d, 16), channels=d)
                )

            def of_ssd(heads=heads) -> Tensors:
                state = (heads[0], 1, n)
                given = random(setting, "bfloat16", x=(*heads, 64), dt=heads, B=state, C=state)
                return (
                    {"state": torch.randn(*heads, 64, n, device=setting.device)}
                    | given
                    | parameters(setting, A=heads[1:], channels=heads[1])
                )

            for operator, contestants, given in (("selective_scan", scan, of_scan), ("ssd", ssd, of_ssd)):
                yield Case("step", {"operator": operator} | label, contestants, given, operator, ("forward",))


OPERATOR_PARTS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    "scan": scan_cases,
    "ssd": ssd_cases,
    "quasiseparable": quasiseparable_cases,
    "mixer": mixer_cases,
    "conv": conv_cases,
    "norm": norm_cases,
    "step": step_cases,
}


def jobs_of(contestant: Contestant, inputs: Tensors, what: str) -> Job:
    """Forward without gradients, or forward and backward with gradients of all floating inputs and parameters."""
    given = contestant.prepare(inputs)
    if what == "forward":

        def forward() -> object:
            with torch.no_grad():
                return contestant.run(**given)

        return forward
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    wanted = list(leaves.values())
    module = getattr(contestant.run, "args", ())
    wanted += [p for part in module if isinstance(part, nn.Module) for p in part.parameters()]
    cotangent: list[Tensor] = []

    def both() -> object:
        out = contestant.run(**leaves)
        if not cotangent:
            cotangent.append(torch.randn_like(out))
        return torch.autograd.grad(out, wanted, cotangent[0], allow_unused=True)

    return both


def bytes_moved(inputs: Tensors, what: str) -> int:
    """Every input read and every output written once; backward reads the inputs and the output's gradient, and writes
    the inputs' gradients. The output is as large as x; a step writes the state, too."""
    read, written = sum(t.nbytes for t in inputs.values()), inputs["x"].nbytes
    if "state" in inputs:
        written += inputs["state"].nbytes
    return read + written + (0 if what == "forward" else 2 * read + written)


# --- models --------------------------------------------------------------------------------------------------------

TRAINED = {"mamba2-130m": (8, 1024), "hydra-base": (32, 512), "hymba-100m": (8, 1024)}  # batch, seqlen
DECODED = ("mamba-130m", "mamba2-130m", "hymba-100m", "mamba-2.8b", "mamba2-2.7b")
TINY_MODELS: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "time_step_rank": 2},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16, "num_heads": 4},
    "hydra": {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16},
    "hymba": {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "global_attn_idx": [0],
        "kv_reuse_group": None, "num_attention_heads": 2, "num_key_value_heads": 1, "num_memory_tokens": 4,
    },
}  # fmt: skip


class OriginalHydra(nn.Module):
    """As many of the original's mixers as our model has, with its embeddings, norms and head."""

    def __init__(self, mixer: Callable[..., nn.Module], values: dict[str, Any]):
        super().__init__()
        size = values["hidden_size"]
        self.embed = nn.Embedding(values["vocab_size"], size)
        self.mixers = nn.ModuleList(
            mixer(size, d_state=values["state_size"], use_mem_eff_path=True)
            for _ in range(values["num_hidden_layers"])
        )
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in self.mixers)
        self.transform = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size))

    def forward(self, ids: Tensor) -> Tensor:
        u = self.embed(ids)
        for mixer, norm in zip(self.mixers, self.norms, strict=True):
            u = norm(u + mixer(u))
        return F.linear(self.transform(u), self.embed.weight)


def model_jobs(
    setting: Setting, part: str
) -> Iterator[tuple[dict[str, Any], Callable[[], tuple[dict[str, Job], int]]]]:
    """(label, what builds the jobs and the bytes that they must move, 0 where that is no bound)."""
    sizes = TRAINED if part == "training" else dict.fromkeys(DECODED, (1, 64))
    if setting.tiny:
        sizes = dict.fromkeys(list(sizes)[:3], (1, 8))
    for size, (batch, seqlen) in sizes.items():
        label = {"model": size, "batch x seqlen": f"{batch} x {seqlen}"}
        if part == "training":
            yield label, partial(training_jobs, setting, size, batch, seqlen)
        else:
            yield {"model": size}, partial(decoding_jobs, setting, size)


def changes_of(setting: Setting, size: str) -> dict[str, Any]:
    from bench_common import settings

    return TINY_MODELS[settings(size)["model_type"]] if setting.tiny else {}


def training_jobs(setting: Setting, size: str, batch: int, seqlen: int) -> tuple[dict[str, Job], int]:
    """Forward, backward and AdamW, in float32 with products and operators in bfloat16 (autocast)."""
    from bench_common import our_model, settings, transformers_model

    changes = changes_of(setting, size)
    values = settings(size) | changes
    ids = torch.randint(1, values["vocab_size"], (batch, seqlen), device=setting.device)

    def step(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Job:
        model = model.to(setting.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

        def run() -> None:
            with torch.autocast(setting.device, dtype=torch.bfloat16):
                value = loss(model)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    def labelled_loss(model: nn.Module) -> Tensor:
        return model(ids, labels=ids).loss

    with torch.device(setting.device):
        mine = our_model(size, torch.float32, **changes)
        other = transformers_model(size, torch.float32, **changes)
    jobs = {"hf_ssm": step(mine, labelled_loss)}
    if "triton" in (row.name for row in OPERATORS["ssd"]) and setting.device == "cuda":
        jobs["hf_ssm triton"] = forced("triton", jobs["hf_ssm"])
    if other is not None:
        jobs["transformers"] = step(other, labelled_loss)
    if values["model_type"] == "hydra":

        def load():
            from hydra.modules.hydra import Hydra

            return Hydra

        if (mixer := setting.peer("goombalab's hydra", load)) is not None:
            jobs["hydra, fused"] = step(
                OriginalHydra(mixer, values), lambda model: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            )
    return jobs, 0


def forced(backend: str, job: Job) -> Job:
    def run() -> None:
        with ops.use_backend(backend):
            job()

    return run


def decoding_jobs(setting: Setting, size: str) -> tuple[dict[str, Job], int]:
    """One token behind a prompt of 64, in bfloat16, batch 1, the likeliest taken."""
    from bench_common import decoded_token, our_model, settings, transformers_model

    changes = changes_of(setting, size)
    ids = torch.randint(1, (settings(size) | changes)["vocab_size"], (1, 64), device=setting.device)
    with torch.device(setting.device):
        model = our_model(size, torch.bfloat16, **changes)
        other = transformers_model(size, torch.bfloat16, **changes)
    jobs = {"hf_ssm": decoded_token(model, ids)}
    if setting.device == "cuda":
        jobs["hf_ssm, captured"] = captured_step(model, ids)
    if other is not None:
        jobs["transformers"] = decoded_token(other, ids)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return jobs, sum(weight.nbytes for weight in weights)


@torch.no_grad()
def captured_step(model: nn.Module, ids: Tensor) -> Job:
    """A step of a static cache, with the choice of the token, as one CUDA graph."""
    cache: Any = None
    token = ids[:, :1].clone()

    def step() -> None:
        token.copy_(model(token, past_key_values=cache).logits[:, -1:].argmax(dim=-1))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cache = model.cache_class.static()(model.config, max_cache_len=4096)
        model(ids, past_key_values=cache)
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# --- measuring -----------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    seconds: dict[str, float] = field(default_factory=dict)  # medians
    peak: dict[str, int] = field(default_factory=dict)  # bytes beyond what was held before
    turns: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def measure(
    setting: Setting, jobs: dict[str, Job], seconds: float, *, as_called: bool, warm_up_only: bool
) -> Measured:
    """Two rounds to warm up, which tell how long one takes; then as many turns as fit into `seconds`, 3 to 50."""
    result, running, expected = Measured(), dict(jobs), 0.0
    for name, job in jobs.items():
        try:
            job()  # compiles
            before = reset_peak(setting)
            start = time.perf_counter()
            job()
            synchronize(setting)
            expected += time.perf_counter() - start
            if setting.device == "cuda":
                result.peak[name] = torch.cuda.max_memory_allocated() - before
        except Exception as error:  # a peer that cannot do a shape is no reason to lose the row
            result.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            del running[name]
            release(setting)
    if warm_up_only or not running:
        return result
    turns = 3 if setting.tiny else max(3, min(50, int(seconds / max(expected, 1e-6))))
    times: dict[str, list[Any]] = {name: [] for name in running}
    for _ in range(turns):
        for name, job in running.items():
            times[name].append(timed(setting, job, as_called))
    synchronize(setting)
    for name, values in times.items():
        each = [start.elapsed_time(end) / 1e3 for start, end in values] if setting.device == "cuda" else values
        result.seconds[name] = statistics.median(each)
    result.turns = turns
    return result


_flushed: list[Tensor] = []


def timed(setting: Setting, job: Job, as_called: bool) -> Any:
    """A pair of events, or seconds on a CPU."""
    if setting.device == "cpu":
        start = time.perf_counter()
        job()
        return time.perf_counter() - start
    if as_called:
        torch.cuda.synchronize()
    else:
        if not _flushed:
            _flushed.append(torch.empty(2**28, dtype=torch.int8, device="cuda"))  # more than any cache holds
        _flushed[0].zero_()
        torch.cuda._sleep(2_000_000)  # a millisecond, in which the job's launches queue up behind
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    job()
    end.record()
    return begin, end


def synchronize(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def reset_peak(setting: Setting) -> int:
    if setting.device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def release(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.empty_cache()


def copy_job(setting: Setting) -> tuple[Job, int]:
    """A large copy, and how many bytes it reads and writes."""
    count = 2**16 if setting.tiny else 2**30
    source, target = (torch.ones(count, dtype=torch.int8, device=setting.device) for _ in range(2))
    return partial(target.copy_, source), 2 * count


@contextmanager
def until(seconds: float) -> Iterator[None]:
    """Raises TimeUp inside the block after that time, and at SIGTERM."""

    def stop(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop), signal.signal(signal.SIGTERM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGTERM, before[1])


def run_parts(setting: Setting, parts: list[str], deadline: float, warm_up_only: bool, emit: Callable[[dict], None]):
    """Every part gets an equal share of the time that is left, and every case one of its part's."""
    for i, part in enumerate(parts):
        ends = time.monotonic() + (deadline - time.monotonic()) / (len(parts) - i)
        if part in OPERATOR_PARTS:
            cases = list(OPERATOR_PARTS[part](setting))
            for j, case in enumerate(cases):
                if time.monotonic() >= ends:
                    emit({"part": part, "skipped": len(cases) - j})
                    break
                share = (ends - time.monotonic()) / (len(cases) - j)
                for row in operator_rows(setting, case, share, warm_up_only):
                    emit(row)
                release(setting)
        else:
            models = list(model_jobs(setting, part))
            for j, (label, build) in enumerate(models):
                if time.monotonic() >= ends:
                    emit({"part": part, "skipped": len(models) - j})
                    break
                share = (ends - time.monotonic()) / (len(models) - j)
                emit(model_row(setting, part, label, build, share, warm_up_only))
                release(setting)


def operator_rows(setting: Setting, case: Case, seconds: float, warm_up_only: bool) -> Iterator[dict]:
    inputs, contestants = case.inputs(), case.contestants()
    copy, copied = copy_job(setting)
    for what in case.passes:
        jobs = {name: jobs_of(contestant, inputs, what) for name, contestant in contestants.items()}
        # building takes time, compiling too: a fifth of the share is for turns
        measured = measure(
            setting,
            {"copy": copy, **jobs},
            0.2 * seconds / len(case.passes),
            as_called=False,
            warm_up_only=warm_up_only,
        )
        row: dict[str, Any] = {"part": case.part, **case.label, "pass": what}
        if "copy" in measured.seconds and case.operator is not None:
            row["bound"] = bytes_moved(inputs, what) * measured.seconds["copy"] / copied
        backends = {name: c.backend for name, c in contestants.items() if c.backend is not None}
        yield row | finished(measured) | {"operator name": case.operator, "backends": backends}


def model_row(setting: Setting, part: str, label: dict, build: Callable, seconds: float, warm_up_only: bool) -> dict:
    row = {"part": part, **label, "pass": "one token" if part == "decoding" else "step"}
    try:
        jobs, moved = build()
    except Exception as error:
        return row | {"seconds": {}, "failed": {"hf_ssm": f"{type(error).__name__}: {error}".splitlines()[0][:160]}}
    copy, copied = copy_job(setting)
    measured = measure(setting, {"copy": copy, **jobs}, 0.3 * seconds, as_called=True, warm_up_only=warm_up_only)
    if "copy" in measured.seconds and moved:
        row["bound"] = moved * measured.seconds["copy"] / copied
    return row | finished(measured)


def finished(measured: Measured) -> dict:
    seconds = {name: value for name, value in measured.seconds.items() if name != "copy"}
    peak = {name: value for name, value in measured.peak.items() if name != "copy"}
    found: dict[str, Any] = {"seconds": seconds, "peak": peak, "turns": measured.turns}
    return found | ({"failed": measured.failed} if measured.failed else {})


# --- what is written -----------------------------------------------------------------------------------------------

NOT_IN_THE_TABLE = (
    "part",
    "bound",
    "seconds",
    "peak",
    "turns",
    "failed",
    "operator name",
    "backends",
)


def table(rows: list[dict]) -> str:
    """Of one part. In a cell: milliseconds, the share of the bound that is reached, peak memory."""
    measured = [row for row in rows if row.get("seconds")]
    if not measured:
        return "Nothing was measured.\n"
    labels = [key for key in measured[0] if key not in NOT_IN_THE_TABLE]
    names = list(dict.fromkeys(name for row in measured for name in row["seconds"]))
    decoding = measured[0]["part"] == "decoding"
    lines = [
        f"| {' | '.join([*labels, 'bound', *names, 'speed: ours / best peer'])} |",
        "| " + "--- | " * (len(labels) + len(names) + 2),
    ]
    for row in measured:
        cells = [str(row.get(key, "")) for key in labels]
        bound = row.get("bound")
        cells.append("" if bound is None else f"{1e3 * bound:.3f} ms")
        for name in names:
            cells.append(cell(row, name, bound, decoding))
        ratio = advantage(row)
        cells.append("" if ratio is None else f"{ratio:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    ratios = [ratio for row in measured if (ratio := advantage(row)) is not None]
    if ratios:
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        lines += ["", f"Speed, ours / best peer: {mean:.2f} in the geometric mean, {min(ratios):.2f} at least."]
    skipped = sum(row.get("skipped", 0) for row in rows)
    failed = [f"{name}, {describe(row)}: {why}" for row in rows for name, why in row.get("failed", {}).items()]
    if skipped:
        lines += ["", f"{skipped} of its cases were not reached in time."]
    return "\n".join([*lines, *(["", "Failed:", ""] if failed else []), *(f"- {line}" for line in failed)]) + "\n"


def cell(row: dict, name: str, bound: float | None, decoding: bool) -> str:
    if name in row.get("failed", {}):
        return "failed"
    if name not in row["seconds"]:
        return ""
    seconds = row["seconds"][name]
    parts = [f"{1e3 * seconds:.3f} ms"]
    if decoding:
        parts.append(f"{1 / seconds:.0f}/s")
    if bound is not None:
        parts.append(f"{bound / seconds:.0%}")
    if name in row.get("peak", {}):
        parts.append(f"{row['peak'][name] / 2**20:.0f} MiB")
    return ", ".join(parts)


def advantage(row: dict) -> float | None:
    """How many times as fast as the fastest peer ours is: the triton backend, or what the model takes of itself."""
    seconds = row.get("seconds", {})
    ours = [value for name, value in seconds.items() if name in ("hf_ssm", "hf_ssm triton", "hf_ssm, captured")]
    peers = [value for name, value in seconds.items() if not name.startswith("hf_ssm")]
    return min(peers) / min(ours) if ours and peers else None


def describe(row: dict) -> str:
    return ", ".join(str(value) for key, value in row.items() if key not in NOT_IN_THE_TABLE)


def preferences(rows: list[dict], source: str, arch: str) -> list[dict]:
    """Of every operator that several of our backends run, for one token and for several: which was the fastest, by the
    geometric mean over the rows that all of them ran."""
    found = []
    measured = [row for row in rows if row.get("operator name") and row["seconds"]]
    for operator, one_token in dict.fromkeys((row["operator name"], row["part"] == "step") for row in measured):
        times: dict[str, list[float]] = {}
        of_it = [row for row in measured if (row["operator name"], row["part"] == "step") == (operator, one_token)]
        candidates = {b for row in of_it for b in row["backends"].values() if b != "torch"}
        for row in of_it:
            by_backend = {b: row["seconds"].get(name) for name, b in row["backends"].items() if b in candidates}
            if len(candidates) > 1 and by_backend.keys() == candidates and None not in by_backend.values():
                for backend, seconds in by_backend.items():
                    times.setdefault(backend, []).append(math.log(seconds))
        if len(times) < 2:
            continue
        mean = {backend: statistics.fmean(values) for backend, values in times.items()}
        best, second = sorted(mean, key=mean.__getitem__)[:2]
        because = (
            f"{math.exp(mean[second] - mean[best]):.2f} times as fast as {second} in the geometric mean of "
            f"{len(times[best])} measurements ({source})"
        )
        found.append(
            {"operator": operator, "architecture": arch, "backend": best, "one_token": one_token, "because": because}
        )
    return found


def header(setting: Setting, command: list[str]) -> str:
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    device = torch.cuda.get_device_name() if setting.device == "cuda" else platform.processor() or platform.machine()
    lines = [
        f"`{' '.join(command)}`, {time.strftime('%Y-%m-%d')}, on {device}. {', '.join(versions)}, "
        f"CUDA {torch.version.cuda}, Python {platform.python_version()}.",
        "",
        "In a cell: the median time, the share of the bandwidth bound that it reaches (of a decoded token: tokens per "
        "second first), and the peak of device memory beyond what inputs and weights hold. benchmarks/README.md says "
        "how it was measured.",
    ]
    if setting.tiny:
        lines += ["", "Tiny shapes: a rehearsal of the program; the numbers mean nothing."]
    if setting.absent:
        lines += ["", "Took no part: " + "; ".join(f"{name} ({why})" for name, why in setting.absent.items()) + "."]
    return "\n".join(lines) + "\n"


def report(setting: Setting, rows: list[dict], parts: list[str], command: list[str]) -> str:
    sections = [header(setting, command)]
    for part in parts:
        of_it = [row for row in rows if row["part"] == part]
        sections.append(f"## {part}\n\n{table(of_it)}")
    return "\n".join(sections)


PARTS = (*OPERATOR_PARTS, "training", "decoding")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="+", default=["130m", "790m", "2.8b"], choices=list(WIDTHS), metavar="SIZE")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(DTYPES))
    parser.add_argument("--minutes", type=float, default=7.5, help="when to stop, whatever is done by then")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see whether it runs")
    parser.add_argument("--warm-up", action="store_true", help="compile and tune, measure nothing")
    parser.add_argument("--output", type=Path, help="also write the tables to this Markdown file, rows beside it")
    parser.add_argument(
        "--write-preferences",
        type=Path,
        nargs="?",
        const=PREFERENCES_FILE,
        metavar="FILE",
        help="enter the fastest backends into the table that operators obey",
    )
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny shows whether the program runs")
    torch.manual_seed(0)
    widths, shapes = {name: WIDTHS[name] for name in arguments.models}, SHAPES
    if arguments.tiny:
        widths, shapes = {"tiny": 128}, ((2, 8),)
    setting = Setting(arguments.device, arguments.tiny, widths, shapes, arguments.dtypes)
    rows: list[dict] = []
    beside = arguments.output.with_suffix(".jsonl") if arguments.output else None
    if beside is not None:
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text("")

    def emit(row: dict) -> None:
        rows.append(row)
        line = json.dumps(row)
        print(line, file=sys.stderr, flush=True)
        if beside is not None:
            with beside.open("a") as file:
                file.write(line + "\n")

    budget = max(1.0, 60 * arguments.minutes - (time.monotonic() - start))
    try:
        with until(budget):
            run_parts(setting, arguments.parts, start + budget - 5, arguments.warm_up, emit)
    except TimeUp:
        print("time is up", file=sys.stderr)
    text = report(setting, rows, arguments.parts, ["python", "scripts/bench_gpu.py", *(argv or sys.argv[1:])])
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    if arguments.write_preferences:
        entries = preferences(
            rows, arguments.output.name if arguments.output else "not kept", architecture(setting.device)
        )
        replace_preferences(arguments.write_preferences, entries)


def replace_preferences(path: Path, entries: list[dict]) -> None:
    """Enter what was measured in place of what was there for the same operator and architecture."""

    def case(entry: dict) -> tuple:
        return entry["operator"], entry["architecture"], entry["one_token"]

    measured = {case(entry) for entry in entries}
    kept = [entry for entry in (json.loads(path.read_text()) if path.exists() else []) if case(entry) not in measured]
    path.write_text(json.dumps(kept + entries, indent=2) + "\n")


if __name__ == "__main__":
    main()
