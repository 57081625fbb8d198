"""What holds for every operator and backend alike: packing, padding, cuts, layouts, compilation, determinism.

Each is compared with the plainest call that must give the same: single documents, one after the other, unpadded,
contiguous, in float64, by the reference.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import (
    ALL,
    CAUSAL,
    CENTRED,
    CONV,
    DEVICE,
    EVERY,
    EVERY_IDS,
    LAYOUTS,
    QUASISEPARABLE,
    SCAN,
    TOLERANCE,
    WITHOUT_FLOAT64,
    assert_near,
    cast,
    documents_alone,
    outputs_and_grads,
    packed_rows,
    positive_steps,
    set_chunks,
    tensors_of,
)

every = pytest.mark.parametrize(("operator", "backend"), EVERY, ids=EVERY_IDS)
every_causal = pytest.mark.parametrize(
    ("operator", "backend"),
    [pytest.param(*case, id=name) for case, name in zip(EVERY, EVERY_IDS, strict=True) if case[0].causal],
)
every_operator = pytest.mark.parametrize("operator", ALL, ids=lambda operator: operator.name)


# --- packing -------------------------------------------------------------------------------------------------------

# Lengths of two rows' documents, 31 tokens each. In chunks of 4 and segments of 8 tokens.
PACKED = {
    "one document": [[31], [31]],
    "ends of chunks and segments": [[4, 4, 8, 12, 3], [8, 16, 7]],
    "next to ends of chunks and segments": [[3, 2, 2, 2, 6, 2, 14], [7, 2, 8, 14]],
    "one token each": [[1] * 31, [1] * 31],
    "one-token documents at the ends": [[1, 29, 1], [30, 1]],
    "several in a chunk": [[2, 1, 1, 5, 1, 1, 1, 19], [9, 1, 1, 2, 18]],
    "across several segments": [[5, 21, 5], [26, 5]],
    "one row only": [[31], [10, 10, 11]],
}
IDS = {
    "counting": list(range(31)),
    "negative": [-i for i in range(31)],
    "descending": list(range(100, 69, -1)),
    "returning": [i % 2 for i in range(31)],  # the same id comes back later and is another document
    "large": [2**40 + i for i in range(31)],
}


def consecutive(lengths: list[list[int]]) -> list[list[list[int]]]:
    rows = []
    for row in lengths:
        ends = torch.tensor(row).cumsum(0).tolist()
        rows.append([list(range(end - length, end)) for end, length in zip(ends, row, strict=True)])
    return rows


@every
@pytest.mark.parametrize("initial_state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("packing", PACKED)
def test_packed_documents_are_separate_documents(monkeypatch, operator, backend, packing, initial_state):
    documents = consecutive(PACKED[packing])
    tensors = operator.inputs(seqlen=31, initial_state=initial_state)
    set_chunks(monkeypatch, operator.name, tensors, chunk=4, per_segment=2)
    seq_idx = packed_rows(documents, 31)["seq_idx"]
    want = outputs_and_grads(documents_alone(operator, documents), tensors)
    assert_near(outputs_and_grads(operator(backend, seq_idx=seq_idx), tensors), want)


@every
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_only_changes_of_the_index_matter(monkeypatch, operator, backend, ids, dtype):
    if ids == "large" and dtype == torch.int32:
        dtype = torch.int16  # 2**40 + i needs 64 bits; 16 bits hold other large ids
        values = [2**14 + i for i in range(31)]
    else:
        values = IDS[ids]
    documents = consecutive(PACKED["several in a chunk"])
    tensors = operator.inputs(seqlen=31)
    set_chunks(monkeypatch, operator.name, tensors, chunk=4, per_segment=2)
    seq_idx = packed_rows(documents, 31, ids=[values, values])["seq_idx"].to(dtype)
    want = outputs_and_grads(documents_alone(operator, documents), tensors)
    assert_near(outputs_and_grads(operator(backend, seq_idx=seq_idx), tensors), want)


@every
def test_packing_in_chunks_as_shipped(operator, backend):
    documents = consecutive([[63, 1, 1, 64, 21], [16, 15, 17, 65, 37]])
    tensors = operator.inputs(seqlen=150)
    seq_idx = packed_rows(documents, 150)["seq_idx"]
    want = outputs_and_grads(documents_alone(operator, documents), tensors)
    assert_near(outputs_and_grads(operator(backend, seq_idx=seq_idx), tensors), want)


# --- padding -------------------------------------------------------------------------------------------------------

# One row per string: "." is padding, a letter is a token of that document.
PADDED = {
    "left": ["...aaaaaaaaaaaaaa", ".aaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaa"],
    "right": ["aaaaaaaaaaaaaa...", "aaaaaaaaaaaaaaaa.", "aaaaaaaaaaaaaaaaa"],
    "both": ["....aaaaaaaaa....", ".aaaaaaaaaaaaaaa.", "........a........"],
    "holes": ["aa.aaaa...aaaaaaa", ".a.a.a.a.a.a.a.a.", "aaaaaaaa.aaaaaaaa"],
    "whole rows": [".................", "aaaaaaaaaaaaaaaaa", "................."],
    "one token left": ["a................", "................a", "......a.........."],
    "packed": ["aaaaabbbbbbcccccc", "..aaaaaaabbbbbbb.", "aa.ab..bbb.ccc..."],
    "packed, padding between": ["aaaa....bbbb.cccc", "...aaa...bbb...c.", "a.b.c.d.e.f.g.h.i"],
    "packed, rows of padding": [".................", "...a...b...c...d.", "..........ab....."],
}


def documents_of(rows: list[str]) -> list[list[list[int]]]:
    return [[[i for i, c in enumerate(row) if c == name] for name in sorted(set(row) - {"."})] for row in rows]


@every
@pytest.mark.parametrize("initial_state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("padding", PADDED)
def test_padded_rows_are_rows_without_padding(monkeypatch, operator, backend, padding, initial_state):
    rows = PADDED[padding]
    documents, seqlen = documents_of(rows), len(rows[0])
    tensors = operator.inputs(len(rows), seqlen, initial_state=initial_state)
    set_chunks(monkeypatch, operator.name, tensors, chunk=4, per_segment=2)
    options = packed_rows(documents, seqlen)
    if "packed" not in padding:
        del options["seq_idx"]
    want = outputs_and_grads(documents_alone(operator, documents), tensors)
    got = outputs_and_grads(operator(backend, **options), tensors)
    assert_near(got, want)
    padded = ~options["mask"]
    for name in ("out", *(f"d_{name}" for name in operator.per_token if name in tensors)):
        assert (got[name][padded] == 0).all(), f"{name} is not 0 at padding"


@every
@pytest.mark.parametrize("extra", [{}, {"initial_state": 7}], ids=["", "longer-state"])
def test_padding_of_a_longer_convolution_state(operator, backend, extra):
    if operator is not CONV:
        extra = {}
    rows = PADDED["packed, padding between"]
    documents = documents_of(rows)
    tensors = operator.inputs(len(rows), len(rows[0]), **extra)
    want = outputs_and_grads(documents_alone(operator, documents), tensors)
    assert_near(outputs_and_grads(operator(backend, **packed_rows(documents, len(rows[0]))), tensors), want)


@every
@pytest.mark.parametrize("options", [{"dt_softplus": False}, {"dt_softplus": True, "dt_limit": (0.3, 0.9)}], ids=str)
def test_padding_takes_no_step_whatever_the_step_size(operator, backend, options):
    """A lower limit of the step size must not give padding one, nor a bias without softplus."""
    if operator in (CONV, CENTRED) or (operator is SCAN and "dt_limit" in options):
        options = {}
    rows = PADDED["packed, padding between"]
    documents = documents_of(rows)
    tensors = positive_steps(operator.inputs(len(rows), len(rows[0])))
    want = outputs_and_grads(documents_alone(operator, documents, **options), tensors)
    got = outputs_and_grads(operator(backend, **options, **packed_rows(documents, len(rows[0]))), tensors)
    assert_near(got, want)


@every
def test_what_stands_at_padding_is_irrelevant(operator, backend):
    """Any finite value there, however large, leaves results and gradients bit for bit as they are."""
    rows = PADDED["packed, padding between"]
    packed = packed_rows(documents_of(rows), len(rows[0]))
    tensors = cast(operator.inputs(len(rows), len(rows[0])), torch.float32)
    other = dict(tensors)
    for name in operator.per_token:
        other[name] = tensors[name].clone()
        other[name][~packed["mask"]] = 1e9
    want = outputs_and_grads(operator(backend, **packed), tensors)
    got = outputs_and_grads(operator(backend, **packed), other)
    assert all(torch.equal(got[name], want[name]) for name in want)


# --- any rows, any cut ---------------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    """Rows of documents and padding: `documents[row][i]` lists positions."""
    seqlen = draw(st.integers(1, 21))
    documents = []
    for _ in range(draw(st.integers(1, 3))):
        # per token: "." is padding, "+" goes on with the document, "|" begins another
        row = draw(st.lists(st.sampled_from("..++++|"), min_size=seqlen, max_size=seqlen))
        found: list[list[int]] = []
        for position, kind in enumerate(row):
            if kind == "|" or (kind == "+" and not found):
                found.append([])
            if kind != ".":
                found[-1].append(position)
        documents.append(found)
    return documents, seqlen


@every
@settings(max_examples=15)
@given(
    batch=batches(),
    initial_state=st.booleans(),
    chunk=st.integers(1, 6),
    per_segment=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_batch_equals_its_documents(operator, backend, batch, initial_state, chunk, per_segment, seed):
    documents, seqlen = batch
    tensors = operator.inputs(len(documents), seqlen, initial_state=initial_state, seed=seed)
    want = outputs_and_grads(documents_alone(operator, documents), tensors)
    with pytest.MonkeyPatch.context() as patch:
        set_chunks(patch, operator.name, tensors, chunk, per_segment)
        assert_near(outputs_and_grads(operator(backend, **packed_rows(documents, seqlen)), tensors), want)


def in_parts(operator, backend: str, cuts: list[int], seqlen: int, **options):
    """The operator called on the parts between `cuts`, each from the state that the one before ended in."""

    def run(initial_state=None, **tensors):
        outs, state = [], initial_state
        bounds = [0, *sorted(cuts), seqlen]
        for start, stop in pairwise(bounds):
            part = operator.tokens(tensors, slice(start, stop))
            rows = {name: value[:, start:stop] for name, value in options.items()}
            out, state = operator(backend)(**part, initial_state=state, **rows)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    return run


@every_causal
@settings(max_examples=15)
@given(data=st.data(), initial_state=st.booleans(), chunk=st.integers(1, 6), seed=st.integers(0, 99))
def test_any_cut_is_no_cut(operator, backend, data, initial_state, chunk, seed):
    """Head, then tail from the head's state; empty parts and parts of one token too; gradients through the states."""
    seqlen = data.draw(st.integers(0, 21), label="seqlen")
    cuts = data.draw(st.lists(st.integers(0, seqlen), max_size=4), label="cuts")
    masked = data.draw(st.booleans(), label="masked")
    tensors = operator.inputs(2, seqlen, initial_state=initial_state, seed=seed)
    rows = {}
    if masked:
        kinds = data.draw(st.lists(st.booleans(), min_size=2 * seqlen, max_size=2 * seqlen), label="mask")
        rows["mask"] = torch.tensor(kinds, dtype=torch.bool, device=DEVICE).view(2, seqlen)
    if seqlen == 0 and not initial_state:
        out, state = in_parts(operator, backend, cuts, seqlen, **rows)(**tensors)
        assert out.numel() == 0
        assert not state.any()
        return
    want = outputs_and_grads(operator("reference", **rows), tensors)
    with pytest.MonkeyPatch.context() as patch:
        set_chunks(patch, operator.name, tensors, chunk, 2)
        assert_near(outputs_and_grads(in_parts(operator, backend, cuts, seqlen, **rows), tensors), want)


# --- shapes and layouts --------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("initial_state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("rows", ["plain", "seq_idx", "mask", "both"])
@pytest.mark.parametrize(("batch", "seqlen"), [(2, 0), (0, 5), (0, 0), (0, 1)])
def test_nothing_to_do(operator, backend, batch, seqlen, rows, initial_state):
    """No tokens leave the state as it is; no rows give no rows; both can be part of a training step."""
    tensors = operator.inputs(batch, seqlen, initial_state=initial_state)
    options = packed_rows([[]] * batch, seqlen) if batch else {}
    if not batch:
        empty = torch.zeros(0, seqlen, dtype=torch.int64, device=DEVICE)
        options = {"seq_idx": empty, "mask": empty.bool()}
    options = {name: t for name, t in options.items() if rows in (name, "both")}
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    out, *states = tensors_of(operator(backend, **options)(**leaves))
    assert out.shape == tensors["x"].shape
    if not operator.causal:
        if out.requires_grad:
            out.sum().backward()
        assert not any(leaf.grad.any() for leaf in leaves.values() if leaf.grad is not None)
        return
    (state,) = states
    assert state.shape[0] == batch
    if initial_state:
        assert torch.equal(state, tensors["initial_state"].to(state.dtype))
        (state.sum() + out.sum()).backward()
        assert torch.equal(leaves["initial_state"].grad, torch.ones_like(leaves["initial_state"]))
    else:
        assert not state.any()


SAME_EVERYWHERE = {  # equal values along an axis, stride 0
    "rows": lambda t: t[:1].expand(t.shape),
    "second axis": lambda t: t[:, :1].expand(t.shape) if t.ndim > 1 else t,
    "last axis": lambda t: t[..., :1].expand(t.shape),
    "all": lambda t: t.flatten()[0].expand(t.shape),
}


@every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(monkeypatch, operator, backend, layout):
    def laid_out(**tensors):
        return operator(backend)(**{name: LAYOUTS[layout](t) for name, t in tensors.items()})

    tensors = operator.inputs()
    set_chunks(monkeypatch, operator.name, tensors, chunk=4, per_segment=2)
    assert_near(outputs_and_grads(laid_out, tensors), outputs_and_grads(operator("reference"), tensors))


@every
@pytest.mark.parametrize("axis", SAME_EVERYWHERE)
def test_expanded_inputs(monkeypatch, operator, backend, axis):
    expand = SAME_EVERYWHERE[axis]
    tensors = operator.inputs()
    set_chunks(monkeypatch, operator.name, tensors, chunk=4, per_segment=2)
    got = outputs_and_grads(lambda **given: operator(backend)(**{n: expand(t) for n, t in given.items()}), tensors)
    want = outputs_and_grads(
        lambda **given: operator("reference")(**{n: expand(t).contiguous() for n, t in given.items()}), tensors
    )
    assert_near(got, want)


@every
def test_layout_of_cotangents_does_not_matter(operator, backend):
    """`sum` sends an expanded gradient, a transposed use a transposed one."""
    tensors = {name: t.requires_grad_() for name, t in operator.inputs().items()}
    grads, dtypes = [], []
    for function in (operator(backend), operator("reference")):
        out, *states = tensors_of(function(**tensors))
        dtypes.append(out.dtype)
        weight = torch.arange(out.numel(), dtype=out.dtype, device=out.device).view(out.mT.shape).sin()
        loss = out.sum() + (out.mT.contiguous() * weight).sum()
        loss = loss + sum(state.sum() + state.mT.contiguous().square().sum() for state in states)
        grads.append(dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True)))
    assert_near(*grads, TOLERANCE[dtypes[0]])


@every
def test_inputs_are_left_as_they_are(operator, backend):
    tensors = operator.inputs(initial_state=True)
    rows = packed_rows(documents_of(["aaaaaa..bbbbbbbbb.cccccc", "." * 24]), 24)
    tensors = operator.inputs(seqlen=24)
    before = {name: t.clone() for name, t in (*tensors.items(), *rows.items())}
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    results = tensors_of(operator(backend, **rows)(**leaves))
    cotangents = [torch.ones_like(result) for result in results]
    torch.autograd.backward(results, cotangents)
    assert all(torch.equal(value, before[name]) for name, value in (*tensors.items(), *rows.items()))
    assert all((cotangent == 1).all() for cotangent in cotangents)


@every
def test_two_runs_are_bit_identical(operator, backend):
    tensors = cast(operator.inputs(seqlen=150), torch.float32)
    rows = packed_rows(consecutive([[100, 50], [30, 120]]), 150)
    first, second = (outputs_and_grads(operator(backend, **rows), tensors) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@every
@pytest.mark.parametrize("seqlen", [1, 20])
def test_autocast_changes_nothing(operator, backend, seqlen):
    """States and decays stay in float32 under autocast (of the forward pass, as torch wants it), whole sequences and
    single tokens."""

    def under_autocast(**given):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return operator(backend)(**given)

    tensors = cast(operator.inputs(seqlen=seqlen), torch.float32)
    want = outputs_and_grads(operator(backend), tensors)
    got = outputs_and_grads(under_autocast, tensors)
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name


@every
@pytest.mark.parametrize("seqlen", [1, 6])
def test_results_have_the_documented_dtypes(operator, backend, seqlen):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        if dtype == torch.float64 and backend in WITHOUT_FLOAT64:
            continue
        tensors = cast(operator.inputs(seqlen=seqlen), dtype)
        out, *states = tensors_of(operator(backend)(**tensors))
        assert out.dtype == dtype
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        assert all(state.dtype == (dtype if operator is CONV else state_dtype) for state in states)


@every
def test_no_state_without_gradient(operator, backend):
    tensors = operator.inputs(seqlen=9)
    with torch.no_grad():
        results = tensors_of(operator(backend)(**tensors))
    with torch.inference_mode():
        again = tensors_of(operator(backend)(**tensors))
    for first, second in zip(results, again, strict=True):
        assert not first.requires_grad
        assert torch.equal(first, second)


# --- autograd, torch.library, torch.compile ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "backend"),
    [
        pytest.param(*case, id=name)
        for case, name in zip(EVERY, EVERY_IDS, strict=True)
        if case[1] not in WITHOUT_FLOAT64  # finite differences need it
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_gradcheck(monkeypatch, operator, backend, packed):
    """Against finite differences, in a random direction of every input."""
    tensors = operator.inputs(1, 5)
    set_chunks(monkeypatch, operator.name, tensors, chunk=2, per_segment=1)
    names = list(tensors)
    rows = {"seq_idx": torch.tensor([[0, 0, 0, 1, 1]], device=DEVICE)} if packed else {}

    def function(*values):
        return operator(backend, **rows)(**dict(zip(names, values, strict=True)))

    torch.autograd.gradcheck(function, [t.requires_grad_() for t in tensors.values()], fast_mode=True)


@every_operator
def test_second_derivative_is_refused(operator):
    tensors = {name: t.requires_grad_() for name, t in operator.inputs(seqlen=6).items()}
    out = tensors_of(operator("torch")(**tensors))[0]
    (grad,) = torch.autograd.grad(out.square().sum(), tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match=f"{library_name(operator)}_backward"):
        grad.sum().backward()


def library_name(operator) -> str:
    """One op computes both convolutions."""
    return "conv1d" if operator in (CONV, CENTRED) else operator.name


SCANNED = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
SCHEMAS = {  # inputs in the order of the op's arguments, its options behind seq_idx, what an input can do without
    "causal_conv1d": (("x", "weight", "bias", "initial_state"), [True, 0], {"bias": False, "initial_state": False}),
    "centred_conv1d": (("x", "weight", "bias", "initial_state"), [True, 2], {"bias": False}),
    "selective_scan": (SCANNED, [True], {"D": False, "z": False, "dt_bias": False, "initial_state": False}),
    "ssd": (SCANNED, [True, 0.0, float("inf"), 4], {"D": None, "z": False, "dt_bias": False, "initial_state": False}),
    "quasiseparable": (
        ("x", "dt_forward", "dt_backward", "A", "B_forward", "C_forward", "B_backward", "C_backward", "diagonal"),
        [4],
        {"diagonal": False},
    ),
}


def schema_samples(operator):
    """(the op, its arguments) of the `torch` backend, as `torch.library.opcheck` takes them: all options and none."""
    op = getattr(torch.ops.hf_ssm, library_name(operator)).default
    backward = getattr(torch.ops.hf_ssm, f"{library_name(operator)}_backward").default
    inputs, options, nothing = SCHEMAS[operator.name]
    for dtype, kwargs in ((torch.float32, {}), (torch.bfloat16, nothing)):
        tensors = cast(operator.inputs(seqlen=9, **kwargs), dtype)
        for name in ("initial_state", "diagonal", "dt_forward", "dt_backward"):  # as the public function passes them
            if name in tensors and operator is not CONV:
                tensors[name] = tensors[name].float()
        seq_idx = None if kwargs else packed_rows(consecutive([[3, 6], [5, 4]]), 9)["seq_idx"]
        given = [tensors.get(name) for name in inputs]
        yield op, (*[None if t is None else t.requires_grad_() for t in given], seq_idx, *options)
        given = [None if t is None else t.detach() for t in given]
        results = op(*given, seq_idx, *options)
        if operator in (CONV, CENTRED):
            yield backward, (torch.ones_like(results), *given, seq_idx, *options)
        elif operator is QUASISEPARABLE:
            yield backward, (torch.ones_like(results[0]), *given, seq_idx, *results[1:], *options)
        else:
            out, final_state, before_segment = results
            for d_final in (None, torch.ones_like(final_state)):
                yield backward, (torch.ones_like(out), d_final, *given[:-1], before_segment, seq_idx, *options)


@every_operator
def test_opcheck(monkeypatch, operator):
    """torch.library's own checks: the schema, the autograd registration, the fake implementation, dynamic shapes."""
    set_chunks(monkeypatch, operator.name, operator.inputs(), chunk=4, per_segment=1)
    for op, arguments in schema_samples(operator):
        torch.library.opcheck(op, arguments)


@every_operator
@pytest.mark.parametrize("segments", ["one segment", "several segments"])
def test_compiles_without_graph_breaks(monkeypatch, operator, segments):
    """One graph for all lengths, forward and backward, whatever rows look like; the same numbers as without."""
    if segments == "several segments":
        set_chunks(monkeypatch, operator.name, operator.inputs(), chunk=4, per_segment=2)
    torch.compiler.reset()
    compiled = torch.compile(operator.function, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (20, 33, 64):
        tensors = cast(operator.inputs(seqlen=seqlen), torch.float32)
        rows = packed_rows([[list(range(2, 9)), list(range(9, 19))], [list(range(seqlen))]], seqlen)
        want = outputs_and_grads(operator("torch", **rows), tensors)
        with torch._dynamo.config.patch(error_on_recompile=seqlen > 20):
            got = outputs_and_grads(lambda **given: compiled(**given, **rows, **operator.options), tensors)  # noqa: B023
        assert_near(got, want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("operator", CAUSAL, ids=lambda operator: operator.name)
def test_compiled_decoding(operator):
    """One token with a state, under autocast too."""
    torch.compiler.reset()
    compiled = torch.compile(operator.function, fullgraph=True, backend="aot_eager")
    tensors = cast(operator.inputs(seqlen=1), torch.float32)
    want = outputs_and_grads(operator("torch"), tensors)
    got = outputs_and_grads(lambda **given: compiled(**given, **operator.options), tensors)
    assert_near(got, want, TOLERANCE[torch.float32])
    with torch.autocast(DEVICE, dtype=torch.bfloat16), torch.no_grad():
        out, state = compiled(**tensors, **operator.options)
    assert_near(
        {"out": out, "final_state": state}, {k: want[k] for k in ("out", "final_state")}, TOLERANCE[torch.float32]
    )
