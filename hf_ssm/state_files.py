"""A cache as a safetensors file: read a long text once, go on from it any number of times, elsewhere and later.

The file holds every tensor of the cache as it is, bit for bit. Its metadata say which version of this format it is and
which model it belongs to, all of it text:

    hf_ssm_state   the version of the format, "1"
    model_type     of the model's configuration
    config         JSON: the configuration's fields that decide what a state means
    dtype          of the model, such as "bfloat16"
    weights        `weights_fingerprint` of the model
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from hf_ssm.cache import RecurrentCache, RecurrentStaticCache, check_states

FORMAT_VERSION = "1"
SAMPLED_VALUES = 64  # of every parameter

# Fields of a configuration that change neither a state nor what follows from it: initialisation, training, outputs,
# and what is a matter of speed. A field that is not named here counts.
_WITHOUT_EFFECT = {
    *("initializer_range", "rescale_prenorm_residual", "A_init_min", "A_init_max"),
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme"),
    *("attention_dropout", "classifier_dropout", "tie_word_embeddings", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
    *("chunk_size", "attn_implementation_new", "layer_type"),
}


@torch.no_grad()
def prefill(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, *, piece: int = 2048
) -> RecurrentCache:
    """Read `input_ids` (batch, seqlen) and return the cache; the memory needed does not grow with the length, but for
    keys and values of layers that see all tokens.

    Args:
        attention_mask: (batch, seqlen), 0 for padding, which may be anywhere.
        piece: tokens to read at a time.
    """
    cache = _cache_class(model)(model.config)
    for start in range(0, input_ids.shape[1], piece):
        new = slice(start, start + piece)
        mask = None if attention_mask is None else attention_mask[:, new]
        model.base_model(input_ids[:, new], attention_mask=mask, past_key_values=cache, use_cache=True)
    return cache


def save_cache(cache: RecurrentCache, path: str | os.PathLike[str], model: Any) -> None:
    """Write what `cache` holds, of all its rows, and which `model` it is of. The file appears when it is complete.

    What the cache has recorded for a rollback is not saved. Raises ValueError for an empty cache, one of another
    model, or a static one; OSError if it cannot be written.
    """
    if isinstance(cache, RecurrentStaticCache):
        raise ValueError("a static cache is a place in memory: save a dynamic one")
    cache = _cache_class(model).adopt(cache, model.config)
    if not cache.get_seq_length():
        raise ValueError("the cache is empty: feed the model at least one token first")
    for i, mixer in enumerate(_mixers(model)):
        states = cache.states(i)
        assert states is not None
        rows = (states[1].shape[0],)
        check_states(states, rows + mixer.conv_state_shape, rows + mixer.ssm_state_shape, states[0].device)
    # copies, since safetensors refuses tensors that share memory
    tensors = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in cache._tensors().items()
    }
    path = Path(path)
    temporary = path.with_name(f".{path.name}.incomplete")
    try:
        save_file(tensors, temporary, metadata={"hf_ssm_state": FORMAT_VERSION} | _identity(model))
        temporary.replace(path)
    except SafetensorError as error:  # its name for every failure to write
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_cache(path: str | os.PathLike[str], model: Any) -> RecurrentCache:
    """The cache that `save_cache` has written, on the model's devices. It goes on exactly as the one saved.

    `model.generate(new_ids, past_key_values=cache)` reads only what is new. It knows new ids by there being fewer of
    them than tokens in the cache; where that may not be so, give it an `attention_mask` for all of them, those in the
    cache in front. A cache is changed by use: load it again, copy it (`copy.deepcopy`), or make n branches of each row
    with `cache.batch_repeat_interleave(n)`.

    Raises FileNotFoundError; ValueError for what is no state file, is not whole, is of another version of the format,
    or was saved with a model of another kind, configuration, dtype or weights than this one.
    """
    cache = _cache_class(model)(model.config)
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            _check_identity(str(path), file.metadata() or {}, model)
            # copies: a mapped file that somebody overwrites would change, or end, beneath us
            layers = [next(mixer.parameters()).device for mixer in _mixers(model)]
            held = {}
            for name in file.keys():  # noqa: SIM118
                layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
                device = model.device if layer is None else layers[layer]
                held[name] = file.get_tensor(name).to(device, copy=True)
    except SafetensorError as error:
        raise ValueError(f"{path} is no state file, or is not whole: {error}") from error
    cache._load(held)
    return cache


def weights_fingerprint(model: Any) -> str:
    """A hash over the names, shapes and up to 64 evenly spaced values, the first and last among them, of every
    parameter below the head. Milliseconds, whatever the model's size.

    It catches other checkpoints, other training, other adapters, merged adapters and quantisation: they change nearly
    every value of the parameters that they change at all. It does not catch edits of single values or rows, such as
    those of one token's embedding, nor of buffers.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.base_model.named_parameters()):
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is not in memory: load the model without offloading it")
        values = parameter.detach().reshape(-1)
        count = min(SAMPLED_VALUES, values.numel())
        where = torch.arange(count, device=values.device) * (values.numel() - 1) // max(1, count - 1)
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(values[where].to("cpu", torch.float64).numpy().astype("<f8").tobytes())
    return digest.hexdigest()


def _cache_class(model: Any) -> type[RecurrentCache]:
    found = getattr(model, "cache_class", None)
    if found is None:
        raise ValueError(f"{type(model).__name__} is not one of hf-ssm's models that generate, which keep a state")
    return found


def _mixers(model: Any) -> list[Any]:
    """The modules that have states, in their layers' order."""
    return [module for module in model.base_model.modules() if hasattr(module, "ssm_state_shape")]


def _identity(model: Any) -> dict[str, str]:
    return {
        "model_type": model.config.model_type,
        "config": json.dumps(_meaning(model.config)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights_fingerprint(model),
    }


def _meaning(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of its own, not of every configuration, that decide what a state means."""
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = [field.name for field in dataclasses.fields(config) if field.name not in common | _WITHOUT_EFFECT]
    return {name: getattr(config, name) for name in sorted(own)}


def _check_identity(path: str, said: dict[str, str], model: Any) -> None:
    """Refuse a file that says it is of another format or another model."""
    version = said.get("hf_ssm_state")
    if version is None:
        raise ValueError(f"{path} is no state file: it is safetensors, but not of a cache")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {version} of the state format, and this hf-ssm reads version {FORMAT_VERSION}: save "
            "it again, or use the hf-ssm that wrote it"
        )
    ours = _identity(model)
    if said.get("model_type") != ours["model_type"]:
        raise ValueError(f"{path} is the state of a {said.get('model_type')} model, this one is {ours['model_type']}")
    theirs, here = json.loads(said["config"]), json.loads(ours["config"])
    names = sorted(name for name in theirs | here if theirs.get(name) != here.get(name))
    if names:
        differences = ", ".join(f"{name} {theirs.get(name)}, here {here.get(name)}" for name in names)
        raise ValueError(f"{path} is the state of another model: {differences}")
    if said["dtype"] != ours["dtype"]:
        raise ValueError(
            f"{path} is the state of the model in {said['dtype']}, and this one is in {ours['dtype']}: load it with "
            f"dtype={said['dtype']}, or save the state again"
        )
    if said["weights"] != ours["weights"]:
        raise ValueError(
            f"{path} is the state of a model of the same shape with other weights: load the checkpoint (and adapter) "
            "that it was saved with, or save the state again"
        )


__all__ = ["load_cache", "prefill", "save_cache", "weights_fingerprint"]
