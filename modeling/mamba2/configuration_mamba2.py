"""Mamba-2's configuration."""

import math

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from hf_ssm.convert import ours


@strict
class Mamba2Config(PreTrainedConfig):
    """Mamba-2: Transformers are SSMs, arXiv:2405.21060.

    Field names and file format are those of transformers' own Mamba2Config; the initialisation's defaults are those of
    the paper's code. Unknown fields are kept as attributes, as transformers does.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream, d_model in the paper.
        state_size: d_state (N in the paper).
        num_hidden_layers: blocks.
        expand: d_inner / hidden_size.
        head_dim: channels per head (P in the paper).
        num_heads: d_inner / head_dim; may be left out.
        n_groups: groups of heads that share B and C; 8 if None, or fewer if num_heads asks for it.
        conv_kernel: width of the causal convolution, d_conv.
        chunk_size: tokens that the scan computes as one matrix; a matter of speed, not of the result.
        use_bias: biases in in_proj and out_proj.
        use_conv_bias: a bias in the convolution.
        hidden_act: "silu", in the convolution and the gate.
        use_rms_norm: RMSNorm in front of the blocks; LayerNorm if False.
        use_gated_norm: a gated RMS norm behind the scan; only the gate if False.
        norm_before_gate: the gated norm's order: RMS(y) silu(z) rather than RMS(y silu(z)).
        D_per_channel: the skip connection has one weight per channel rather than per head.
        layer_norm_epsilon: epsilon of all norms.
        residual_in_fp32: keep the residual stream in float32 when the weights are not.
        mlp_intermediate_size: hidden size of a gated MLP behind every mixer; 0 for none.
        initializer_range: standard deviation of projections and embeddings.
        rescale_prenorm_residual: divide the initial out_proj by sqrt(num_hidden_layers).
        A_init_min, A_init_max: A is initialised to minus a uniform draw between them.
        time_step_min, time_step_max, time_step_floor: dt's bias is initialised so that softplus(bias) is log-uniform
            between the first two, and not below the third.
        time_step_limit: (smallest, largest) step size, always in force.
        use_cache: whether forward returns a cache when not training.
        tie_word_embeddings: one matrix for the embedding and lm_head.
        classifier_dropout: dropout in front of the token classification head.
    """

    model_type = "mamba2"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32768
    hidden_size: int = 4096
    state_size: int = 128
    num_hidden_layers: int = 64
    expand: int | float = 2
    head_dim: int = 64
    num_heads: int | None = None
    n_groups: int | None = None
    conv_kernel: int = 4
    chunk_size: int = 256
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    use_rms_norm: bool = True
    use_gated_norm: bool = True
    norm_before_gate: bool = False
    D_per_channel: bool = False
    layer_norm_epsilon: int | float = 1e-5
    residual_in_fp32: bool = True
    mlp_intermediate_size: int = 0
    initializer_range: int | float = 0.02
    rescale_prenorm_residual: bool = True
    A_init_min: int | float = 1.0
    A_init_max: int | float = 16.0
    time_step_min: int | float = 0.001
    time_step_max: int | float = 0.1
    time_step_floor: int | float = 1e-4
    time_step_limit: list[int | float] | tuple[int | float, ...] = (0.0, float("inf"))
    use_cache: bool = True
    tie_word_embeddings: bool = False
    classifier_dropout: int | float = 0.1
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs):
        if self.num_heads is None and self.head_dim > 0:
            self.num_heads = int(self.expand * self.hidden_size) // self.head_dim
        if self.n_groups is None and self.num_heads:
            self.n_groups = math.gcd(8, self.num_heads)
        super().__post_init__(**kwargs)

    @property
    def intermediate_size(self) -> int:
        return int(self.expand * self.hidden_size)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Also takes the configuration of a mamba-ssm checkpoint."""
        return super().from_dict(ours(config_dict, cls.model_type), **kwargs)

    @property
    def layer_types(self) -> list[str]:
        """Every layer keeps recurrent states; transformers' caches ask for this."""
        return ["linear_attention"] * self.num_hidden_layers

    def validate_architecture(self):
        sizes = ("vocab_size", "hidden_size", "state_size", "num_hidden_layers", "conv_kernel", "chunk_size")
        for name in (*sizes, "head_dim", "num_heads", "n_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        d_inner = self.expand * self.hidden_size
        if self.num_heads * self.head_dim != d_inner:
            raise ValueError(
                f"expand * hidden_size = {d_inner} must equal num_heads * head_dim = "
                f"{self.num_heads} * {self.head_dim}"
            )
        if self.num_heads % self.n_groups:
            raise ValueError(f"n_groups={self.n_groups} must divide num_heads={self.num_heads}")
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act={self.hidden_act!r}: Mamba-2's kernels compute 'silu' only")
        limit = self.time_step_limit
        if len(limit) != 2 or not 0 <= limit[0] <= limit[1]:
            raise ValueError(f"time_step_limit={limit} must be (smallest, largest), both at least 0")
        if self.mlp_intermediate_size < 0:
            raise ValueError(f"mlp_intermediate_size={self.mlp_intermediate_size} must not be negative")


__all__ = ["Mamba2Config"]
