"""A decoder-only language model around any recurrent mixer: block, backbone, heads, generation.

An architecture brings a mixer and a configuration; everything here is the same for all of them. A mixer is a module

    mixer(u, conv_state=None, ssm_state=None, *, seq_idx=None, mask=None, record=None) -> (out, conv_state, ssm_state)

with u and out (batch, seqlen, hidden_size). `record`, if given, is called with a function `replay(n)` that returns the
two states after the first n tokens of the call. `mixer.conv_state_shape` and `mixer.ssm_state_shape` are the shapes of
one row's states, (d_conv, channels) and that of the scan. The projection whose output is added to the residual stream
has the attribute `writes_to_residual = True`; it is initialised accordingly.

b batch   l seqlen
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from hf_ssm.cache import RecurrentCache, RecurrentStaticCache, Replay, check_states
from hf_ssm.convert import ORIGINAL_EMBEDDING, OUR_EMBEDDING
from hf_ssm.layers import GatedMLP, LayerNorm, Linear, RMSNorm
from hf_ssm.ops.discretize import compute_dtype
from hf_ssm.ops.rows import sequence_starts
from hf_ssm.pretrained import (
    SSMPreTrainedModel,
    check_ids,
    check_labels,
    mean_cross_entropy,
    one_of_ids_and_embeds,
    packed_rows,
    padding_mask,
    row_label_loss,
    token_label_loss,
)


@dataclass
class SSMModelOutput(BaseModelOutputWithPast):
    """transformers' output; `cache_params` is its own Mamba models' name for `past_key_values`."""

    @property
    def cache_params(self) -> Cache | None:
        return self.past_key_values


@dataclass
class SSMCausalLMOutput(CausalLMOutputWithPast):
    """transformers' output; `cache_params` is its own Mamba models' name for `past_key_values`."""

    @property
    def cache_params(self) -> Cache | None:
        return self.past_key_values


class Block(GradientCheckpointingLayer):
    """norm -> mixer -> residual, then, if the configuration has an MLP, norm -> MLP -> residual."""

    def __init__(self, config, mixer: nn.Module):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = make_norm(config)
        self.mixer = mixer
        self.mlp: GatedMLP | None = None
        if config.mlp_intermediate_size:
            self.norm2 = make_norm(config)
            self.mlp = GatedMLP(config.hidden_size, config.mlp_intermediate_size)

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None = None,
        ssm_state: Tensor | None = None,
        seq_idx: Tensor | None = None,
        mask: Tensor | None = None,
        record: Callable[[Replay], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states (b, l, hidden_size) and the states before -> the same after. States go in and out as tensors,
        not as a cache, so that gradient checkpointing and autograd see them."""
        residual = hidden_states
        if self.residual_in_fp32:
            residual = residual.to(torch.promote_types(residual.dtype, torch.float32))
        out, conv_state, ssm_state = self.mixer(
            self.norm(hidden_states), conv_state, ssm_state, seq_idx=seq_idx, mask=mask, record=record
        )
        hidden_states = residual + out
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.norm2(hidden_states))
        return hidden_states, conv_state, ssm_state


def make_norm(config) -> nn.Module:
    kind = RMSNorm if config.use_rms_norm else LayerNorm
    return kind(config.hidden_size, eps=config.layer_norm_epsilon)


class SSMDecoderPreTrainedModel(SSMPreTrainedModel):
    """What the decoders add: mamba-ssm's names, and the initialisation of what writes to the residual stream."""

    base_model_prefix = "backbone"
    cache_class = RecurrentCache
    _is_stateful = False  # the cache can be rolled back, so assisted decoding works
    _no_split_modules = ["Block"]
    _can_record_outputs = {"hidden_states": Block}

    @classmethod
    def from_pretrained(cls, *args: Any, key_mapping: dict[str, str] | None = None, **kwargs: Any) -> Any:
        """As `SSMPreTrainedModel.from_pretrained`; it reads mamba-ssm's original folders, too."""
        key_mapping = {ORIGINAL_EMBEDDING: OUR_EMBEDDING} | (key_mapping or {})
        return super().from_pretrained(*args, key_mapping=key_mapping, **kwargs)

    def save_pretrained(self, *args: Any, save_original_format: bool = False, **kwargs: Any) -> None:
        """transformers' `save_pretrained`, always with transformers' names, whatever the model was loaded from.

        The saved configuration says `rescale_prenorm_residual: false`, since it has been done: transformers' own Mamba
        classes would otherwise divide the weights again, every time they load them.
        """
        rescale = self.config.rescale_prenorm_residual
        self.config.rescale_prenorm_residual = False
        try:
            super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)
        finally:
            self.config.rescale_prenorm_residual = rescale

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in the original implementation: projections that write to the residual stream uniform, and divided by the
        square root of their number (GPT-2's scheme)."""
        if not getattr(module, "writes_to_residual", False):
            return super()._init_weights(module)
        assert isinstance(module, nn.Linear)
        bound = module.in_features**-0.5  # PyTorch's own range for a linear layer
        if self.config.rescale_prenorm_residual:
            writers = 2 if self.config.mlp_intermediate_size else 1  # per layer
            bound /= (self.config.num_hidden_layers * writers) ** 0.5
        init.uniform_(module.weight, -bound, bound)
        if module.bias is not None:
            init.zeros_(module.bias)


class SSMModel(SSMDecoderPreTrainedModel):
    """Embedding, blocks, final norm. A subclass says how a block's mixer is made."""

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, self.make_mixer(config)) for _ in range(config.num_hidden_layers))
        self.norm_f = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @staticmethod
    def make_mixer(config) -> nn.Module:
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings = value

    @capture_outputs
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
        **kwargs: Any,
    ) -> "SSMModelOutput":
        """
        Args:
            input_ids: (batch, seqlen) token ids; or `inputs_embeds` (batch, seqlen, hidden_size). seqlen may be 0.
            attention_mask: (batch, seqlen) or, with a cache, (batch, tokens in the cache + seqlen): 0 for padding.
                Padding may be anywhere in a row; it is skipped, so the rest of the row does not depend on it.
            position_ids: (batch, seqlen) or (1, seqlen); a new sequence begins where they do not increase. They mean
                nothing else to a recurrent model.
            past_key_values: a `RecurrentCache` (or `DynamicCache(config=...)`) to continue, changed in place; or the
                static form of one.
            use_cache: whether to return the cache; by default the configuration's value, False while training.
            seq_idx: (batch, seqlen) integers; a new sequence begins where they change. The cache's state belongs to
                the first sequence of a row.
            cache_params: transformers' name for `past_key_values` in these models.

        Returns:
            last_hidden_state (batch, seqlen, hidden_size), past_key_values, and hidden_states if
            `output_hidden_states=True`: the input of every block and the final norm's output.
        """
        batch, seqlen = one_of_ids_and_embeds(input_ids, inputs_embeds, self.config.hidden_size)
        past_key_values = one_cache(past_key_values, cache_params)
        if input_ids is not None:
            # a decoded token comes from our own logits: on an accelerator it is not worth waiting for it
            if input_ids.device.type == "cpu" or seqlen > 1:
                check_ids(input_ids, self.config.vocab_size)
            inputs_embeds = self.embeddings(input_ids)
        assert inputs_embeds is not None
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        cache = None if past_key_values is None else RecurrentCache.adopt(past_key_values, self.config)
        if cache is None and use_cache:
            cache = RecurrentCache(self.config)
        mask = padding_mask(attention_mask, batch, seqlen, 0 if cache is None else cache.get_seq_length())
        seq_idx = packed_rows(seq_idx, position_ids, mask, batch, seqlen)

        hidden_states = inputs_embeds
        for i, block in enumerate(self.layers):
            if cache is None:
                hidden_states = block(hidden_states, None, None, seq_idx, mask)[0]
            else:
                hidden_states = self._continue(block, i, hidden_states, cache, seq_idx, mask)
        return SSMModelOutput(
            last_hidden_state=self.norm_f(hidden_states),
            past_key_values=cache if use_cache else None,
        )

    def _continue(
        self,
        block: Any,
        layer_idx: int,
        hidden_states: Tensor,
        cache: RecurrentCache,
        seq_idx: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """One block, with its states taken from the cache and given back to it."""
        batch, seqlen = hidden_states.shape[:2]
        conv_shape = (batch, *block.mixer.conv_state_shape)
        states = cache.states(layer_idx)
        if states is None:
            conv_state, ssm_state = hidden_states.new_zeros(conv_shape, dtype=block.norm.weight.dtype), None
        else:
            check_states(states, conv_shape, (batch, *block.mixer.ssm_state_shape), hidden_states.device)
            conv_state, ssm_state = states
        replays: list[Replay] = []
        record = replays.append if cache.is_recording_past(layer_idx) else None
        hidden_states, conv_state, ssm_state = block(hidden_states, conv_state, ssm_state, seq_idx, mask, record)
        cache.advance(layer_idx, (conv_state, ssm_state), seqlen, replays[0] if replays else None)
        return hidden_states


class SSMGenerationMixin(GenerationMixin):
    """generate() with a recurrent cache under its one name, fed only with what is new."""

    cache_class: type[RecurrentCache]

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        cache = one_cache(model_kwargs.get("past_key_values"), model_kwargs.pop("cache_params", None))
        if cache is None and not generation_config.use_cache:
            return
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation={kind!r}: this model's states are kept by a {self.cache_class.__name__} or its "
                "static form, which are no such caches: leave it out"
            )
        if cache is not None and kind is not None:
            raise ValueError(f"cache_implementation={kind!r} and past_key_values: give one of them")
        if cache is not None:
            self.cache_class.adopt(cache, self.config)
            cache._is_user_defined = True
        elif kind == "static":
            most = max(max_cache_length, generation_config.max_cache_len or 0)
            cache = self._prepare_static_cache(kind, batch_size, most, None, model_kwargs)
            self.cache_class.adopt(cache, self.config)
        else:
            cache = self.cache_class(self.config)
        if 0 <= cache.get_max_length() < max_cache_length and isinstance(cache, RecurrentStaticCache):
            raise ValueError(
                f"past_key_values has room for {cache.get_max_length()} tokens and {max_cache_length} may come: make "
                "the static cache with a larger max_cache_len, or ask for fewer new tokens"
            )
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, *args: Any, **kwargs: Any) -> Tensor | None:
        """transformers would make (batch, 1, queries, keys) of the mask where a cache is static."""
        return attention_mask

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        inputs = model_kwargs.get("inputs_embeds")
        given = input_ids.shape[1] if inputs is None else max(input_ids.shape[1], inputs.shape[1])
        cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
        past = 0 if cache is None else cache.get_seq_length()
        refuse_empty_prompt(given)
        mask_length = getattr(generation_config, "_mask_length", given) if mask is None else mask.shape[1]
        if inputs is None and past and mask_length == given <= past:
            mask = model_kwargs["attention_mask"] = mask_of_conversation(input_ids, mask, past)
        if generation_config.prefill_chunk_size is not None and mask is not None and inputs is None:
            # every row must end in the last chunk
            new = slice(mask.shape[1] - min(input_ids.shape[1], mask.shape[1] - past), None)
            order = padding_first(mask[:, new])
            if order is not None:
                input_ids, mask = input_ids.clone(), mask.clone()
                count = order.shape[1]
                input_ids[:, -count:] = input_ids[:, -count:].gather(1, order)
                mask[:, new] = mask[:, new].gather(1, order)
                model_kwargs["attention_mask"] = mask
        if generation_config.prefill_chunk_size is not None and isinstance(cache, RecurrentStaticCache) and not past:
            self(input_ids[:, :0], past_key_values=cache)  # compiled chunks must not be what allocates the cache
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        past, given = 0 if cache is None else cache.get_seq_length(), input_ids.shape[1]
        if kwargs.get("inputs_embeds") is None:
            refuse_empty_prompt(given)
        if past:
            mask_length = getattr(generation_config, "_mask_length", given) if mask is None else mask.shape[1]
            whole = mask_length == given > past
            if mask is not None and not whole:
                raise ValueError(
                    "assisted decoding from a cache, with padding: give the ids of the whole conversation, and "
                    "their mask"
                )
            if whole and mask is None:  # tells `prepare_inputs_for_generation` that the past is among the ids
                kwargs["attention_mask"] = torch.ones_like(input_ids)
        try:
            return super()._assisted_decoding(
                input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
            )
        finally:
            if cache is not None:
                cache.stop_recording()

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, attention_mask=None, **kwargs):
        kwargs.pop("position_ids", None)  # a recurrent model has no positions, and generated rows are not packed
        first, cache = kwargs.get("is_first_iteration"), kwargs.get("past_key_values")
        if first and cache is not None and attention_mask is not None and inputs_embeds is None:
            whole = attention_mask.shape[1] == input_ids.shape[1]
            past = cache.get_seq_length()
            if whole and past and kwargs.get("next_sequence_length") is None:  # assisted decoding keeps the past
                kwargs["next_sequence_length"] = input_ids.shape[1] - past
        model_inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs
        )
        # the next token is read off the last position, so padding goes to the left; the states do not change
        name = "input_ids" if model_inputs.get("inputs_embeds") is None else "inputs_embeds"
        inputs, mask = model_inputs[name], model_inputs.get("attention_mask")
        if mask is not None and kwargs.get("next_sequence_length") == 1 and not first:
            model_inputs["attention_mask"] = None  # a generated token is never padding
        elif mask is not None:
            mask = mask[:, -inputs.shape[1] :]
            order = padding_first(mask)
            if order is not None:
                mask = mask.gather(1, order)
                index = order if inputs.ndim == 2 else order[..., None].expand_as(inputs)
                model_inputs[name] = inputs.gather(1, index)
            model_inputs["attention_mask"] = mask
        return model_inputs


def next_token_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Mean cross entropy of logits[:, :-1] with labels[:, 1:]; with `num_items_in_batch`, the sum divided by that.

    As transformers' own, which is in float32 even if the logits are in float64.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits = logits.to(compute_dtype(logits)).reshape(-1, vocab_size)
    return mean_cross_entropy(logits, shift_labels.reshape(-1), num_items_in_batch, ignore_index)


class SSMForCausalLM(SSMPreTrainedModel, SSMGenerationMixin):
    """The backbone, named `base_model_prefix`, and a projection to the vocabulary. A subclass says which backbone."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}
    _loss_function = staticmethod(next_token_loss)
    model_class: type[SSMPreTrainedModel]

    def __init__(self, config):
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.lm_head: nn.Linear = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        seq_idx: Tensor | None = None,
        cache_params: Cache | None = None,
        **kwargs: Any,
    ) -> "SSMCausalLMOutput":
        """
        Args:
            labels: (batch, seqlen) token ids, shifted inside; -100 is ignored. So is a token whose predecessor is
                padding or belongs to another sequence: nothing of its own row predicts it.
            logits_to_keep: compute the logits of the last so many positions only; 0 for all. Or positions, as in
                `transformers.modeling_utils.slice_logits_to_keep`.

        The other arguments are the backbone's. Returns logits (batch, positions, vocab_size).
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels need the logits of every position: leave logits_to_keep out")
        outputs = self.base_model(
            input_ids,
            return_dict=True,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            seq_idx=seq_idx,
            cache_params=cache_params,
            **kwargs,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            batch, seqlen = labels.shape
            mask = padding_mask(attention_mask, batch, seqlen)
            labels = predictable(labels, mask, packed_rows(seq_idx, position_ids, mask, batch, seqlen))
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return SSMCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value


class SSMForSequenceClassification(SSMPreTrainedModel):
    """The backbone and a linear layer on each row's last real token."""

    accepts_loss_kwargs = False  # the loss is the mean over rows, whatever the batches that a step is made of
    model_class: type[SSMPreTrainedModel]

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.score = Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Without an attention mask, a row's last real token is its last one that is not `config.pad_token_id`.

        Args:
            labels: (batch,) class indices, or (batch,) / (batch, num_labels) values for regression, or
                (batch, num_labels) zeros and ones; `config.problem_type` says which, or their type does.

        The other arguments are the backbone's. Returns logits (batch, num_labels).
        """
        outputs = self.base_model(
            input_ids,
            return_dict=True,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        batch, seqlen = hidden_states.shape[:2]
        last = self._last_real_token(input_ids, attention_mask, batch, seqlen, hidden_states.device)
        logits = self.score(hidden_states[torch.arange(batch, device=hidden_states.device), last])
        return SequenceClassifierOutputWithPast(
            loss=row_label_loss(self, logits, labels),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _last_real_token(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, batch: int, seqlen: int, device
    ) -> Tensor:
        """(b,) positions."""
        if seqlen == 0:
            raise ValueError("cannot classify a sequence of length 0")
        pad_token_id = self.config.pad_token_id
        if attention_mask is not None:
            real = attention_mask[:, -seqlen:].bool()
        elif input_ids is not None and pad_token_id is not None:
            real = input_ids != pad_token_id
        elif batch == 1 or input_ids is None:
            return torch.full((batch,), seqlen - 1, device=device)
        else:
            raise ValueError(
                "cannot tell padding in a batch of several rows: give an attention_mask or set config.pad_token_id"
            )
        return (torch.arange(seqlen, device=device) * real.to(device)).argmax(dim=1)


class SSMForTokenClassification(SSMPreTrainedModel):
    """The backbone and a linear layer on every token."""

    _loss_function = staticmethod(token_label_loss)
    model_class: type[SSMPreTrainedModel]

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.score = Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """
        Args:
            labels: (batch, seqlen) class indices; -100 is ignored, and so is padding.

        The other arguments are the backbone's. Returns logits (batch, seqlen, num_labels).
        """
        kwargs.setdefault("use_cache", False)
        outputs = self.base_model(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            mask = padding_mask(attention_mask, *logits.shape[:2])
            check_labels(labels, tuple(logits.shape[:2]), logits.shape[2], "num_labels", mask)
            labels = labels.long() if mask is None else labels.long().masked_fill(~mask, -100)
            loss = self.loss_function(logits, labels, **kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


# --- rows and caches -----------------------------------------------------------------------------------------------


def one_cache(past_key_values: Cache | None, cache_params: Cache | None) -> Cache | None:
    """`past_key_values` under either of its names."""
    if past_key_values is not None and cache_params is not None and past_key_values is not cache_params:
        raise ValueError("past_key_values and cache_params are two names for one cache: give one of them")
    return cache_params if past_key_values is None else past_key_values


def predictable(labels: Tensor, mask: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    """`labels` with -100 for every token that the position before it does not predict."""
    unpredictable = torch.zeros_like(labels, dtype=torch.bool)
    if mask is not None:
        unpredictable |= ~mask
        unpredictable[:, 1:] |= ~mask[:, :-1]
    if seq_idx is not None:
        unpredictable |= sequence_starts(seq_idx)
    return labels.masked_fill(unpredictable, -100)


def refuse_empty_prompt(tokens: int) -> None:
    if tokens == 0:
        raise ValueError("the prompt is empty: give at least one token, such as the tokenizer's bos_token")


def mask_of_conversation(input_ids: Tensor, mask: Tensor | None, past: int) -> Tensor:
    """(b, past + new) mask for `input_ids` (b, new) that follow `past` tokens in a cache. Fewer tokens than the cache
    has seen are new ones; without a longer mask transformers would take them for the whole conversation."""
    ones = input_ids.new_ones(input_ids.shape[0], past)
    return torch.cat([ones, torch.ones_like(input_ids) if mask is None else mask.to(ones)], dim=1)


def padding_first(mask: Tensor) -> Tensor | None:
    """(b, l) permutation that moves each row's padding to its front, or None if it is there already."""
    if bool((mask[:, 1:] >= mask[:, :-1]).all()):
        return None
    return torch.argsort(mask.int(), dim=1, stable=True)
