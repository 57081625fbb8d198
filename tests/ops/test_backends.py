"""Which backend runs: chosen, forced in three ways, refused with a reason, reported."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_cases import ALL, CONV, SSD, cast, conv_inputs, ssd_inputs, usable
from stand_ins import forget_choices

from hf_ssm.ops import (
    BackendUnavailable,
    UnsupportedByBackend,
    backend_report,
    backends,
    cpu,
    explain,
    rms_norm,
    ssd,
    use_backend,
)


@pytest.fixture
def runs(monkeypatch):
    """The names of the backends that ran, in order."""
    names = []
    for operator, rows in backends.OPERATORS.items():
        for row in rows:
            if row.name in ("torch", "reference"):
                impl = backends._choose_impl(operator, "cpu", torch.float64, (), (row.name,))
                function = backends._LOADED[operator][impl]

                def spy(*args, name=row.name, function=function):
                    names.append(name)
                    return function(*args)

                monkeypatch.setitem(backends._LOADED[operator], impl, spy)
    return names


@pytest.fixture
def bare_machine(monkeypatch):
    """No kernel package, no native kernels, no device but the CPU, whatever this machine has."""
    monkeypatch.setattr(backends, "_installed", lambda package: False)
    monkeypatch.setattr(backends, "_device_present", lambda device: device == "cpu")
    monkeypatch.setattr(cpu, "kernels", lambda: None)
    backends._choose_row.cache_clear()
    yield
    monkeypatch.undo()
    forget_choices()


@pytest.mark.parametrize("operator", ALL, ids=lambda operator: operator.name)
def test_the_innermost_request_wins(runs, operator):
    tensors = operator.inputs(seqlen=3)
    call = operator.function
    call(**tensors)
    call(**tensors, backend="reference")
    with use_backend("reference"):
        call(**tensors)
        call(**tensors, backend="torch")
        with use_backend("torch"):
            call(**tensors)
            with use_backend("reference"):
                call(**tensors)
            call(**tensors)
        call(**tensors)
    call(**tensors)
    assert runs == ["torch", "reference", "reference", "torch", "torch", "reference", "torch", "reference", "torch"]


def test_a_request_ends_with_its_block(runs):
    with pytest.raises(ZeroDivisionError), use_backend("reference"):
        1 / 0  # noqa: B018
    SSD.function(**ssd_inputs())
    assert runs == ["torch"]


def test_updates_can_be_forced(runs):
    from hf_ssm.ops import causal_conv1d_update, selective_scan_update, ssd_update

    with use_backend("reference"):
        causal_conv1d_update(torch.zeros(1, 4), torch.zeros(1, 3, 4), torch.zeros(4, 4))
        one = torch.ones
        selective_scan_update(one(1, 2, 3), one(1, 2), one(1, 2), -one(2, 3), one(1, 3), one(1, 3))
        ssd_update(one(1, 2, 3, 4), one(1, 2, 3), one(1, 2), -one(2), one(1, 1, 4), one(1, 1, 4))
    assert runs == ["reference"] * 3


def test_an_operator_takes_the_first_name_it_has(runs, bare_machine):
    with use_backend("mamba_ssm", "reference"), pytest.raises(BackendUnavailable, match="ssd: backend 'mamba_ssm'"):
        ssd(**ssd_inputs())  # it has a mamba_ssm, which this machine has not
    with use_backend("causal_conv1d", "reference", "torch"):
        ssd(**ssd_inputs())
    assert runs == ["reference"]
    with use_backend("causal_conv1d"), pytest.raises(BackendUnavailable, match="ssd has no backend 'causal_conv1d'"):
        ssd(**ssd_inputs())
    with pytest.raises(ValueError, match="at least one"), use_backend():
        pass


def test_a_minor_operator_has_only_names_of_its_own(runs, bare_machine):
    """Kernels for the scans do not ask the norms to be theirs; a call's own request is refused all the same."""
    x, weight = torch.ones(2, 3), torch.ones(3)
    with use_backend("mamba_ssm", "causal_conv1d"):
        rms_norm(x, weight, eps=1e-5)
        chosen = {row["operator"]: row["backend"] for row in backend_report() if row["chosen"]}
    assert chosen == {"rms_norm": "torch", "gated_rms_norm": "torch"}
    with use_backend("mamba_ssm", "reference"):
        rms_norm(x, weight, eps=1e-5)
    with pytest.raises(BackendUnavailable, match="rms_norm has no backend 'mamba_ssm'"):
        rms_norm(x, weight, eps=1e-5, backend="mamba_ssm")
    with pytest.raises(ValueError, match="unknown backend 'tourch'"):
        rms_norm(x, weight, eps=1e-5, backend="tourch")
    assert runs == ["torch", "reference"]


def test_unknown_names():
    with pytest.raises(ValueError, match=r"unknown backend 'tourch': choose one of .*torch.*reference"):
        ssd(**ssd_inputs(), backend="tourch")
    with pytest.raises(ValueError, match="unknown backend 'tourch'"), use_backend("tourch"):
        pass


def test_what_is_not_installed(bare_machine):
    message = "ssd: backend 'mamba_ssm' cannot be used: mamba_ssm is not installed"
    with pytest.raises(BackendUnavailable, match=message):
        ssd(**ssd_inputs(), backend="mamba_ssm")
    with use_backend("mamba_ssm"), pytest.raises(BackendUnavailable, match=message):
        ssd(**ssd_inputs())


def test_a_package_without_its_compiled_part(bare_machine, monkeypatch):
    monkeypatch.setattr(backends, "_installed", lambda package: package == "mamba_ssm")
    with pytest.raises(BackendUnavailable, match="cannot be used: selective_scan_cuda is not installed"):
        ssd(**ssd_inputs(), backend="mamba_ssm")


def test_a_device_that_is_not_there(bare_machine, monkeypatch):
    monkeypatch.setattr(backends, "_installed", lambda package: True)
    message = "ssd: backend 'mamba_ssm' runs on cuda, which this machine does not have"
    with pytest.raises(BackendUnavailable, match=message):
        ssd(**ssd_inputs(), backend="mamba_ssm")


def test_tensors_on_another_device(bare_machine, monkeypatch):
    monkeypatch.setattr(backends, "_installed", lambda package: True)
    monkeypatch.setattr(backends, "_device_present", lambda device: True)
    with pytest.raises(UnsupportedByBackend, match=r"ssd\[mamba_ssm\]: runs on cuda, the tensors are on cpu"):
        ssd(**ssd_inputs(), backend="mamba_ssm")
    ssd(**cast(ssd_inputs(), torch.float32))  # of itself it takes one that can


def test_an_operator_without_that_backend():
    with pytest.raises(BackendUnavailable, match="causal_conv1d has no backend 'mamba_ssm'; it has causal_conv1d, "):
        CONV("mamba_ssm")(**conv_inputs())


def test_no_backend_at_all(bare_machine, monkeypatch):
    monkeypatch.setitem(backends.OPERATORS, "ssd", backends.OPERATORS["ssd"][:1])
    with pytest.raises(BackendUnavailable, match="no backend can run ssd here: mamba_ssm: mamba_ssm is not installed"):
        ssd(**ssd_inputs())


def test_the_first_that_can_run_the_call_is_taken(monkeypatch, runs):
    """In the table's order, past those that refuse, never one that is there only by name."""
    torch_row, reference = (row for row in backends.OPERATORS["ssd"] if row.name in ("torch", "reference"))
    picky = dataclasses.replace(
        reference, name="picky", automatic=True, lacks=lambda call: "a state" if call["initial_state"] else None
    )
    monkeypatch.setitem(backends.OPERATORS, "ssd", (reference, picky, torch_row))
    forget_choices()
    ssd(**ssd_inputs())
    ssd(**ssd_inputs(initial_state=False))
    with pytest.raises(UnsupportedByBackend, match=r"ssd\[picky\]: a state"):
        ssd(**ssd_inputs(), backend="picky")
    monkeypatch.undo()
    forget_choices()
    assert runs == ["torch", "reference"]


def test_report(bare_machine, capsys):
    report = backend_report()
    assert {row["operator"] for row in report} == set(backends.OPERATORS)
    chosen = {row["operator"]: row["backend"] for row in report if row["chosen"]}
    assert chosen == dict.fromkeys(backends.OPERATORS, "torch")
    reasons = {(row["operator"], row["backend"]): (row["available"], row["reason"]) for row in report}
    assert reasons["ssd", "mamba_ssm"] == (False, "mamba_ssm is not installed")
    assert reasons["ssd", "torch"] == (True, "first that runs on cpu")
    assert reasons["ssd", "reference"] == (True, "only when asked for by name")
    with use_backend("reference"):
        forced = {row["operator"]: row for row in backend_report() if row["chosen"]}
    assert {row["backend"] for row in forced.values()} == {"reference"}
    assert {row["reason"] for row in forced.values()} == {"forced: reference"}

    explain()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(report)
    assert "-> ssd             torch          first that runs on cpu" in lines
    assert "   ssd             mamba_ssm      mamba_ssm is not installed" in lines


def test_a_compiled_function_follows_the_request():
    """A choice is a constant of the graph, and another request another graph."""
    torch.compiler.reset()
    tensors = cast(conv_inputs(channels=5), torch.float32)
    compiled = torch.compile(CONV.function, fullgraph=True, backend="eager")
    compiled(**tensors)
    with use_backend("causal_conv1d"), pytest.raises(Exception, match=r"backend 'causal_conv1d'|multiples of 8"):
        compiled(**tensors)
    compiled(**tensors)


SCRIPT = """
import sys
import torch._dynamo, transformers  # _dynamo looks for triton by importing it
before = set(sys.modules)
from hf_ssm.ops import backends, causal_conv1d
kernels = {"mamba_ssm", "selective_scan_cuda", "causal_conv1d", "causal_conv1d_cuda", "flash_attn", "triton"}
assert not kernels & (set(sys.modules) - before)
causal_conv1d(torch.zeros(1, 3, 2), torch.zeros(2, 4))
print(*(impl for loaded in backends._LOADED.values() for impl in loaded))
"""


# what an ordinary call takes on a CPU
OF_ITSELF = next(
    row.impl for row in backends.OPERATORS["causal_conv1d"] if row.name in usable("causal_conv1d") and row.automatic
)


@pytest.mark.parametrize(
    ("value", "printed", "complaint"),
    [
        ("reference", "hf_ssm.ops.causal_conv1d:causal_conv1d_reference", ""),
        ("", OF_ITSELF, ""),
        ("tourch", "", "ValueError: unknown backend 'tourch': choose one of"),
    ],
    ids=["reference", "empty", "unknown"],
)
def test_environment(value, printed, complaint):
    """HF_SSM_BACKEND forces, an empty one does not; importing the operators imports no kernel package."""
    environment = {**os.environ, "HF_SSM_BACKEND": value}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert complaint in done.stderr
    assert bool(complaint) == bool(done.returncode), done.stderr
    assert done.stdout.strip() == printed


@pytest.fixture
def preferring(monkeypatch, tmp_path):
    """Let preferences.json be what a test writes."""

    def write(*entries):
        path = tmp_path / "preferences.json"
        path.write_text(json.dumps(list(entries)))
        monkeypatch.setattr(backends, "PREFERENCES_FILE", path)
        backends._all_preferences.cache_clear()
        backends._choose_row.cache_clear()

    yield write
    monkeypatch.undo()
    backends._all_preferences.cache_clear()
    backends._choose_row.cache_clear()


MEASURED = {"operator": "ssd", "architecture": "cpu", "backend": "torch", "one_token": False, "because": "2 times"}


def test_what_was_measured_is_obeyed(bare_machine, preferring, monkeypatch, runs):
    """On that architecture, for that kind of call; where it cannot run the call, the table goes on as ever."""
    torch_row, reference = (row for row in backends.OPERATORS["ssd"] if row.name in ("torch", "reference"))
    first = dataclasses.replace(reference, automatic=True)
    monkeypatch.setitem(backends.OPERATORS, "ssd", (first, torch_row))
    for entry, several, one in [
        (MEASURED, "torch", "reference"),
        (MEASURED | {"one_token": True}, "reference", "torch"),
        (MEASURED | {"architecture": "sm_90"}, "reference", "reference"),
        (MEASURED | {"operator": "selective_scan"}, "reference", "reference"),
        (MEASURED | {"backend": "not installed"}, "reference", "reference"),
    ]:
        preferring(entry)
        ssd(**ssd_inputs())
        ssd(**ssd_inputs(seqlen=1))
        assert runs == [several, one]
        runs.clear()
    preferring(MEASURED)
    with use_backend("reference"):
        ssd(**ssd_inputs())
    assert runs == ["reference"], "who asks by name gets it"
    (row,) = (row for row in backend_report() if row["operator"] == "ssd" and row["chosen"])
    assert (row["backend"], row["reason"]) == ("torch", "measured: 2 times")


def test_preferences_as_shipped():
    """Every entry names a backend that its operator has, and measurements that are in the repository."""
    for entry in json.loads(backends.PREFERENCES_FILE.read_text()):
        preference = backends.Preference(**entry)
        assert preference.backend in [row.name for row in backends.OPERATORS[preference.operator]]
        results = Path(__file__).parents[2] / "benchmarks" / "results"
        assert any(path.name in preference.because for path in results.iterdir())


def test_operators_need_no_transformers():
    """Only models do: an installation with an older one can still use, test and measure the operators."""
    script = "import sys; sys.modules['transformers'] = None; import hf_ssm.ops; hf_ssm.ops.explain()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
