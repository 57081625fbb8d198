"""The one property of every model and backend: how tokens are brought does not matter.

A batch is drawn: rows of documents, padding anywhere, packed by seq_idx or by position_ids, fed through a cache in any
number of calls. Logits, final states, loss and the gradients of all parameters must be those of every document alone,
in one unpadded pass, by the reference in float64.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .batches import Batch, batches, written_out
from .helpers import (
    DECODERS,
    GRADIENT_TOLERANCE,
    TOLERANCE,
    assert_near,
    backends,
    keys_held,
    mixers,
    new_cache,
    on,
    random_ids,
    same_states,
    states,
    tiny,
    unused,
)

every_model = pytest.mark.parametrize("model_type", DECODERS)
every_backend = pytest.mark.parametrize("backend", backends())


# --- the two ways of computing ---------------------------------------------------------------------------------------


def cotangent(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def row_cotangents(batch: Batch, model) -> tuple[Tensor, list[Tensor]]:
    """Of the logits (zero on padding) and of the final states."""
    rows = len(batch.owner)
    logits = cotangent((rows, batch.seqlen, model.config.vocab_size), 1)
    mask = batch.fill(torch.zeros(rows, batch.seqlen), lambda *_: 1)
    with torch.no_grad():
        shapes = [tuple(s.shape) for s in states(model(torch.ones(1, 1, dtype=torch.long)).past_key_values)]
    return logits * mask[..., None], [cotangent((rows, *shape[1:]), 2 + i) for i, shape in enumerate(shapes)]


def documents_alone(model, batch: Batch) -> dict[str, Tensor]:
    """Every document in one pass of its own; the answer to which all others are compared."""
    d_logits, d_states = row_cotangents(batch, model)
    rows, seqlen = len(batch.owner), batch.seqlen
    logits = d_logits.new_zeros(rows, seqlen, model.config.vocab_size)
    final = [torch.zeros_like(s) for s in d_states]
    objective, losses, held = 0.0, [], {}
    for row, documents in enumerate(batch.documents):
        for doc, ids in enumerate(documents):
            places = [i for i, owner in enumerate(batch.owner[row]) if owner is not None and owner[0] == doc]
            out = model(ids[None], use_cache=True)
            cache = out.past_key_values
            logits[row, places] = out.logits[0].detach()
            objective = objective + (out.logits[0] * d_logits[row, places]).sum()
            # the loss leaves out a token behind padding
            predicted = [i for i in range(1, len(ids)) if places[i] == places[i - 1] + 1]
            losses += list(F.cross_entropy(out.logits[0, :-1], ids[1:], reduction="none")[[i - 1 for i in predicted]])
            if doc == len(documents) - 1:
                held |= {f"held by row {row}, {i}": t for i, t in enumerate(keys_held(cache, model.config)[0])}
                for i, state in enumerate(states(cache)):
                    final[i][row] = state[0].detach()
                    objective = objective + (state[0] * d_states[i][row]).sum()
    result = {"logits": logits, **{f"state {i}": s for i, s in enumerate(final)}, **held}
    model.zero_grad()
    objective.backward(retain_graph=True)
    result |= {f"gradient of {name}": grad for name, grad in gradients(model).items()}
    if losses:
        model.zero_grad()
        loss = torch.stack(losses).mean()
        loss.backward()
        result["loss"] = loss.detach()
        result |= {f"loss gradient of {name}": grad for name, grad in gradients(model).items()}
    return result


def batched(model, batch: Batch) -> dict[str, Tensor]:
    d_logits, d_states = row_cotangents(batch, model)
    cache, pieces = new_cache(model), []
    for call in batch.calls():
        pieces.append(model(**call, past_key_values=cache).logits)
    assert cache.get_seq_length() == batch.seqlen
    logits = torch.cat(pieces, dim=1)
    objective = (logits.double() * d_logits).sum()
    for state, d_state in zip(states(cache), d_states, strict=True):
        objective = objective + (state.double() * d_state).sum()
    real = batch.fill(torch.zeros(logits.shape[:2]), lambda *_: 1)[..., None]
    result = {"logits": logits * real, **{f"state {i}": s for i, s in enumerate(states(cache))}}
    for row, tensors in enumerate(keys_held(cache, model.config)):
        result |= {f"held by row {row}, {i}": t for i, t in enumerate(tensors)}
    model.zero_grad()
    objective.backward()
    result |= {f"gradient of {name}": grad for name, grad in gradients(model).items()}
    inputs = batch.inputs()
    if batch.seqlen > 1:
        model.zero_grad()
        loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        if loss.isfinite():
            loss.backward()
            result["loss"] = loss
            result |= {f"loss gradient of {name}": grad for name, grad in gradients(model).items()}
    return result


def gradients(model) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if not unused(model, name)}


def agree(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        assert_near(name, got[name], value, (GRADIENT_TOLERANCE if "gradient" in name else TOLERANCE)[dtype])


# --- the property ----------------------------------------------------------------------------------------------------


@every_model
@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_any_split_padding_packing_and_batch_equal_single_passes(model_type, backend, dtype):
    model, oracle = tiny(model_type, dtype=dtype), tiny(model_type, dtype=torch.float64)

    @given(batch=batches())
    # documents of one token, side by side and with padding between them; a call of one token, and one of none
    @example(batch=written_out(["..a.bcc.d", "aaab.c.dd"], "position_ids", []))
    @example(batch=written_out(["..a.bcc.d", "aaab.c.dd"], "seq_idx", []))
    @example(batch=written_out(["abbb.bbbb", "a.bbbbbbb"], "position_ids", [4, 5, 5]))
    def holds(batch):
        with on("reference"):
            want = documents_alone(oracle, batch)
        with on(backend):
            got = batched(model, batch)
        agree(got, want, dtype)

    holds()


# --- precision -------------------------------------------------------------------------------------------------------


@every_model
@every_backend
def test_bfloat16_stays_near(model_type, backend):
    model = tiny(model_type, dtype=torch.bfloat16)
    oracle = tiny(model_type, dtype=torch.bfloat16).double()

    @given(batch=batches())
    def holds(batch):
        with on("reference"), torch.no_grad():
            want = model_outputs_alone(oracle, batch)
        with on(backend), torch.no_grad():
            cache, pieces = new_cache(model), []
            for call in batch.calls():
                out = model(**call, past_key_values=cache)
                assert out.logits.dtype == torch.bfloat16
                pieces.append(out.logits)
        real = batch.fill(torch.zeros(want.shape[:2]), lambda *_: 1)[..., None]
        assert_near("logits", torch.cat(pieces, dim=1) * real, want, TOLERANCE[torch.bfloat16])
        for layer in cache.layers:
            assert layer.recurrent_states[0].dtype == torch.float32

    holds()


def model_outputs_alone(model, batch: Batch) -> Tensor:
    logits = torch.zeros(len(batch.owner), batch.seqlen, model.config.vocab_size, dtype=torch.float64)
    for row, documents in enumerate(batch.documents):
        for doc, ids in enumerate(documents):
            places = [i for i, owner in enumerate(batch.owner[row]) if owner is not None and owner[0] == doc]
            logits[row, places] = model(ids[None]).logits[0].double()
    return logits


class OnlyFloat64(TorchDispatchMode):
    """Fails at the first operation that gives a floating-point tensor of another type."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                assert leaf.dtype == torch.float64, f"{func} gives {leaf.dtype}"
        return out


@every_model
@every_backend
@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForTokenClassification"])
def test_float64_is_float64_throughout(model_type, backend, auto_class):
    model = tiny(model_type, auto_class, dtype=torch.float64, residual_in_fp32=True, num_labels=41)
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    with on(backend), OnlyFloat64():
        out = model(ids, attention_mask=mask, labels=ids, use_cache=False)
        out.loss.backward()
        if auto_class == "AutoModelForCausalLM":
            cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
            model(ids[:, :1], past_key_values=cache)
            model(ids[:, :4], past_key_values=cache)
    assert out.loss.dtype == out.logits.dtype == torch.float64
    assert all(p.grad.dtype == torch.float64 for p in model.parameters() if p.grad is not None)


@every_model
def test_float64_is_asked_for_and_got_from_a_folder(model_type, tmp_path):
    tiny(model_type).save_pretrained(tmp_path)
    model = type(tiny(model_type)).from_pretrained(tmp_path, dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


# --- gradients through the state -------------------------------------------------------------------------------------


@every_model
@every_backend
@pytest.mark.parametrize("cut", [1, 2, 8, 13])
def test_gradients_flow_through_a_passed_in_cache(model_type, backend, cut):
    """Two chunks with a cache are one pass, for the parameters and for the first chunk's inputs."""
    model = tiny(model_type, dtype=torch.float64)
    embeds = cotangent((2, 14, model.config.hidden_size), 5).requires_grad_()
    weights = cotangent((2, 14, model.config.vocab_size), 6)
    with on(backend):
        (model(inputs_embeds=embeds, use_cache=False).logits * weights).sum().backward()
        want = {"inputs": embeds.grad} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        embeds.grad = None
        model.zero_grad()
        first = model(inputs_embeds=embeds[:, :cut], use_cache=True)
        second = model(inputs_embeds=embeds[:, cut:], past_key_values=first.past_key_values)
        # only the second chunk's loss reaches the first chunk through the state
        (second.logits * weights[:, cut:]).sum().backward(retain_graph=True)
        assert embeds.grad[:, :cut].abs().amin(dim=(0, 2)).max() > 0
        (first.logits * weights[:, :cut]).sum().backward()
    got = {"inputs": embeds.grad} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(got) == set(want)
    for name in want:
        assert_near(f"gradient of {name}", got[name], want[name], GRADIENT_TOLERANCE[torch.float64])


@every_model
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("with_cache", [False, True], ids=["no cache", "cache"])
def test_gradient_checkpointing_changes_nothing(model_type, reentrant, with_cache):
    def results(checkpointing: bool) -> dict[str, Tensor]:
        model = tiny(model_type, dtype=torch.float64).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()  # what Trainer does, for the reentrant kind
        ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
        mask[1, :4] = 0
        calls = []
        for mixer in mixers(model):
            mixer.register_forward_pre_hook(lambda *_: calls.append(1))
        if with_cache:
            first = model(ids[:, :7], attention_mask=mask[:, :7], use_cache=True)
            assert first.past_key_values is not None
            second = model(ids[:, 7:], past_key_values=first.past_key_values)
            logits, cache = torch.cat([first.logits, second.logits], dim=1), states(second.past_key_values)
        else:
            logits, cache = model(ids, attention_mask=mask, use_cache=False).logits, []
        forward_calls = len(calls)
        (logits * cotangent(tuple(logits.shape), 3)).sum().backward()
        assert len(calls) == (2 if checkpointing else 1) * forward_calls, "recomputed in the backward pass, or not"
        result = {"logits": logits, **{f"state {i}": state for i, state in enumerate(cache)}}
        return result | {f"gradient of {name}": grad for name, grad in gradients(model).items()}

    if with_cache and model_type == "hymba":  # its layers write their keys into the cache
        with pytest.raises(ValueError, match=r"gradient checkpointing .* no cache"):
            results(True)
        return
    agree(results(True), results(False), torch.float64)


# --- calls of length 0, and what is documented about them ------------------------------------------------------------


@every_model
@every_backend
def test_no_tokens_give_no_logits_and_leave_the_cache_alone(model_type, backend):
    model = tiny(model_type)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    with on(backend), torch.no_grad():
        out = model(nothing, use_cache=True)
        assert out.logits.shape == (2, 0, model.config.vocab_size)
        assert out.past_key_values.get_seq_length() == 0
        ids = random_ids(2, 6)
        want = model(ids).past_key_values
        cache = model(ids, past_key_values=out.past_key_values).past_key_values
        same_states(cache, want, 0.0)
        out = model(nothing, past_key_values=cache, attention_mask=torch.ones(2, 6, dtype=torch.long))
        assert out.logits.shape == (2, 0, model.config.vocab_size)
        same_states(cache, want, 0.0)
        assert cache.get_seq_length() == 6


@every_model
def test_a_row_of_padding_only_leaves_its_state_alone(model_type):
    model = tiny(model_type)
    ids, mask = random_ids(2, 5), torch.ones(2, 5, dtype=torch.long)
    with torch.no_grad():
        cache = model(ids).past_key_values
        before = [state.clone() for state in states(cache)]
        mask[0] = 0
        logits = model(random_ids(2, 5, seed=1), attention_mask=mask, past_key_values=cache).logits
    assert logits.isfinite().all()
    for state, was in zip(states(cache), before, strict=True):
        assert_near("state of the padded row", state[0], was[0], 0.0)
        assert not torch.equal(state[1], was[1])


@every_model
def test_a_single_position_ids_row_serves_the_whole_batch(model_type):
    model, ids = tiny(model_type), random_ids(3, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.no_grad():
        got = model(ids, position_ids=positions).logits
        want = torch.cat([model(ids[:, :3]).logits, model(ids[:, 3:]).logits], dim=1)
    assert_near("logits", got, want, TOLERANCE[torch.float32])
