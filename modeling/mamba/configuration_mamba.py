"""Mamba's configuration."""

import math

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from hf_ssm.convert import ours


@strict
class MambaConfig(PreTrainedConfig):
    """Mamba: Linear-Time Sequence Modeling with Selective State Spaces, arXiv:2312.00752.

    Field names and file format are those of transformers' own MambaConfig; the defaults are those of the paper's code.
    Unknown fields are kept as attributes, as transformers does.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream, d_model in the paper.
        state_size: states per channel, d_state (N in the paper).
        num_hidden_layers: blocks.
        expand: d_inner / hidden_size, where intermediate_size does not say otherwise.
        intermediate_size: d_inner; expand * hidden_size if None.
        conv_kernel: width of the causal convolution, d_conv.
        time_step_rank: rank of dt's projection; "auto" is ceil(hidden_size / 16).
        use_bias: biases in in_proj and out_proj.
        use_conv_bias: a bias in the convolution.
        hidden_act: "silu", in the convolution and the gate.
        use_rms_norm: RMSNorm in front of the blocks; LayerNorm if False.
        layer_norm_epsilon: epsilon of either.
        residual_in_fp32: keep the residual stream in float32 when the weights are not.
        mlp_intermediate_size: hidden size of a gated MLP behind every mixer; 0 for none.
        initializer_range: standard deviation of projections and embeddings.
        rescale_prenorm_residual: divide the initial out_proj by sqrt(num_hidden_layers).
        time_step_min, time_step_max, time_step_floor: dt's bias is initialised so that softplus(bias) is log-uniform
            between the first two, and not below the third.
        time_step_scale, time_step_init_scheme: dt's weight is initialised uniformly within, or ("constant") equal to,
            time_step_scale / sqrt(time_step_rank).
        use_cache: whether forward returns a cache when not training.
        tie_word_embeddings: one matrix for the embedding and lm_head.
        classifier_dropout: dropout in front of the token classification head.
    """

    model_type = "mamba"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 50280
    hidden_size: int = 768
    state_size: int = 16
    num_hidden_layers: int = 32
    expand: int | float = 2
    intermediate_size: int | None = None
    conv_kernel: int = 4
    time_step_rank: int | str = "auto"
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    use_rms_norm: bool = True
    layer_norm_epsilon: int | float = 1e-5
    residual_in_fp32: bool = True
    mlp_intermediate_size: int = 0
    initializer_range: int | float = 0.02
    rescale_prenorm_residual: bool = True
    time_step_min: int | float = 0.001
    time_step_max: int | float = 0.1
    time_step_floor: int | float = 1e-4
    time_step_scale: int | float = 1.0
    time_step_init_scheme: str = "random"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    classifier_dropout: int | float = 0.1
    pad_token_id: int | None = 0
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = int(self.expand * self.hidden_size)
        if self.time_step_rank == "auto":
            self.time_step_rank = math.ceil(self.hidden_size / 16)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Also takes the configuration of a mamba-ssm checkpoint."""
        return super().from_dict(ours(config_dict, cls.model_type), **kwargs)

    @property
    def layer_types(self) -> list[str]:
        """Every layer keeps recurrent states; transformers' caches ask for this."""
        return ["linear_attention"] * self.num_hidden_layers

    def validate_architecture(self):
        sizes = ("vocab_size", "hidden_size", "state_size", "num_hidden_layers", "conv_kernel")
        for name in (*sizes, "time_step_rank", "intermediate_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act={self.hidden_act!r}: Mamba's kernels compute 'silu' only")
        if self.time_step_init_scheme not in ("random", "constant"):
            raise ValueError(f"time_step_init_scheme={self.time_step_init_scheme!r} must be 'random' or 'constant'")
        if self.mlp_intermediate_size < 0:
            raise ValueError(f"mlp_intermediate_size={self.mlp_intermediate_size} must not be negative")


__all__ = ["MambaConfig"]
