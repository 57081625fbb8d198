"""The `hf-ssm` command: what it prints, what it refuses, and its exit codes."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_ssm import HydraConfig, HydraForMaskedLM
from hf_ssm.cli import app
from hf_ssm.data import train_tokenizer
from hf_ssm.recipes import model_config


def invoke(*arguments, **kwargs):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **kwargs)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """An untrained model that never ends its text by itself."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 3, 280)
    config = model_config(
        {
            "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8, "head_dim": 16,
            "num_heads": 4, "n_groups": 1, "chunk_size": 16, "vocab_size": len(tokenizer), "eos_token_id": None,
            "bos_token_id": None, "pad_token_id": 1,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(200)))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
        output_dir: {tmp_path / "run"}
        model: {{model_type: mamba2, hidden_size: 32, num_hidden_layers: 1, state_size: 8, head_dim: 16, num_heads: 4,
                n_groups: 1, chunk_size: 16}}
        tokenizer: {{vocab_size: 270}}
        data: {{source: {tmp_path / "text.txt"}, block_length: 32}}
        training: {{max_steps: 2, per_device_train_batch_size: 2, use_cpu: true, disable_tqdm: true}}
        """
    )
    return path


def test_help_shows_every_command_with_examples():
    top = invoke("--help")
    assert top.exit_code == 0
    for command in ("train", "generate", "state save", "convert", "push", "doctor"):
        assert command.split()[0] in top.stdout
        page = invoke(*command.split(), "--help")
        assert page.exit_code == 0
        assert command == "doctor" or f"hf-ssm {command}" in page.stdout


def test_wrong_usage_exits_with_2():
    assert invoke().exit_code == 2
    assert invoke("trian").exit_code == 2
    assert invoke("generate").exit_code == 2
    assert invoke("generate", "model", "text", "--max-new-tokens", "0").exit_code == 2
    assert invoke("convert", "a", "b", "--to", "elsewhere").exit_code == 2


# ---------------------------------------------------------------- train


def test_train_and_generate_from_what_was_saved(recipe, tmp_path):
    result = invoke("train", recipe, "--set", "training.max_steps=1", "--set", "seed=1")
    assert result.exit_code == 0, result.output
    assert "bits per byte:" in result.stdout and str(tmp_path / "run" / "report.md") in result.stdout
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["steps"] == 1
    assert invoke("generate", tmp_path / "run" / "model", "line", "--max-new-tokens", 3).exit_code == 0

    refused = invoke("train", recipe)
    assert refused.exit_code == 1
    assert "different: seed, training.max_steps" in refused.stderr
    assert invoke("train", recipe, "--restart").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "training.max_stps=3"], "did you mean 'training.max_steps'"),
        (["--set", "nonsense"], "expected key=value"),
        (["--set", "data.source=missing.txt"], "'missing.txt' does not exist"),
        (["--set", "model.hidden_size=33"], "model:"),
    ],
)
def test_train_refuses_bad_input(recipe, arguments, complaint):
    result = invoke("train", recipe, *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr and result.stderr.startswith("error: ") and "Traceback" not in result.output


def test_train_without_its_recipe(tmp_path):
    result = invoke("train", tmp_path / "missing.yaml")
    assert result.exit_code == 2 and "missing.yaml" in result.stderr


def test_train_into_a_folder_that_cannot_be_written(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    result = invoke("train", recipe, "--set", f"output_dir={tmp_path / 'file' / 'run'}")
    assert result.exit_code == 1 and "cannot write in" in result.stderr


# ---------------------------------------------------------------- generate


def continuation(folder, prompt, **how):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, **how)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("beams", [1, 2])
def test_generate_prints_the_continuation(model_folder, beams):
    result = invoke("generate", model_folder, "def f(x):", "--max-new-tokens", 12, "--num-beams", beams)
    assert result.exit_code == 0, result.output
    want = continuation(model_folder, "def f(x):", max_new_tokens=12, do_sample=False, num_beams=beams)
    assert result.stdout == want + "\n"


def test_generate_streams(model_folder, monkeypatch):
    from transformers import TextStreamer

    pieces = []
    monkeypatch.setattr(TextStreamer, "put", lambda self, value: pieces.append(value.numel()))
    monkeypatch.setattr(TextStreamer, "end", lambda self: pieces.append("end"))
    assert invoke("generate", model_folder, "def", "--max-new-tokens", 4).exit_code == 0
    assert pieces[1:] == [1, 1, 1, 1, "end"]


def test_generate_reads_standard_input(model_folder):
    given = invoke("generate", model_folder, "def f(x):", "--max-new-tokens", 8)
    piped = invoke("generate", model_folder, "-", "--max-new-tokens", 8, input="def f(x):")
    assert piped.exit_code == 0 and piped.stdout == given.stdout


def test_a_seed_repeats_the_sample(model_folder):
    arguments = ["generate", model_folder, "def", "--temperature", 2, "--top-p", 0.99, "--max-new-tokens", 20]
    one, same, other = (invoke(*arguments, "--seed", seed).stdout for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([""], "the prompt is empty"),
        (["-"], "the prompt is empty"),
        (["text", "--top-p", "0.5"], "add --temperature"),
    ],
)
def test_generate_refuses_bad_input(model_folder, arguments, complaint):
    result = invoke("generate", model_folder, *arguments, input="")
    assert result.exit_code == 2 and complaint in result.stderr and not result.stdout


@pytest.mark.parametrize("place", ["./missing", "empty"])
def test_generate_without_a_model(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    result = invoke("generate", place, "text")
    assert result.exit_code == 2 and place in result.stderr and "Traceback" not in result.output


def test_generate_with_an_encoder(tmp_path):
    config = HydraConfig(vocab_size=16, hidden_size=8, head_dim=8, num_hidden_layers=1)
    HydraForMaskedLM(config).save_pretrained(tmp_path)
    result = invoke("generate", str(tmp_path), "x")
    assert result.exit_code == 2
    assert "a hydra model is an encoder, it does not generate" in result.stderr


def test_generate_with_a_truncated_file(model_folder, tmp_path):
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = invoke("generate", tmp_path, "text")
    assert result.exit_code != 0 and result.stderr.startswith("error: ") and "Traceback" not in result.output


# ---------------------------------------------------------------- state


DOCUMENT = "def f(x):\n    return x + 1\n" * 40


@pytest.fixture(scope="session")
def state_file(model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "doc.safetensors"
    (path.parent / "doc.py").write_text(DOCUMENT)
    result = invoke("state", "save", model_folder, path.parent / "doc.py", "-o", path)
    assert result.exit_code == 0, result.output
    tokens = len(AutoTokenizer.from_pretrained(model_folder)(DOCUMENT)["input_ids"])
    assert f"written: {path}" in result.stdout and f"after {tokens:,} tokens" in result.stdout
    return path


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("question", ["f", "def g(x):\n    return x - 1\n"], ids=["short", "long"])
def test_generate_goes_on_from_a_state(model_folder, state_file, question, beams):
    how = ("--max-new-tokens", 12, "--num-beams", beams)
    result = invoke("generate", model_folder, "--state", state_file, question, *how)
    assert result.exit_code == 0, result.output
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in (DOCUMENT, question)]
    output = model.generate(torch.cat(ids, dim=1), max_new_tokens=12, do_sample=False, num_beams=beams)
    assert result.stdout == tokenizer.decode(output[0, -12:], skip_special_tokens=True) + "\n"


def test_a_prompt_may_be_longer_than_what_the_state_has_read(model_folder, tmp_path):
    path = tmp_path / "short.safetensors"
    assert invoke("state", "save", model_folder, "-", "-o", path, input="def").exit_code == 0
    result = invoke("generate", model_folder, "--state", path, " f(x):\n    return", "--max-new-tokens", 12)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in ("def", " f(x):\n    return")]
    output = model.generate(torch.cat(ids, dim=1), max_new_tokens=12, do_sample=False)
    assert result.stdout == tokenizer.decode(output[0, -12:], skip_special_tokens=True) + "\n"


@pytest.mark.parametrize(
    ("text", "output", "complaint"),
    [
        ("", "doc.safetensors", "the text is empty"),
        ("missing.txt", "doc.safetensors", "no such file: missing.txt"),
        ("some text", "missing/doc.safetensors", "no such folder: missing"),
    ],
)
def test_state_save_refuses_bad_input(model_folder, tmp_path, monkeypatch, text, output, complaint):
    monkeypatch.chdir(tmp_path)
    result = invoke("state", "save", model_folder, text, "-o", output)
    assert result.exit_code == 2 and complaint in result.stderr and not list(tmp_path.iterdir())


def test_generate_refuses_a_state_that_is_none(model_folder, tmp_path):
    result = invoke("generate", model_folder, "--state", model_folder / "model.safetensors", "x")
    assert result.exit_code == 2 and "not of a cache" in result.stderr
    result = invoke("generate", model_folder, "--state", tmp_path / "missing.safetensors", "x")
    assert result.exit_code == 2 and "no such file" in result.stderr


# ---------------------------------------------------------------- convert, doctor


def test_convert_passes_everything_on(monkeypatch, tmp_path):
    asked = []

    def convert(source, destination, *, to="hf", dtype=None):
        asked.append((source, destination, to, dtype))
        if source.name == "foreign":
            raise ValueError("foreign: not a checkpoint of ours")
        return destination

    monkeypatch.setitem(sys.modules, "hf_ssm.convert", types.SimpleNamespace(convert=convert))
    result = invoke("convert", "a", "b", "--to", "original", "--dtype", "bfloat16")
    assert result.exit_code == 0 and "b" in result.stdout
    assert asked == [(Path("a"), Path("b"), "original", "bfloat16")]
    refused = invoke("convert", "foreign", "b")
    assert refused.exit_code == 2 and "not a checkpoint of ours" in refused.stderr


def test_doctor_says_what_runs_here():
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["packages"]["torch"] == torch.__version__
    assert "mamba-ssm" in report["packages"] and report["devices"][0].startswith("cpu")
    operators = {row["operator"] for row in report["operators"]}
    assert {"causal_conv1d", "selective_scan", "ssd"} <= operators
    for operator in operators:
        chosen = [row for row in report["operators"] if row["operator"] == operator and row["chosen"]]
        assert len(chosen) == 1 and chosen[0]["available"] and chosen[0]["reason"]
    table = invoke("doctor")
    assert table.exit_code == 0 and all(operator in table.stdout for operator in operators)


def test_doctor_imports_no_kernel_package(tmp_path):
    for name in ("mamba_ssm", "causal_conv1d", "flash_attn"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "hf_ssm.cli", "doctor", "--json"], env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- errors in general


def fail_with(error):
    def convert(*args, **kwargs):
        raise error

    return types.SimpleNamespace(convert=convert)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("bad value"), 2, "error: bad value"),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: "),
        (PermissionError(13, "Permission denied", "x"), 1, "error: "),
        (RuntimeError("odd"), 1, "error: RuntimeError: odd"),
    ],
)
def test_exit_codes(monkeypatch, error, code, message):
    monkeypatch.setitem(sys.modules, "hf_ssm.convert", fail_with(error))
    result = invoke("convert", "a", "b")
    assert result.exit_code == code
    assert result.stderr.startswith(message) and "Traceback" not in result.output


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_ssm.convert", fail_with(RuntimeError("odd")))
    result = invoke("--debug", "convert", "a", "b")
    assert result.exit_code == 1 and isinstance(result.exception, RuntimeError)
