"""centred_conv1d: against its float64 reference and torch's own convolution."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import CENTRED, DEVICE, TOLERANCE, assert_near, cast, centred_inputs, error, outputs_and_grads, usable

from hf_ssm.ops import centred_conv1d

BACKENDS = usable("centred_conv1d")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seqlen", [1, 2, 3, 4, 5, 23])  # around the width
@pytest.mark.parametrize("width", [1, 3, 7])
def test_agrees_with_reference(backend, dtype, seqlen, width):
    tensors = cast(centred_inputs(seqlen=seqlen, width=width), dtype)
    want = outputs_and_grads(CENTRED("reference"), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(CENTRED(backend), tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [3, 7])
@pytest.mark.parametrize("channels", [32, 37, 300])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_many_tokens_and_channels(backend, packed, channels, width):
    tensors = centred_inputs(seqlen=150, channels=channels, width=width)
    seq_idx = torch.arange(300, device=DEVICE).view(2, 150).div(70, rounding_mode="floor")
    rows = {"seq_idx": seq_idx} if packed else {}
    want = outputs_and_grads(CENTRED("reference", **rows), tensors)
    assert_near(outputs_and_grads(CENTRED(backend, **rows), tensors), want)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("width", [1, 3, 5, 9])
@pytest.mark.parametrize("seqlen", [1, 3, 23])
def test_agrees_with_torch_conv1d(backend, activation, bias, width, seqlen):
    def depthwise(x, weight, bias=None):
        out = F.conv1d(x.mT, weight[:, None], bias, groups=x.shape[2], padding=width // 2).mT
        return F.silu(out) if activation else out

    tensors = centred_inputs(seqlen=seqlen, width=width, bias=bias)
    want = outputs_and_grads(depthwise, tensors)
    assert_near(outputs_and_grads(CENTRED(backend, activation=activation), tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_good_as_the_reference(backend, dtype):
    tensors = cast(centred_inputs(seqlen=64), dtype)
    exact = outputs_and_grads(CENTRED("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(CENTRED(name), tensors) for name in (backend, "reference"))
    for name, want in exact.items():
        assert got[name].dtype == dtype, name
        assert error(got[name], want) <= 2 * error(reference[name], want) + TOLERANCE[torch.float32], name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 6)}, r"x has shape \(2, 6\), expected \(batch, seqlen, channels\)"),
        ({"weight": torch.zeros(5, 3)}, r"weight has shape \(5, 3\), expected \(channels, width\) with channels=6"),
        ({"weight": torch.zeros(6, 4)}, r"width=4 \(weight\), expected an odd number"),
        ({"bias": torch.zeros(5)}, r"bias has shape \(5,\), expected \(channels,\) = \(6,\)"),
        ({"activation": "gelu"}, "activation='gelu', expected None, 'silu' or 'swish'"),
        ({"seq_idx": torch.zeros(2, 4)}, r"seq_idx is torch.float32, expected an integer type"),
        ({"mask": torch.ones(2, 4, dtype=torch.int64)}, r"mask is torch.int64, expected bool, True for real tokens"),
    ],
)
def test_errors(change, message):
    given = {"x": torch.zeros(2, 4, 6), "weight": torch.zeros(6, 3), **change}
    with pytest.raises(ValueError, match="^centred_conv1d: " + message):
        centred_conv1d(**given)
