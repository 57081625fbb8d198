"""The GPU benchmark runs through, in tiny shapes on the CPU: a typing error must not wait for a GPU to be found."""

import json

import bench_gpu
import pytest
import torch
from stand_ins import stand_ins  # noqa: F401  (a fixture)


def rows_of(path):
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def test_everything_in_tiny_shapes(tmp_path, capsys):
    output, preferences = tmp_path / "gpu.md", tmp_path / "preferences.json"
    command = ["--device", "cpu", "--tiny", "--minutes", "2", "--output", str(output)]
    bench_gpu.main([*command, "--write-preferences", str(preferences)])
    rows, text = rows_of(output), output.read_text()
    assert not [row["failed"] for row in rows if row.get("failed")]
    assert {row["part"] for row in rows} == set(bench_gpu.PARTS)
    for row in rows:
        assert "hf_ssm torch" in row["seconds"] or "hf_ssm" in row["seconds"]
        assert all(seconds > 0 for seconds in row["seconds"].values())
    assert all(f"## {part}\n\n| " in text for part in bench_gpu.PARTS)
    assert text in capsys.readouterr().out
    assert json.loads(preferences.read_text()) == [], "of backends that run here, one is no choice"


def test_it_stops_in_time_and_keeps_what_it_has(tmp_path, monkeypatch):
    output = tmp_path / "gpu.md"

    def slow_from_the_third_on(*arguments, **options):
        slow_from_the_third_on.calls += 1
        if slow_from_the_third_on.calls > 2:
            while True:
                sum(range(1000))
        return measure(*arguments, **options)

    slow_from_the_third_on.calls, measure = 0, bench_gpu.measure
    monkeypatch.setattr(bench_gpu, "measure", slow_from_the_third_on)
    bench_gpu.main(["--device", "cpu", "--tiny", "--minutes", "0.1", "--parts", "conv", "--output", str(output)])
    assert len(rows_of(output)) == 2
    assert "| causal_conv1d | tiny |" in output.read_text()


def row(part, seconds, operator="ssd"):
    backends = {name: name.removeprefix("hf_ssm ") for name in seconds if name.startswith("hf_ssm ")}
    return {"part": part, "model": "130m", "seconds": seconds, "operator name": operator, "backends": backends}


def test_preferences_are_the_geometric_means():
    rows = [
        row("ssd", {"hf_ssm triton": 1.0, "hf_ssm mamba_ssm": 2.0, "hf_ssm torch": 0.1, "mamba_ssm": 0.5}),
        row("ssd", {"hf_ssm triton": 3.0, "hf_ssm mamba_ssm": 2.0}),
        row("step", {"hf_ssm triton": 3.0, "hf_ssm mamba_ssm": 1.0}),
        row("norm", {"hf_ssm triton": 3.0, "hf_ssm torch": 1.0}, "gated_rms_norm"),
        {"part": "ssd", "skipped": 3},
    ]
    several, one = bench_gpu.preferences(rows, "gpu.md", "sm_90")
    assert several | {"because": ""} == {
        "operator": "ssd", "architecture": "sm_90", "backend": "triton", "one_token": False, "because": "",
    }  # fmt: skip
    assert several["because"] == ("1.15 times as fast as mamba_ssm in the geometric mean of 2 measurements (gpu.md)")
    assert (one["backend"], one["one_token"]) == ("mamba_ssm", True)


def test_preferences_replace_those_of_the_same_kind(tmp_path):
    path = tmp_path / "preferences.json"
    old = {"operator": "ssd", "architecture": "sm_90", "backend": "mamba_ssm", "one_token": False, "because": "old"}
    other = old | {"architecture": "sm_80"}
    path.write_text(json.dumps([old, other]))
    bench_gpu.replace_preferences(path, [old | {"backend": "triton"}])
    assert json.loads(path.read_text()) == [other, old | {"backend": "triton"}]


def test_a_peer_that_cannot_be_imported_takes_no_part():
    setting = bench_gpu.Setting("cuda", True, {}, (), [])

    def load():
        raise OSError("undefined symbol\nsecond line")

    assert setting.peer("theirs", load) is None
    assert setting.absent == {"theirs": "OSError: undefined symbol"}


def test_needs_a_device(monkeypatch, capsys):
    monkeypatch.setattr(bench_gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_gpu.main([])
    assert "--device cpu --tiny" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["scan", "ssd", "quasiseparable", "conv"])
def test_peers_compute_the_same(stand_ins, monkeypatch, part):  # noqa: F811
    """With stand-ins for their packages, which have the published signatures."""
    monkeypatch.setattr(bench_gpu.Setting, "peer", lambda self, name, load: load())
    setting = bench_gpu.Setting("cpu", True, {"tiny": 128}, ((2, 40),), ["float32"])
    for case in bench_gpu.OPERATOR_PARTS[part](setting):
        inputs = case.inputs()
        contestants = case.contestants()
        with torch.no_grad():
            outs = {name: each.run(**each.prepare(inputs)) for name, each in contestants.items()}
        for name, out in outs.items():
            out = out.mT if (part, name) == ("scan", "mamba_ssm") else out
            torch.testing.assert_close(out, outs["hf_ssm torch"], rtol=1e-5, atol=1e-5)
        for each in contestants.values():
            grads = bench_gpu.jobs_of(each, inputs, "forward and backward")()
            assert all(grad is not None for grad in grads)
    assert stand_ins
