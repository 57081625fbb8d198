"""Batches in which documents stand in every way: rows of several, padding anywhere, cut into several calls."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from .helpers import random_ids


@dataclass
class Batch:
    """`owner[row][i]` is (document, position in it) of token i, or None where it is padding."""

    documents: list[list[Tensor]]
    owner: list[list[tuple[int, int] | None]]
    packing: str  # "seq_idx", "position_ids" or, with one document per row, "none"
    cuts: list[int]
    mask_covers_past: bool
    pad_ids: Tensor  # (batch, seqlen) what stands on padding

    @property
    def seqlen(self) -> int:
        return len(self.owner[0])

    def fill(self, tensor: Tensor, value) -> Tensor:
        for row, owners in enumerate(self.owner):
            for i, owner in enumerate(owners):
                if owner is not None:
                    tensor[row, i] = value(row, *owner)
        return tensor

    def inputs(self) -> dict[str, Tensor]:
        noise = self.pad_ids.clone()
        inputs = {"input_ids": self.fill(noise.clone(), lambda row, doc, i: self.documents[row][doc][i])}
        mask = self.fill(torch.zeros_like(noise), lambda *_: 1)
        if not mask.all():
            inputs["attention_mask"] = mask
        if self.packing == "seq_idx":
            # an index on padding means nothing
            inputs["seq_idx"] = self.fill(noise.clone(), lambda row, doc, i: doc)
        elif self.packing == "position_ids":
            inputs["position_ids"] = self.fill(noise.clone(), lambda row, doc, i: i)
        return inputs

    def calls(self) -> list[dict[str, Tensor]]:
        """The inputs of one forward call per piece."""
        inputs, calls = self.inputs(), []
        bounds = [0, *self.cuts, self.seqlen]
        for start, stop in pairwise(bounds):
            piece = {name: tensor[:, start:stop] for name, tensor in inputs.items()}
            if self.mask_covers_past and "attention_mask" in piece:
                piece["attention_mask"] = inputs["attention_mask"][:, :stop]
            calls.append(piece)
        return calls


def may_cut(owners: list[tuple[int, int] | None], at: int) -> bool:
    """A cache's state belongs to the document that the row goes on with: a cut between documents is no such call."""
    before = [owner[0] for owner in owners[:at] if owner is not None]
    after = [owner[0] for owner in owners[at:] if owner is not None]
    return not before or not after or before[-1] == after[0]


@st.composite
def batches(draw) -> Batch:
    packing = draw(st.sampled_from(["none", "seq_idx", "position_ids"]))
    most = 1 if packing == "none" else 3
    lengths = draw(
        st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=most), min_size=1, max_size=3), label="lengths"
    )
    tokens = [sum(row) for row in lengths]
    padding = draw(st.integers(0, 4), label="padding")
    seqlen = max(tokens) + padding
    owner: list[list[tuple[int, int] | None]] = []
    for row, count in zip(lengths, tokens, strict=True):
        kind = draw(st.sampled_from(["left", "right", "both", "anywhere"]))
        free = seqlen - count
        gaps = [0] * (count + 1)  # before each token, and behind the last
        if kind == "left":
            gaps[0] = free
        elif kind == "right":
            gaps[-1] = free
        elif kind == "both":
            gaps[0] = draw(st.integers(0, free))
            gaps[-1] += free - gaps[0]
        else:
            for _ in range(free):
                gaps[draw(st.integers(0, count))] += 1
        slots: list[tuple[int, int] | None] = []
        real = [(doc, i) for doc, length in enumerate(row) for i in range(length)]
        for gap, token in zip(gaps, [*real, None], strict=True):
            slots += [None] * gap + ([token] if token is not None else [])
        owner.append(slots)
    allowed = [at for at in range(seqlen + 1) if all(may_cut(owners, at) for owners in owner)]
    cuts = sorted(draw(st.lists(st.sampled_from(allowed), max_size=3), label="cuts")) if allowed else []
    seed = draw(st.integers(0, 1000), label="seed")
    documents = [
        [random_ids(1, length, seed=seed + 10 * r + d)[0] for d, length in enumerate(row)]
        for r, row in enumerate(lengths)
    ]
    pad_ids = random_ids(len(lengths), seqlen, seed=seed + 999)
    return Batch(documents, owner, packing, cuts, draw(st.booleans(), label="mask covers the past"), pad_ids)


def written_out(rows: list[str], packing: str, cuts: list[int]) -> Batch:
    """A batch as one sees it: a letter per token of a document, a dot for padding."""
    owner: list[list[tuple[int, int] | None]] = []
    documents = []
    for r, row in enumerate(rows):
        names = list(dict.fromkeys(row.replace(".", "")))
        counts = dict.fromkeys(names, 0)
        slots: list[tuple[int, int] | None] = []
        for letter in row:
            slots.append(None if letter == "." else (names.index(letter), counts[letter]))
            if letter != ".":
                counts[letter] += 1
        owner.append(slots)
        documents.append([random_ids(1, counts[name], seed=10 * r + d)[0] for d, name in enumerate(names)])
    return Batch(documents, owner, packing, cuts, True, random_ids(len(rows), len(rows[0]), seed=999))
