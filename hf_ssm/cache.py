"""Generation caches: what a model remembers of the tokens it has seen, and how to take tokens back.

A cache holds states and knows no arithmetic: the model hands it new states, and, while it records, a function that
tells the states after fewer tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import is_tracing

from hf_ssm.ops.attention import Places
from hf_ssm.ops.rows import real_tokens_first, take_tokens

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

    @classmethod
    def static(cls) -> "type[RecurrentStaticCache]":
        """The same at fixed addresses."""
        return RecurrentStaticCache

    @classmethod
    def adopt(cls, cache: Cache, config: PreTrainedConfig) -> Self:
        """Make one of a new cache made by `DynamicCache(...)`, the static form of one by `StaticCache(...)`, in place:
        its owner keeps using it.

        Raises ValueError for a cache that belongs to another kind of model, or that another implementation has filled.
        """
        kind = cls.static() if isinstance(cache, StaticCache | RecurrentStaticCache) else cls
        if type(cache) is kind and len(cache.layers) == config.num_hidden_layers:
            return cast(Self, cache)
        if not isinstance(cache, DynamicCache | StaticCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}, expected a {cls.__name__}(config)")
        new = DynamicCache(config=config) if kind is cls else StaticCache(config=config, max_cache_len=1)
        layers, expected = cache.layers, new.layers
        if not layers:  # DynamicCache() without a config makes its layers when they are first written to
            layers.extend(expected)
        if len(layers) != len(expected):
            raise ValueError(
                f"past_key_values has {len(layers)} layers and this model has {len(expected)}: "
                "it belongs to another model"
            )
        for i, (layer, wanted) in enumerate(zip(layers, map(type, expected), strict=True)):
            if not isinstance(layer, wanted):
                raise ValueError(
                    f"layer {i} of past_key_values is a {type(layer).__name__}, this model's is a {wanted.__name__}: "
                    "it belongs to another model"
                )
        if any(layer.has_previous_state[0] or getattr(layer, "keys", None) is not None for layer in layers):
            raise ValueError(
                "past_key_values was filled by another implementation, which does not say how many tokens it has "
                f"seen; use {kind.__name__}"
            )
        cache.__class__ = kind  # transformers' own cannot tell the length of recurrent layers
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
        self._tokens[layer_idx] = self._tokens[layer_idx] + tokens  # not in place: while tracing it can be a tensor

    def _set(self, layer_idx: int, states: States | None) -> None:
        layer = self.layers[layer_idx]
        if states is None:
            self._hold(layer_idx, None, None)
        else:
            conv_state = self._put(layer.conv_states[0], states[0].transpose(1, 2))
            self._hold(layer_idx, conv_state, self._put(layer.recurrent_states[0], states[1]))

    def _hold(self, layer_idx: int, conv_state: Tensor | None, ssm_state: Tensor | None) -> None:
        layer = self.layers[layer_idx]
        known = conv_state is not None
        layer.has_previous_state[0] = known
        layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = known
        layer.conv_states[0], layer.recurrent_states[0] = conv_state, ssm_state
        if conv_state is not None:
            layer.conv_kernel_size[0] = conv_state.shape[2]
            layer.dtype, layer.device = conv_state.dtype, conv_state.device

    def _put(self, held: Tensor | None, new: Tensor) -> Tensor:
        """What to hold on to from now on."""
        return new

    def _tensors(self) -> dict[str, Tensor]:
        """All that it holds, by name."""
        held = {}
        for i, layer in enumerate(self.layers):
            if layer.has_previous_state[0]:
                held[f"{i}.conv_state"], held[f"{i}.ssm_state"] = layer.conv_states[0], layer.recurrent_states[0]
        return held | self._tokens_held(held["0.ssm_state"]) if held else held

    def _tokens_held(self, like: Tensor) -> dict[str, Tensor]:
        """What tells the tokens fed, on the device of `like`, which has the rows."""
        return {"tokens": like.new_zeros((), dtype=torch.long) + self._tokens[0]}

    def _load(self, held: dict[str, Tensor]) -> None:
        """Hold on to what `_tensors` gave."""
        for i in range(len(self.layers)):
            self._hold(i, held.get(f"{i}.conv_state"), held.get(f"{i}.ssm_state"))
        if "tokens" in held:
            self._tokens = [_number(held["tokens"])] * len(self.layers)

    # what transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens[layer_idx]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

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


def _number(tensor: Tensor) -> int:
    """What a tensor () holds; itself, while tracing."""
    return cast(int, tensor) if is_tracing(tensor) else int(tensor)


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
            elif producer == i and not self._made_for(layer, window):
                wrong = "has another window"
            elif self.kept(i) and (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) != sizes:
                wrong = "has other heads"
            if wrong:
                raise ValueError(
                    f"layer {i} of past_key_values {wrong} than this model's: it belongs to another model"
                )
        if (self.meta is not None or self.states(0) is not None) and self.meta_count != config.num_memory_tokens:
            raise ValueError(
                f"past_key_values has {self.meta_count} meta tokens and this model {config.num_memory_tokens}: "
                "it belongs to another model"
            )

    def _made_for(self, layer: Any, window: int | None) -> bool:
        return window == (layer.sliding_window if layer.is_sliding else None)

    @classmethod
    def static(cls) -> "type[RecurrentStaticCache]":
        return HybridMambaAttentionStaticCache

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
            return self.get_seq_length() - tokens
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

    def places(self, layer_idx: int, new: Places) -> Places:
        """Where the keys stand that `extend` will return for a call's tokens and meta tokens, `new`: the meta tokens
        in front, the tokens held, and these. To be asked before `feed`."""
        parts, meta, kept = [new], self.meta_count, self.kept(layer_idx)
        if kept:
            real = self.real(kept)
            order = torch.arange(kept, device=new.positions.device)[None] if real is None else real.cumsum(dim=1) - 1
            positions = order + self.tokens_before(kept) + meta
            parts.insert(0, Places(positions, torch.zeros_like(positions, dtype=torch.bool), real=real))
        if meta:
            positions = torch.arange(meta, device=new.positions.device)[None]
            parts.insert(0, Places(positions, torch.ones_like(positions, dtype=torch.bool)))
        return Places.join(*parts)

    def extend(
        self, layer_idx: int, keys: Tensor, values: Tensor, *, window: int | None, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's keys and values of `feed`'s tokens; returns them behind those of the meta tokens and those
        held. With a window, only what later tokens can see is kept, all while recording.

        `index` (batch, tokens fed): which of the keys are to be kept; the others belong to meta tokens among them.
        """
        layer, batch = self.layers[layer_idx], keys.shape[0]
        front_keys, front_values = self._front(layer_idx)
        whole, kept = [], []
        for new, before, front in ((keys, layer.keys, front_keys), (values, layer.values, front_values)):
            front = None if front is None else front.expand(batch, -1, -1, -1)
            parts = [t for t in (front, before, new) if t is not None]
            whole.append(torch.cat(parts, dim=2) if len(parts) > 1 else new)
            if index is None:
                kept.append(whole[-1][:, :, self.meta_count :])
            else:
                new = _take(new, index)
                kept.append(new if before is None else torch.cat([before, new], dim=2))
        self._keep(layer_idx, kept[0], kept[1], window)
        return whole[0], whole[1]

    def _front(self, layer_idx: int) -> tuple[Tensor | None, Tensor | None]:
        """The meta tokens' keys and values."""
        return (None, None) if self.meta is None else (self.meta[layer_idx].keys, self.meta[layer_idx].values)

    def _keep(self, layer_idx: int, keys: Tensor, values: Tensor, window: int | None) -> None:
        """Hold on to what is needed of the keys and values held and the new ones behind them."""
        self._set_keys(layer_idx, keys, values)
        if window is not None and not self.is_recording_past(layer_idx):
            self._trim(layer_idx, window)

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
        if keys is not None and values is not None:
            keys, values = self._put(layer.keys, keys), self._put(layer.values, values)
            layer.dtype, layer.device = keys.dtype, keys.device
        layer.keys, layer.values, layer.is_initialized = keys, values, keys is not None

    def _tensors(self) -> dict[str, Tensor]:
        held = super()._tensors()
        for i in self._owners():
            held[f"{i}.keys"], held[f"{i}.values"] = self.layers[i].keys, self.layers[i].values
        for i, meta in enumerate(self.meta or []):
            held[f"meta.{i}.conv_state"], held[f"meta.{i}.ssm_state"] = meta.states
            if meta.keys is not None and meta.values is not None:
                held[f"meta.{i}.keys"], held[f"meta.{i}.values"] = meta.keys, meta.values
        return held

    def _tokens_held(self, like: Tensor) -> dict[str, Tensor]:
        everything = like.new_ones(like.shape[0], self.get_seq_length(), dtype=torch.bool)
        return {"real": everything if self._real is None else self._real}

    def _load(self, held: dict[str, Tensor]) -> None:
        super()._load(held)
        count = len(self.layers)
        for i, layer in enumerate(self.layers):
            if f"{i}.keys" in held:
                layer.keys, layer.values, layer.is_initialized = held[f"{i}.keys"], held[f"{i}.values"], True
        if "meta.0.conv_state" in held:
            states = [(held[f"meta.{i}.conv_state"], held[f"meta.{i}.ssm_state"]) for i in range(count)]
            keys = [(held.get(f"meta.{i}.keys"), held.get(f"meta.{i}.values")) for i in range(count)]
            self.meta = [MetaTokens(state, *pair) for state, pair in zip(states, keys, strict=True)]
        if "real" in held:
            real = held["real"]
            self._tokens = [real.shape[1]] * count
            self._real = real if is_tracing(real) or not bool(real.all()) else None

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


class RecurrentStaticCache(RecurrentCache):
    """A `RecurrentCache` at fixed addresses, for compiled decoding: states are written in place and tokens counted in
    a tensor, so that one graph serves every token. While tracing, `get_seq_length()` is that tensor.

    It cannot be rolled back. `max_cache_len` bounds keys and values, of which a recurrent model has none.
    """

    is_compileable = True

    def __init__(self, config: PreTrainedConfig, max_cache_len: int):
        if max_cache_len < 1:
            raise ValueError(f"max_cache_len={max_cache_len} must be at least 1")
        Cache.__init__(self, layers=StaticCache(config=config, max_cache_len=max_cache_len).layers)
        self._prepare()

    def _prepare(self) -> None:
        super()._prepare()
        self._fed: Tensor | None = None  # ()

    def _put(self, held: Tensor | None, new: Tensor) -> Tensor:
        if held is not None and held.shape == new.shape:
            return held.copy_(new)
        own = new.clone(memory_format=torch.contiguous_format)
        if not is_tracing(own):
            torch._dynamo.mark_static_address(own)  # so that CUDA graphs write to it without a copy
        return own

    def advance(self, layer_idx: int, states: States, tokens: int, replay: Replay | None = None) -> None:
        self._set(layer_idx, states)
        if layer_idx == len(self.layers) - 1:
            self._count(states[1], tokens)

    def _count(self, like: Tensor, tokens: int) -> None:
        """All layers have taken a call's tokens; `like` has its rows and is on its device."""
        if self._fed is None:
            self._fed = self._put(None, like.new_zeros((), dtype=torch.long))
        self._fed.add_(tokens)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._fed is None else _number(self._fed.clone())

    def _tokens_held(self, like: Tensor) -> dict[str, Tensor]:
        return {"fed": cast(Tensor, self._fed)}

    def _load(self, held: dict[str, Tensor]) -> None:
        super()._load(held)
        self._fed = held.get("fed")

    @property
    def is_croppable(self) -> bool:
        return False

    def activate_past_recording(self) -> None:
        raise ValueError("a static cache overwrites its past and cannot be rolled back: use a dynamic one for that")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            self.activate_past_recording()


class HybridMambaAttentionStaticCache(RecurrentStaticCache, HybridMambaAttentionDynamicCache):
    """A `HybridMambaAttentionDynamicCache` of a fixed size at fixed addresses; see `RecurrentStaticCache`.

    A layer that sees all tokens has slots for the meta tokens and, behind them, `max_cache_len` for a row's real
    tokens, one after the other. A layer with a window has the last real tokens of every row, right-aligned. There is
    one sequence per row.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self._counts: Tensor | None = None  # (batch, 1): real tokens
        self._new: Tensor | None = None  # (batch, tokens) bool: which of a call's tokens are real; None for all

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """How many tokens the layers without a window have slots for; -1 if there are no such layers."""
        return next((layer.max_cache_len for layer in self.layers if not getattr(layer, "is_sliding", True)), -1)

    def _made_for(self, layer: Any, window: int | None) -> bool:
        if window is None or not layer.is_sliding:
            return window is None and not layer.is_sliding
        most = self.get_max_length()
        return layer.max_cache_len == window or layer.max_cache_len == most < window

    def feed(self, real: Tensor | None, batch: int, tokens: int) -> None:
        past, most = self.get_seq_length(), self.get_max_length()
        if most >= 0 and isinstance(past, int) and past + tokens > most:
            raise ValueError(
                f"past_key_values has room for {most} tokens, holds {past}, and {tokens} come: make the static cache "
                "with a larger max_cache_len"
            )
        self._new = real

    def _count(self, like: Tensor, tokens: int) -> None:
        super()._count(like, tokens)
        if self._counts is None:
            self._counts = self._put(None, like.new_zeros((like.shape[0], 1), dtype=torch.long))
        self._counts.add_(tokens if self._new is None else self._new.sum(dim=1, keepdim=True))

    def _tokens_held(self, like: Tensor) -> dict[str, Tensor]:
        return super()._tokens_held(like) | {"counts": cast(Tensor, self._counts)}

    def _load(self, held: dict[str, Tensor]) -> None:
        super()._load(held)
        self._counts = held.get("counts")

    def tokens_before(self, tokens: int) -> Tensor | int:
        return 0 if self._counts is None else (self._counts - tokens).clamp(min=0)

    def real(self, count: int) -> Tensor | None:
        if self._counts is None:
            return None
        return torch.arange(count, device=self._counts.device) >= count - self._counts

    def places(self, layer_idx: int, new: Places) -> Places:
        if new.sequences is not None:
            raise ValueError("a static cache holds one sequence per row: use a dynamic one for packed rows")
        layer, meta = self.layers[layer_idx], self.meta_count
        if layer.keys is None or layer.is_sliding:
            return super().places(layer_idx, new)
        slots = torch.arange(layer.keys.shape[2], device=new.positions.device)[None]
        come = new.positions.shape[1] if new.real is None else new.real.sum(dim=1, keepdim=True)
        return Places(slots, slots < meta, real=slots < self.tokens_before(0) + meta + come)

    def extend(
        self, layer_idx: int, keys: Tensor, values: Tensor, *, window: int | None, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if layer.keys is None or layer.is_sliding:
            return super().extend(layer_idx, keys, values, window=window, index=index)
        return self._fill(layer.keys, keys), self._fill(layer.values, values)

    def _keep(self, layer_idx: int, keys: Tensor, values: Tensor, window: int | None) -> None:
        layer = self.layers[layer_idx]
        if layer.is_sliding:
            first, size = layer.keys is None, layer.max_cache_len
            self._set_keys(layer_idx, self._last(keys, size, first), self._last(values, size, first))
            return
        slots = []
        for new, front in zip((keys, values), self._front(layer_idx), strict=True):
            empty = new.new_zeros(*new.shape[:2], self.meta_count + layer.max_cache_len, new.shape[3])
            if front is not None:
                empty[:, :, : self.meta_count] = front
            slots.append(self._fill(empty, new))
        self._set_keys(layer_idx, slots[0], slots[1])

    def _fill(self, slots: Tensor, new: Tensor) -> Tensor:
        """Write a call's tokens behind those before. What is padding comes last, where the next tokens will be."""
        if self._new is not None:
            new = _take(new, real_tokens_first(self._new))
        where = torch.arange(new.shape[2], device=new.device)[None] + self.meta_count + self.tokens_before(0)
        return slots.scatter_(2, where[:, None, :, None].expand_as(new), new)

    def _last(self, tokens: Tensor, size: int, first: bool) -> Tensor:
        """The last `size` real ones of the tokens held, `size` as well but in the first call, and the new ones."""
        if first:
            tokens = torch.nn.functional.pad(tokens, (0, 0, size, 0))
        if self._new is None:
            return tokens[:, :, tokens.shape[2] - size :]
        order = real_tokens_first(torch.nn.functional.pad(self._new, (size, 0), value=True))
        end = torch.arange(size, device=order.device) + self._new.sum(dim=1, keepdim=True)
        return _take(tokens, order.gather(1, end))

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map(change)
        self._counts = None if self._counts is None else self._put(self._counts, change(self._counts))


def _take(tokens: Tensor, index: Tensor) -> Tensor:
    """The tokens `index` (b, n) of every row of keys or values (b, kv_heads, tokens, size)."""
    return take_tokens(tokens.transpose(1, 2), index).transpose(1, 2)


def register_cache_export_support() -> None:
    """Let `torch.export` take our caches as inputs and outputs, as trees of their tensors.

    Not done on import, as little as transformers does it for its own: FSDP and others take whatever is registered
    apart and hand on a copy, and a cache is to be changed in place.
    """
    for kind in (
        form for base in (RecurrentCache, HybridMambaAttentionDynamicCache) for form in (base, base.static())
    ):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                _flatten,
                partial(_unflatten, kind),
                serialized_type_name=f"{kind.__module__}.{kind.__name__}",
                flatten_with_keys_fn=_flatten_with_keys,
            )


# what a tree is besides its tensors: every layer's kind and size, and the tensors' names; in JSON's types, for
# torch.export.save
_Context = list[list[Any]]


def _flatten(cache: RecurrentCache) -> tuple[list[Tensor], _Context]:
    if any(cache.is_recording_past(i) for i in range(len(cache.layers))):
        raise ValueError("a cache that records its past is no tree of tensors: call stop_recording()")
    sizes = [getattr(layer, "sliding_window", getattr(layer, "max_cache_len", None)) for layer in cache.layers]
    kinds = [[type(layer).__name__, size] for layer, size in zip(cache.layers, sizes, strict=True)]
    held = cache._tensors()
    return list(held.values()), [kinds, list(held)]


def _flatten_with_keys(cache: RecurrentCache) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], _Context]:
    tensors, context = _flatten(cache)
    return [(pytree.MappingKey(name), t) for name, t in zip(context[1], tensors, strict=True)], context


def _unflatten(kind: type[RecurrentCache], tensors: Iterable[Tensor], context: _Context) -> RecurrentCache:
    kinds, names = context
    cache = kind.__new__(kind)
    layers = [getattr(cache_utils, name)(sliding_window=size, max_cache_len=size) for name, size in kinds]
    Cache.__init__(cache, layers=layers)
    cache._prepare()
    cache._load(dict(zip(names, tensors, strict=True)))
    return cache


def check_states(
    states: States, conv_shape: tuple[int, ...], ssm_shape: tuple[int, ...], device: torch.device
) -> None:
    """Refuse states of another batch size or another model; shapes as `RecurrentCache.states` gives them."""
    for name, state, expected in zip(("convolution", "scan"), states, (conv_shape, ssm_shape), strict=True):
        if state.shape == expected and state.device == device:
            continue
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
        raise ValueError(f"past_key_values is on {state.device}, the input is on {device}: move one of them")


__all__ = [
    "HybridMambaAttentionDynamicCache",
    "HybridMambaAttentionStaticCache",
    "MetaTokens",
    "RecurrentCache",
    "RecurrentStaticCache",
    "Replay",
    "States",
    "check_states",
    "register_cache_export_support",
]
