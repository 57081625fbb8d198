"""scripts/tag_python.py: the labels, the variant of two scans, the scores, a whole small comparison."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tag_python import LABELS, MODELS, Blocks, Settings, blocks, fit, in_use, label_bytes, scores, two_scans

ROOT = Path(__file__).parents[1]
SMALL = {
    "hydra": {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "head_dim": 8, "chunk_size": 16},
    "attention": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
}
SMALL["two-scans"] = SMALL["hydra"]


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models gain nothing from threads, and on a busy machine lose much by waiting for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tagged(source):
    """[(bytes, label)] of runs of one label."""
    found = []
    for byte, label in zip(source.encode(), label_bytes(source), strict=True):
        if found and found[-1][1] == LABELS[label]:
            found[-1][0].append(byte)
        else:
            found.append((bytearray([byte]), LABELS[label]))
    return [(bytes(text).decode(), label) for text, label in found]


def test_every_byte_has_the_type_of_its_token():
    source = 'if é:\n    x = [1,\n  "a"]  # ü\n\n    x.open(open)\n'
    assert tagged(source) == [
        ("if", "keyword"), (" ", "space"), ("é", "name"), (":", "operator"), ("\n", "newline"), ("    ", "indent"),
        ("x", "name"), (" ", "space"), ("=", "operator"), (" ", "space"), ("[", "operator"), ("1", "number"),
        (",", "operator"), ("\n", "line break"), ("  ", "space"), ('"a"', "string"), ("]", "operator"),
        ("  ", "space"), ("# ü", "comment"), ("\n", "newline"), ("\n", "line break"), ("    ", "space"), ("x", "name"),
        (".", "operator"), ("open", "name"), ("(", "operator"), ("open", "builtin"), (")", "operator"),
        ("\n", "newline"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ('"""a\nb"""\n', [('"""a\nb"""', "string"), ("\n", "newline")]),
        ("rb'\\''\n", [("rb'\\''", "string"), ("\n", "newline")]),
        ("f'a'", [("f'a'", "f-string")]),  # and no line end
        ("a\r\n", [("a", "name"), ("\r\n", "newline")]),
        ("a = \\\n1\n", [("a", "name"), (" ", "space"), ("=", "operator"), (" \\\n", "space"), ("1", "number"),
                         ("\n", "newline")]),
        ("", []),
    ],
)  # fmt: skip
def test_labels_of_what_is_easily_got_wrong(source, want):
    assert tagged(source) == want


def test_blocks_leave_out_what_is_no_python_and_what_is_too_short():
    texts = ["x = 1\n" * 3, "def (:\n  '''", "a\n", "y = 22\n" * 2]
    found = blocks(texts, 6)
    assert [bytes(row.tolist()) for row in found.input_ids] == [b"x = 1\n"] * 3 + [b"y = 22", b"\ny = 2"]
    assert found.labels[0].tolist() == label_bytes("x = 1\n").tolist()
    with pytest.raises(ValueError, match="no file of valid Python has 100 bytes"):
        blocks(texts, 100)


def test_two_scans_are_the_sum_of_mamba2_in_both_directions():
    torch.manual_seed(0)
    batch, seqlen, nheads, headdim, d_state = 2, 7, 3, 4, 5
    x = torch.randn(batch, seqlen, nheads, headdim)
    dts = torch.randn(2, batch, seqlen, nheads)
    B, C = torch.randn(2, 2, batch, seqlen, 1, d_state)
    A, D, dt_bias = -torch.rand(nheads), torch.randn(nheads), torch.randn(nheads)
    want = torch.zeros_like(x)
    for direction, order in ((0, range(seqlen)), (1, reversed(range(seqlen)))):
        state = torch.zeros(batch, nheads, headdim, d_state)
        for t in order:
            dt = torch.nn.functional.softplus(dts[direction, :, t] + dt_bias)
            update = torch.einsum("bh,bhp,bn->bhpn", dt, x[:, t], B[direction, :, t, 0])
            state = torch.exp(dt * A)[..., None, None] * state + update
            want[:, t] += torch.einsum("bhpn,bn->bhp", state, C[direction, :, t, 0]) + D[:, None] * x[:, t]
    got = two_scans(
        x, dts[0], dts[1], A, B[0], C[0], B[1], C[1], torch.randn(batch, seqlen, nheads), D, dt_bias, dt_softplus=True,
        dt_limit=(0.0, float("inf")), chunk_size=4, initial_state=None, seq_idx=None, mask=None,
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_variant_is_in_use_only_where_it_is_asked_for():
    torch.manual_seed(0)
    model = MODELS["hydra"](**SMALL["hydra"]).eval()
    input_ids = torch.randint(256, (1, 20))
    with torch.no_grad():
        before = model(input_ids=input_ids).logits
        with in_use("two-scans"):
            assert not torch.equal(model(input_ids=input_ids).logits, before)
        assert torch.equal(model(input_ids=input_ids).logits, before)


def test_the_contestants_have_one_size():
    sizes = [MODELS[name]().num_parameters() for name in MODELS]
    assert max(sizes) < 1.05 * min(sizes)


def test_scores_by_hand():
    confusion = np.zeros((len(LABELS), len(LABELS)), dtype=np.int64)
    confusion[0, 0], confusion[0, 1], confusion[1, 1], confusion[1, 2] = 6, 2, 3, 1
    found = scores(confusion)
    assert found["accuracy"] == 9 / 12
    assert found["f1"] == {"space": pytest.approx(2 * 6 / (6 + 8)), "keyword": pytest.approx(2 * 3 / (5 + 4))}
    assert found["macro_f1"] == pytest.approx((12 / 14 + 6 / 9) / 2)  # labels that do not occur do not count


@pytest.mark.parametrize("name", MODELS)
def test_every_contestant_learns_and_is_measured(name):
    source = "def f(x):\n    return 'a' + x  # why\n" * 40
    data = blocks([source], 64)
    few = Blocks(data.input_ids[:4], data.labels[:4])
    settings = Settings(steps=40, batch_size=4, validate_every=20)
    result = fit(name, 3e-2, data, few, settings, **SMALL[name])
    assert [check["step"] for check in result["validation"]] == [20, 40] and len(result["history"]) == 40
    assert result["history"][-1] < 0.5 * result["history"][0]
    assert result["loss"] == result["validation"][-1]["loss"] and result["accuracy"] > 0.5
    model = MODELS[name](**SMALL[name])
    unused = sum(p.numel() for n, p in model.named_parameters() if "fc_D" in n) if name == "two-scans" else 0
    assert result["parameters"] == model.num_parameters() - unused


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "scripts/tag_python.py", "--steps", "10", "--seqlen", "64", "--validation-blocks", "4",
               "--output", str(tmp_path)]  # fmt: skip
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["hydra", "two-scans", "attention"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "| accuracy |" in (tmp_path / "results.md").read_text()
