"""Training end to end on a tiny model: groups, bits per byte, checkpoints, resuming, what is left on disk."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hf_ssm  # noqa: F401  registers the architectures
from hf_ssm import objectives, training
from hf_ssm.data import PackedCollator, token_byte_lengths
from hf_ssm.objectives import bits_per_byte
from hf_ssm.recipes import RecipeError, load_recipe, model_config, recipe_from_dict
from hf_ssm.training import (
    OutputError,
    SSMTrainer,
    decay_parameter_names,
    is_complete,
    last_complete_checkpoint,
    mark_complete,
    parameter_groups,
    train,
)

TINY = {
    "mamba2": {
        "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "head_dim": 16,
        "num_heads": 4, "n_groups": 1, "chunk_size": 16, "tie_word_embeddings": True,
    },
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models gain nothing from threads, and on a busy machine lose much by waiting for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(20):
        lines = (f"def f{number}_{line}(x):\n    return x + {line * number}\n" for line in range(12))
        (folder / f"{number}.py").write_text("".join(lines))
    return folder


def tiny_recipe(text_folder, output_dir, **changes):
    content = {
        "output_dir": str(output_dir),
        "model": TINY["mamba2"],
        "tokenizer": {"vocab_size": 300},
        "data": {"source": str(text_folder), "block_length": 64, "validation_fraction": 0.1, "validation_blocks": 6},
        "training": {
            "max_steps": 14, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "logging_steps": 3, "save_steps": 4,
            "disable_tqdm": True, "use_cpu": True,
        },
        "samples": {"prompts": ["def f", "return"], "max_new_tokens": 5},
    }  # fmt: skip
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(value, dict) and key != "model" else value
    return recipe_from_dict(content)


@pytest.fixture(scope="session")
def finished(text_folder, tmp_path_factory):
    """One uninterrupted run that several tests look at and none changes."""
    torch.set_num_threads(1)
    return train(tiny_recipe(text_folder, tmp_path_factory.mktemp("runs") / "whole"))


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_equal_runs(one, other):
    assert [entry["loss"] for entry in one.metrics["history"]] == [entry["loss"] for entry in other.metrics["history"]]
    assert [e["step"] for e in one.metrics["history"]] == [e["step"] for e in other.metrics["history"]]
    assert one.metrics["bits_per_byte"] == other.metrics["bits_per_byte"]
    left, right = weights(one.model_folder), weights(other.model_folder)
    assert all(torch.equal(left[name], right[name]) for name in left)


# ---------------------------------------------------------------- optimiser


def decayed_suffixes(model):
    return {".".join(name.rsplit(".", 2)[-2:]) for name in decay_parameter_names(model)}


def test_what_decays_in_mamba():
    model = AutoModelForCausalLM.from_config(model_config(TINY["mamba"]))
    assert decayed_suffixes(model) == {
        "embeddings.weight", "in_proj.weight", "conv1d.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight",
        "lm_head.weight",
    }  # fmt: skip


def test_what_decays_in_mamba2():
    model = AutoModelForCausalLM.from_config(model_config(TINY["mamba2"] | {"use_bias": True}))
    assert decayed_suffixes(model) == {
        "embeddings.weight", "in_proj.weight", "conv1d.weight", "out_proj.weight", "lm_head.weight",
    }  # fmt: skip


def test_what_decays_in_hymba():
    sizes = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 8, "kq_norm": "perhead-rms"}
    model = AutoModelForCausalLM.from_config(model_config({"model_type": "hymba"} | sizes))
    assert decayed_suffixes(model) == {
        "model.memory_tokens", "embed_tokens.weight", "in_proj.weight", "conv1d.weight", "0.weight", "out_proj.weight",
        "gate_proj.weight", "up_proj.weight", "down_proj.weight", "lm_head.weight",
    }  # fmt: skip


@pytest.mark.parametrize("model_type", TINY)
def test_the_groups_hold_every_trainable_parameter_once(model_type):
    model = AutoModelForCausalLM.from_config(model_config(TINY[model_type]))
    model.get_input_embeddings().weight.requires_grad_(False)
    decayed, undecayed = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
    found = [id(parameter) for parameter in decayed["params"] + undecayed["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(parameter)].rsplit(".", 1)[-1] for parameter in undecayed["params"]}
    assert {"A_log", "D"} <= kept and "backbone.norm_f.weight" in {names[id(p)] for p in undecayed["params"]}


def test_a_marked_parameter_does_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight._no_weight_decay = True
    assert decay_parameter_names(model) == ["0.weight"]


def test_our_trainer_and_a_plain_one_take_the_same_groups(tmp_path):
    model = AutoModelForCausalLM.from_config(model_config(TINY["mamba2"]))
    arguments = TrainingArguments(str(tmp_path), weight_decay=0.2, use_cpu=True, report_to="none")
    groups = SSMTrainer(model, arguments).create_optimizer().param_groups
    plain = torch.optim.AdamW(parameter_groups(model, 0.2), lr=1e-3)
    assert Trainer(model, arguments, optimizers=(plain, None)).create_optimizer() is plain
    for group, want in zip(groups, plain.param_groups, strict=True):
        assert group["weight_decay"] == want["weight_decay"]
        assert [id(p) for p in group["params"]] == [id(p) for p in want["params"]]


# ---------------------------------------------------------------- evaluation


def test_bits_per_byte_is_the_likelihood_of_the_bytes_whatever_the_batch(finished, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(finished.model_folder)
    tokenizer = AutoTokenizer.from_pretrained(finished.model_folder)
    text = Path(finished.metrics["data"], "3.py").read_text()
    ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    blocks = [{"input_ids": block} for block in ids[: len(ids) // 8 * 8].view(-1, 8)]

    with torch.no_grad():
        logits = model(torch.stack([block["input_ids"] for block in blocks])).logits.double()
    nats = covered = 0.0
    for row, block in zip(logits.log_softmax(-1), blocks, strict=True):
        for position in range(7):
            token = int(block["input_ids"][position + 1])
            nats -= float(row[position, token])
            covered += len(tokenizer.decode(token).encode()) if token != tokenizer.eos_token_id else 0

    for batch_size in (3, 100):
        trainer = SSMTrainer(
            model,
            TrainingArguments(
                str(tmp_path), per_device_eval_batch_size=batch_size, use_cpu=True, disable_tqdm=True, report_to="none"
            ),
            data_collator=PackedCollator(tokenizer.eos_token_id),
            eval_dataset=blocks,
            **bits_per_byte(token_byte_lengths(tokenizer)),
        )
        assert trainer.evaluate()["eval_bits_per_byte"] == pytest.approx(nats / math.log(2) / covered, rel=1e-5)


@pytest.mark.parametrize("model_type", TINY)
def test_packed_documents_do_not_see_each_other(model_type):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(TINY[model_type] | {"vocab_size": 50})).eval()
    eos = 0
    documents = [torch.randint(1, 50, (length,)) for length in (5, 1, 9)]
    closed = [torch.cat([document, torch.tensor([eos])]) for document in documents]
    batch = PackedCollator(eos)([{"input_ids": torch.cat(closed)}])
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
        alone = torch.cat([model(document[None]).logits[0] for document in closed])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- checkpoints


def fake_checkpoint(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "weights").write_text("w" * 100)
    return path


def test_only_complete_checkpoints_are_resumed_from(tmp_path):
    assert last_complete_checkpoint(tmp_path / "nowhere") is None
    for step in (5, 10, 200):
        fake_checkpoint(tmp_path, step)
    assert last_complete_checkpoint(tmp_path) is None
    for step in (5, 10):
        mark_complete(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-latest").mkdir()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def damage_by_truncation(path):
    (path / "weights").write_text("w" * 50)


def damage_by_removal(path):
    (path / "weights").unlink()


def damage_the_marker(path):
    (path / "complete.json").write_text('{"files": {"wei')


@pytest.mark.parametrize("damage", [damage_by_truncation, damage_by_removal, damage_the_marker])
def test_a_damaged_checkpoint_is_not_complete(tmp_path, damage):
    path = fake_checkpoint(tmp_path, 5)
    mark_complete(path)
    assert is_complete(path)
    damage(path)
    assert not is_complete(path)


def test_the_newest_checkpoints_are_kept(finished):
    checkpoints = sorted(path.name for path in (finished.folder / "checkpoints").iterdir())
    assert checkpoints == ["checkpoint-12", "checkpoint-14"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "model"
    for content in ("first", "second"):
        with training.folder_in_one_step(target) as partial:
            (partial / "file").write_text(content)
            assert not (target / "file").exists() or (target / "file").read_text() == "first"
    with pytest.raises(RuntimeError), training.folder_in_one_step(target) as partial:
        (partial / "file").write_text("third")
        raise RuntimeError
    assert (target / "file").read_text() == "second" and [p.name for p in tmp_path.iterdir()] == ["model"]


# ---------------------------------------------------------------- a run


def test_a_run_leaves_everything_it_promises(finished):
    folder, metrics = finished.folder, finished.metrics
    assert metrics["bits_per_byte"]["after"] < 0.8 * metrics["bits_per_byte"]["before"]
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = (folder / "report.md").read_text()
    assert f"{metrics['bits_per_byte']['before']:.3f} to {metrics['bits_per_byte']['after']:.3f}" in report
    samples = (folder / "samples.md").read_text()
    assert "def f⟶" in samples and "return⟶" in samples
    assert metrics["steps"] == 14 and metrics["tokens_per_step"] == 4 * 2 * 64
    assert {path.name for path in finished.model_folder.iterdir()} >= {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md",
    }  # fmt: skip
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_the_saved_model_knows_its_special_tokens_and_stops(finished):
    model = AutoModelForCausalLM.from_pretrained(finished.model_folder)
    tokenizer = AutoTokenizer.from_pretrained(finished.model_folder)
    assert model.config.vocab_size % 8 == 0 and model.config.vocab_size >= len(tokenizer) == 300
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert next(model.parameters()).dtype == torch.float32


def test_the_model_card_can_be_read_by_the_hub(finished):
    from huggingface_hub import ModelCard

    card = ModelCard.load(finished.model_folder / "README.md")
    assert card.data.license == "other" and "mamba2" in card.data.tags
    (result,) = card.data.eval_results
    assert result.metric_value == pytest.approx(finished.metrics["bits_per_byte"]["after"], abs=1e-4)
    assert card.text.lstrip().startswith("# mamba2 trained with hf-ssm") and "{{" not in card.text


class Stop(Exception):
    """Stands for a killed process where starting one would be slow."""


@pytest.mark.parametrize("killed_at", [3, 9, 12])
def test_an_interrupted_run_goes_on_with_the_same_losses(finished, text_folder, tmp_path, monkeypatch, killed_at):
    recipe = tiny_recipe(text_folder, tmp_path / "run")

    def stop(self, args, state, control, **kwargs):
        if state.global_step == killed_at:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(training.CompleteCheckpoints, "on_step_begin", stop, raising=False)
        with pytest.raises(Stop):
            train(recipe)
    half_written = tmp_path / "run" / "checkpoints" / "checkpoint-13"
    half_written.mkdir(parents=True, exist_ok=True)
    (half_written / "model.safetensors").write_text("half")
    assert not (tmp_path / "run" / "metrics.json").exists()

    torch.rand(7)  # whatever the process did before must not matter
    assert_equal_runs(train(recipe), finished)


def test_killed_while_a_checkpoint_is_written(finished, text_folder, tmp_path, monkeypatch):
    recipe = tiny_recipe(text_folder, tmp_path / "run")

    def stop(checkpoint):
        if checkpoint.name == "checkpoint-8":
            raise Stop
        mark_complete(checkpoint)

    with monkeypatch.context() as patch:
        patch.setattr(training, "mark_complete", stop)
        with pytest.raises(Stop):
            train(recipe)
    assert last_complete_checkpoint(tmp_path / "run" / "checkpoints").name == "checkpoint-4"
    assert_equal_runs(train(recipe), finished)


def test_killed_after_the_last_step(finished, text_folder, tmp_path, monkeypatch):
    recipe = tiny_recipe(text_folder, tmp_path / "run")

    def stop(*args, **kwargs):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(objectives, "continue_prompts", stop)
        with pytest.raises(Stop):
            train(recipe)
    assert_equal_runs(train(recipe), finished)


@pytest.mark.slow
def test_kill_9_and_the_same_command_again(text_folder, tmp_path):
    """The promise itself, with real processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def command(name):
        changes = {"training": {"max_steps": 150, "save_steps": 20}}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tiny_recipe(text_folder, tmp_path / name, **changes).to_dict()))
        return [sys.executable, "-m", "hf_ssm.cli", "train", str(path)]

    subprocess.run(command("whole"), env=environment, check=True, capture_output=True)
    process = subprocess.Popen(
        command("killed"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "killed/checkpoints/checkpoint-40/complete.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed/model").exists()

    subprocess.run(command("killed"), env=environment, check=True, capture_output=True)
    runs = [training.RunResult(tmp_path / n, json.loads((tmp_path / n / "metrics.json").read_text())) for n in
            ("whole", "killed")]  # fmt: skip
    assert_equal_runs(*runs)


def test_a_finished_run_is_not_repeated_unless_asked(finished, text_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)  # also: a run may be moved
    recipe = tiny_recipe(text_folder, folder)
    weights_file = folder / "model" / "model.safetensors"
    written = weights_file.stat().st_mtime_ns
    assert train(recipe).metrics == finished.metrics and weights_file.stat().st_mtime_ns == written
    (folder / "notes.txt").write_text("mine")
    again = train(recipe, restart=True)
    assert weights_file.stat().st_mtime_ns > written and (folder / "notes.txt").read_text() == "mine"
    assert_equal_runs(again, finished)


def test_another_recipe_does_not_take_over_a_folder(finished, text_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    recipe = tiny_recipe(text_folder, folder, training={"learning_rate": 1.0}, seed=3)
    with pytest.raises(OutputError, match=r"another recipe \(different: seed, training\.learning_rate\)"):
        train(recipe)


def test_changed_data_is_noticed(text_folder, tmp_path, monkeypatch):
    texts = tmp_path / "texts"
    shutil.copytree(text_folder, texts)
    recipe = tiny_recipe(texts, tmp_path / "run")

    def stop(*args, **kwargs):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(training, "_train_or_resume", stop)
        with pytest.raises(Stop):
            train(recipe)
    (texts / "0.py").write_text("something else entirely\n" * 50)
    (texts / "new.py").write_text("more\n" * 50)
    with pytest.raises(OutputError, match="the data has changed"):
        train(recipe)


def test_fine_tuning_a_saved_model_on_json_lines(finished, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": f"return x + {n}\n" * 5}) + "\n" for n in range(30)))
    recipe = recipe_from_dict(
        {
            "output_dir": str(tmp_path / "run"),
            "model": str(finished.model_folder),
            "data": {"source": str(path), "field": "body", "block_length": 32, "validation_fraction": 0.2},
            "training": {"num_train_epochs": 2, "learning_rate": 3e-3, "disable_tqdm": True, "use_cpu": True},
        }
    )
    result = train(recipe)
    assert result.metrics["bits_per_byte"]["after"] < result.metrics["bits_per_byte"]["before"]
    assert "fine-tuned from" in (result.model_folder / "README.md").read_text()


def test_streaming_resumes_too(text_folder, tmp_path, monkeypatch):
    changes = {"data": {"streaming": True, "validation_fraction": 0.3}, "training": {"max_steps": 10}}
    whole = train(tiny_recipe(text_folder, tmp_path / "whole", **changes))
    recipe = tiny_recipe(text_folder, tmp_path / "run", **changes)

    def stop(self, args, state, control, **kwargs):
        if state.global_step == 6:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(training.CompleteCheckpoints, "on_step_begin", stop, raising=False)
        with pytest.raises(Stop):
            train(recipe)
    assert_equal_runs(train(recipe), whole)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["demo.yaml", "hymba-demo.yaml"])
def test_the_demo_with_fewer_steps(recipe, tmp_path, monkeypatch):
    root = Path(__file__).parent.parent
    monkeypatch.chdir(root)
    changes = ["training.max_steps=20", "data.validation_blocks=8", f"output_dir={tmp_path / 'demo'}"]
    result = train(load_recipe(root / "configs/recipes" / recipe, changes))
    assert result.metrics["bits_per_byte"]["after"] < 0.9 * result.metrics["bits_per_byte"]["before"]
    assert (result.folder / "samples.md").read_text().count("⟶") == 1 + 3


# ---------------------------------------------------------------- trouble


def test_an_output_folder_that_cannot_be_written(text_folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match=r"cannot write in .*file/run"):
        train(tiny_recipe(text_folder, tmp_path / "file" / "run"))


def test_missing_packages_are_named_before_training(text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"needs accelerate and matplotlib: pip install 'hf-ssm\[train\]'"):
        train(tiny_recipe(text_folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_too_little_space_is_noticed_before_training(text_folder, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(training.shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(OutputError, match=r"has 1 MB free, this run needs about"):
        train(tiny_recipe(text_folder, tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()
    monkeypatch.undo()  # a run that never began does not keep its folder from another
    train(tiny_recipe(text_folder, tmp_path / "run", training={"max_steps": 1}, tokenizer={"vocab_size": 280}))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[enforce fail at inline_container.cc:672] . "
     "unexpected pos 423168 vs 423060")],  # the second is what torch.save makes of it
    ids=["system", "torch"],
)  # fmt: skip
def test_a_disk_that_fills_up_leaves_no_model(text_folder, tmp_path, monkeypatch, error):
    from transformers import PreTrainedModel

    recipe = tiny_recipe(text_folder, tmp_path / "run", training={"max_steps": 1})
    save = PreTrainedModel.save_pretrained

    def full(self, folder, *args, **kwargs):
        save(self, folder, *args, **kwargs)
        if "checkpoint" not in str(folder):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(OutputError, match="is full"):
            train(recipe)
    assert not (tmp_path / "run" / "model").exists() and not (tmp_path / "run" / "metrics.json").exists()
    assert train(recipe).metrics["steps"] == 1


def test_a_tokenizer_too_large_for_the_model_is_refused(finished, text_folder, tmp_path):
    from hf_ssm.data import train_tokenizer

    train_tokenizer(["abc " * 100, *(str(n) for n in range(10_000))], 600).save_pretrained(tmp_path / "tokenizer")
    recipe = tiny_recipe(
        text_folder, tmp_path / "run", model=str(finished.model_folder), tokenizer=str(tmp_path / "tokenizer")
    )
    with pytest.raises(RecipeError, match=r"600 tokens, .* has embeddings for 304"):
        train(recipe)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "no/such/folder", "tokenizer": None}, "cannot load one from 'no/such/folder'"),
        ({"training": {"lr_scheduler_type": "bumpy"}}, "training: .*bumpy"),
    ],
)
def test_what_cannot_be_built_is_explained(text_folder, tmp_path, monkeypatch, changes, complaint):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match=complaint):
        train(tiny_recipe(text_folder, tmp_path / "run", **changes))
