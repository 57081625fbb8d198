"""Hydra's checkpoints as the authors' code (goombalab/hydra) writes them.

Its models are called BERT, so their config.json says `model_type: bert`; `matrix_mixer_type` is what BERT's
does not have. Parameter names are ours. Weights come as a plain state dict, as safetensors, or as Composer's
`latest-rank0.pt`, where they lie under state.model and begin with `model.`.
"""

from typing import Any

from hf_ssm.convert import UnknownCheckpoint

# --- configurations ------------------------------------------------------------------------------------------------

# field of the authors' BertConfig -> field of ours, where they differ
_RENAMED = {"d_state": "state_size", "headdim": "head_dim", "d_conv": "conv_kernel"}
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
_HEAD_NORM_EPSILON = 1e-12  # of the masked-LM head, which their configuration does not change


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
    mixer = config["matrix_mixer_type"]
    if mixer != "hydra":
        raise UnknownCheckpoint(f"matrix_mixer_type={mixer!r}: only 'hydra' is a Hydra, the others are other models")
    epsilon = config.get("layer_norm_eps", _HEAD_NORM_EPSILON)
    if epsilon != _HEAD_NORM_EPSILON:
        raise UnknownCheckpoint(
            f"layer_norm_eps={epsilon}: the original's masked-LM head keeps {_HEAD_NORM_EPSILON}, ours would not"
        )
    translated: dict[str, Any] = {
        _RENAMED.get(name, name): value
        for name, value in (_ORIGINAL_DEFAULTS | config).items()
        if name not in _NO_EFFECT | {"layer_norm_eps", "pool_all"}
    }
    if config.get("architectures"):
        translated["architectures"] = [name.replace("Bert", "Hydra", 1) for name in config["architectures"]]
    pooling = "mean" if config.get("pool_all") else "first"
    return translated | {"model_type": "hydra", "pooling": pooling, "embedding_norm_epsilon": epsilon}
