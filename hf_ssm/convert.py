"""Original published checkpoints <-> this package.

mamba-ssm (state-spaces/mamba) writes a `config.json` of its own fields and a `pytorch_model.bin`. Its parameter names
differ from ours in the embedding only, so such a folder loads directly; `convert` rewrites it, in either direction.
Hydra's are in `hf_ssm.hydra_checkpoints`.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

ORIGINAL_EMBEDDING = r"^backbone\.embedding\."
OUR_EMBEDDING = "backbone.embeddings."


class UnknownCheckpoint(ValueError):
    """A folder or file that is none of the formats this package reads; the message says what is wrong."""


# --- configurations ------------------------------------------------------------------------------------------------

# field of ssm_cfg -> field of ours
_BOTH = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init_floor": "time_step_floor",
}
_SSM_FIELDS = {
    "mamba": _BOTH | {"dt_rank": "time_step_rank", "dt_init": "time_step_init_scheme", "dt_scale": "time_step_scale"},
    "mamba2": _BOTH
    | {
        "headdim": "head_dim",
        "ngroups": "n_groups",
        "chunk_size": "chunk_size",
        "dt_limit": "time_step_limit",
        "rmsnorm": "use_gated_norm",
        "norm_before_gate": "norm_before_gate",
        "D_has_hdim": "D_per_channel",
    },
}
# what the original classes use where ssm_cfg says nothing and our default differs
_ORIGINAL_DEFAULTS: dict[str, dict[str, Any]] = {"mamba": {}, "mamba2": {"n_groups": 1}}
_LAYERS = {"Mamba1": "mamba", "Mamba2": "mamba2"}
_NO_EFFECT_ON_RESULTS = {"layer", "use_fast_path", "use_mem_eff_path", "conv_init", "device", "dtype", "layer_idx"}


def is_original_config(config: dict[str, Any]) -> bool:
    """Whether `config` is that of a mamba-ssm checkpoint."""
    return "d_model" in config and "n_layer" in config and "model_type" not in config


def config_from_original(config: dict[str, Any]) -> dict[str, Any]:
    """mamba-ssm's configuration -> the fields of MambaConfig or Mamba2Config, `model_type` among them.

    Raises UnknownCheckpoint for options that these models do not have (attention layers, d_ssm, an unknown layer).
    """
    ssm_cfg = dict(config.get("ssm_cfg") or {})
    layer = ssm_cfg.get("layer", "Mamba1")
    if layer not in _LAYERS:
        raise UnknownCheckpoint(f"ssm_cfg.layer={layer!r}: expected {' or '.join(map(repr, _LAYERS))}")
    model_type = _LAYERS[layer]
    if config.get("attn_layer_idx"):
        raise UnknownCheckpoint("attn_layer_idx is not empty: hybrids with attention layers are not supported")
    fields = _SSM_FIELDS[model_type]
    d_ssm = ssm_cfg.pop("d_ssm", None)
    if d_ssm is not None and d_ssm != ssm_cfg.get("expand", 2) * config["d_model"]:
        raise UnknownCheckpoint(f"ssm_cfg.d_ssm={d_ssm}: only a scan over all channels is supported")
    initial_A = {}
    if model_type == "mamba2" and "A_init_range" in ssm_cfg:
        low, high = ssm_cfg.pop("A_init_range")
        initial_A = {"A_init_min": float(low), "A_init_max": float(high)}
    unknown = set(ssm_cfg) - set(fields) - _NO_EFFECT_ON_RESULTS
    if unknown:
        raise UnknownCheckpoint(f"ssm_cfg has fields that {layer} does not: {', '.join(sorted(unknown))}")
    multiple = config.get("pad_vocab_size_multiple", 8)
    d_intermediate = config.get("d_intermediate", 0)
    return {
        "model_type": model_type,
        "hidden_size": config["d_model"],
        "num_hidden_layers": config["n_layer"],
        "vocab_size": _round_up(config["vocab_size"], multiple),
        "use_rms_norm": config.get("rms_norm", True),
        "residual_in_fp32": config.get("residual_in_fp32", True),
        "mlp_intermediate_size": _round_up(d_intermediate, 128),
        "tie_word_embeddings": config.get("tie_embeddings", True),
        "layer_norm_epsilon": 1e-5,
        "pad_token_id": 0,  # of the GPT-NeoX tokenizer, which all published checkpoints use
        "bos_token_id": 0,
        "eos_token_id": 0,
        **_ORIGINAL_DEFAULTS[model_type],
        **initial_A,
        **{fields[name]: value for name, value in ssm_cfg.items() if name in fields},
    }


def ours(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """`config`, translated if it is mamba-ssm's; UnknownCheckpoint if it is of another model type than asked for."""
    if not is_original_config(config):
        return config
    translated = config_from_original(config)
    if translated["model_type"] != model_type:
        raise UnknownCheckpoint(
            f"this is an original checkpoint of model type {translated['model_type']!r}, not {model_type!r}: "
            "load it with the classes of that architecture"
        )
    return translated


def config_to_original(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of MambaConfig or Mamba2Config -> mamba-ssm's configuration.

    Raises UnknownCheckpoint for what mamba-ssm cannot express.
    """
    model_type = config.get("model_type")
    if model_type not in _SSM_FIELDS:
        raise UnknownCheckpoint(f"model_type={model_type!r} has no original format; only mamba and mamba2 have")
    if abs(config.get("layer_norm_epsilon", 1e-5) - 1e-5) > 1e-12:
        raise UnknownCheckpoint(
            f"layer_norm_epsilon={config['layer_norm_epsilon']}: mamba-ssm's is always 1e-5, the result would differ"
        )
    layer = next(layer for layer, kind in _LAYERS.items() if kind == model_type)
    ssm_cfg = {name: config[field] for name, field in _SSM_FIELDS[model_type].items() if field in config}
    if "A_init_min" in config:
        ssm_cfg["A_init_range"] = [config["A_init_min"], config["A_init_max"]]
    if config.get("intermediate_size"):
        ssm_cfg["expand"] = config["intermediate_size"] / config["hidden_size"]
    return {
        "d_model": config["hidden_size"],
        "d_intermediate": config.get("mlp_intermediate_size", 0),
        "n_layer": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "ssm_cfg": {"layer": layer, **ssm_cfg},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": config.get("use_rms_norm", True),
        "residual_in_fp32": config.get("residual_in_fp32", True),
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,  # vocab_size is the embedding's already
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _round_up(value: int, multiple: int) -> int:
    return -(-value // max(1, multiple)) * max(1, multiple)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: Literal["hf", "original"] = "hf",
    dtype: str | None = None,
) -> Path:
    """Rewrite the checkpoint in `source` in another format, with the tokenizer files beside it.

    Args:
        source: a folder saved by mamba-ssm, by the authors of Hydra, by transformers or by this package; or a file of
            weights that Hydra's authors' code has written, see `hf_ssm.hydra_checkpoints`.
        destination: a folder that does not exist yet; it appears only when it is complete.
        to: "hf" for config.json and model.safetensors, "original" for the authors' config.json and pytorch_model.bin.
        dtype: torch dtype to store, such as "bfloat16"; None keeps the source's.

    Raises:
        FileNotFoundError, FileExistsError; UnknownCheckpoint if the source is none of these, or is incomplete.
    """
    from hf_ssm import hydra_checkpoints

    source, destination = Path(source), Path(destination)
    if destination.exists():
        raise FileExistsError(f"{destination} exists already: choose a folder that does not")
    config = _config_beside(source)
    if config is None and hydra_checkpoints.weights_file(source) is None:
        raise FileNotFoundError(f"{source}: no config.json; expected a folder with a config.json and weights")
    stored = _torch_dtype(dtype)
    if config is None or source.is_file() or hydra_checkpoints.is_original_config(config):
        model = hydra_checkpoints.load_original(source, stored)
    else:
        model = _load(source, config, stored)

    def write(folder: Path) -> None:
        if to == "original":
            save_original(model, folder)
        else:
            model.save_pretrained(folder)
        for file in source.iterdir() if source.is_dir() else []:
            if file.name.startswith(_KEPT) and file.is_file():
                shutil.copy2(file, folder / file.name)

    return write_whole(destination, write)


_KEPT = ("tokenizer", "special_tokens_map", "vocab", "merges", "preprocessor_config")


def _config_beside(source: Path) -> dict[str, Any] | None:
    """config.json in the folder, or beside the file of weights."""
    config_file = (source.parent if source.is_file() else source) / "config.json"
    if not config_file.is_file():
        return None
    return read_config(config_file)


def read_config(file: Path) -> dict[str, Any]:
    """A config.json; UnknownCheckpoint if it is none."""
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnknownCheckpoint(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnknownCheckpoint(f"{file} holds {type(config).__name__}, expected an object with a model's settings")
    return config


def _torch_dtype(dtype: str | None) -> Any:
    import torch

    if dtype is None:
        return "auto"
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is no torch dtype; for example 'float32' or 'bfloat16'")
    return found


def _load(source: Path, config: dict[str, Any], dtype: Any) -> Any:
    """The model in a folder of transformers, of this package or of mamba-ssm."""
    from hf_ssm import registry

    model_type = (config_from_original(config) if is_original_config(config) else config).get("model_type")
    if model_type not in registry.ARCHITECTURES:
        known = ", ".join(registry.ARCHITECTURES)
        raise UnknownCheckpoint(f"{source / 'config.json'}: model_type is {model_type!r}, expected one of {known}")
    architecture = registry.ARCHITECTURES[model_type]
    model_class = registry.load(_saved_class(config, architecture.models))
    return fitting(model_class, source, source, dtype=dtype)


def fitting(model_class: Any, where: Path, *args: Any, **kwargs: Any) -> Any:
    """`model_class.from_pretrained`, or UnknownCheckpoint if the weights are not exactly those of the class."""
    model, info = model_class.from_pretrained(*args, output_loading_info=True, **kwargs)
    wrong = {name: info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(name)}
    if wrong:
        raise UnknownCheckpoint(f"{where}: the weights do not fit {model_class.__name__}: {_some(wrong)}")
    return model


def save_original(model: Any, folder: str | Path) -> None:
    """Write config.json and pytorch_model.bin as the authors' code does; mamba-ssm's holds language models only."""
    import torch

    if model.config.model_type == "hydra":
        from hf_ssm import hydra_checkpoints

        return hydra_checkpoints.save_original(model, Path(folder))
    config = config_to_original(model.config.to_dict())
    if not hasattr(model, "lm_head"):
        raise UnknownCheckpoint(f"{type(model).__name__}: mamba-ssm's format holds language models only")
    weights = {
        name.replace(OUR_EMBEDDING, "backbone.embedding."): tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    folder = Path(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    torch.save(weights, folder / "pytorch_model.bin")


def write_whole(destination: Path, write: Callable[[Path], None]) -> Path:
    """`write(folder)` into a temporary neighbour of `destination`, which is renamed when it is complete."""
    temporary = destination.with_name(f".{destination.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        temporary.rename(destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return destination


def _saved_class(config: dict[str, Any], models: dict[str, str]) -> str:
    named = (config.get("architectures") or [None])[0]
    usual = next(head for head in ("AutoModelForCausalLM", "AutoModelForMaskedLM") if head in models)
    return named if named in models.values() else models[usual]


def _some(wrong: dict[str, Any], most: int = 3) -> str:
    parts = []
    for kind, keys in wrong.items():
        keys = sorted(map(str, keys))
        more = f" and {len(keys) - most} more" if len(keys) > most else ""
        parts.append(f"{kind.replace('_', ' ')}: {', '.join(keys[:most])}{more}")
    return "; ".join(parts)
