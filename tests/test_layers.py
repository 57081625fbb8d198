"""The shared modules against the original packages' numbers and against torch's own."""

import pytest
import torch
from published import assert_as_published, cases
from torch import nn

from hf_ssm.layers import GatedRMSNorm, LayerNorm, RMSNorm


@pytest.mark.parametrize("case", cases("gated_rms_norm"))
def test_gated_norm_has_the_published_numbers(case):
    norm = GatedRMSNorm(case.inputs["weight"].shape[0], **case.arguments)

    def original_names(x, weight, z=None):
        return {"out": torch.func.functional_call(norm, {"weight": weight}, (x, z))}

    assert_as_published(case, original_names)


@pytest.mark.parametrize("ours", [RMSNorm, LayerNorm])
def test_norms_are_torchs(ours):
    """In float64 exactly; from bfloat16 with float32 in between, in the weight's dtype."""
    theirs = {RMSNorm: nn.RMSNorm, LayerNorm: nn.LayerNorm}[ours](24, eps=1e-5, dtype=torch.float64)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(24))
    norm = ours(24, eps=1e-5)
    norm.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 24)
    with torch.no_grad():
        torch.testing.assert_close(norm.double()(x.double()), theirs(x.double()), rtol=1e-12, atol=1e-12)
        out = norm.bfloat16()(x)
    assert out.dtype == torch.bfloat16
    theirs.load_state_dict(norm.state_dict())  # the same rounded weights
    # at most two roundings to bfloat16 (result of the norm, product), 2**-8 each; float32 in between
    torch.testing.assert_close(out.double(), theirs(x.double()), rtol=2.1 * 2**-8, atol=1e-5)


def test_group_size_must_divide():
    with pytest.raises(ValueError, match="group_size=7 does not divide hidden_size=24"):
        GatedRMSNorm(24, 7, norm_before_gate=True)
