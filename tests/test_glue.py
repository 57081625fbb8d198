"""scripts/glue.py: its metrics, every task on made-up data, what it writes, what it refuses."""

import dataclasses
import json

import datasets
import glue
import numpy as np
import pytest
import torch
from glue import TASKS, GlueError, accuracy, f1, load_split, matthews, pearson, ranks, run, spearman
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

import hf_ssm
from hf_ssm.data import train_tokenizer
from hf_ssm.training import OutputError

WORDS = ["good", "bad", "fine", "poor", "the", "film", "was"]


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models gain nothing from threads, and on a busy machine lose much by waiting for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained masked Hydra with its tokenizer, as `hf-ssm train` leaves it."""
    folder = str(tmp_path_factory.mktemp("model"))
    tokenizer = train_tokenizer([" ".join(WORDS)] * 5, 280, masked=True)
    config = hf_ssm.HydraConfig(
        vocab_size=280, hidden_size=16, num_hidden_layers=1, state_size=4, head_dim=8, chunk_size=16, pad_token_id=1
    )
    torch.manual_seed(0)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def examples(name, count, seed=0):
    """Texts of random words; the label is whether the first text begins with "good", as far as the task allows it."""
    task, random = TASKS[name], np.random.default_rng(seed)
    rows = []
    for index in range(count):
        texts = [" ".join(random.choice(WORDS, size=4)) for _ in task.columns]
        label = int(index % 2)
        texts[0] = f"{'good' if label else 'bad'} {texts[0]}"
        rows.append(
            dict(zip(task.columns, texts, strict=True)) | {"label": 4.5 * label if task.num_labels == 1 else label}
        )
    return rows


def write_task(folder, name, train=8, validation=6):
    (folder / name).mkdir(parents=True, exist_ok=True)
    for split, count in [("train", train), *((split, validation) for split in TASKS[name].validation)]:
        lines = (json.dumps(row) + "\n" for row in examples(name, count, seed=len(split)))
        (folder / name / f"{split}.jsonl").write_text("".join(lines))


@pytest.fixture
def data(tmp_path):
    for name in TASKS:
        write_task(tmp_path / "data", name)
    return str(tmp_path / "data")


# ---------------------------------------------------------------- metrics


def test_metrics_have_known_values():
    # By hand: 2 found, 1 wrongly, 1 missed; correlations from scipy's and scikit-learn's documentation.
    predicted, labels = np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 1, 0])
    assert accuracy(predicted, labels) == pytest.approx(3 / 5)
    assert f1(predicted, labels) == pytest.approx(4 / 6)
    assert matthews(np.array([1, -1, 1, 1]), np.array([1, 1, 1, -1])) == pytest.approx(-1 / 3)
    assert matthews(predicted, labels) == pytest.approx((2 * 1 - 1 * 1) / 6)  # (TP TN - FP FN) / sqrt(3 * 3 * 2 * 2)
    x, y = np.array([1.0, 2, 3, 4, 5]), np.array([5.0, 6, 7, 8, 7])
    assert pearson(x, y) == pytest.approx(0.8320502943378437)
    assert spearman(x, y) == pytest.approx(0.8207826816681233)
    assert ranks(np.array([3.0, 1, 3, 2, 3])).tolist() == [4, 1, 4, 2, 4]


def test_metrics_where_nothing_varies():
    zeros, labels = np.zeros(4, int), np.array([0, 1, 0, 1])
    assert f1(zeros, zeros) == 0 and matthews(zeros, labels) == 0 and spearman(zeros.astype(float), labels) == 0


# ---------------------------------------------------------------- running


def test_the_settings_are_those_of_the_paper(tmp_path):
    found = glue.arguments(TASKS["mnli"], tmp_path, 0)
    assert (found.learning_rate, found.num_train_epochs, found.per_device_train_batch_size) == (1e-4, 2, 48)
    assert (found.adam_beta1, found.adam_beta2, found.adam_epsilon, found.warmup_steps) == (0.9, 0.98, 1e-6, 0.06)
    # What a step takes off a weight at the peak: 5e-6 of it, as in the original's decoupled decay.
    assert found.weight_decay * found.learning_rate == pytest.approx(5e-6)


def test_every_task_on_local_data(model, data, tmp_path):
    output = tmp_path / "out"
    results = run(model, list(TASKS), data, output, from_mnli=True, seed=3)
    assert json.loads((output / "results.json").read_text()) == results
    names = {
        "mnli": ["accuracy matched", "accuracy mismatched"], "rte": ["accuracy"], "qqp": ["accuracy", "f1"],
        "qnli": ["accuracy"], "sst2": ["accuracy"], "stsb": ["pearson", "spearman"], "mrpc": ["accuracy", "f1"],
        "cola": ["matthews"],
    }  # fmt: skip
    assert {name: list(task["metrics"]) for name, task in results["tasks"].items()} == names
    assert results["tasks"]["qnli"]["steps"] == 7 and results["tasks"]["mnli"]["validation_examples"] == 12
    from_mnli = {name for name, task in results["tasks"].items() if task["started_from"] != model}
    assert from_mnli == {"rte", "mrpc", "stsb"}
    assert AutoModelForSequenceClassification.from_pretrained(output / "mnli" / "model").config.num_labels == 3
    average = np.mean([task["score"] for task in results["tasks"].values()])
    assert f"| **average** | | **{100 * average:.1f}** |" in (output / "glue.md").read_text()


def test_a_finished_task_is_not_repeated(model, data, tmp_path, monkeypatch):
    first = run(model, ["cola"], data, tmp_path / "out", from_mnli=False, seed=0)
    assert "average, 1 of 8 tasks" in (tmp_path / "out" / "glue.md").read_text()
    ran = []
    monkeypatch.setattr(glue, "run_task", lambda name, *args, **kwargs: ran.append(name) or first["tasks"]["cola"])
    run(model, ["cola", "rte"], data, tmp_path / "out", from_mnli=False, seed=0)
    assert ran == ["rte"]
    with pytest.raises(OutputError, match=r"other settings \(seed\); choose another --output"):
        run(model, ["rte"], data, tmp_path / "out", from_mnli=False, seed=1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"settings": {', "is not valid JSON"),
        ("", "is not valid JSON"),
        *((text, "holds no results of this script") for text in ("{}", "[]", '{"settings": {}, "tasks": []}')),
    ],
)
def test_results_that_cannot_be_read(tmp_path, content, complaint):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(OutputError, match=rf"results\.json {complaint}.*; delete it, or choose another --output"):
        run("model", ["cola"], "data", tmp_path, from_mnli=False, seed=0)
    assert (tmp_path / "results.json").read_text() == content


def test_an_interrupted_run_keeps_what_is_finished(model, data, tmp_path, monkeypatch):
    def stop(name, *args, **kwargs):
        if name == "cola":
            raise KeyboardInterrupt
        return run_task(name, *args, **kwargs)

    run_task = glue.run_task
    with monkeypatch.context() as patch:
        patch.setattr(glue, "run_task", stop)
        with pytest.raises(KeyboardInterrupt):
            run(model, ["cola", "rte"], data, tmp_path / "out", from_mnli=False, seed=0)
    kept = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]
    results = run(model, ["cola", "rte"], data, tmp_path / "out", from_mnli=False, seed=0)["tasks"]
    assert set(kept) == {"rte"} and results["rte"] == kept["rte"] and set(results) == {"rte", "cola"}


def test_it_learns_what_can_be_learnt(model, tmp_path, monkeypatch):
    write_task(tmp_path / "data", "cola", train=64, validation=32)
    monkeypatch.setitem(TASKS, "cola", dataclasses.replace(TASKS["cola"], learning_rate=1e-2))
    results = run(model, ["cola"], str(tmp_path / "data"), tmp_path / "out", from_mnli=False, seed=0)
    assert results["tasks"]["cola"]["metrics"]["matthews"] > 0.9


@pytest.mark.parametrize("form", ["csv", "parquet", "save_to_disk"])
def test_local_data_in_other_forms(data, tmp_path, form):
    want = load_split(data, "stsb", "validation")
    folder = tmp_path / "other" / "stsb"
    folder.mkdir(parents=True)
    found = datasets.Dataset.from_list(examples("stsb", 6, seed=len("validation")))
    if form == "save_to_disk":
        datasets.DatasetDict({"validation": found}).save_to_disk(folder)
    else:
        getattr(found, f"to_{form}")(str(folder / f"validation.{form}"))
    assert load_split(str(tmp_path / "other"), "stsb", "validation").to_list() == want.to_list()


def test_whole_numbers_are_values_in_a_regression(data, tmp_path):
    rows = [row | {"label": 3} for row in examples("stsb", 4)]
    (tmp_path / "stsb").mkdir()
    (tmp_path / "stsb" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_split(str(tmp_path), "stsb", "train").features["label"].dtype == "float32"


def test_the_dataset_of_the_hub_is_asked_for_by_task_and_split(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list([row | {"idx": 0} for row in examples("mnli", 4)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load_split("nyu-mll/glue", "mnli", "validation_matched")
    assert asked == [("nyu-mll/glue", "mnli", "validation_matched")]
    assert found.column_names == ["premise", "hypothesis", "label"]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"sentence1": "a", "label": 0}, r"rte, train: no column 'sentence2' among \['sentence1', 'label'\]"),
        ({"sentence1": "a", "sentence2": "b"}, "rte, train: no column 'label'"),
        ({"sentence1": "a", "sentence2": "b", "label": -1}, "label -1, where an integer from 0 to 1 is expected"),
        ({"sentence1": "a", "sentence2": "b", "label": 2}, "label 2, where"),
        ({"sentence1": "a", "sentence2": "b", "label": 0.5}, r"label 0\.5, where"),
        ({"sentence1": "a", "sentence2": "b", "label": None}, "label None, where"),
        ({"sentence1": "a", "sentence2": 3, "label": 0}, "column 'sentence2' must hold text"),
    ],
)
def test_wrong_data_is_refused(tmp_path, row, complaint):
    (tmp_path / "rte").mkdir()
    (tmp_path / "rte" / "train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(GlueError, match=complaint):
        load_split(str(tmp_path), "rte", "train")


def test_missing_data_is_named(data, tmp_path):
    with pytest.raises(GlueError, match=r"mnli, validation: .* holds no validation with one of the suffixes"):
        load_split(data, "mnli", "validation")
    folder = tmp_path / "rte"
    datasets.DatasetDict({"train": datasets.Dataset.from_list(examples("rte", 2))}).save_to_disk(folder)
    with pytest.raises(GlueError, match=r"no such split, only \['train'\]"):
        load_split(str(tmp_path), "rte", "validation")
    (tmp_path / "cola").mkdir()
    (tmp_path / "cola" / "train.jsonl").write_text("not json\n")
    with pytest.raises(GlueError, match=r"train\.jsonl cannot be read"):
        load_split(str(tmp_path), "cola", "train")
    (tmp_path / "cola" / "train.jsonl").write_text("")
    with pytest.raises(GlueError, match=r"cola, train: .*train\.jsonl is empty"):
        load_split(str(tmp_path), "cola", "train")
    with pytest.raises(GlueError, match="sst2, train: no examples"):
        glue.check_labels(np.array([]), 2, "sst2, train")


def test_a_tokenizer_without_padding_is_refused(model, data, tmp_path):
    folder = tmp_path / "model"
    AutoModelForMaskedLM.from_pretrained(model).save_pretrained(folder)
    tokenizer = train_tokenizer(WORDS, 280, masked=True)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(GlueError, match="has no padding token"):
        run(str(folder), ["cola"], data, tmp_path / "out", from_mnli=False, seed=0)


def test_the_command(model, data, tmp_path):
    import typer

    app = typer.Typer()
    app.command()(glue.main)
    options = ["--data", data, "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [model, "--task", "cola", *options])
    assert result.exit_code == 0 and "| cola | matthews" in result.output
    for arguments, complaint in (
        (["--task", "wnli"], "unknown task 'wnli'; there are mnli, rte"),
        (["--task", "rte", "--from-mnli", "--output", str(tmp_path / "other")], "starts from the model of mnli"),
    ):
        result = CliRunner().invoke(app, [model, *options, *arguments])
        assert result.exit_code == 2 and complaint in result.output
