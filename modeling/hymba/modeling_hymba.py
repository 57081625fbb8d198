"""Hymba: attention heads and Mamba heads in parallel in every layer. arXiv:2411.13676.

Modules are named as in NVIDIA's code: `model.layers.0.mamba.in_proj`. Learned meta tokens stand in front of every
sequence; what they leave behind does not depend on it, so a cache starts from it.

b batch   l seqlen   s tokens and the meta tokens among them   m meta tokens   h query heads   d channels   n d_state
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import can_return_tuple, is_tracing, logging

from hf_ssm.cache import HybridMambaAttentionDynamicCache, MetaTokens, Replay, States, check_states
from hf_ssm.decoder import (
    SSMForCausalLM,
    SSMForSequenceClassification,
    SSMForTokenClassification,
    SSMModelOutput,
    one_cache,
)
from hf_ssm.layers import CausalConv1d, Linear, RMSNorm, log_uniform_time_step_bias
from hf_ssm.ops import selective_scan
from hf_ssm.ops.attention import Pattern, Places, attend
from hf_ssm.ops.discretize import compute_dtype, decay_rates
from hf_ssm.ops.rows import fill_padding, sequence_starts, take_tokens
from hf_ssm.pretrained import (
    SSMPreTrainedModel,
    check_ids,
    one_of_ids_and_embeds,
    packed_rows,
    padding_mask,
    positions_in_sequence,
)

from .configuration_hymba import HymbaConfig

logger = logging.get_logger(__name__)

Keys = tuple[Tensor, Tensor]  # (b, kv_heads, tokens, head size) keys and values
Extend = Callable[[Tensor, Tensor], Keys]  # a call's keys and values -> these behind those of the tokens before


class HymbaPerHeadRMSNorm(nn.Module):
    """RMS norm of every head's vector, (b, h, s, d), with a weight of its own."""

    def __init__(self, head_dim: int, heads: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, heads, 1, head_dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.rms_norm(x.to(compute_dtype(x)), x.shape[-1:], eps=self.eps)
        return normed.to(self.weight.dtype) * self.weight


class HymbaAttention(nn.Module):
    """Rotated, optionally normalised queries and keys; values twice as wide. No projections of its own."""

    _NORM_EPSILON = 1e-6  # whatever the other norms have

    def __init__(self, config: HymbaConfig):
        super().__init__()
        self.config = config
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.kq_norm == "rms":
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, self._NORM_EPSILON) for _ in range(2))
        elif config.kq_norm == "perhead-rms":
            self.q_norm, self.k_norm = (
                HymbaPerHeadRMSNorm(config.head_dim, heads, self._NORM_EPSILON)
                for heads in (config.num_attention_heads, config.num_key_value_heads)
            )

    def prepare(self, x: Tensor, norm: nn.Module | None, rotation: Keys | None) -> Tensor:
        """Queries or keys (b, s, h d) -> (b, h, s, d), normalised and rotated by (cos, sin) (b or 1, 1, s, d)."""
        x = x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim)).transpose(1, 2)
        if norm is not None:
            x = norm(x)
        if rotation is None:
            return x
        cos, sin = rotation
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor | None]:
        """query (b, h, s, d) -> (b, s, h e), and the weights (b, h, s, keys) where the implementation gives them."""
        out, weights = attend(
            self,
            query,
            keys,
            values,
            pattern,
            self.config._attn_implementation,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        return out.flatten(2), weights


class HymbaParameter(nn.Module):
    """One parameter with the name of a list's, `A_log.0`; a module that is called, so that accelerate's hooks bring an
    offloaded parameter here, which they do not for a ParameterList."""

    def __init__(self, *shape: int):
        super().__init__()
        self.register_parameter("0", nn.Parameter(torch.empty(*shape)))

    def forward(self) -> Tensor:
        return self.get_parameter("0")


class HymbaMixer(nn.Module):
    """in_proj -> q, k, v, x, gate; attention of q, k, v beside convolution and selective scan of x; the mean of both
    normalised outputs -> out_proj. Without `owns_keys`, k and v are those of another layer. Paper: section 2.1."""

    def __init__(self, config: HymbaConfig, owns_keys: bool):
        super().__init__()
        d_inner, d_state, rank = config.d_inner, config.mamba_d_state, config.mamba_dt_rank
        kv_heads = config.num_key_value_heads
        keys_and_values = [kv_heads * config.head_dim, kv_heads * config.v_head_dim] if owns_keys else []
        self.owns_keys = owns_keys
        self.value_heads = (kv_heads, config.v_head_dim)
        self.in_proj_sizes = [config.hidden_size, *keys_and_values, d_inner, d_inner]
        self.in_proj = Linear(config.hidden_size, sum(self.in_proj_sizes), bias=config.mamba_proj_bias)
        self.self_attn = HymbaAttention(config)
        self.conv1d = CausalConv1d(d_inner, config.mamba_d_conv, bias=config.mamba_conv_bias)
        self.x_proj_sizes = [rank, d_state, d_state]
        self.x_proj = nn.ModuleList([Linear(d_inner, sum(self.x_proj_sizes), bias=False)])
        self.dt_proj = nn.ModuleList([Linear(rank, d_inner, bias=True)])
        self.dt_proj[0].projects_time_step = True  # type: ignore[assignment]
        self.A_log = HymbaParameter(d_inner, d_state)
        self.D = HymbaParameter(d_inner)
        self.inner_norms = config.mamba_inner_layernorms
        if self.inner_norms:
            self.dt_layernorm = RMSNorm(rank, config.rms_norm_eps)
            self.B_layernorm = RMSNorm(d_state, config.rms_norm_eps)
            self.C_layernorm = RMSNorm(d_state, config.rms_norm_eps)
        self.pre_avg_layernorm1 = RMSNorm(d_inner, config.rms_norm_eps)
        self.pre_avg_layernorm2 = RMSNorm(d_inner, config.rms_norm_eps)
        self.out_proj = Linear(d_inner, config.hidden_size, bias=config.mamba_proj_bias)
        self.conv_state_shape = (config.mamba_d_conv, d_inner)
        self.ssm_state_shape = (d_inner, d_state)

    def forward(
        self,
        u: Tensor,
        rotation: Keys | None,
        pattern: Pattern,
        key: Tensor | None,
        value: Tensor | None,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        seq_idx: Tensor | None,
        mask: Tensor | None,
        extend: Extend | None,
        record: Callable[[Replay], None] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """u (b, s, hidden_size) -> the same, both states, the keys and values attended to, and the weights. `key` and
        `value` are those of another layer, if it does not own keys."""
        query, *own, x, gate = self.in_proj(u).split_with_sizes(self.in_proj_sizes, dim=-1)
        attention = self.self_attn
        if self.owns_keys:
            key = attention.prepare(own[0], attention.k_norm, rotation)
            value = own[1].unflatten(-1, self.value_heads).transpose(1, 2)
            if extend is not None:
                key, value = extend(key, value)
        assert key is not None and value is not None
        attended, weights = attention(attention.prepare(query, attention.q_norm, rotation), key, value, pattern)
        scanned, *states = self.mix(x, gate, conv_state, ssm_state, seq_idx, mask)
        if record is not None:
            record(partial(self.states_after, x, conv_state, ssm_state, seq_idx, mask))
        fused = (self.pre_avg_layernorm1(attended) + self.pre_avg_layernorm2(scanned)) / 2
        return self.out_proj(fused), *states, key, value, weights

    def mix(self, x, gate, conv_state, ssm_state, seq_idx, mask) -> tuple[Tensor, Tensor, Tensor]:
        """x (b, s, d), gate (b, s, d) or None -> the gated output of the scan (b, s, d) and both states."""
        x, conv_state = self.conv1d(x, conv_state, seq_idx, mask)
        dt, B, C = self.x_proj[0](x).split_with_sizes(self.x_proj_sizes, dim=-1)
        if self.inner_norms:
            dt, B, C = self.dt_layernorm(dt), self.B_layernorm(B), self.C_layernorm(C)
        A_log = self.A_log()
        y, ssm_state = selective_scan(
            x,
            self.dt_proj[0](dt),
            decay_rates(A_log),
            B,
            C,
            self.D(),
            gate,
            dt_softplus=True,
            initial_state=ssm_state,
            seq_idx=seq_idx,
            mask=mask,
        )
        return y, conv_state, ssm_state

    def states_after(self, x, conv_state, ssm_state, seq_idx, mask, tokens: int) -> States:
        """The states after the first `tokens` tokens of a call."""
        x, seq_idx, mask = (None if t is None else t[:, :tokens] for t in (x, seq_idx, mask))
        _, conv_state, ssm_state = self.mix(x, None, conv_state, ssm_state, seq_idx, mask)
        return conv_state, ssm_state


class HymbaMLP(nn.Module):
    """down(act(gate(x)) * up(x))"""

    def __init__(self, config: HymbaConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.mlp_hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class HymbaLayer(GradientCheckpointingLayer):
    """norm -> mixer -> residual, norm -> MLP -> residual. The MLP is called an expert, as in the published files."""

    def __init__(self, config: HymbaConfig, owns_keys: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mamba = HymbaMixer(config, owns_keys)
        self.moe: nn.ModuleDict | None = None
        if config.intermediate_size:
            self.pre_moe_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.moe = nn.ModuleDict({"experts": nn.ModuleList([HymbaMLP(config)])})

    def forward(self, hidden_states: Tensor, *mixer_inputs: Any) -> tuple[Any, ...]:
        """hidden_states (b, s, hidden_size) and what the mixer takes -> the same as the mixer. States, keys and values
        go in and out as tensors, not as a cache or in pairs, so that gradient checkpointing and autograd see them."""
        out, *others = self.mamba(self.input_layernorm(hidden_states), *mixer_inputs)
        hidden_states = hidden_states + out
        if self.moe is not None:
            mlp = self.moe.get_submodule("experts.0")
            hidden_states = hidden_states + mlp(self.pre_moe_layernorm(hidden_states))
        return hidden_states, *others


class HymbaPreTrainedModel(SSMPreTrainedModel):
    config_class = HymbaConfig
    cache_class = HybridMambaAttentionDynamicCache
    base_model_prefix = "model"
    _is_stateful = False  # the cache can be rolled back, so assisted decoding works
    _no_split_modules = ["HymbaLayer"]
    _keep_in_fp32_modules_strict = ["A_log"]  # they set decay rates: an error grows with the length
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers looks for the use of its table in this file; hf_ssm.ops.attention uses it

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if getattr(module, "projects_time_step", False):
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.copy_(module.bias, log_uniform_time_step_bias(module.out_features))
            return
        super()._init_weights(module)
        if isinstance(module, HymbaParameter):
            parameter = module()
            if parameter.ndim == 2:  # A_log
                init.copy_(parameter, torch.arange(1.0, parameter.shape[1] + 1).log().expand_as(parameter))
            else:
                init.ones_(parameter)
        elif isinstance(module, HymbaModel) and module.memory_tokens is not None:
            init.normal_(module.memory_tokens, mean=0.0, std=1.0)


class HymbaModel(HymbaPreTrainedModel):
    """Embedding, meta tokens, layers, final norm."""

    def __init__(self, config: HymbaConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.memory_tokens: nn.Parameter | None = None
        if config.num_memory_tokens:
            self.memory_tokens = nn.Parameter(torch.empty(config.num_memory_tokens, config.hidden_size))
        self.producers, self.windows = config.producers, config.windows
        self.layers = nn.ModuleList(HymbaLayer(config, i == producer) for i, producer in enumerate(self.producers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        cache_params: Cache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SSMModelOutput:
        """
        Args:
            input_ids: (batch, seqlen) token ids; or `inputs_embeds` (batch, seqlen, hidden_size). seqlen may be 0.
            attention_mask: (batch, seqlen) or, with a cache, (batch, tokens in the cache + seqlen): 0 for padding.
                Padding may be anywhere in a row; it is skipped, so the rest of the row does not depend on it.
            position_ids: (batch, seqlen) or (1, seqlen); a new sequence begins where they do not increase. The
                positions themselves follow from that: meta tokens first, then the real tokens of a sequence.
            past_key_values: a `HybridMambaAttentionDynamicCache` (or `DynamicCache(config=...)`) to continue, changed
                in place; or the static form of one.
            use_cache: whether to return the cache; by default the configuration's value, False while training.
            seq_idx: (batch, seqlen) integers; a new sequence, with meta tokens of its own, begins where they change.
                What the cache holds belongs to the first sequence of a row, and then to the last.
            cache_params: another name for `past_key_values`.

        Returns:
            last_hidden_state (batch, seqlen, hidden_size), past_key_values; with `output_hidden_states` the input of
            every layer and the final norm's output; with `output_attentions` (and "eager" attention) every layer's
            weights (batch, heads, seqlen, keys), meta tokens' keys first.
        """
        batch, seqlen = one_of_ids_and_embeds(input_ids, inputs_embeds, self.config.hidden_size)
        past_key_values = one_cache(past_key_values, cache_params)
        if input_ids is not None:
            if input_ids.device.type == "cpu" or seqlen > 1:
                check_ids(input_ids, self.config.vocab_size)
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        cache = None
        if past_key_values is not None:
            cache = HybridMambaAttentionDynamicCache.adopt(past_key_values, self.config)
        elif use_cache:
            cache = HybridMambaAttentionDynamicCache(self.config)
        if cache is not None and self.gradient_checkpointing and self.training:
            raise ValueError("gradient checkpointing repeats a layer's call, which a cache does not survive: no cache")
        past = 0 if cache is None else cache.get_seq_length()
        mask = padding_mask(attention_mask, batch, seqlen, past)
        seq_idx = packed_rows(seq_idx, position_ids, mask, batch, seqlen)

        if cache is not None and cache.meta is None and self.memory_tokens is not None:
            cache.begin(self.meta_tokens())
        rows = _Rows.of(inputs_embeds, mask, seq_idx, self.memory_tokens, in_front=cache is None)
        hidden_states, states, weights, _ = self.through_layers(rows, cache, mask)
        if cache is not None and seq_idx is not None:
            cache.forget(tokens_of_earlier_sequences(seq_idx, mask, past))
        last_hidden_state = rows.tokens(self.final_layernorm(hidden_states))
        recorded = None
        if self.config.output_hidden_states if output_hidden_states is None else output_hidden_states:
            recorded = (*(rows.tokens(state) for state in states), last_hidden_state)
        attentions = None
        if self.config.output_attentions if output_attentions is None else output_attentions:
            if all(w is not None for w in weights):
                attentions = tuple(rows.tokens(w, dim=2) for w in weights)
            else:
                logger.warning_once(
                    f"output_attentions: {self.config._attn_implementation!r} attention does not have the weights; "
                    "load the model with attn_implementation='eager'"
                )
        return SSMModelOutput(
            last_hidden_state=last_hidden_state,
            past_key_values=cache if use_cache else None,
            hidden_states=recorded,
            attentions=attentions,
        )

    def meta_tokens(self) -> list[MetaTokens]:
        """What the meta tokens leave behind in every layer, for one row. A cache computes it once, for all its rows;
        it is not kept beyond, since nothing tells when adapters, hooks or `parameter.data` have changed the model."""
        assert self.memory_tokens is not None
        cache = HybridMambaAttentionDynamicCache(self.config)
        rows = _Rows.of(self.memory_tokens[None], None, None, None, in_front=False)
        rows.meta, rows.front = torch.ones_like(rows.meta), rows.count
        _, _, _, keys = self.through_layers(rows, cache)
        meta = []
        for i, producer in enumerate(self.producers):
            states = cache.states(i)
            assert states is not None
            meta.append(MetaTokens(states, *(keys[i] if i == producer else (None, None))))
        return meta

    def through_layers(
        self, rows: "_Rows", cache: HybridMambaAttentionDynamicCache | None, real: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Any], list[Keys]]:
        """The last layer's output, and of every layer its input, attention weights, and the keys and values it attends
        to. What the cache holds comes before; it takes what is new, where `real` (b, count) is False for padding.
        """
        past = 0 if cache is None else cache.get_seq_length()
        new = rows.places(0 if cache is None else cache.tokens_before(0) + cache.meta_count)
        self.check_positions(new, past + rows.count)
        front = rows.front + (0 if cache is None else cache.meta_count)
        patterns: dict[int | None, Pattern] = {}  # layers of one window hold the same tokens
        for i, window in enumerate(self.windows):
            if window not in patterns:
                patterns[window] = Pattern(new, new if cache is None else cache.places(i, new), window, front)
        rotation = self.rotation(new, rows.hidden.dtype)
        states: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(self.layers)
        if cache is not None:  # nothing has changed it yet: a refused call leaves it as it was
            states = [self.states_before(layer, i, cache, rows.hidden) for i, layer in enumerate(self.layers)]
            cache.feed(real, rows.hidden.shape[0], rows.count)
        hidden_states = rows.hidden
        inputs: list[Tensor] = []
        weights: list[Any] = []
        keys: list[Keys] = []
        for i, (layer, producer, window) in enumerate(zip(self.layers, self.producers, self.windows, strict=True)):
            inputs.append(hidden_states)
            shared = (None, None) if i == producer else keys[producer]
            extend = record = None
            replays: list[Replay] = []
            if cache is not None:
                extend = partial(cache.extend, i, window=window, index=rows.index)
                record = replays.append if cache.is_recording_past(i) else None
            hidden_states, conv_state, ssm_state, key, value, weight = layer(
                hidden_states,
                rotation,
                patterns[window],
                *shared,
                *states[i],
                rows.seq_idx,
                rows.mask,
                extend,
                record,
            )
            if cache is not None:
                cache.advance(i, (conv_state, ssm_state), rows.count, replays[0] if replays else None)
            keys.append((key, value))
            weights.append(weight)
        return hidden_states, inputs, weights, keys

    def states_before(
        self, layer: Any, layer_idx: int, cache: HybridMambaAttentionDynamicCache, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A layer's two states before this call."""
        mixer, batch = layer.mamba, hidden_states.shape[0]
        conv_shape, ssm_shape = (batch, *mixer.conv_state_shape), (batch, *mixer.ssm_state_shape)
        states = cache.states(layer_idx)
        if states is None and cache.meta is not None:  # of one row
            before = cache.meta[layer_idx].states
            states = (before[0].expand(conv_shape), before[1].expand(ssm_shape))
        if states is None:
            return hidden_states.new_zeros(conv_shape), None
        check_states(states, conv_shape, ssm_shape, hidden_states.device)
        return states

    def check_positions(self, places: Places, most: int) -> None:
        """Refuse positions beyond the rotation's range; there are none in a row of `most` tokens below it."""
        config, limit = self.config, self.config.max_position_embeddings
        if not config.rope or config.rope_type == "dynamic_ntk" or is_tracing(places.positions) or most <= limit:
            return
        last = int(places.positions.max()) - config.num_memory_tokens
        if last >= limit:
            raise ValueError(
                f"token {last} of a sequence is outside 0 ... {limit - 1} (max_position_embeddings): shorten the "
                "input, or raise that field, which changes the rotation"
            )

    def rotation(self, places: Places, dtype: torch.dtype) -> Keys | None:
        """cos and sin (b or 1, 1, s, head_dim) of the angles position * frequency, each frequency twice."""
        config = self.config
        if not config.rope:
            return None
        exact = torch.promote_types(dtype, torch.float32)
        positions, size = places.positions, config.head_dim
        base: float | Tensor = config.rope_theta
        original = config.orig_max_position_embeddings
        if config.rope_type == "ntk":
            base = base * (2 * config.max_position_embeddings / original - 1) ** (size / (size - 2))
        elif config.rope_type == "dynamic_ntk":
            longest = sequence_lengths(places).to(exact)[..., None].clamp(min=original)
            base = base * (2 * longest / original - 1) ** (size / (size - 2))
        exponents = torch.arange(0, size, 2, device=positions.device).to(exact) / size
        angles = positions[..., None].to(exact) * (1.0 / base**exponents)
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


@dataclass
class _Rows:
    """A call's tokens with meta tokens among them."""

    hidden: Tensor  # (b, s, hidden_size)
    seq_idx: Tensor | None  # (b, s)
    mask: Tensor | None  # (b, s)
    meta: Tensor  # (b or 1, s) bool
    count: int  # tokens without meta tokens
    index: Tensor | None = None  # (b, count): where these are; None if they are the last
    front: int = 0  # meta tokens that come first in every row

    @staticmethod
    def of(
        embeds: Tensor, mask: Tensor | None, seq_idx: Tensor | None, meta_tokens: Tensor | None, in_front: bool
    ) -> "_Rows":
        """Put meta tokens before every sequence but a row's first, and before that, too, if `in_front`."""
        batch, count = embeds.shape[:2]
        if meta_tokens is None:
            meta = torch.zeros(1, count, dtype=torch.bool, device=embeds.device)
            return _Rows(embeds, seq_idx, mask, meta, count)
        length = meta_tokens.shape[0]
        if seq_idx is None:
            front = length if in_front else 0
            meta = torch.arange(front + count, device=embeds.device)[None] < front
            if in_front:
                embeds = torch.cat([meta_tokens.expand(batch, -1, -1).to(embeds.dtype), embeds], dim=1)
                mask = None if mask is None else nn.functional.pad(mask, (length, 0), value=True)
            return _Rows(embeds, None, mask, meta, count, front=front)
        starts = sequence_starts(seq_idx if mask is None else fill_padding(seq_idx, mask))
        index = torch.arange(count, device=embeds.device) + length * (starts.cumsum(dim=1) + int(in_front))
        total = int(index.max()) + 1 if index.numel() else 0
        real = torch.zeros(batch, total, dtype=torch.bool, device=embeds.device)
        occupied = real.scatter(1, index, True)
        slot = torch.arange(total, device=embeds.device).expand(batch, -1)
        meta = ~occupied & (slot < index[:, -1:])
        first = meta & ~nn.functional.pad(meta, (1, 0))[:, :-1]
        which = (slot - torch.where(first, slot, 0).cummax(dim=1).values).clamp(max=length - 1)
        over = index[..., None].expand(-1, -1, embeds.shape[2])
        hidden = embeds.new_zeros(batch, total, embeds.shape[2]).scatter(1, over, embeds)
        hidden = torch.where(meta[..., None], meta_tokens[which].to(embeds.dtype), hidden)
        real = (occupied if mask is None else real.scatter(1, index, mask)) | meta
        return _Rows(hidden, first.cumsum(dim=1), None if bool(real.all()) else real, meta, count, index)

    def places(self, before: Tensor | int) -> Places:
        """`before`: how many tokens, meta tokens included, the row's first sequence has had."""
        batch, length = self.hidden.shape[:2]
        positions = positions_in_sequence(self.seq_idx, self.mask, batch, length, self.hidden.device)
        if self.seq_idx is None:
            return Places(positions + before, self.meta, None, self.mask)
        run = sequence_starts(self.seq_idx).cumsum(dim=1)
        return Places(positions + before * (run == 0), self.meta, run, self.mask)

    def tokens(self, t: Tensor, dim: int = 1) -> Tensor:
        """`t` without meta tokens, which stand among those of dimension `dim`."""
        if t.shape[dim] == self.count:
            return t
        if self.index is None:
            return t.narrow(dim, t.shape[dim] - self.count, self.count)
        return take_tokens(t.transpose(1, dim), self.index).transpose(1, dim)


def tokens_of_earlier_sequences(seq_idx: Tensor, mask: Tensor | None, past: int) -> Tensor:
    """(b, past + l) bool: tokens of other sequences than the row's last; `past` ones belong to its first."""
    run = sequence_starts(seq_idx if mask is None else fill_padding(seq_idx, mask)).cumsum(dim=1)
    last = run[:, -1:]
    return torch.cat([(last > 0).expand(-1, past), run < last], dim=1)


def sequence_lengths(places: Places) -> Tensor:
    """(b or 1, s): the length, so far, of the sequence that each token is of."""
    ends = places.positions + 1
    if places.sequences is None:
        return ends.amax(dim=1, keepdim=True)
    longest = torch.zeros_like(ends).scatter_reduce(1, places.sequences, ends, "amax")
    return longest.gather(1, places.sequences)


class HymbaForCausalLM(SSMForCausalLM, HymbaPreTrainedModel, GenerationMixin):
    """The language model. Loaded from NVIDIA's files it generates with a cache, whatever their generation_config.json
    says of `use_cache`; see `HymbaConfig`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    model_class = HymbaModel

    def adjust_generation_fn(self, generation_config, *args: Any, **kwargs: Any) -> None:
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if generation_config is None and self.config.written_by_nvidia:
            self.generation_config.use_cache = self.config.use_cache

    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        if generation_config.output_attentions:
            raise ValueError(
                "output_attentions: assisted decoding takes the weights apart as if every key were a token, and every "
                "layer saw all; decode without an assistant"
            )
        return super()._assisted_decoding(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


class HymbaForSequenceClassification(SSMForSequenceClassification, HymbaPreTrainedModel):
    """One label per row, read off its last real token."""

    model_class = HymbaModel


class HymbaForTokenClassification(SSMForTokenClassification, HymbaPreTrainedModel):
    """One label per token, which sees the tokens before it only."""

    model_class = HymbaModel


__all__ = [
    "HymbaForCausalLM",
    "HymbaForSequenceClassification",
    "HymbaForTokenClassification",
    "HymbaModel",
    "HymbaPreTrainedModel",
]
