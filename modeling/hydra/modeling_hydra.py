"""Hydra: a bidirectional encoder of quasiseparable mixers. arXiv:2407.09941.

Modules are named as in the authors' code, whose models are called BERT: `bert.encoder.layer.0.layer.mixer.in_proj`.

A row gives the same output whatever is padded or packed beside it. In the authors' code padding changes the real
tokens of its row, since the biases of the convolution and of dt act on it; on rows without padding the two agree.

b batch   l seqlen   d hidden_size   h nheads   p headdim   g ngroups   n d_state
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple, is_tracing
from transformers.utils.output_capturing import capture_outputs

from hf_ssm.layers import CentredConv1d, GatedRMSNorm, LayerNorm, log_uniform_time_step_bias
from hf_ssm.ops import quasiseparable
from hf_ssm.ops.discretize import compute_dtype, decay_rates
from hf_ssm.ops.rows import one_of
from hf_ssm.pretrained import (
    SSMPreTrainedModel,
    check_ids,
    check_labels,
    one_of_ids_and_embeds,
    outside,
    packed_rows,
    padding_as_sequences,
    padding_mask,
    positions_in_sequence,
    row_label_loss,
    token_label_loss,
)

from .configuration_hydra import HydraConfig


class HydraMixer(nn.Module):
    """in_proj -> z, (x, B, C of both directions), dt; centred convolution of (x, B, C) -> quasiseparable matrix ->
    gated norm -> out_proj. Paper: section 3."""

    def __init__(self, config: HydraConfig):
        super().__init__()
        d_inner, nheads, bc_size = config.intermediate_size, config.num_heads, config.n_groups * config.state_size
        self.head_dim, self.ngroups, self.chunk_size = config.head_dim, config.n_groups, config.chunk_size
        self.dt_limit = (float(config.time_step_limit[0]), float(config.time_step_limit[1]))
        self.in_proj_sizes = [d_inner, d_inner + 4 * bc_size, nheads, nheads]
        self.xBC_sizes = [d_inner, bc_size, bc_size, bc_size, bc_size]
        self.in_proj = nn.Linear(config.hidden_size, sum(self.in_proj_sizes), bias=config.use_bias)
        self.conv1d = CentredConv1d(d_inner + 4 * bc_size, config.conv_kernel, bias=config.use_conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(nheads))
        self.A_log = nn.Parameter(torch.empty(nheads))
        self.D = nn.Parameter(torch.empty(nheads))
        self.fc_D = nn.Linear(d_inner, nheads, bias=False)
        self.init_states: nn.Parameter | None = None
        if config.learnable_initial_states:
            self.init_states = nn.Parameter(torch.empty(nheads, config.head_dim, config.state_size))
        self.norm = GatedRMSNorm(d_inner, eps=config.layer_norm_epsilon, norm_before_gate=True)
        self.out_proj = nn.Linear(d_inner, config.hidden_size, bias=config.use_bias)

    def forward(self, u: Tensor, seq_idx: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """u (b, l, d) -> (b, l, d)"""
        z, xBC, dt_forward, dt_backward = self.in_proj(u).split(self.in_proj_sizes, dim=-1)
        x, *BC = self.conv1d(xBC, seq_idx, mask).split(self.xBC_sizes, dim=-1)
        B_forward, C_forward, B_backward, C_backward = (t.unflatten(-1, (self.ngroups, -1)) for t in BC)
        y = quasiseparable(
            x.unflatten(-1, (-1, self.head_dim)),
            dt_forward,
            dt_backward,
            decay_rates(self.A_log),
            B_forward,
            C_forward,
            B_backward,
            C_backward,
            self.fc_D(x),
            self.D,
            self.dt_bias,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            chunk_size=self.chunk_size,
            initial_state=self.init_states,
            seq_idx=seq_idx,
            mask=mask,
        )
        return self.out_proj(self.norm(y.flatten(2), z))


class HydraLayer(GradientCheckpointingLayer):
    """A mixer and its norm, `layer.mixer` and `layer.norm`, around a residual connection."""

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.is_prenorm = config.is_prenorm
        norm = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.layer = nn.ModuleDict({"mixer": HydraMixer(config), "norm": norm})

    def forward(
        self,
        hidden_states: Tensor,
        seq_idx: Tensor | None = None,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """(b, l, d) -> (b, l, d), with zeros where `padding` (b, l, 1) is True; the mixer's operators get the rest."""
        mixer, norm = self.layer["mixer"], self.layer["norm"]
        if self.is_prenorm:
            hidden_states = hidden_states + mixer(norm(hidden_states), seq_idx, mask)
        else:
            hidden_states = norm(hidden_states + mixer(hidden_states, seq_idx, mask))
        return without(padding, hidden_states)


def without(padding: Tensor | None, hidden_states: Tensor) -> Tensor:
    return hidden_states if padding is None else hidden_states.masked_fill(padding, 0)


class HydraEncoder(nn.Module):
    """The layers and, if they are pre-norm, a last LayerNorm."""

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.layer = nn.ModuleList(HydraLayer(config) for _ in range(config.num_hidden_layers))
        self.norm_f: nn.Module | None = None
        if config.is_prenorm:
            self.norm_f = LayerNorm(config.hidden_size, eps=config.embedding_norm_epsilon)

    def forward(self, hidden_states: Tensor, seq_idx: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(b, l, d) -> (b, l, d), zeros where `mask` is False: padding is the same however the operators skip it."""
        padding = None if mask is None else ~mask[..., None]
        seq_idx, mask = padding_as_sequences(seq_idx, mask)
        hidden_states = without(padding, hidden_states)
        for layer in self.layer:
            hidden_states = layer(hidden_states, seq_idx, mask, padding)
        return hidden_states if self.norm_f is None else without(padding, self.norm_f(hidden_states))


class HydraEmbeddings(nn.Module):
    """Word + token type (+ position), LayerNorm, dropout."""

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.config, size = config, config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.position_embeddings: nn.Embedding | None = None
        if config.use_position_embeddings:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.LayerNorm = LayerNorm(size, eps=config.embedding_norm_epsilon)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        inputs_embeds: Tensor,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        seq_idx: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """inputs_embeds (b, l, d), the word embeddings -> (b, l, d)"""
        batch, seqlen = inputs_embeds.shape[:2]
        if token_type_ids is None:
            token_type_ids = torch.zeros(1, 1, dtype=torch.long, device=inputs_embeds.device)
        else:
            if not one_of(token_type_ids.shape[0], [1, batch]) or tuple(token_type_ids.shape[1:]) != (seqlen,):
                raise ValueError(
                    f"token_type_ids has shape {tuple(token_type_ids.shape)}, expected (batch, seqlen) = "
                    f"({batch}, {seqlen})"
                )
            types = self.config.type_vocab_size
            wrong = outside(token_type_ids, types)
            if wrong is not None:
                raise ValueError(f"token type {wrong} is outside 0 ... {types - 1} (type_vocab_size = {types})")
        embeddings = inputs_embeds + self.token_type_embeddings(token_type_ids)
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = positions_in_sequence(seq_idx, mask, batch, seqlen, inputs_embeds.device)
            limit = self.config.max_position_embeddings
            wrong = outside(position_ids, limit)
            if wrong is not None:
                raise ValueError(
                    f"position {wrong} is outside 0 ... {limit - 1} (max_position_embeddings = {limit}): shorten the "
                    "sequences, or use a model without position embeddings, which knows no longest length"
                )
            embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class HydraPooler(nn.Module):
    """tanh(dense(.)) of each row's first real token, or of the mean of its real tokens."""

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.pooling = config.pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        """(b, l, d) -> (b, d). A row without real tokens is pooled as zeros."""
        batch, seqlen = hidden_states.shape[:2]
        if seqlen == 0:
            raise ValueError("cannot pool a sequence of length 0")
        if self.pooling == "first":
            if mask is None:
                pooled = hidden_states[:, 0]
            else:
                pooled = hidden_states[torch.arange(batch, device=mask.device), mask.int().argmax(dim=1)]
        else:
            pooled = mean_of_real_tokens(hidden_states, mask)
        return torch.tanh(self.dense(pooled))


def mean_of_real_tokens(hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """(b, l, d), zeros at padding -> (b, d)"""
    if mask is None:
        return hidden_states.mean(dim=1)
    return hidden_states.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)


class HydraPreTrainedModel(SSMPreTrainedModel):
    config_class = HydraConfig
    base_model_prefix = "bert"
    _no_split_modules = ["HydraLayer", "HydraEmbeddings"]
    _can_record_outputs = {"hidden_states": HydraLayer}
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # they set decay rates: an error grows with the length
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As everywhere here. A model of text refuses what a model of images has saved: both have one configuration,
        so AutoModel cannot tell them apart."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        saved = (model.config.architectures or [""])[0]
        if "Image" in saved and cls.main_input_name != "pixel_values":
            raise ValueError(
                f"{cls.__name__} reads text and {model.name_or_path} holds a {saved}: load it with "
                "AutoModelForImageClassification, whose `bert` is the encoder"
            )
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in the authors' code: A is -1, D is 1, whatever the head."""
        super()._init_weights(module)
        if isinstance(module, HydraMixer):
            time_steps = self.config.time_step_min, self.config.time_step_max, self.config.time_step_floor
            init.copy_(module.dt_bias, log_uniform_time_step_bias(module.dt_bias.shape[0], *time_steps))
            init.zeros_(module.A_log)
            init.ones_(module.D)
            if module.init_states is not None:
                init.zeros_(module.init_states)
        elif isinstance(module, CentredConv1d) and module.bias is not None:
            bound = module.kernel_size[0] ** -0.5  # PyTorch's own range for a depthwise convolution
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, HydraPatchEmbeddings) and module.position_embeddings is not None:
            init.normal_(module.position_embeddings, mean=0.0, std=self.config.initializer_range)


class HydraModel(HydraPreTrainedModel):
    """The encoder, with a pooled output for every row unless `add_pooling_layer=False`."""

    def __init__(self, config: HydraConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = HydraEmbeddings(config)
        self.encoder = HydraEncoder(config)
        self.pooler = HydraPooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            input_ids: (batch, seqlen) token ids; or `inputs_embeds` (batch, seqlen, hidden_size), word embeddings.
            attention_mask: (batch, seqlen), 0 for padding, which may be anywhere in a row: it is skipped, so the rest
                of the row does not depend on it. Hidden states at padding are zeros.
            token_type_ids: (batch, seqlen), below type_vocab_size; zeros if None.
            position_ids: (batch, seqlen) or (1, seqlen); a new sequence begins where they do not increase. With
                position embeddings they also choose those; by default the real tokens of a sequence are counted.
            seq_idx: (batch, seqlen) integers; a new sequence begins where they change.

        Returns:
            last_hidden_state (batch, seqlen, hidden_size); pooler_output (batch, hidden_size), of a whole row even if
            several sequences are packed in it; and hidden_states if `output_hidden_states=True`: the embeddings and
            the output of every layer, the last one that of the final norm.
        """
        batch, seqlen = one_of_ids_and_embeds(input_ids, inputs_embeds, self.config.hidden_size)
        mask = padding_mask(attention_mask, batch, seqlen)
        if mask is not None and not is_tracing(mask) and not bool(mask.any()):
            raise ValueError("attention_mask is 0 everywhere: the batch has no tokens")
        seq_idx = packed_rows(seq_idx, position_ids, mask, batch, seqlen)
        if input_ids is not None:
            check_ids(input_ids, self.config.vocab_size)
            inputs_embeds = self.embeddings.word_embeddings(input_ids)
        hidden_states = self.embeddings(inputs_embeds, token_type_ids, position_ids, seq_idx, mask)
        hidden_states = self.encoder(hidden_states, seq_idx, mask)
        pooled = None if self.pooler is None else self.pooler(hidden_states, mask)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


# --- heads on every token ------------------------------------------------------------------------------------------


class HydraPredictions(nn.Module):
    """Linear, activation, LayerNorm, and the projection to the vocabulary."""

    _NORM_EPSILON = 1e-12  # whatever the other norms have, as in the authors' code

    def __init__(self, config: HydraConfig):
        super().__init__()
        size = config.hidden_size
        norm = LayerNorm(size, eps=self._NORM_EPSILON)
        self.transform = nn.ModuleDict({"dense": nn.Linear(size, size), "LayerNorm": norm})
        self.activation = ACT2FN[config.hidden_act]
        self.decoder = nn.Linear(size, config.vocab_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(b, l, d) -> (b, l, vocab_size)"""
        hidden_states = self.activation(self.transform["dense"](hidden_states))
        return self.decoder(self.transform["LayerNorm"](hidden_states))


class HydraForMaskedLM(HydraPreTrainedModel):
    """The encoder and a prediction of every token.

    Label 0 is a token like any other; the authors' code leaves it out of the loss.
    """

    _tied_weights_keys = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}
    _loss_function = staticmethod(token_label_loss)

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        self.bert = HydraModel(config, add_pooling_layer=False)
        self.cls = nn.ModuleDict({"predictions": HydraPredictions(config)})
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.get_submodule("predictions.decoder")

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.cls.set_submodule("predictions.decoder", value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """
        Args:
            labels: (batch, seqlen) token ids; -100 is ignored, and must be what stands at padding.

        The other arguments are the encoder's. Returns logits (batch, seqlen, vocab_size).
        """
        outputs = self.bert(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, seq_idx),
            return_dict=True,
            **kwargs,
        )
        logits = self.cls["predictions"](outputs.last_hidden_state)
        loss = None
        if labels is not None:
            check_labels(labels, tuple(logits.shape[:2]), logits.shape[2], "the vocabulary")
            loss = self.loss_function(logits, labels, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class HydraClassifier(HydraPreTrainedModel):
    """The encoder, dropout, and a linear layer with as many outputs as a subclass says."""

    add_pooling_layer: bool

    def __init__(self, config: HydraConfig, outputs: int | None = None):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = HydraModel(config, add_pooling_layer=self.add_pooling_layer)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels if outputs is None else outputs)
        self.post_init()


def classifier_dropout(config: HydraConfig) -> nn.Module:
    return nn.Dropout(config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout)


class HydraForTokenClassification(HydraClassifier):
    """The encoder and a linear layer on every token."""

    add_pooling_layer = False
    _loss_function = staticmethod(token_label_loss)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """
        Args:
            labels: (batch, seqlen) class indices; -100 is ignored, and so is padding.

        The other arguments are the encoder's. Returns logits (batch, seqlen, num_labels).
        """
        outputs = self.bert(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, seq_idx),
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            mask = padding_mask(attention_mask, *logits.shape[:2])
            check_labels(labels, tuple(logits.shape[:2]), logits.shape[2], "num_labels", mask)
            labels = labels.long() if mask is None else labels.long().masked_fill(~mask, -100)
            loss = self.loss_function(logits, labels, **kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class HydraForQuestionAnswering(HydraPreTrainedModel):
    """The encoder and two scores for every token, as the first and as the last of an answer."""

    accepts_loss_kwargs = False  # the loss is the mean over rows, whatever the batches that a step is made of

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        self.bert = HydraModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """
        Args:
            start_positions, end_positions: (batch,) positions of the answer's first and last token; one at or behind
                seqlen (the answer was cut off) is ignored. A negative one counts as 0, the first token, as in all of
                transformers' heads.

        The other arguments are the encoder's. Returns start_logits and end_logits (batch, seqlen).
        """
        outputs = self.bert(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, seq_idx),
            return_dict=True,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions.long(), end_positions.long())
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, hidden_states=outputs.hidden_states
        )


# --- heads on the pooled output --------------------------------------------------------------------------------------


class HydraForSequenceClassification(HydraClassifier):
    """The pooled output and a linear layer."""

    add_pooling_layer = True
    accepts_loss_kwargs = False  # as above

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            labels: (batch,) class indices, or (batch,) / (batch, num_labels) values for regression, or
                (batch, num_labels) zeros and ones; `config.problem_type` says which, or their type does.

        The other arguments are the encoder's. Returns logits (batch, num_labels).
        """
        outputs = self.bert(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, seq_idx),
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.pooler_output))
        return SequenceClassifierOutput(
            loss=row_label_loss(self, logits, labels), logits=logits, hidden_states=outputs.hidden_states
        )


class HydraForMultipleChoice(HydraClassifier):
    """The pooled output of every choice, and one score for it."""

    add_pooling_layer = True
    accepts_loss_kwargs = False  # as above

    def __init__(self, config: HydraConfig):
        super().__init__(config, outputs=1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """
        Args:
            input_ids, and all that is like them: (batch, choices, seqlen), or (batch, choices, seqlen, hidden_size).
            labels: (batch,) which choice is right.

        Returns logits (batch, choices).
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or given.ndim != (3 if inputs_embeds is None else 4):
            raise ValueError("give input_ids (batch, choices, seqlen) or inputs_embeds (batch, choices, seqlen, size)")
        batch, choices = given.shape[:2]
        rows = (
            None if t is None else t.flatten(0, 1)
            for t in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, seq_idx)
        )
        outputs = self.bert(*rows, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(batch, choices)
        loss = None
        if labels is not None:
            check_labels(labels, (batch,), choices, "choices")
            loss = F.cross_entropy(logits.to(compute_dtype(logits)), labels.long())
        return MultipleChoiceModelOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


# --- images ----------------------------------------------------------------------------------------------------------


class HydraPatchEmbeddings(nn.Module):
    """Every square patch of an image, row by row, as one token (+ position), dropout."""

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.image_shape = (config.num_channels, config.image_size, config.image_size)
        patch, patches = config.patch_size, (config.image_size // config.patch_size) ** 2
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=patch, stride=patch)
        self.position_embeddings: nn.Parameter | None = None
        if config.use_position_embeddings:
            self.position_embeddings = nn.Parameter(torch.empty(patches, config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(b, channels, height, width) -> (b, patches, d)"""
        if pixel_values.ndim != 4 or tuple(pixel_values.shape[1:]) != self.image_shape:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}, expected (batch, channels, height, width) with "
                f"{self.image_shape}: use the model's image processor, or set image_size and num_channels"
            )
        patches = self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)
        if self.position_embeddings is not None:
            patches = patches + self.position_embeddings
        return self.dropout(patches)


class HydraImageModel(HydraPreTrainedModel):
    """The encoder over the patches of an image, without a head."""

    main_input_name = "pixel_values"
    input_modalities = ("image",)

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        self.embeddings = HydraPatchEmbeddings(config)
        self.encoder = HydraEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.projection

    @capture_outputs
    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutput:
        """pixel_values (batch, num_channels, image_size, image_size), as the image processor makes them -> one hidden
        state per patch, (batch, patches, hidden_size)."""
        return BaseModelOutput(last_hidden_state=self.encoder(self.embeddings(pixel_values)))


class HydraForImageClassification(HydraPreTrainedModel):
    """The encoder over patches, their mean, LayerNorm, and a linear layer."""

    main_input_name = "pixel_values"
    input_modalities = ("image",)
    accepts_loss_kwargs = False  # as above

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = HydraImageModel(config)
        self.layernorm = LayerNorm(config.hidden_size, eps=config.embedding_norm_epsilon)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> ImageClassifierOutput:
        """
        Args:
            pixel_values: (batch, num_channels, image_size, image_size), as the image processor makes them.
            labels: as in `HydraForSequenceClassification`.

        Returns logits (batch, num_labels).
        """
        outputs = self.bert(pixel_values, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(self.layernorm(outputs.last_hidden_state.mean(dim=1))))
        return ImageClassifierOutput(
            loss=row_label_loss(self, logits, labels), logits=logits, hidden_states=outputs.hidden_states
        )


__all__ = [
    "HydraForImageClassification",
    "HydraForMaskedLM",
    "HydraForMultipleChoice",
    "HydraForQuestionAnswering",
    "HydraForSequenceClassification",
    "HydraForTokenClassification",
    "HydraImageModel",
    "HydraModel",
    "HydraPreTrainedModel",
]
