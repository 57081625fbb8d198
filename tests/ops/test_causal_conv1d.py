"""causal_conv1d: against its float64 reference, torch's own convolution, and the original package's numbers."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import (
    CONV,
    TOLERANCE,
    assert_near,
    cast,
    conv_inputs,
    dtypes_of,
    error,
    outputs_and_grads,
    packed_rows,
    usable,
)
from published import assert_as_published, cases

from hf_ssm.ops import causal_conv1d, causal_conv1d_update

BACKENDS = usable("causal_conv1d")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seqlen", [1, 2, 3, 4, 5, 23])  # around the width
@pytest.mark.parametrize("initial_state", [False, True, 6], ids=["zeros", "state", "longer-state"])
def test_agrees_with_reference(backend, dtype, seqlen, initial_state):
    tensors = cast(conv_inputs(seqlen=seqlen, initial_state=initial_state), dtype)
    want = outputs_and_grads(CONV("reference"), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(CONV(backend), tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [3, 4, 7])
@pytest.mark.parametrize("channels", [32, 37, 300])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_many_tokens_and_channels(backend, packed, channels, width):
    tensors = conv_inputs(seqlen=150, channels=channels, width=width)
    rows = {}
    if packed:
        documents = [[list(range(70)), list(range(70, 71)), list(range(71, 150))], [list(range(129, 150))]]
        rows["seq_idx"] = packed_rows(documents, 150)["seq_idx"]
        rows["seq_idx"][1, :129] = 7
    want = outputs_and_grads(CONV("reference", **rows), tensors)
    assert_near(outputs_and_grads(CONV(backend, **rows), tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
def test_options(backend, activation, bias, width):
    tensors = conv_inputs(width=width, bias=bias)
    want = outputs_and_grads(CONV("reference", activation=activation), tensors)
    assert_near(outputs_and_grads(CONV(backend, activation=activation), tensors), want)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("seqlen", [2, 23])
def test_agrees_with_torch_conv1d(backend, seqlen):
    def depthwise(x, weight, bias, initial_state):
        inputs = torch.cat([initial_state, x], dim=1)
        out = F.conv1d(inputs.mT, weight[:, None], bias, groups=x.shape[2]).mT
        return F.silu(out), inputs[:, -(weight.shape[1] - 1) :]

    tensors = conv_inputs(seqlen=seqlen)
    assert_near(outputs_and_grads(CONV(backend), tensors), outputs_and_grads(depthwise, tensors))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [6, 37])
def test_half_precision_is_as_good_as_the_reference(backend, dtype, channels):
    tensors = cast(conv_inputs(seqlen=64, channels=channels), dtype)
    exact = outputs_and_grads(CONV("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(CONV(name), tensors) for name in (backend, "reference"))
    for name, want in exact.items():
        assert got[name].dtype == dtype, name
        limit = 2 * error(reference[name], want) + TOLERANCE[torch.float32]
        assert error(got[name], want) <= limit, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mixed_dtypes(backend, x, weight):
    dtypes = {"x": x, "initial_state": x, "weight": weight, "bias": torch.float32}
    tensors = cast(conv_inputs(seqlen=20, channels=37), dtypes)
    exact = outputs_and_grads(CONV("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(CONV(name), tensors) for name in (backend, "reference"))
    for name, want in exact.items():
        assert got[name].dtype == reference[name].dtype, name
        limit = 2 * error(reference[name], want) + TOLERANCE[torch.float32]
        assert error(got[name], want) <= limit, name


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("case", cases("causal_conv1d", "update"))
def test_published_numbers(backend, case):
    def original_layout(x, weight, bias=None, initial_states=None, seq_idx=None):
        out, state = causal_conv1d(
            x.mT,
            weight,
            bias,
            activation=case.arguments["activation"],
            initial_state=None if initial_states is None else initial_states.mT,
            seq_idx=seq_idx,
            backend=backend,
        )
        return {"out": out.mT, "final_states": state.mT}

    assert_as_published(case, original_layout, dtypes_of(backend))


@pytest.mark.parametrize("case", cases("causal_conv1d", "silu", "linear", "bias", "initial", "packed", "shorter"))
def test_published_one_token_updates(case):
    given = {name: case.inputs[name].double() for name in case.inputs}
    state = given["conv_state"].mT
    for t in range(case.arguments["steps"]):
        before = state.clone()
        out, new_state = causal_conv1d_update(
            given["x"][..., t], state, given["weight"], given["bias"], activation=case.arguments["activation"]
        )
        assert torch.equal(state, before), "the old state is left as it was"
        state = new_state
        # stored in float32: half a unit in the last place of values below 8
        torch.testing.assert_close(out, case.outputs["out"][..., t].double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(state.mT.float(), case.outputs["conv_state_after_each_step"][:, t], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_outlives_many_tokens_and_none(backend):
    """A state longer than width - 1 keeps its length, whatever comes; no token leaves it as it is."""
    tensors = conv_inputs(seqlen=9, initial_state=5)
    inputs = torch.cat([tensors["initial_state"], tensors["x"]], dim=1)
    state = tensors["initial_state"]
    for start, stop in [(0, 0), (0, 1), (1, 4), (4, 9)]:
        _, state = CONV(backend)(**{**CONV.tokens(tensors, slice(start, stop)), "initial_state": state})
        assert torch.equal(state, inputs[:, stop : stop + 5].to(state.dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 6)}, r"x has shape \(2, 6\), expected \(batch, seqlen, channels\)"),
        ({"weight": torch.zeros(5, 4)}, r"weight has shape \(5, 4\), expected \(channels, width\) with channels=6"),
        ({"weight": torch.zeros(6, 0)}, r"weight has shape \(6, 0\)"),
        ({"bias": torch.zeros(5)}, r"bias has shape \(5,\), expected \(channels,\) = \(6,\)"),
        ({"activation": "gelu"}, "activation='gelu', expected None, 'silu' or 'swish'"),
        ({"initial_state": torch.zeros(2, 2, 6)}, r"initial_state has shape \(2, 2, 6\).* \(2, >= 3, 6\)"),
        ({"initial_state": torch.zeros(1, 3, 6)}, r"initial_state has shape \(1, 3, 6\)"),
        ({"seq_idx": torch.zeros(2, 5, dtype=torch.int64)}, r"seq_idx has shape \(2, 5\), expected .* = \(2, 4\)"),
        ({"seq_idx": torch.zeros(2, 4)}, r"seq_idx is torch.float32, expected an integer type"),
        ({"mask": torch.ones(2, 4, dtype=torch.int64)}, r"mask is torch.int64, expected bool, True for real tokens"),
    ],
)
def test_errors(change, message):
    given = {"x": torch.zeros(2, 4, 6), "weight": torch.zeros(6, 4), **change}
    with pytest.raises(ValueError, match="^causal_conv1d: " + message):
        causal_conv1d(**given)
