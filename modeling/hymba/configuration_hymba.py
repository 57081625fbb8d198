"""Hymba's configuration."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig


@strict
class HymbaConfig(PreTrainedConfig):
    """Hymba: A Hybrid-head Architecture for Small Language Models, arXiv:2411.13676.

    Field names and file format are those of NVIDIA's published config.json; the defaults are those of Hymba-1.5B-Base.
    Unknown fields are kept as attributes, as transformers does. What a file written by NVIDIA's code says of
    `use_cache` is not read: it says false, because that code's cache decodes something else than one pass does, and
    ours does not. `use_cache=False` as an argument counts.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: hidden size of every layer's MLP; 0 for none.
        num_hidden_layers: layers.
        num_attention_heads, num_key_value_heads: heads of queries, and of keys and values.
        hidden_act, mlp_hidden_act: activations of the SSM branch, "silu" only, and of the MLP.
        num_memory_tokens: learned meta tokens in front of every sequence; 0 for none.
        sliding_window: a token sees itself, so many tokens before it, and all meta tokens; None for all tokens.
        global_attn_idx: layers that see all tokens, whatever sliding_window says.
        kv_reuse_group: lists of layers; the first computes keys and values, the others attend to the same.
        kv_reuse_every_i_layer: without kv_reuse_group, layers i, 2i, ... and layer 0 compute them; -1 for all layers.
        kq_norm: RMS norm of keys and queries: "none", "rms" (one weight for all heads) or "perhead-rms".
        rope: whether queries and keys are rotated by their positions.
        rope_type: "default", or "ntk" for a base that grows with max / orig_max_position_embeddings, or "dynamic_ntk"
            for one that grows with the sequence beyond orig_max_position_embeddings. What a cache holds keeps the
            rotation that it got: with "dynamic_ntk" decoding with a cache equals one pass up to that length only.
        rope_theta: base of the rotation's frequencies.
        max_position_embeddings, orig_max_position_embeddings: tokens the model was made for, and trained on before.
        mamba_d_state, mamba_d_conv, mamba_expand, mamba_dt_rank: sizes of the SSM branch; the rank "auto" is
            ceil(hidden_size / 16).
        mamba_conv_bias, mamba_proj_bias: biases of the convolution, and of in_proj and out_proj.
        mamba_inner_layernorms: RMS norms of dt, B and C.
        rms_norm_eps: epsilon of all RMS norms but those of kq_norm, which have 1e-6.
        attention_dropout: dropout of the attention weights while training.
        classifier_dropout: dropout in front of the token classifier.
        initializer_range: standard deviation of projections and embeddings.
        tie_word_embeddings: one matrix for the embedding and lm_head.
        use_cache: whether forward returns a cache when not training.
        num_experts, num_experts_per_tok, num_mamba, memory_tokens_interspersed_every, kv_weight_reuse, layer_type,
        attn_hidden_size, kq_head_dim: declared in the published file; other values than the published are refused,
            since NVIDIA's code never runs them.
    """

    model_type = "hymba"
    written_by_nvidia = False  # set where it is so
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32001
    hidden_size: int = 1600
    intermediate_size: int = 5504
    num_hidden_layers: int = 32
    num_attention_heads: int = 25
    num_key_value_heads: int | None = 5
    hidden_act: str = "silu"
    mlp_hidden_act: str = "silu"
    num_memory_tokens: int = 128
    sliding_window: int | None = 1024
    global_attn_idx: list[int] | None = None
    kv_reuse_group: list[list[int]] | None = None
    kv_reuse_every_i_layer: int = -1
    kq_norm: str = "none"
    rope: bool = True
    rope_type: str | None = "ntk"
    rope_theta: int | float = 10000.0
    max_position_embeddings: int = 8192
    orig_max_position_embeddings: int | None = 2048
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int | float = 2
    mamba_dt_rank: int | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_inner_layernorms: bool = True
    rms_norm_eps: int | float = 1e-6
    attention_dropout: int | float = 0.0
    initializer_range: int | float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    num_experts: int = 1
    num_experts_per_tok: int = 1
    num_mamba: int = 1
    memory_tokens_interspersed_every: int = 0
    kv_weight_reuse: bool = False
    layer_type: list[str] | None = None
    attn_hidden_size: int = -1
    kq_head_dim: int = -1
    attn_implementation_new: str = "flex"
    classifier_dropout: int | float = 0.0
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs):
        if self.mamba_dt_rank == "auto":
            self.mamba_dt_rank = math.ceil(self.hidden_size / 16)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.sliding_window is not None and self.global_attn_idx is None:
            self.global_attn_idx = []
        kwargs.pop("conv_dim", None)  # follows from the other fields
        kwargs.pop("v_head_dim", None)
        if kwargs.get("attn_implementation") == "flex":  # what `to_dict` writes for NVIDIA's code
            del kwargs["attn_implementation"]
        if kwargs.get("auto_map") and str(self.transformers_version).startswith("4."):
            del kwargs["auto_map"]  # NVIDIA's code, which is not saved beside our files
            self.use_cache = self.written_by_nvidia = True
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Also takes the published config.json, whose `attn_implementation: flex` names no implementation here."""
        config_dict = {name: value for name, value in config_dict.items() if name != "attn_implementation"}
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """With what NVIDIA's code expects in the file and ours derives."""
        fields = {"seq_length": self.max_position_embeddings} | super().to_dict()
        fields.pop("written_by_nvidia", None)
        return fields | {
            "attn_implementation": self.attn_implementation_new,
            "conv_dim": {str(i): self.d_inner for i in range(self.num_hidden_layers)},
            "layer_type": ["h"] * self.num_hidden_layers,
            "v_head_dim": self.v_head_dim,
        }

    @property
    def d_inner(self) -> int:
        return int(self.mamba_expand * self.hidden_size)

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.hidden_size // self.num_attention_heads

    @property
    def v_head_dim(self) -> int:
        return self.d_inner // self.num_attention_heads

    @property
    def producers(self) -> list[int]:
        """For every layer, the one whose keys and values it attends to."""
        if self.kv_reuse_group is None and self.kv_reuse_every_i_layer > 0:
            return [i - i % self.kv_reuse_every_i_layer for i in range(self.num_hidden_layers)]
        first = {i: group[0] for group in self.kv_reuse_group or [] for i in group}
        return [first.get(i, i) for i in range(self.num_hidden_layers)]

    @property
    def windows(self) -> list[int | None]:
        """For every layer, how many tokens before it a token sees; None for all."""
        everywhere = self.sliding_window is None
        return [
            None if everywhere or i in self.global_attn_idx else self.sliding_window
            for i in range(self.num_hidden_layers)
        ]

    @property
    def layer_types(self) -> list[str]:
        """What each layer caches, in transformers' words: states, and keys and values if they are its own."""
        return [
            "linear_attention" if i != producer else "hybrid" if window is None else "hybrid_sliding"
            for i, (producer, window) in enumerate(zip(self.producers, self.windows, strict=True))
        ]

    def validate_architecture(self):
        for name in (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("max_position_embeddings", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        for name in ("num_memory_tokens", "intermediate_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        self._check_heads()
        self._check_attention()
        self._check_kv_reuse()
        self._refuse_what_never_ran()

    def _check_heads(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads:
            raise ValueError(f"num_attention_heads={heads} must divide hidden_size={self.hidden_size}")
        if self.d_inner < 1 or self.mamba_expand * self.hidden_size != self.d_inner or self.d_inner % heads:
            raise ValueError(
                f"num_attention_heads={heads} must divide mamba_expand * hidden_size = "
                f"{self.mamba_expand * self.hidden_size}"
            )
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}")
        if self.rope and self.head_dim % 2:
            raise ValueError(f"hidden_size / num_attention_heads = {self.head_dim} must be even for a rotation")

    def _check_attention(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be at least 1, or None for all tokens")
        for i in self.global_attn_idx or []:
            if not 0 <= i < self.num_hidden_layers:
                raise ValueError(f"global_attn_idx: there is no layer {i} among {self.num_hidden_layers}")
        if self.kq_norm not in ("none", "rms", "perhead-rms"):
            raise ValueError(f"kq_norm={self.kq_norm!r} must be 'none', 'rms' or 'perhead-rms'")
        if self.rope_type not in (None, "default", "ntk", "dynamic_ntk"):
            raise ValueError(f"rope_type={self.rope_type!r} must be 'default', 'ntk' or 'dynamic_ntk'")
        if self.rope and self.rope_type in ("ntk", "dynamic_ntk"):
            if not self.orig_max_position_embeddings:
                raise ValueError(f"rope_type={self.rope_type!r} needs orig_max_position_embeddings")
            if self.orig_max_position_embeddings > self.max_position_embeddings:
                raise ValueError(
                    f"orig_max_position_embeddings={self.orig_max_position_embeddings} must not be above "
                    f"max_position_embeddings={self.max_position_embeddings}"
                )
            if self.head_dim < 4:
                raise ValueError(f"rope_type={self.rope_type!r} needs a head size of at least 4, not {self.head_dim}")
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act={self.hidden_act!r}: the SSM branch computes 'silu' only")
        if self.mlp_hidden_act not in ACT2FN:
            raise ValueError(f"mlp_hidden_act={self.mlp_hidden_act!r} is no activation that transformers knows")

    def _check_kv_reuse(self) -> None:
        owner: dict[int, int] = {}
        for number, group in enumerate(self.kv_reuse_group or []):
            if not group:
                raise ValueError(f"kv_reuse_group: group {number} is empty")
            for i in group:
                if not 0 <= i < self.num_hidden_layers:
                    raise ValueError(f"kv_reuse_group: there is no layer {i} among {self.num_hidden_layers}")
                if i in owner:
                    raise ValueError(f"kv_reuse_group: layer {i} is in groups {owner[i]} and {number}")
                owner[i] = number
            if group != sorted(group):
                raise ValueError(f"kv_reuse_group: {group}: the first layer computes keys and values for later ones")
        windows = self.windows
        for i, producer in enumerate(self.producers):
            if windows[i] != windows[producer]:
                kind = {True: "sees all tokens", False: "sees a window"}
                raise ValueError(
                    f"layer {i} {kind[windows[i] is None]} and shares the keys of layer {producer}, which "
                    f"{kind[windows[producer] is None]}: such layers cannot share"
                )

    def _refuse_what_never_ran(self) -> None:
        published = {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "num_mamba": 1,
            "memory_tokens_interspersed_every": 0,
            "kv_weight_reuse": False,
        }
        for name, only in published.items():
            if getattr(self, name) != only:
                raise ValueError(f"{name}={getattr(self, name)!r}: only {only!r} is supported, as in published models")
        for name, same in (("attn_hidden_size", self.hidden_size), ("kq_head_dim", self.head_dim)):
            if getattr(self, name) > 0 and getattr(self, name) != same:
                raise ValueError(f"{name}={getattr(self, name)}: only -1 (here: {same}) is supported")
        if self.layer_type is not None and self.layer_type != ["h"] * self.num_hidden_layers:
            raise ValueError(f"layer_type={self.layer_type}: all {self.num_hidden_layers} layers must be 'h', hybrid")


__all__ = ["HymbaConfig"]
