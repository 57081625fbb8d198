"""Hydra's configuration."""

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

from hf_ssm.hydra_checkpoints import ours


@strict
class HydraConfig(PreTrainedConfig):
    """Hydra, a bidirectional encoder: arXiv:2407.09941.

    Field names are those of transformers' Mamba2Config and BertConfig; the defaults are the published base model.
    Unknown fields are kept as attributes, as transformers does.

    Args:
        vocab_size: rows of the word embedding; bert-base-uncased's 30522 rounded up to a multiple of 8.
        hidden_size: width of the residual stream, d_model in the paper.
        num_hidden_layers: layers, each of one mixer and one LayerNorm.
        state_size: d_state of each direction.
        head_dim: channels per head.
        n_groups: groups of heads that share B and C.
        expand: d_inner / hidden_size.
        conv_kernel: width of the convolution, d_conv; odd, since its token is in the middle.
        chunk_size: tokens that the scans compute as one matrix; a matter of speed, not of the result.
        use_bias: biases in in_proj and out_proj.
        use_conv_bias: a bias in the convolution.
        learnable_initial_states: the state before the first token of either direction is a parameter, not zeros.
        hidden_act: activation in the masked-LM head; the mixer's are SiLU.
        is_prenorm: h + mixer(norm(h)), and a norm behind the last layer; otherwise norm(h + mixer(h)).
        layer_norm_epsilon: of the layers' LayerNorms and the mixers' gated norms.
        embedding_norm_epsilon: of the LayerNorms behind the embeddings, behind the last layer if is_prenorm, and in
            front of the image classifier; that of the masked-LM head is always 1e-12.
        type_vocab_size: token types.
        use_position_embeddings: learned positions, of tokens or of patches.
        max_position_embeddings: how many positions tokens have, if any; without, no length is too long.
        hidden_dropout_prob: dropout behind the embeddings.
        classifier_dropout: dropout in front of a classifier; as hidden_dropout_prob if None.
        pooling: what a sequence classifier sees, the "first" real token or the "mean" of all real tokens.
        image_size, patch_size, num_channels: of images, whose tokens are square patches.
        initializer_range: standard deviation of projections and embeddings.
        time_step_min, time_step_max, time_step_floor: dt's bias is initialised so that softplus(bias) is log-uniform
            between the first two, and not below the third.
        time_step_limit: (smallest, largest) step size, always in force.
        tie_word_embeddings: one matrix for the word embedding and the masked-LM head.
    """

    model_type = "hydra"

    vocab_size: int = 30528
    hidden_size: int = 768
    num_hidden_layers: int = 23
    state_size: int = 64
    head_dim: int = 64
    n_groups: int = 1
    expand: int | float = 2
    conv_kernel: int = 7
    chunk_size: int = 256
    use_bias: bool = False
    use_conv_bias: bool = True
    learnable_initial_states: bool = False
    hidden_act: str = "gelu"
    is_prenorm: bool = False
    layer_norm_epsilon: int | float = 1e-5
    embedding_norm_epsilon: int | float = 1e-12
    type_vocab_size: int = 2
    use_position_embeddings: bool = False
    max_position_embeddings: int = 512
    hidden_dropout_prob: int | float = 0.1
    classifier_dropout: int | float | None = None
    pooling: str = "first"
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    initializer_range: int | float = 0.02
    time_step_min: int | float = 0.001
    time_step_max: int | float = 0.1
    time_step_floor: int | float = 1e-4
    time_step_limit: list[int | float] | tuple[int | float, ...] = (0.0, float("inf"))
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0

    @property
    def intermediate_size(self) -> int:
        return int(self.expand * self.hidden_size)

    @property
    def num_heads(self) -> int:
        return self.intermediate_size // self.head_dim

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return ours(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Also takes the configuration of the authors' code."""
        return super().from_dict(ours(config_dict), **kwargs)

    def validate_architecture(self):
        sizes = (
            *("vocab_size", "hidden_size", "num_hidden_layers", "state_size", "head_dim", "n_groups", "conv_kernel"),
            *("chunk_size", "type_vocab_size", "max_position_embeddings", "image_size", "patch_size", "num_channels"),
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        d_inner = self.expand * self.hidden_size
        if d_inner < 1 or d_inner % self.head_dim:
            raise ValueError(f"expand * hidden_size = {d_inner} must be a multiple of head_dim = {self.head_dim}")
        if self.num_heads % self.n_groups:
            raise ValueError(f"n_groups={self.n_groups} must divide the number of heads, {self.num_heads}")
        if self.conv_kernel % 2 == 0:
            raise ValueError(f"conv_kernel={self.conv_kernel} must be odd: the convolution is centred on its token")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is no activation that transformers knows")
        if self.pooling not in ("first", "mean"):
            raise ValueError(f"pooling={self.pooling!r} must be 'first' or 'mean'")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size}")
        for name in ("layer_norm_epsilon", "embedding_norm_epsilon"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if not 0 < self.time_step_min <= self.time_step_max:
            raise ValueError(
                f"time_step_min={self.time_step_min} must be above 0 and not above time_step_max={self.time_step_max}"
            )
        limit = self.time_step_limit
        if len(limit) != 2 or not 0 <= limit[0] <= limit[1]:
            raise ValueError(f"time_step_limit={limit} must be (smallest, largest), both at least 0")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id={self.pad_token_id} is outside the vocabulary of {self.vocab_size}")


__all__ = ["HydraConfig"]
