"""The scans as matrices: what the operator computes is the matrix times x, entry by entry what the papers write."""

import math

import pytest
import torch
from op_cases import QUASISEPARABLE, SCAN, SSD, assert_near, outputs_and_grads, quasiseparable_inputs, ssd_inputs

from hf_ssm.ops import quasiseparable_matrix, selective_scan_matrix, ssd_matrix

SEQ_IDX = torch.tensor([[0] * 5 + [1] + [2] * 6, [7] * 12])
MATRICES = {
    "selective_scan": (SCAN, selective_scan_matrix, {"z": False, "initial_state": False}, "bdts,bsd->btd"),
    "selective_scan, no groups": (
        SCAN,
        selective_scan_matrix,
        {"z": False, "initial_state": False, "ngroups": None, "D": False},
        "bdts,bsd->btd",
    ),
    "ssd": (SSD, ssd_matrix, {"z": False, "initial_state": False}, "bhts,bshp->bthp"),
    "ssd, no D": (SSD, ssd_matrix, {"z": False, "initial_state": False, "D": None}, "bhts,bshp->bthp"),
    "quasiseparable": (QUASISEPARABLE, quasiseparable_matrix, {"initial_state": False}, "bhts,bshp->bthp"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("case", MATRICES)
def test_matrix_times_x_is_the_operator(case, packed):
    operator, matrix, options, product = MATRICES[case]
    tensors = operator.inputs(seqlen=12, **options)
    rows = {"seq_idx": SEQ_IDX} if packed else {}

    def multiplied(x, **given):
        return torch.einsum(product, matrix(**given, **rows, **operator.options), x)

    def out_alone(**given):
        out = operator("torch", **rows)(**given)
        return out[0] if operator.causal else out

    assert_near(outputs_and_grads(multiplied, tensors), outputs_and_grads(out_alone, tensors))


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def test_entries_of_a_semiseparable_matrix():
    """One by one, as in definition 3.2 of arXiv:2405.21060."""
    given = ssd_inputs(1, 5, 2, 1, 1, 3, z=False, initial_state=False)
    matrix = ssd_matrix(*(given[n] for n in ("dt", "A", "B", "C", "D", "dt_bias")), dt_softplus=True)
    for h in range(2):
        dt = [softplus(float(given["dt"][0, t, h] + given["dt_bias"][h])) for t in range(5)]
        for t in range(5):
            for s in range(5):
                want = 0.0
                if s <= t:
                    decay = math.exp(float(given["A"][h]) * sum(dt[s + 1 : t + 1]))
                    want = float(given["C"][0, t, 0] @ given["B"][0, s, 0]) * decay * dt[s]
                want += float(given["D"][h]) if s == t else 0.0
                assert abs(float(matrix[0, h, t, s]) - want) < 1e-12


def test_entries_of_a_quasiseparable_matrix():
    """One by one, as in definition 3.1 of arXiv:2407.09941, with Hydra's read-out one token on."""
    given = quasiseparable_inputs(1, 5, 2, 1, 1, 3, initial_state=False)
    x = given.pop("x")
    matrix = quasiseparable_matrix(**given, dt_softplus=True)
    assert matrix.shape == (1, 2, 5, 5) and matrix.dtype == x.dtype
    for h in range(2):
        dt = {
            side: [softplus(float(given[f"dt_{side}"][0, t, h] + given["dt_bias"][h])) for t in range(5)]
            for side in ("forward", "backward")
        }
        for t in range(5):
            for s in range(5):
                if s == t:
                    want = float(given["diagonal"][0, t, h] + given["D"][h])
                else:
                    side, reader = ("forward", t - 1) if s < t else ("backward", t + 1)
                    between = dt[side][s + 1 : t] if s < t else dt[side][t + 1 : s]
                    score = float(given[f"C_{side}"][0, reader, 0] @ given[f"B_{side}"][0, s, 0])
                    want = score * math.exp(float(given["A"][h]) * sum(between)) * dt[side][s]
                assert abs(float(matrix[0, h, t, s]) - want) < 1e-12
