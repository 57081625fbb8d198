"""Generation caches: what a layer remembers of the tokens it has seen, and how to take tokens back.

A cache holds states and knows no arithmetic: layers hand it new states, and, while it records, a function that tells
the states after fewer tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer
from transformers.configuration_utils import PreTrainedConfig

States = tuple[Tensor, Tensor]  # the convolution's and the recurrence's


@dataclass
class _Recorded:
    """One call while recording: how many tokens it fed, the states before it (None: nothing yet), and `replay(n)`,
    the states after its first n tokens."""

    tokens: int
    before: States | None
    replay: Callable[[int], States]


class RecurrentLayer(LinearAttentionLayer):
    """One layer's recurrent states; unlike transformers' layer it knows its length and can be rolled back.

    `conv_states[0]` is (batch, channels, d_conv), the last d_conv inputs of the convolution, oldest first, zeros in
    front if there were fewer; `recurrent_states[0]` is the float32 state of the scan.
    """

    is_compileable = False  # transformers would compile every call of generate() for it

    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.tokens = 0
        self.recorded: list[_Recorded] = []

    # what a model reads and writes

    def states(self) -> States | None:
        """(conv_state (batch, d_conv, channels), recurrent_state), or None before the first token."""
        if not self.has_previous_state[0]:
            return None
        return self.conv_states[0].transpose(1, 2), self.recurrent_states[0]

    def advance(self, states: States, tokens: int, replay: Callable[[int], States] | None = None) -> None:
        """Take the states after `tokens` more tokens. `replay` is needed while recording."""
        if self.record_past:
            if replay is None:
                raise RuntimeError("this cache records its past, but the layer gave it no way to replay this call")
            self.recorded.append(_Recorded(tokens, self.states(), replay))
        self._set(states)
        self.tokens += tokens

    def _set(self, states: States | None) -> None:
        self.has_previous_state[0] = states is not None
        if states is None:
            self.conv_states[0] = self.recurrent_states[0] = None
            self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = False
            return
        conv_state, recurrent_state = states[0].transpose(1, 2), states[1]
        self.conv_states[0], self.recurrent_states[0] = conv_state, recurrent_state
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        self.conv_kernel_size[0] = conv_state.shape[-1]
        self.dtype, self.device = conv_state.dtype, conv_state.device

    # what transformers' Cache asks of a layer

    def update_conv_state(self, conv_states, state_idx: int = 0, **kwargs):
        raise RuntimeError("this layer takes both states at once, through advance()")

    update_recurrent_state = update_conv_state

    @property
    def batch_size(self) -> int:
        if self.recurrent_states[0] is None:
            raise AttributeError("batch_size is not known before the first token")
        return self.recurrent_states[0].shape[0]

    @property
    def is_croppable(self) -> bool:
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens and all that was recorded. Only recorded tokens can go."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to forget as a negative number")
        remaining = -tokens_to_remove
        recorded = sum(call.tokens for call in self.recorded)
        if remaining > recorded:
            raise RuntimeError(
                f"cannot forget {remaining} tokens: {recorded} were recorded. A recurrent state can only be rolled "
                "back over tokens fed after activate_past_recording()"
            )
        self.tokens -= remaining
        while remaining:
            call = self.recorded.pop()
            keep = max(0, call.tokens - remaining)
            remaining -= call.tokens - keep
            self._set(call.replay(keep) if keep else call.before)
        self.recorded.clear()

    def reset(self) -> None:
        self._set(None)
        self.tokens = 0
        self.recorded.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda state: state.index_select(0, indices.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._map(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.device is not None:
            self._map(lambda state: state.to(self.device, non_blocking=True))

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        states = self.states()
        if states is not None:
            device = self.device
            self._set((change(states[0]), change(states[1])))
            self.device = device
        self.recorded.clear()


class RecurrentCache(DynamicCache):
    """The cache of a model whose layers are all recurrent: a few states per layer, whatever the context's length.

    `get_seq_length()` counts the tokens fed, padding included. It can be continued by any number of tokens, reordered
    for beams, copied (`copy.deepcopy`), and rolled back: after `activate_past_recording()`, `crop(-n)` forgets the last
    n tokens exactly.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        adopt(self, config)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx].tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0


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
    for i, layer in enumerate(layers):
        if isinstance(layer, RecurrentLayer):
            continue
        if not isinstance(layer, LinearAttentionLayer):
            raise ValueError(
                f"layer {i} of past_key_values is a {type(layer).__name__}, this model's layers are recurrent: "
                "it belongs to another model"
            )
        if layer.has_previous_state[0]:
            raise ValueError(
                "past_key_values was filled by another implementation, which does not say how many tokens it has seen; "
                "use RecurrentCache(config)"
            )
        layers[i] = RecurrentLayer()
        layers[i].record_past = layer.record_past
    if not isinstance(cache, RecurrentCache):
        cache.__class__ = RecurrentCache  # DynamicCache cannot tell the length of recurrent layers
        cache.layer_class_to_replicate = None
    return cache


def check_states(states: States, conv_shape: tuple[int, ...], recurrent_shape: tuple[int, ...], device) -> None:
    """Refuse states of another batch size or another model; shapes as `RecurrentLayer.states` gives them."""
    for name, state, expected in zip(("convolution", "scan"), states, (conv_shape, recurrent_shape), strict=True):
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


__all__ = ["RecurrentCache", "RecurrentLayer", "States", "adopt", "check_states"]
