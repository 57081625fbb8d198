"""Hydra gives every document what it gives it alone, whatever is padded, packed or batched beside it.

The answer to compare with is each document in one unpadded pass, by the reference in float64.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from torch import Tensor

from hf_ssm.ops.rows import real_tokens_first
from hf_ssm.pretrained import padding_as_sequences

from .batches import Batch, batches, written_out
from .helpers import GRADIENT_TOLERANCE, TOLERANCE, assert_near, backends, on, random_ids, tiny

every_backend = pytest.mark.parametrize("backend", backends())
VARIANTS = {
    "postnorm": {},
    "prenorm, positions": {"is_prenorm": True, "use_position_embeddings": True, "learnable_initial_states": False},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
# The first two leave no document interrupted by padding, the third does, twice.
PACKED = ["..a.bcc.d", "aaab.c.dd"], ["..aab", "cc..."], ["a.abb.bb.", "aab.bb..."]


def cotangent(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_types(batch: Batch) -> Tensor:
    """(batch, seqlen), the same for a document wherever it stands."""
    zeros = torch.zeros(len(batch.owner), batch.seqlen, dtype=torch.long)
    return batch.fill(zeros, lambda row, doc, i: (row + doc + i) % 2)


def documents_alone(model, batch: Batch) -> dict[str, Tensor]:
    d_logits = cotangent((len(batch.owner), batch.seqlen, model.config.vocab_size))
    logits, types = torch.zeros_like(d_logits), token_types(batch)
    objective, losses = 0.0, []
    for row, documents in enumerate(batch.documents):
        for doc, ids in enumerate(documents):
            places = [i for i, owner in enumerate(batch.owner[row]) if owner is not None and owner[0] == doc]
            out = model(ids[None], token_type_ids=types[row : row + 1, places]).logits[0]
            logits[row, places] = out.detach()
            objective = objective + (out * d_logits[row, places]).sum()
            losses.append(F.cross_entropy(out, ids, reduction="sum"))
    count = sum(len(ids) for documents in batch.documents for ids in documents)
    return {"logits": logits, **gradients(model, objective, sum(losses) / count)}


def batched(model, batch: Batch) -> dict[str, Tensor]:
    inputs = batch.inputs()
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    out = model(**inputs, token_type_ids=token_types(batch), labels=inputs["input_ids"].masked_fill(mask == 0, -100))
    logits = out.logits * mask[..., None]
    return {"logits": logits, **gradients(model, (logits.double() * cotangent(tuple(logits.shape))).sum(), out.loss)}


def gradients(model, *objectives: Tensor) -> dict[str, Tensor]:
    result = {}
    for kind, objective in zip(("", "loss "), objectives, strict=True):
        model.zero_grad()
        objective.backward(retain_graph=True)
        result |= {f"{kind}gradient of {name}": p.grad.clone() for name, p in model.named_parameters()}
    return result | {"loss": objectives[-1].detach()}


@every_variant
@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_documents_do_not_depend_on_what_is_beside_them(variant, backend, dtype):
    models = {dtype: tiny("hydra", "AutoModelForMaskedLM", dtype=dtype, **VARIANTS[variant])}
    model = models[dtype]
    oracle = tiny("hydra", "AutoModelForMaskedLM", dtype=torch.float64, **VARIANTS[variant])

    @given(batch=batches())
    @example(batch=written_out(PACKED[0], "position_ids", []))
    @example(batch=written_out(PACKED[0], "seq_idx", []))
    @example(batch=written_out(PACKED[1], "position_ids", []))
    @example(batch=written_out(PACKED[2], "seq_idx", []))
    @example(batch=written_out(PACKED[2], "position_ids", []))
    def holds(batch):
        with on("reference"):
            want = documents_alone(oracle, batch)
        with on(backend):
            got = batched(model, batch)
        assert set(got) == set(want)
        for name, value in want.items():
            assert_near(name, got[name], value, (GRADIENT_TOLERANCE if "gradient" in name else TOLERANCE)[dtype])

    holds()


@given(batch=batches())
@example(batch=written_out(PACKED[1], "seq_idx", []))
@example(batch=written_out(PACKED[2], "seq_idx", []))
def test_hidden_states_at_padding_are_zeros(batch):
    model, inputs = tiny("hydra", "AutoModel", pooling="mean"), batch.inputs()
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True)
    padding = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) == 0
    assert all((state[padding] == 0).all() for state in out.hidden_states)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_pooling_sees_real_tokens_only(pooling, side):
    model = tiny("hydra", "AutoModelForSequenceClassification", dtype=torch.float64, pooling=pooling, num_labels=3)
    rows = [random_ids(1, length, seed=length)[0] for length in (6, 2, 4)]
    ids, mask = random_ids(3, 6, seed=99), torch.zeros(3, 6, dtype=torch.long)
    for i, row in enumerate(rows):
        places = {"left": range(6 - len(row), 6), "right": range(len(row)), "holes": [*range(len(row) - 1), 5]}[side]
        ids[i, list(places)], mask[i, list(places)] = row, 1
    with torch.no_grad():
        want = torch.cat([model(row[None]).logits for row in rows])
        assert_near("logits", model(ids, attention_mask=mask).logits, want, TOLERANCE[torch.float64])


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_row_of_nothing_but_padding(pooling):
    model, ids = tiny("hydra", "AutoModel", pooling=pooling, dtype=torch.float64), random_ids(2, 5)
    mask = torch.tensor([[0] * 5, [1] * 5])
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
        alone = model(ids[1:])
        nothing = torch.tanh(model.pooler.dense(torch.zeros(12, dtype=torch.float64)))
    assert_near("the other row", out.last_hidden_state[1], alone.last_hidden_state[0], TOLERANCE[torch.float64])
    assert_near("the other row, pooled", out.pooler_output[1], alone.pooler_output[0], TOLERANCE[torch.float64])
    assert_near("nothing, pooled", out.pooler_output[0], nothing, TOLERANCE[torch.float64])


def test_what_stands_at_padding_does_not_matter_at_all():
    model, mask = tiny("hydra", "AutoModelForMaskedLM"), torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]])
    ids = random_ids(2, 4)
    with torch.no_grad():
        first = model(ids, attention_mask=mask).logits
        embeds = model.get_input_embeddings()(ids).masked_fill(mask[..., None] == 0, float("nan"))
        assert torch.equal(model(ids.masked_fill(mask == 0, 7), attention_mask=mask).logits, first)
        assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).logits, first), "not even NaN"


@given(batch=batches())
def test_padding_as_sequences(batch):
    """Same neighbours for every real token: no two of a document are parted, none joins another's."""
    inputs = batch.inputs()
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    documents = batch.fill(torch.zeros(mask.shape, dtype=torch.long), lambda row, doc, i: doc)
    seq_idx, left = padding_as_sequences(documents, mask)
    order = real_tokens_first(mask)
    interrupted = any(
        places[-1] - places[0] >= len(places)
        for row, owners in enumerate(batch.owner)
        for doc in range(len(batch.documents[row]))
        for places in [[i for i, owner in enumerate(owners) if owner is not None and owner[0] == doc]]
    )
    assert (left is not None) == interrupted
    if interrupted:
        assert seq_idx is documents and left is mask
    else:
        for row in range(len(mask)):
            groups = [(seq_idx[row, i].item(), mask[row, i].item(), documents[row, i].item()) for i in order[row]]
            real = {(group, document) for group, is_real, document in groups if is_real}
            assert len({g for g, _ in real}) == len({d for _, d in real}) == len(real)
            assert not {g for g, _ in real} & {group for group, is_real, _ in groups if not is_real}


def test_a_position_is_the_number_of_tokens_before():
    """Left padding, a hole and packing do not move a position embedding; given positions are taken as they are."""
    model = tiny("hydra", "AutoModel", use_position_embeddings=True, dtype=torch.float64)
    ids, mask = random_ids(1, 6), torch.tensor([[0, 1, 1, 0, 1, 1]])
    seq_idx = torch.tensor([[9, 1, 1, 7, 1, 2]])
    with torch.no_grad():
        counted = model(ids, attention_mask=mask, seq_idx=seq_idx).last_hidden_state
        positions = torch.tensor([[5, 0, 1, 5, 2, 0]])
        said = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
        other = model(ids, attention_mask=mask, seq_idx=seq_idx, position_ids=positions + 1).last_hidden_state
    assert_near("positions", counted, said, TOLERANCE[torch.float64])
    assert (other - said).abs().max() > 0.1


@every_variant
def test_bfloat16_stays_near(variant):
    """The residual stream is bfloat16, too, as the original's; the tolerance is that of the other models."""
    model = tiny("hydra", "AutoModelForMaskedLM", dtype=torch.bfloat16, **VARIANTS[variant])
    exact = tiny("hydra", "AutoModelForMaskedLM", dtype=torch.bfloat16, **VARIANTS[variant]).double()
    ids = random_ids(3, 23)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        assert {state.dtype for state in (out.logits, *out.hidden_states)} == {torch.bfloat16}
        assert_near("logits", out.logits, exact(ids).logits, TOLERANCE[torch.bfloat16])
