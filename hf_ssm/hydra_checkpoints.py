"""Hydra's checkpoints as the authors' code (goombalab/hydra) writes them.

Its models are called BERT, so their config.json says `model_type: bert`; `matrix_mixer_type` is what BERT's
does not have. Parameter names are ours. Weights come as a plain state dict, as safetensors, or as Composer's
`latest-rank0.pt`, where they lie under state.model and begin with `model.`.
"""

import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

from hf_ssm.convert import UnknownCheckpoint, fitting, read_config

# --- configurations ------------------------------------------------------------------------------------------------

# field of the authors' BertConfig -> field of ours, where they differ
_RENAMED = {
    "d_state": "state_size",
    "headdim": "head_dim",
    "d_conv": "conv_kernel",
    "layer_norm_eps": "embedding_norm_epsilon",
}
# what the authors' classes use where config.json says nothing and our default differs
_ORIGINAL_DEFAULTS: dict[str, Any] = {"vocab_size": 30522, "num_hidden_layers": 12}
# fields of attention, of MLPs and of the other matrix mixers, which a Hydra does not have
_NO_EFFECT = {
    "model_type",
    "matrix_mixer_type",
    "is_data_dependent",
    "qk_dim",
    "num_attention_heads",
    "intermediate_size",
    "attention_probs_dropout_prob",
    "position_embedding_type",
    "max_position_embedding",
    "is_decoder",
    "add_cross_attention",
    "use_cache",
    "transformers_version",
}


def is_original_config(config: dict[str, Any]) -> bool:
    return "matrix_mixer_type" in config


def ours(config: dict[str, Any]) -> dict[str, Any]:
    """`config`, translated if it is the authors'; UnknownCheckpoint if it is another model's."""
    if is_original_config(config):
        return config_from_original(config)
    if config.get("model_type") == "bert":
        raise UnknownCheckpoint("this is the configuration of a BERT, not of a Hydra: it has no matrix_mixer_type")
    return config


def config_from_original(config: dict[str, Any]) -> dict[str, Any]:
    """The authors' BertConfig -> the fields of HydraConfig. UnknownCheckpoint for their other matrix mixers."""
    return _ORIGINAL_DEFAULTS | _translated(config)


def _translated(config: dict[str, Any]) -> dict[str, Any]:
    """Only what `config` says."""
    mixer = config["matrix_mixer_type"]
    if mixer != "hydra":
        raise UnknownCheckpoint(f"matrix_mixer_type={mixer!r}: only 'hydra' is a Hydra, the others are other models")
    translated: dict[str, Any] = {
        _RENAMED.get(name, name): value for name, value in config.items() if name not in _NO_EFFECT | {"pool_all"}
    }
    if config.get("architectures"):
        translated["architectures"] = [name.replace("Bert", "Hydra", 1) for name in config["architectures"]]
    pooling = "mean" if config.get("pool_all") else "first"
    return translated | {"model_type": "hydra", "pooling": pooling}


# what the authors' classes do not let their configuration change
_FIXED = {
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "learnable_initial_states": False,
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": [0.0, float("inf")],
    "tie_word_embeddings": True,
}
_WRITTEN = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "expand", "chunk_size", "is_prenorm", "hidden_act"),
    *("type_vocab_size", "use_position_embeddings", "max_position_embeddings", "hidden_dropout_prob"),
    *("classifier_dropout", "initializer_range", "pad_token_id", "tie_word_embeddings"),
)


def config_to_original(config: Any) -> dict[str, Any]:
    """A HydraConfig -> the authors' BertConfig. UnknownCheckpoint for what that cannot express."""
    for name, fixed in _FIXED.items():
        value = getattr(config, name)
        if (list(value) if isinstance(value, tuple) else value) != fixed:
            raise UnknownCheckpoint(f"{name}={value}: the authors' code always has {fixed}, the result would differ")
    return {
        "model_type": "bert",
        "matrix_mixer_type": "hydra",
        **{name: getattr(config, name) for name in _WRITTEN},
        **{theirs: getattr(config, name) for theirs, name in _RENAMED.items()},
        "pool_all": config.pooling == "mean",
        "id2label": config.id2label,
        "label2id": config.label2id,
        "problem_type": config.problem_type,
    }


# --- checkpoints ---------------------------------------------------------------------------------------------------

_FILES = ("model.safetensors", "pytorch_model.bin", "latest-rank0.pt")
_POSITION_IDS = "embeddings.position_ids"  # a buffer of the authors' code, always 0, 1, 2, ...


def weights_file(source: Path) -> Path | None:
    """`source` itself if it is a file, else the file of weights in that folder, under a usual name or the only one."""
    if source.is_file():
        return source
    for name in _FILES:
        if (source / name).is_file():
            return source / name
    others = [file for file in source.glob("*") if file.suffix in (".pt", ".bin", ".safetensors")]
    return others[0] if len(others) == 1 else None


def load_original(source: Path, dtype: Any) -> Any:
    """The model of a folder or file that the authors' code has written, as the class that its parameters are of.

    With a config.json beside the weights, that is used; what it does not say is read off the shapes.
    """
    import torch

    from hf_ssm import registry

    file = weights_file(source)
    if file is None:
        raise FileNotFoundError(f"{source}: no file of weights; expected {', '.join(_FILES)}, or one file like them")
    weights = {name: tensor for name, tensor in read_weights(file).items() if not name.endswith(_POSITION_IDS)}
    config = config_of(weights, file)
    config_file = file.parent / "config.json"
    if config_file.is_file():
        said = read_config(config_file)
        said = _translated(said) if is_original_config(said) else ours(said)
        rows = config["vocab_size"]
        if said.get("vocab_size") is not None and rows == -(-said["vocab_size"] // 8) * 8:
            said["vocab_size"] = rows  # the authors' trainer pads it to a multiple of 8
        if "id2label" in said:
            del config["num_labels"]
        config |= said
    model_class = registry.load(_class_of(weights, config.get("architectures")))
    config = model_class.config_class.from_dict(config)
    options = {}
    if model_class is registry.load("HydraModel"):
        options["add_pooling_layer"] = any(name.endswith("pooler.dense.weight") for name in weights)
    with torch.device("meta"):
        expected = model_class(config, **options).state_dict()
    wrong = [name for name, tensor in weights.items() if name in expected and tensor.shape != expected[name].shape]
    if wrong:
        shapes = f"{wrong[0]} is {tuple(weights[wrong[0]].shape)} and not {tuple(expected[wrong[0]].shape)}"
        raise UnknownCheckpoint(f"{file} is not of the sizes that config.json says: {shapes}")
    return fitting(model_class, file, None, config=config, state_dict=weights, dtype=dtype, **options)


def read_weights(file: Path) -> dict[str, Any]:
    """The state dict in a file of any of the three shapes, under the names that ours has, too."""
    import torch
    from safetensors.torch import load_file

    loaded: Any
    try:
        if file.suffix == ".safetensors":
            loaded = load_file(file)
        else:
            _check_archive(file)
            with torch.serialization.safe_globals(_beside_weights()):
                loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnknownCheckpoint(
            f"{file} holds more than tensors, and loading that could run code of whoever wrote it. If you trust them, "
            "keep only the weights: torch.save(torch.load(FILE, weights_only=False)['state']['model'], 'weights.pt'), "
            f"and convert weights.pt. ({str(error).splitlines()[0]})"
        ) from error
    except UnknownCheckpoint:
        raise
    except Exception as error:  # torch.load lets through whatever a damaged file makes its parts raise
        raise UnknownCheckpoint(f"{file} cannot be read ({error}): it is truncated or something else") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state"), dict):
        loaded = loaded["state"].get("model")
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise UnknownCheckpoint(f"{file}: neither a state dict nor a checkpoint of Composer with one in state.model")
    return {name.removeprefix("model."): value for name, value in loaded.items()}


def _beside_weights() -> list[Any]:
    """What Composer saves beside the weights, harmless to make: times, and the state of numpy's random numbers, under
    numpy's present names and those before version 2."""
    from datetime import timedelta

    import numpy as np

    array = np.zeros(1).__reduce__()[0]
    return [
        timedelta,
        array,
        (array, "numpy.core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype("uint32")),
    ]


def _check_archive(file: Path) -> None:
    """torch.load does not look at the checksums of the archive that it has written, and what it says of a part of one
    depends on where that ends."""
    if not zipfile.is_zipfile(file):  # its table of contents stands at the end
        with file.open("rb") as stream:
            if stream.read(2) == b"PK":
                raise UnknownCheckpoint(f"{file} is truncated: its end is missing; copy it again")
        return
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise UnknownCheckpoint(f"{file} is damaged: the checksum of {damaged} in it is wrong; copy it again")


def config_of(weights: dict[str, Any], file: Path) -> dict[str, Any]:
    """The configuration that the shapes of `weights` tell, in the fields of HydraConfig. They do not tell pooling; and
    n_groups only together with initial states, so without them it is 1, as in all that the authors train."""
    bert = "bert." if any(name.startswith("bert.") for name in weights) else ""
    layers = [re.match(rf"{re.escape(bert)}encoder\.layer\.(\d+)\.layer\.mixer\.", name) for name in weights]
    mixer = f"{bert}encoder.layer.0.layer.mixer."

    def shape(name: str) -> tuple[int, ...]:
        if name not in weights:
            raise UnknownCheckpoint(f"{file} is no Hydra: it has no {name}. Other models convert as a whole folder.")
        return tuple(weights[name].shape)

    projected, hidden_size = shape(f"{mixer}in_proj.weight")
    (d_inner,), (nheads,) = shape(f"{mixer}norm.weight"), shape(f"{mixer}dt_bias")
    bc_size = (projected - 2 * d_inner - 2 * nheads) // 4
    initial_states = f"{mixer}init_states" in weights
    state_size = shape(f"{mixer}init_states")[2] if initial_states else bc_size
    positions = f"{bert}embeddings.position_embeddings.weight"
    config = {
        "model_type": "hydra",
        "vocab_size": shape(f"{bert}embeddings.word_embeddings.weight")[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": 1 + max(int(found[1]) for found in layers if found),
        "state_size": state_size,
        "head_dim": d_inner // nheads,
        "n_groups": bc_size // state_size,
        "expand": d_inner // hidden_size if d_inner % hidden_size == 0 else d_inner / hidden_size,
        "conv_kernel": shape(f"{mixer}conv1d.weight")[2],
        "use_bias": f"{mixer}in_proj.bias" in weights,
        "use_conv_bias": f"{mixer}conv1d.bias" in weights,
        "learnable_initial_states": initial_states,
        "is_prenorm": f"{bert}encoder.norm_f.weight" in weights,
        "type_vocab_size": shape(f"{bert}embeddings.token_type_embeddings.weight")[0],
        "use_position_embeddings": positions in weights,
        "num_labels": shape("classifier.weight")[0] if "classifier.weight" in weights else 2,
    }
    return config | ({"max_position_embeddings": shape(positions)[0]} if positions in weights else {})


def _class_of(weights: dict[str, Any], architectures: list[str] | None) -> str:
    from hf_ssm import registry

    if architectures and architectures[0] in registry.ARCHITECTURES["hydra"].models.values():
        return architectures[0]
    if any(name.startswith("cls.") for name in weights):
        return "HydraForMaskedLM"
    if "qa_outputs.weight" in weights:
        return "HydraForQuestionAnswering"
    if "classifier.weight" in weights:
        pooled = "bert.pooler.dense.weight" in weights
        return "HydraForSequenceClassification" if pooled else "HydraForTokenClassification"
    return "HydraModel"


def save_original(model: Any, folder: Path) -> None:
    """config.json and, as a plain state dict, pytorch_model.bin: the authors' `from_composer` and `from_pretrained`
    both read that."""
    import torch

    config = config_to_original(model.config)
    name = type(model).__name__.replace("Hydra", "Bert", 1)
    if name not in ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering"):
        raise UnknownCheckpoint(f"{type(model).__name__}: the authors' code has no such model")
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.use_position_embeddings:
        positions = torch.arange(model.config.max_position_embeddings)[None]
        weights[f"bert.{_POSITION_IDS}" if hasattr(model, "bert") else _POSITION_IDS] = positions
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}, indent=4))
    torch.save(weights, folder / "pytorch_model.bin")
