"""Rows of a batch: where packed sequences begin, and where padding is. Shared by all operators.

b batch   l seqlen
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def sequence_starts(seq_idx: Tensor) -> Tensor:
    """True where a token's sequence index differs from that of the token before it; (b, l) bool, False in column 0.

    The first sequence of a row is not a start: it continues the initial state.
    """
    starts = torch.zeros_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return starts


def fill_padding(seq_idx: Tensor, mask: Tensor) -> Tensor:
    """`seq_idx` with every padded position given the index of the last real token before it, or, where there is none,
    of the first real token of the row; so padding never looks like a new sequence."""
    seqlen = seq_idx.shape[1]
    positions = torch.arange(seqlen, device=seq_idx.device)
    last_real = torch.where(mask, positions, -1).cummax(dim=1).values
    first_real = mask.int().argmax(dim=1, keepdim=True)
    return seq_idx.gather(1, torch.where(last_real < 0, first_real, last_real))


def padding_last(mask: Tensor, seq_idx: Tensor | None) -> tuple[Tensor, Tensor]:
    """(b, l) permutation of every row that puts its real tokens first, and a `seq_idx` for the rows so permuted in
    which padding is a sequence of its own."""
    order = real_tokens_first(mask)
    padding = ~mask.gather(1, order)
    run = padding.int()
    if seq_idx is not None:
        starts = sequence_starts(seq_idx.gather(1, order)) & ~padding
        run = run + starts.int().cumsum(dim=1)
    return order, run


def take_tokens(t: Tensor, order: Tensor) -> Tensor:
    """Every row of `t` (b, l, ...) in the order of the permutation `order` (b, l)."""
    return t.gather(1, _over_axes(order, t))


def put_tokens_back(t: Tensor, order: Tensor) -> Tensor:
    """The inverse of `take_tokens`."""
    return torch.zeros_like(t).scatter(1, _over_axes(order, t), t)


def shifted(t: Tensor, distance: int) -> Tensor:
    """`t` (b, l, ...) moved on by `distance` tokens (back, if negative), with zeros where nothing comes from."""
    padding = (0, 0) * (t.ndim - 2)
    padded = torch.nn.functional.pad(t, (*padding, max(distance, 0), max(-distance, 0)))
    return padded.narrow(1, max(-distance, 0), t.shape[1])


def _over_axes(order: Tensor, t: Tensor) -> Tensor:
    return order.view(*order.shape, *[1] * (t.ndim - 2)).expand(-1, -1, *t.shape[2:])


def real_tokens_first(mask: Tensor) -> Tensor:
    """(b, l) permutation of every row that puts its real tokens first and keeps their order."""
    return torch.argsort((~mask).int(), dim=1, stable=True)


def check_row_tensor(operator: str, name: str, value: Tensor, x: Tensor) -> None:
    """`value` must be (batch, seqlen) of `x`: an integer `seq_idx` or a bool `mask`."""
    if tuple(value.shape) != tuple(x.shape[:2]):
        raise ValueError(
            f"{operator}: {name} has shape {tuple(value.shape)}, expected (batch, seqlen) = {tuple(x.shape[:2])}"
        )
    wants_bool = name == "mask"
    if wants_bool != (value.dtype == torch.bool) or value.is_floating_point():
        kind = "bool, True for real tokens" if wants_bool else "an integer type"
        raise ValueError(f"{operator}: {name} is {value.dtype}, expected {kind}")


def one_of(size: Any, sizes: Iterable[Any]) -> bool:
    """`size in sizes`. There torch.compile says no where only one of two equal sizes is symbolic, as after a call with
    dynamic shapes: https://github.com/pytorch/pytorch/issues/153366."""
    return any(size == other for other in sizes)


def check_shape(operator: str, name: str, value: Tensor, expected: tuple[int, ...], axes: str) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"{operator}: {name} has shape {tuple(value.shape)}, expected {axes} = {expected}")
