"""Publishing and fetching, through huggingface_hub's client and a small Hub on the loopback interface."""

import json
import logging
import os
import subprocess
import sys
import time

import huggingface_hub
import pytest
import torch
import transformers
from hub_server import OWNER, READER, WRITER, Hub
from huggingface_hub import ModelCard, constants
from models.helpers import random_ids, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_ssm import registry
from hf_ssm.cards import auto_class
from hf_ssm.cli import app
from hf_ssm.data import train_tokenizer

REPO = f"{OWNER}/tiny"
ARCHITECTURES = list(registry.ARCHITECTURES)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process' client talks to, as somebody who may write; nothing is cached or logged in yet."""
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        for client in (huggingface_hub.hf_api.api, transformers.utils.hub.hf_api()):
            monkeypatch.setattr(client, "endpoint", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, which the server lacks
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", WRITER)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's attempts
        yield server


def save(folder, model_type="mamba", auto="AutoModelForCausalLM", max_shard_size="5GB", **changes):
    model = tiny(model_type, auto, **changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


@pytest.fixture
def folder(tmp_path):
    """A model and its tokenizer, without a card."""
    save(tmp_path / "model", vocab_size=280)
    train_tokenizer(["def f(x):\n    return x\n"] * 3, 280).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def push(*arguments):
    return CliRunner().invoke(app, ["push", *map(str, arguments)])


def fetched(**how):
    return AutoModelForCausalLM.from_pretrained(REPO, **how)


def same_weights(model, other) -> None:
    want = other.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


# ---------------------------------------------------------------- there and back


def test_a_folder_is_published_and_fetched(hub, folder):
    result = push(folder, REPO, "--license", "apache-2.0")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"published: {hub.endpoint}/{REPO}/commit/{hub.repositories[REPO].find('main').sha}\n"
    published = hub.files(REPO)
    assert set(published) == {path.name for path in folder.iterdir()} | {"README.md"}
    assert published["config.json"] == (folder / "config.json").read_bytes()
    same_weights(fetched(), AutoModelForCausalLM.from_pretrained(folder))
    assert AutoTokenizer.from_pretrained(REPO)("def")["input_ids"]
    assert not (folder / "README.md").exists()


def test_a_sharded_folder_in_parts_is_published_and_fetched(hub, tmp_path):
    model = save(tmp_path / "model", "hymba", max_shard_size=10_000)
    shards = list((tmp_path / "model").glob("model-*.safetensors"))
    assert len(shards) > 2
    hub.part_size = 4_000
    assert push(tmp_path / "model", REPO, "--license", "mit").exit_code == 0
    assert hub.uploads() > len(shards)
    same_weights(fetched(), model)
    assert f"{model.num_parameters():,} parameters" in hub.files(REPO)["README.md"].decode()


def test_what_has_not_changed_is_not_sent_again(hub, folder):
    push(folder, REPO, "--license", "mit")
    sent, commits = hub.uploads(), len(hub.repositories[REPO].branches["main"])
    result = push(folder, REPO, "--license", "mit")
    assert result.exit_code == 0 and hub.uploads() == sent
    assert len(hub.repositories[REPO].branches["main"]) == commits


def test_revisions(hub, folder):
    push(folder, REPO, "--license", "mit")
    model = save(folder, "mamba2")
    assert push(folder, REPO, "--license", "mit", "--revision", "second").exit_code == 0
    assert fetched().config.model_type == "mamba" and fetched(revision="second").config.model_type == "mamba2"
    same_weights(fetched(revision=hub.repositories[REPO].find("second").sha), model)


def test_private_repositories(hub, folder, monkeypatch):
    assert push(folder, REPO, "--license", "mit", "--private").exit_code == 0
    assert hub.repositories[REPO].private
    assert fetched().config.model_type == "mamba"
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(OSError, match="is not a local folder and is not a valid model identifier"):
        fetched(force_download=True)

    monkeypatch.setenv("HF_TOKEN", WRITER)
    push(folder, f"{OWNER}/open", "--license", "mit")
    before = hub.files(f"{OWNER}/open")
    result = push(folder, f"{OWNER}/open", "--license", "other", "--private")
    assert result.exit_code == 1 and "exists and is public" in result.stderr
    assert hub.files(f"{OWNER}/open") == before


@pytest.mark.parametrize("model_type", ["mamba2", "hymba"])
def test_push_to_hub_of_a_model(hub, model_type):
    model = tiny(model_type)
    model.push_to_hub(REPO)
    again = fetched()
    ids = random_ids(1, 9)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert {"config.json", "model.safetensors"} <= set(hub.files(REPO))


def test_hidden_files_and_checkpoints_stay_behind(hub, folder):
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "optimizer.pt").write_text("large")
    (folder / ".env").write_text("secret")
    (folder / "samples").mkdir()
    (folder / "samples" / "one.txt").write_text("text")
    assert push(folder, REPO, "--license", "mit").exit_code == 0
    names = set(hub.files(REPO))
    assert "samples/one.txt" in names and not any("checkpoint" in name or name.startswith(".") for name in names)


# ---------------------------------------------------------------- cards


def tasks():
    return [(kind, auto) for kind, architecture in registry.ARCHITECTURES.items() for auto in architecture.models]


@pytest.mark.parametrize(("model_type", "auto"), tasks())
def test_a_card_is_written_of_what_is_known(hub, tmp_path, model_type, auto):
    model = save(tmp_path, model_type, auto)
    assert auto_class(json.loads((tmp_path / "config.json").read_text())) == auto
    result = push(tmp_path, REPO, "--license", "cc-by-4.0", "--base-model", "someone/base", "--code")
    assert result.exit_code == 0, result.output
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert card.data.license == "cc-by-4.0" and card.data.base_model == "someone/base"
    assert card.data.library_name == "transformers" and {model_type, "hf-ssm"} <= set(card.data.tags)
    assert card.data.pipeline_tag in constants_of_the_hub()
    assert card.text.lstrip().startswith("# tiny\n")
    assert f"with {model.num_parameters():,} parameters, fine-tuned from `someone/base`: " in card.text
    assert f"{model.config.num_hidden_layers} layers, " in card.text
    assert "## Limits" in card.text and "@article{" in card.text and "## Training" not in card.text
    assert "trust_remote_code=True" in card.text and "{{" not in card.text and "{%" not in card.text
    (code,) = (block.split("```")[0] for block in card.text.split("```python\n")[1:])
    compile(code, "README.md", "exec")
    assert f'"{REPO}"' in code


def constants_of_the_hub() -> set[str]:
    """Tasks that its client knows, and those that it does not name but the Hub does."""
    from huggingface_hub.inference._client import InferenceClient

    known = {name.replace("_", "-") for name in dir(InferenceClient)}
    return known | {"text-generation", "multiple-choice"}


def test_the_usage_in_a_card_runs(hub, folder):
    push(folder, REPO, "--license", "mit")
    (code,) = (block.split("```")[0] for block in hub.files(REPO)["README.md"].decode().split("```python\n")[1:])
    exec(compile(code, "README.md", "exec"), {})


def test_the_folders_own_card_is_kept(hub, folder):
    card = "---\nlicense: mit  # as agreed\ntags: [mine]\n---\n\n# Mine\n\nAs I want it.\n"
    (folder / "README.md").write_text(card)
    assert push(folder, REPO).exit_code == 0
    assert hub.files(REPO)["README.md"].decode() == card

    result = push(folder, REPO, "--license", "apache-2.0")
    assert result.exit_code == 2 and "states the licence mit, and --license apache-2.0" in result.stderr


def test_a_card_without_a_licence_is_refused(hub, folder):
    result = push(folder, REPO)
    assert result.exit_code == 2 and "the folder has no model card" in result.stderr and not hub.requests

    (folder / "README.md").write_text("# Mine\n")
    result = push(folder, REPO)
    assert result.exit_code == 2 and "README.md states no licence" in result.stderr and not hub.requests
    assert push(folder, REPO, "--license", "mit").exit_code == 0
    assert ModelCard(hub.files(REPO)["README.md"].decode()).data.license == "mit"
    assert (folder / "README.md").read_text() == "# Mine\n"


def test_a_card_that_is_no_yaml_is_refused(hub, folder):
    (folder / "README.md").write_text("---\nlicense: [mit\n---\n\n# Mine\n")
    result = push(folder, REPO)
    assert result.exit_code == 2 and result.stderr.startswith("error: README.md") and not hub.requests


# ---------------------------------------------------------------- code


def elsewhere(hub, code: str, **environment: str):
    """Run Python as somebody else would: another process, with an empty cache."""
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1"} | environment
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_remote_code_loads_without_the_import(hub, tmp_path, model_type):
    auto = "AutoModelForMaskedLM" if model_type == "hydra" else "AutoModelForCausalLM"
    model = save(tmp_path / "model", model_type, auto)
    assert push(tmp_path / "model", REPO, "--code", "--license", "mit").exit_code == 0
    config = json.loads(hub.files(REPO)["config.json"])
    assert config["auto_map"]["AutoConfig"].startswith(f"configuration_{model_type}.")
    assert config["auto_map"][auto] == f"modeling_{model_type}.{type(model).__name__}"
    assert "auto_map" not in json.loads((tmp_path / "model" / "config.json").read_text())

    known = getattr(transformers, auto).from_pretrained(REPO)  # hf_ssm is imported here: no trust is asked for
    assert type(known) is type(model)
    ids = random_ids(1, 9)
    done = elsewhere(
        hub,
        f"import torch, transformers\n"
        f"model = transformers.{auto}.from_pretrained({REPO!r}, trust_remote_code=True).eval()\n"
        f"assert type(model).__module__.startswith('transformers_modules.'), type(model).__module__\n"
        f"torch.save(model(torch.tensor({ids.tolist()})).logits, {str(tmp_path / 'logits.pt')!r})\n",
        HF_HOME=str(tmp_path / "home"),
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(ids).logits)
    assert WRITER not in done.stdout + done.stderr


def test_without_hf_ssm_remote_code_says_what_to_install(hub, tmp_path):
    save(tmp_path / "model", "hymba")
    push(tmp_path / "model", REPO, "--code", "--license", "mit")
    done = elsewhere(
        hub,
        "import sys\n"
        "class NotInstalled:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('hf_ssm'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, NotInstalled())\n"
        "import transformers\n"
        f"transformers.AutoModelForCausalLM.from_pretrained({REPO!r}, trust_remote_code=True)\n",
        HF_HOME=str(tmp_path / "home"),
    )
    assert done.returncode != 0 and "pip install hf_ssm" in done.stderr, done.stderr


def test_offline(hub, folder, tmp_path):
    push(folder, REPO, "--license", "mit")
    load = f"import hf_ssm, transformers\ntransformers.AutoModelForCausalLM.from_pretrained({REPO!r})\n"
    home = {"HF_HOME": str(tmp_path / "home")}
    assert elsewhere(hub, load, **home).returncode == 0
    asked = len(hub.requests)
    assert elsewhere(hub, load, HF_HUB_OFFLINE="1", **home).returncode == 0
    command = f"from hf_ssm.cli import app\napp(['push', {str(folder)!r}, {REPO!r}, '--license', 'mit'])\n"
    done = elsewhere(hub, command, HF_HUB_OFFLINE="1", **home)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "offline mode" in done.stderr.lower()
    assert len(done.stderr.splitlines()) == 1 and len(hub.requests) == asked


# ---------------------------------------------------------------- what goes wrong


def refused(result, *complaints: str, code: int = 1) -> None:
    """One line that says what is wrong, at the end, and no token."""
    assert result.exit_code == code and not result.stdout, result.output
    *before, line = result.stderr.splitlines()
    assert line.startswith("error: ") and not any("error" in text for text in before), result.stderr
    assert all(complaint in line for complaint in complaints), line
    assert WRITER not in line and READER not in line


def test_no_permission(hub, folder, monkeypatch):
    refused(push(folder, "other/tiny", "--license", "mit"), "your token may not write to other/tiny")
    monkeypatch.setenv("HF_TOKEN", READER)
    refused(push(folder, REPO, "--license", "mit"), f"your token may not write to {REPO}")
    assert not hub.repositories
    monkeypatch.setenv("HF_TOKEN", WRITER)
    push(folder, REPO, "--license", "mit")
    before = hub.files(REPO)
    monkeypatch.setenv("HF_TOKEN", READER)
    (folder / "more.txt").write_text("more")
    refused(push(folder, REPO, "--license", "mit"), f"your token may not write to {REPO}")
    assert hub.files(REPO) == before


@pytest.mark.parametrize("token", ["", "hf_" + "x" * 34])
def test_nobody_is_told_to_log_in(hub, folder, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    refused(push(folder, REPO, "--license", "mit"), f"{hub.endpoint} does not know you", "hf auth login")


def test_a_repository_that_does_not_exist(hub, tmp_path):
    with pytest.raises(OSError, match="is not a local folder and is not a valid model identifier"):
        fetched()
    result = CliRunner().invoke(app, ["generate", REPO, "text"])
    assert result.exit_code == 2 and f"cannot load {REPO}" in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize("name", ["a/b/c", "with space", "-dash-"])
def test_names_that_are_none(hub, folder, name):
    result = push("--license", "mit", "--", folder, name)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and not hub.repositories


def test_an_upload_that_breaks_off_shows_nothing_and_goes_on(hub, tmp_path):
    save(tmp_path / "model", "hymba", max_shard_size=10_000)
    sizes = sorted(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    hub.drop_uploads_after = sizes[-2]  # all arrive but the largest
    refused(push(tmp_path / "model", REPO, "--license", "mit"), f"the connection to {hub.endpoint} broke", "goes on")
    assert hub.files(REPO) == {} and len(hub.stored) >= 1
    with pytest.raises(ValueError, match="Unrecognized model"):  # nothing but an empty repository
        fetched()

    hub.drop_uploads_after = None
    already = len(hub.stored)
    hub.requests.clear()
    assert push(tmp_path / "model", REPO, "--license", "mit").exit_code == 0
    assert hub.uploads() == len(sizes) - already
    assert fetched().config.model_type == "hymba"


def test_a_download_that_breaks_off_leaves_nothing_that_looks_finished(hub, folder, tmp_path):
    push(folder, REPO, "--license", "mit")
    hub.drop_downloads_after = 3_000
    with pytest.raises(OSError, match="Can't load the model"):
        fetched()
    result = CliRunner().invoke(app, ["generate", REPO, "text"])
    refused(result, f"cannot load {REPO}: the connection broke; the same command goes on")
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    hub.drop_downloads_after = None
    same_weights(fetched(), AutoModelForCausalLM.from_pretrained(folder))


def test_nobody_answers(hub, folder, monkeypatch):
    with Hub() as gone:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", gone.endpoint)
    refused(push(folder, REPO, "--license", "mit"), f"the connection to {gone.endpoint} broke")


def test_no_token_in_any_log(hub, folder, caplog, capfd):
    logging.getLogger("huggingface_hub").setLevel(logging.DEBUG)
    with caplog.at_level(logging.DEBUG):
        result = push(folder, REPO, "--license", "mit")
        hub.drop_uploads_after = 10
        save(folder, "mamba2")
        again = push(folder, REPO, "--license", "mit")
    assert result.exit_code == 0 and again.exit_code == 1
    out, err = capfd.readouterr()
    assert WRITER not in caplog.text + out + err + result.output + again.output


def test_folders_that_are_no_models(hub, tmp_path):
    refused(push(tmp_path, REPO, "--license", "mit"), "holds no config.json", code=2)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused(push(tmp_path, REPO, "--license", "mit"), "model_type is 'llama', expected one of mamba", code=2)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    refused(push(tmp_path, REPO, "--license", "mit"), "holds no model.safetensors", code=2)
    save(tmp_path, "mamba")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refused(push(tmp_path, REPO, "--license", "mit"), "is not whole", code=2)
    weights.unlink()
    save(tmp_path, "hymba", max_shard_size=10_000)
    next(tmp_path.glob("model-00002*")).unlink()
    refused(push(tmp_path, REPO, "--license", "mit"), "holds no model-00002", code=2)
    assert not hub.requests
