"""Generation caches: what a model remembers of the tokens it has seen, and how to take tokens back.

A cache holds states and knows no arithmetic: the model hands it new states, and, while it records, a function that
tells the states after fewer tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import is_tracing

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
    implementations: tuple[str | None, ...] = (None, "dynamic", "static")  # names it goes by: its size is fixed

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self._prepare()

    @classmethod
    def adopt(cls, cache: Cache, config: PreTrainedConfig) -> Self:
        """Make one of a new cache made by `DynamicCache(...)`, in place: its owner keeps using it.

        Raises ValueError for a cache that belongs to another kind of model, or that another implementation has filled.
        """
        if type(cache) is cls and len(cache.layers) == config.num_hidden_layers:
            return cache
        if not isinstance(cache, DynamicCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}, expected a {cls.__name__}(config)")
        layers, expected = cache.layers, DynamicCache(config=config).layers
        if not layers:  # DynamicCache() without a config makes its layers when they are first written to
            layers.extend(expected)
        if len(layers) != len(expected):
            raise ValueError(
                f"past_key_values has {len(layers)} layers and this model has {len(expected)}: "
                "it belongs to another model"
            )
        for i, (layer, kind) in enumerate(zip(layers, map(type, expected), strict=True)):
            if not isinstance(layer, kind):
                raise ValueError(
                    f"layer {i} of past_key_values is a {type(layer).__name__}, this model's is a {kind.__name__}: "
                    "it belongs to another model"
                )
        if any(layer.has_previous_state[0] or getattr(layer, "keys", None) is not None for layer in layers):
            raise ValueError(
                "past_key_values was filled by another implementation, which does not say how many tokens it has "
                f"seen; use {cls.__name__}(config)"
            )
        cache.__class__ = cls  # DynamicCache cannot tell the length of recurrent layers
        cache.layer_class_to_replicate = None
        adopted = cast(Self, cache)
        adopted._prepare()
        return adopted

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


@dataclass
class MetaTokens:
    """What the meta tokens in front of every sequence leave behind in one layer, for one row."""

    states: States
    keys: Tensor | None  # (1, kv_heads, meta tokens, head size); None in a layer that attends to another's
    values: Tensor | None


class HybridMambaAttentionDynamicCache(RecurrentCache):
    """The cache of a model with attention beside its recurrence: two states for every layer, keys and values for those
    that compute their own, of all tokens or only of those that the window still reaches.

    `get_seq_length()` counts the tokens fed, without meta tokens: their keys and values are kept once for all rows.
    `layers[i].keys` (batch, kv_heads, tokens, head size) and `layers[i].values` hold the tokens' own.
    """

    implementations = (None, "dynamic")

    @classmethod
    def adopt(cls, cache: Cache, config: PreTrainedConfig) -> Self:
        adopted = super().adopt(cache, config)
        adopted._check(config)
        return adopted

    def _check(self, config: PreTrainedConfig) -> None:
        """Refuse what another configuration filled."""
        sizes = (config.num_key_value_heads, config.head_dim, config.v_head_dim)
        for i, (layer, producer, window) in enumerate(zip(self.layers, config.producers, config.windows, strict=True)):
            wrong = None
            if hasattr(layer, "keys") != (producer == i):
                wrong = "shares keys and values otherwise"
            elif producer == i and (layer.sliding_window if layer.is_sliding else None) != window:
                wrong = "has another window"
            elif self.kept(i) and (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) != sizes:
                wrong = "has other heads"
            if wrong:
                raise ValueError(
                    f"layer {i} of past_key_values {wrong} than this model's: it belongs to another model"
                )
        if (self.meta is not None or self.get_seq_length()) and self.meta_count != config.num_memory_tokens:
            raise ValueError(
                f"past_key_values has {self.meta_count} meta tokens and this model {config.num_memory_tokens}: "
                "it belongs to another model"
            )

    def _prepare(self) -> None:
        super()._prepare()
        self.meta: list[MetaTokens] | None = None
        self._real: Tensor | None = None  # (batch, tokens fed) bool; None if all are

    def begin(self, meta: list[MetaTokens]) -> None:
        """Start every sequence with the meta tokens."""
        self.meta = meta

    def feed(self, real: Tensor | None, batch: int, tokens: int) -> None:
        """Announce a call's tokens; `real` (batch, tokens) is False for padding."""
        past = self.get_seq_length()
        if real is None and self._real is None:
            return
        device = real.device if real is not None else cast(Tensor, self._real).device
        before = torch.ones(batch, past, dtype=torch.bool, device=device) if self._real is None else self._real
        now = torch.ones(batch, tokens, dtype=torch.bool, device=device) if real is None else real
        self._real = torch.cat([before, now], dim=1)

    def forget(self, past: Tensor) -> None:
        """Treat tokens as padding from now on: `past` (batch, tokens fed) bool."""
        kept = ~past if self._real is None else self._real & ~past
        self._real = None if bool(kept.all()) else kept

    def real(self, count: int) -> Tensor | None:
        """(batch, count) bool, False for padding, of the last `count` tokens fed; None if there is no padding."""
        return None if self._real is None else self._real[:, self._real.shape[1] - count :]

    def tokens_before(self, tokens: int) -> Tensor | int:
        """How many real tokens stand before the last `tokens` fed: (batch, 1), or one number for all rows."""
        if self._real is None:
            return self.get_seq_length()
        return self._real[:, : self._real.shape[1] - tokens].sum(dim=1, keepdim=True)

    def kept(self, layer_idx: int) -> int:
        """Tokens whose keys and values a layer holds."""
        keys = getattr(self.layers[layer_idx], "keys", None)
        return 0 if keys is None else keys.shape[2]

    @property
    def meta_count(self) -> int:
        """Meta tokens in front of every sequence."""
        keys = [] if self.meta is None else [meta.keys for meta in self.meta if meta.keys is not None]
        return keys[0].shape[2] if keys else 0

    def extend(
        self, layer_idx: int, keys: Tensor, values: Tensor, *, window: int | None, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's keys and values of `feed`'s tokens; returns them behind those of the meta tokens and those
        held. With a window, only what later tokens can see is kept, all while recording.

        `index` (batch, tokens fed): which of the keys are to be kept; the others belong to meta tokens among them.
        """
        layer, batch = self.layers[layer_idx], keys.shape[0]
        if layer.keys is not None and layer.keys.shape[0] != batch:
            raise ValueError(
                f"past_key_values holds {layer.keys.shape[0]} rows and the input has {batch}: use one cache per "
                "batch, or batch_select_indices / batch_repeat_interleave"
            )
        meta = (None, None) if self.meta is None else (self.meta[layer_idx].keys, self.meta[layer_idx].values)
        whole, kept = [], []
        for new, before, front in ((keys, layer.keys, meta[0]), (values, layer.values, meta[1])):
            front = None if front is None else front.expand(batch, -1, -1, -1)
            parts = [t for t in (front, before, new) if t is not None]
            whole.append(torch.cat(parts, dim=2) if len(parts) > 1 else new)
            if index is None:
                kept.append(whole[-1][:, :, self.meta_count :])
            else:
                new = new.gather(2, index[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))
                kept.append(new if before is None else torch.cat([before, new], dim=2))
        self._set_keys(layer_idx, kept[0], kept[1])
        if window is not None and not self.is_recording_past(layer_idx):
            self._trim(layer_idx, window)
        return whole[0], whole[1]

    def _trim(self, layer_idx: int, window: int) -> None:
        """Keep what a window reaches."""
        layer = self.layers[layer_idx]
        first = layer.keys.shape[2] - self._reach(window, layer.keys.shape[2])
        kept = [t[:, :, first:] for t in (layer.keys, layer.values)]
        if first > kept[0].shape[2]:  # do not hold on to much more memory than that
            kept = [t.clone() for t in kept]
        self._set_keys(layer_idx, kept[0], kept[1])

    def _reach(self, window: int, count: int) -> int:
        """How many of the last `count` tokens fed hold the last `window` real ones of every row."""
        real = self.real(count)
        if real is None:
            return min(window, count)
        if is_tracing(real):  # nobody can look
            return count
        from_end = real.flip(1).cumsum(dim=1)
        return min(count, int((from_end < window).sum(dim=1).max()) + 1)

    def _set_keys(self, layer_idx: int, keys: Tensor | None, values: Tensor | None) -> None:
        layer = self.layers[layer_idx]
        layer.keys, layer.values, layer.is_initialized = keys, values, keys is not None
        if keys is not None:
            layer.dtype, layer.device = keys.dtype, keys.device

    def _owners(self) -> list[int]:
        """Layers that hold keys and values."""
        return [i for i, layer in enumerate(self.layers) if getattr(layer, "keys", None) is not None]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self._real is not None:
            self._real = self._real[:, : self._real.shape[1] + tokens_to_remove]
        for i in self._owners():
            layer = self.layers[i]
            left = layer.keys.shape[2] + tokens_to_remove
            self._set_keys(i, layer.keys[:, :, :left], layer.values[:, :, :left])
            if layer.is_sliding:
                self._trim(i, layer.sliding_window)

    def reset(self) -> None:
        super().reset()
        for i in self._owners():
            self._set_keys(i, None, None)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map(change)
        for i in self._owners():
            self._set_keys(i, change(self.layers[i].keys), change(self.layers[i].values))
        self._real = None if self._real is None else change(self._real)


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


__all__ = ["HybridMambaAttentionDynamicCache", "RecurrentCache", "Replay", "States", "check_states"]
