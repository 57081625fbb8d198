"""What the benchmarks share: models with random weights, ours and transformers' own, and what they are asked to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import hf_ssm  # noqa: F401  registers the architectures

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Job = Callable[[], object]


def settings(size: str) -> dict[str, Any]:
    """What configs/models/<size>.json says."""
    return json.loads((ROOT / "configs" / "models" / f"{size}.json").read_text())


def our_model(size: str, dtype: torch.dtype, **changes: object) -> nn.Module:
    config = AutoConfig.for_model(**settings(size) | changes)
    kind = AutoModelForMaskedLM if config.model_type == "hydra" else AutoModelForCausalLM
    return kind.from_config(config, dtype=dtype)


def transformers_model(size: str, dtype: torch.dtype, **changes: object) -> nn.Module | None:
    """transformers' own, if it has one."""
    values = settings(size) | changes
    classes = {"mamba": ("MambaConfig", "MambaForCausalLM"), "mamba2": ("Mamba2Config", "Mamba2ForCausalLM")}
    if values["model_type"] not in classes:
        return None
    config_class, model_class = (getattr(transformers, name) for name in classes[values["model_type"]])
    return model_class(config_class(**values)).to(dtype)


def prompt(model: nn.Module, ids: Tensor) -> Job:
    """All tokens at once: with a cache and the last token's logits, or an encoder's."""
    model.eval()
    options = {"use_cache": True, "logits_to_keep": 1} if model.can_generate() else {}

    def run() -> None:
        with torch.no_grad():
            model(ids, **options)

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
