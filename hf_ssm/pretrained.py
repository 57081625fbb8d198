"""What every model here shares: loading that refuses broken files, initialisation, and checks of what comes in.

b batch   l seqlen
"""

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import initialization as init
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import is_tracing

from hf_ssm.layers import CausalConv1d, CentredConv1d
from hf_ssm.ops.discretize import compute_dtype
from hf_ssm.ops.rows import fill_padding, one_of, sequence_starts


class SSMPreTrainedModel(PreTrainedModel):
    """A `PreTrainedModel` that refuses broken checkpoints and initialises what these models are made of."""

    supports_gradient_checkpointing = True

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """transformers' `from_pretrained`.

        As everywhere in transformers, parameters that the checkpoint lacks are initialised, and a table says which.
        A file that is not whole, or NaN in a weight, is a ValueError.
        """
        try:
            loaded = super().from_pretrained(*args, **kwargs)
        except SafetensorError as error:
            where = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            raise ValueError(
                f"{where}: a safetensors file cannot be read ({error}); it is truncated or something else: copy or "
                "download it again"
            ) from error
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, parameter in model.named_parameters():
            if parameter.device.type != "meta" and parameter.is_floating_point() and bool(parameter.sum().isnan()):
                raise ValueError(f"{name} holds NaN: this checkpoint is broken, go back to an earlier one")
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Projections and embeddings normal with `initializer_range`, convolutions as PyTorch does, norms 1.

        Every parameter is initialised from the module that owns it, so that a partly loaded model is right, too.
        """
        std = self.config.initializer_range
        if isinstance(module, CausalConv1d | CentredConv1d):
            init.kaiming_uniform_(module.weight, a=5**0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif getattr(module, "weight", None) is not None and "Norm" in type(module).__name__:
            init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)


# --- what comes in -------------------------------------------------------------------------------------------------


def one_of_ids_and_embeds(input_ids: Tensor | None, inputs_embeds: Tensor | None, hidden_size: int) -> tuple[int, int]:
    """(batch, seqlen) of the one that is given."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    if input_ids is not None and input_ids.ndim != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, expected (batch, seqlen)")
    if inputs_embeds is not None and (inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != hidden_size):
        raise ValueError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)}, expected (batch, seqlen, hidden_size) with "
            f"hidden_size = {hidden_size}"
        )
    shape = input_ids.shape if input_ids is not None else inputs_embeds.shape  # type: ignore[union-attr]
    return shape[0], shape[1]


def outside(values: Tensor, limit: int) -> int | None:
    """One of `values` that is not in 0 ... limit - 1, or None if all are. Nothing is looked at while tracing."""
    if values.device.type == "meta" or not values.numel() or is_tracing(values):
        return None
    low, high = (int(bound) for bound in torch.aminmax(values))
    return low if low < 0 else high if high >= limit else None


def check_ids(input_ids: Tensor, vocab_size: int) -> None:
    wrong = outside(input_ids, vocab_size)
    if wrong is not None:
        raise ValueError(
            f"token id {wrong} is outside the vocabulary of {vocab_size}: is this the model's own tokenizer?"
        )


def check_labels(labels: Tensor, shape: tuple[int, ...], count: int, name: str, mask: Tensor | None = None) -> None:
    """Class indices below `count` (the value of what `name` says), or -100, in an integer tensor of that shape. Where
    `mask`, of the same shape, is False, they may be anything."""
    if tuple(labels.shape) != shape:
        raise ValueError(f"labels has shape {tuple(labels.shape)}, expected {shape}")
    if labels.is_floating_point():
        raise ValueError(f"labels is {labels.dtype}, expected an integer type")
    ignored = labels == -100 if mask is None else (labels == -100) | ~mask
    wrong = outside(labels.masked_fill(ignored, 0), count)
    if wrong is not None:
        raise ValueError(
            f"label {wrong} is outside 0 ... {count - 1} ({name} = {count}); -100 leaves a position out of the loss"
        )


def padding_mask(attention_mask: Tensor | None, batch: int, seqlen: int, past: int | Tensor = 0) -> Tensor | None:
    """(batch, seqlen) bool, True for real tokens, or None if all are. A mask may also cover `past` tokens before."""
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    before = shape[-1] - seqlen
    covers_past = before >= 0 if isinstance(past, Tensor) else before == past  # a tensor: tracing, nobody can look
    if len(shape) != 2 or shape[0] != batch or (before != 0 and not covers_past):
        also = f" or ({batch}, {past + seqlen}), with the {past} tokens in the cache" if past else ""
        raise ValueError(f"attention_mask has shape {shape}, expected (batch, seqlen) = ({batch}, {seqlen}){also}")
    mask = attention_mask[:, shape[1] - seqlen :].bool()
    if not is_tracing(mask) and mask.device.type != "meta" and bool(mask.all()):
        return None
    return mask


def packed_rows(
    seq_idx: Tensor | None, position_ids: Tensor | None, mask: Tensor | None, batch: int, seqlen: int
) -> Tensor | None:
    """`seq_idx`, or one that changes where a real token's position is not above that of the real token before it.
    None if no row holds more than one sequence."""
    if position_ids is not None and (
        position_ids.ndim != 2 or position_ids.shape[1] != seqlen or not one_of(position_ids.shape[0], [1, batch])
    ):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}, expected (batch, seqlen) = ({batch}, {seqlen})"
        )
    if seq_idx is not None:
        if tuple(seq_idx.shape) != (batch, seqlen):
            raise ValueError(
                f"seq_idx has shape {tuple(seq_idx.shape)}, expected (batch, seqlen) = ({batch}, {seqlen})"
            )
        if seq_idx.is_floating_point() or seq_idx.dtype == torch.bool:
            raise ValueError(f"seq_idx is {seq_idx.dtype}, expected an integer type")
        return seq_idx if seqlen else None
    if position_ids is None or seqlen < 2:
        return None
    positions = position_ids.expand(batch, seqlen)
    restarts = torch.zeros_like(positions, dtype=torch.bool)
    if mask is None:
        restarts[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    else:  # compare a real token with the real token before it, if there is one
        before = fill_padding(positions, mask)[:, :-1]
        restarts[:, 1:] = (positions[:, 1:] <= before) & mask[:, 1:] & mask[:, :-1].cummax(dim=1).values
    if not is_tracing(restarts) and not bool(restarts.any()):
        return None
    return restarts.cumsum(dim=1)


def positions_in_sequence(
    seq_idx: Tensor | None, mask: Tensor | None, batch: int, seqlen: int, device: torch.device
) -> Tensor:
    """(b or 1, l): how many real tokens of its own sequence stand before each real token; 0 for padding."""
    if mask is None and seq_idx is None:
        return torch.arange(seqlen, device=device)[None]
    real = torch.ones(batch, seqlen, dtype=torch.bool, device=device) if mask is None else mask
    before = real.cumsum(dim=1) - real.int()
    if seq_idx is not None:
        starts = sequence_starts(fill_padding(seq_idx, real))
        before = before - (before * starts).cummax(dim=1).values
    return before.masked_fill(~real, 0)


def padding_as_sequences(seq_idx: Tensor | None, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The same rows with every run of padding as a sequence of its own, and no mask: operators that keep sequences
    apart then need not move padding out of the way. Where padding interrupts a sequence (or nobody can look, while
    tracing) nothing changes."""
    if mask is None or is_tracing(mask):
        return seq_idx, mask
    starts = torch.zeros_like(mask) if seq_idx is None else sequence_starts(fill_padding(seq_idx, mask))
    changes = sequence_starts(mask)
    behind_a_token = torch.zeros_like(mask)
    behind_a_token[:, 1:] = mask[:, :-1].cummax(dim=1).values
    if bool((changes & mask & behind_a_token & ~starts).any()):
        return seq_idx, mask
    return (starts | changes).cumsum(dim=1), None


# --- losses ----------------------------------------------------------------------------------------------------------


def token_label_loss(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
) -> Tensor:
    """Mean cross entropy of every token's logits (b, l, classes) with its label (b, l), -100 left out; with
    `num_items_in_batch`, the sum divided by that. As transformers' own, but in float64 for float64 logits."""
    logits = logits.to(compute_dtype(logits)).reshape(-1, logits.shape[-1])
    return mean_cross_entropy(logits, labels.reshape(-1), num_items_in_batch)


def row_label_loss(model: SSMPreTrainedModel, logits: Tensor, labels: Tensor | None) -> Tensor | None:
    """transformers' loss of one row's logits (b, classes) with its labels, in `compute_dtype`: class indices (b,) or
    (b, 1) of any integer type, values (b,) or (b, classes), or zeros and ones (b, classes) of any type.
    `config.problem_type` says which; without it integers are class indices, unless there is only one class."""
    if labels is None:
        return None
    config, (batch, classes) = model.config, logits.shape
    logits = logits.to(compute_dtype(logits))
    indices = config.problem_type == "single_label_classification"
    if config.problem_type is None and classes > 1:
        indices = not labels.is_floating_point() and labels.dtype != torch.bool
    if indices:
        labels = labels.squeeze(1) if labels.ndim == 2 else labels  # (b, 1): one column of a table
        check_labels(labels, (batch,), classes, "num_labels")
        labels = labels.long()
    else:
        labels = labels.to(logits.dtype)
    return model.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=config)


def mean_cross_entropy(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None, ignore_index: int = -100
) -> Tensor:
    """transformers' loss of logits (n, classes) and labels (n,), but 0 where no label counts, not NaN."""
    labels = labels.to(logits.device, torch.long)
    if num_items_in_batch is None:
        num_items_in_batch = (labels != ignore_index).sum().clamp(min=1)
    return fixed_cross_entropy(logits, labels, num_items_in_batch, ignore_index)
