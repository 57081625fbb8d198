"""Generation caches: what a model remembers of the tokens it has seen, and how to take tokens back.

A cache holds states and knows no arithmetic: the model hands it new states, and, while it records, a function that
tells the states after fewer tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer
from transformers.configuration_utils import PreTrainedConfig

States = tuple[Tensor, Tensor]  # the convolution's (batch, d_conv, channels) and the scan's
Replay = Callable[[int], States]  # n -> the states after the first n tokens of a call


@dataclass
class _Recorded:
    """One layer's part of one call while recording: how many tokens it fed, and the states before it, if any."""

    tokens: int
    before: States | None
    replay: Replay


class RecurrentCache(DynamicCache):
    """The cache of a model whose layers are all recurrent: two states per layer, whatever the context's length.

    `get_seq_length()` counts the tokens fed, padding included. The cache can be continued by any number of tokens,
    reordered for beams, copied (`copy.deepcopy`), and rolled back: after `activate_past_recording()`, `crop(-n)`
    forgets the last n tokens exactly, by computing the states after the others again.

    Its layers are transformers' own: `layers[i].conv_states[0]` (batch, channels, d_conv) holds the last d_conv inputs
    of the convolution, oldest first, zeros in front if there were fewer; `layers[i].recurrent_states[0]` the state of
    the scan. States are replaced, never written into, so a gradient can flow through them.
    """

    is_compileable = False  # transformers would compile every call of generate() for it

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self._prepare()

    def _prepare(self) -> None:
        self._tokens = [0] * len(self.layers)
        self._recorded: list[list[_Recorded]] = [[] for _ in self.layers]

    # what a model reads and writes

    def states(self, layer_idx: int) -> States | None:
        """A layer's states, or None before the first token."""
        layer = self.layers[layer_idx]
        if not layer.has_previous_state[0]:
            return None
        return layer.conv_states[0].transpose(1, 2), layer.recurrent_states[0]

    def advance(self, layer_idx: int, states: States, tokens: int, replay: Replay | None = None) -> None:
        """Take a layer's states after `tokens` more tokens. While recording, `replay` is needed."""
        if self.is_recording_past(layer_idx):
            if replay is None:
                raise RuntimeError("this cache records its past, but the model gave it no way to replay this call")
            self._recorded[layer_idx].append(_Recorded(tokens, self.states(layer_idx), replay))
        self._set(layer_idx, states)
        self._tokens[layer_idx] += tokens

    def _set(self, layer_idx: int, states: States | None) -> None:
        layer = self.layers[layer_idx]
        known = states is not None
        layer.has_previous_state[0] = known
        layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = known
        if states is None:
            layer.conv_states[0] = layer.recurrent_states[0] = None
            return
        layer.conv_states[0], layer.recurrent_states[0] = states[0].transpose(1, 2), states[1]
        layer.conv_kernel_size[0] = states[0].shape[1]
        layer.dtype, layer.device = states[0].dtype, states[0].device

    # what transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens[layer_idx]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._tokens[layer_idx] + query_length, 0

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first token."""
        states = self.states(0)
        return -1 if states is None else states[1].shape[0]

    @property
    def is_croppable(self) -> bool:
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens and all that was recorded. Only recorded tokens can go."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to forget as a negative number")
        for layer_idx, calls in enumerate(self._recorded):
            remaining, recorded = -tokens_to_remove, sum(call.tokens for call in calls)
            if remaining > recorded:
                raise RuntimeError(
                    f"cannot forget {remaining} tokens: {recorded} were recorded. A recurrent state can only be "
                    "rolled back over tokens fed after activate_past_recording()"
                )
            self._tokens[layer_idx] -= remaining
            while remaining:
                call = calls.pop()
                keep = max(0, call.tokens - remaining)
                remaining -= call.tokens - keep
                self._set(layer_idx, call.replay(keep) if keep else call.before)
            calls.clear()

    def stop_recording(self) -> None:
        """Undo `activate_past_recording()`. A recording keeps every call's activations, until `crop`."""
        for layer, calls in zip(self.layers, self._recorded, strict=True):
            layer.record_past = False
            calls.clear()

    def reset(self) -> None:
        for layer_idx in range(len(self.layers)):
            self._set(layer_idx, None)
        self._prepare()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (rows,), in that order."""
        self._map(lambda state: state.index_select(0, indices.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer_idx, calls in enumerate(self._recorded):
            states = self.states(layer_idx)
            if states is not None:
                self._set(layer_idx, (change(states[0]), change(states[1])))
            calls.clear()  # what was recorded belongs to the rows as they were


def adopt(cache: Cache, config: PreTrainedConfig) -> RecurrentCache:
    """Make a `RecurrentCache` of a new one made by `DynamicCache(...)`, in place: its owner keeps using it.

    Raises ValueError for a cache that belongs to another kind of model, or that another implementation has filled.
    """
    if not isinstance(cache, DynamicCache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}, expected a RecurrentCache(config)")
    layers = cache.layers
    if not layers:  # DynamicCache() without a config makes its layers when they are first written to
        layers.extend(LinearAttentionLayer() for _ in range(config.num_hidden_layers))
    if len(layers) != config.num_hidden_layers:
        raise ValueError(
            f"past_key_values has {len(layers)} layers and this model has {config.num_hidden_layers}: "
            "it belongs to another model"
        )
    if isinstance(cache, RecurrentCache):
        return cache
    for i, layer in enumerate(layers):
        if not isinstance(layer, LinearAttentionLayer):
            raise ValueError(
                f"layer {i} of past_key_values is a {type(layer).__name__}, this model's layers are recurrent: "
                "it belongs to another model"
            )
        if layer.has_previous_state[0]:
            raise ValueError(
                "past_key_values was filled by another implementation, which does not say how many tokens it has "
                "seen; use RecurrentCache(config)"
            )
    cache.__class__ = RecurrentCache  # DynamicCache cannot tell the length of recurrent layers
    cache.layer_class_to_replicate = None
    cache._prepare()
    return cache


def check_states(
    states: States, conv_shape: tuple[int, ...], ssm_shape: tuple[int, ...], device: torch.device
) -> None:
    """Refuse states of another batch size or another model; shapes as `RecurrentCache.states` gives them."""
    for name, state, expected in zip(("convolution", "scan"), states, (conv_shape, ssm_shape), strict=True):
        if state.shape[0] != expected[0]:
            raise ValueError(
                f"past_key_values holds {state.shape[0]} rows and the input has {expected[0]}: use one cache per "
                "batch, or batch_select_indices / batch_repeat_interleave"
            )
        if tuple(state.shape) != expected:
            raise ValueError(
                f"past_key_values: the {name} state has shape {tuple(state.shape)}, this model's is {expected}: "
                "it belongs to another model"
            )
        if state.device != device:
            raise ValueError(f"past_key_values is on {state.device}, the input is on {device}: move one of them")


__all__ = ["RecurrentCache", "Replay", "States", "adopt", "check_states"]
