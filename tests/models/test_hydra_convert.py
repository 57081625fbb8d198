"""Hydra's checkpoints in the shapes that its authors' code writes, to ours and back."""

import json
import random
import shutil
import zipfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

import hf_ssm
from hf_ssm.cli import app
from hf_ssm.convert import UnknownCheckpoint, convert

from .helpers import tiny

DATA = Path(__file__).parents[1] / "data" / "models"
MASKED_LM = DATA / "hydra_masked_lm"
CASES = [
    *(MASKED_LM / case for case in ("postnorm", "prenorm", "positions")),
    *(DATA / "hydra_sequence_classification" / case for case in ("pool_first", "pool_all")),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


# what the authors' code can hold of the tiny models
PLAIN = {
    "n_groups": 1,
    "learnable_initial_states": False,
    "use_bias": False,
    "time_step_limit": (0.0, float("inf")),
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


# --- what there is ---------------------------------------------------------------------------------------------------


@every_case
def test_both_ways_keep_every_bit_and_what_matters_of_the_configuration(case, tmp_path):
    ours = convert(case, tmp_path / "ours")
    assert json.loads((ours / "config.json").read_text())["model_type"] == "hydra"
    back = convert(ours, tmp_path / "back", to="original")
    same(torch.load(back / "pytorch_model.bin", weights_only=True), weights(case))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (case, back))
    attention = {"num_attention_heads", "intermediate_size", "attention_probs_dropout_prob"}
    others = {"qk_dim", "is_data_dependent"}  # of other matrix mixers
    for name in set(before) - attention - others - {"num_labels"}:
        assert after[name] == before[name], name
    assert len(after["id2label"]) == before.get("num_labels", 2)
    again = convert(back, tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (again / file).read_bytes() == (ours / file).read_bytes(), file
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "back", "ours"], "nothing unfinished is left"


def as_composer(state: dict, path: Path) -> None:
    torch.save(
        {"state": {"model": {f"model.{name}": t for name, t in state.items()}, "timestamp": {"batch": 7}}}, path
    )


SHAPES = {
    "Composer's latest-rank0.pt": ("latest-rank0.pt", as_composer),
    "a plain state dict, .pt": ("weights.pt", torch.save),
    "a plain state dict, .bin": ("pytorch_model.bin", torch.save),
    "safetensors": ("model.safetensors", save_file),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("place", ["a file", "a folder", "a folder with config.json"])
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_every_shape_gives_the_same_model(shape, place, case, tmp_path):
    name, save = SHAPES[shape]
    source = tmp_path / "source"
    source.mkdir()
    save(weights(case), source / name)
    if place == "a folder with config.json":
        shutil.copy(case / "config.json", source)
    folder = convert(source / name if place == "a file" else source, tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(folder)
    assert type(model) is hf_ssm.HydraForMaskedLM
    same(model.state_dict(), weights(case))


def test_composers_own_file(tmp_path):
    folder = convert(MASKED_LM / "postnorm" / "latest-rank0.pt", tmp_path / "out")
    same(AutoModelForMaskedLM.from_pretrained(folder).state_dict(), weights(MASKED_LM / "postnorm"))


@pytest.mark.parametrize("numpy_module", ["numpy._core.multiarray", "numpy.core.multiarray"])
def test_all_that_composer_saves(numpy_module, tmp_path):
    """Times and the states of random number generators lie beside the weights, of numpy before and since version 2."""
    state = {f"model.{name}": t for name, t in weights(MASKED_LM / "postnorm").items()}
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    times = {"Timestamp": {"total_wct": timedelta(seconds=3), "batch": 7}}
    file = tmp_path / "latest-rank0.pt"
    torch.save({"state": {"model": state, "timestamp": times}, "rng": [rng]}, file)
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content.replace(b"numpy._core.multiarray", numpy_module.encode()))
    folder = convert(file, tmp_path / "out")
    same(AutoModelForMaskedLM.from_pretrained(folder).state_dict(), weights(MASKED_LM / "postnorm"))


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file(kept, tmp_path):
    content = (MASKED_LM / "postnorm" / "latest-rank0.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(content[: int(kept * len(content))])
    refused(tmp_path / "half.pt", tmp_path, "half.pt is truncated: its end is missing; copy it again")


def test_a_damaged_file(tmp_path):
    content = bytearray((MASKED_LM / "postnorm" / "latest-rank0.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "flipped.pt").write_bytes(content)
    refused(tmp_path / "flipped.pt", tmp_path, "flipped.pt is damaged: the checksum of")


@pytest.mark.parametrize("content", ["[]", "null", '"text"'])
def test_a_configuration_that_is_no_object(content, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(MASKED_LM / "postnorm", source)
    (source / "config.json").write_text(content)
    refused(source, tmp_path, "expected an object with a model's settings")


@every_case
def test_a_configuration_is_read_off_the_shapes(case, tmp_path):
    shutil.copy(case / "model.safetensors", tmp_path / "file.safetensors")
    read, said = (
        json.loads((convert(source, tmp_path / name) / "config.json").read_text())
        for source, name in ((tmp_path / "file.safetensors", "read"), (case, "said"))
    )
    differ = {name for name in {*read, *said} if read.get(name) != said.get(name)}
    assert differ <= {
        "chunk_size",
        "max_position_embeddings",
        "pooling",
    }  # of no parameter's size, if there is no table
    assert read["architectures"] == said["architectures"]
    if case.name == "positions":
        assert read["max_position_embeddings"] == 64


@pytest.mark.parametrize("changes", [{}, {"n_groups": 1, "learnable_initial_states": False, "is_prenorm": True}])
@pytest.mark.parametrize(
    ("auto_class", "changes_of_head"),
    [
        ("AutoModel", {}),
        ("AutoModelForMaskedLM", {"use_position_embeddings": True, "embedding_norm_epsilon": 1e-3}),
        ("AutoModelForQuestionAnswering", {}),
        ("AutoModelForSequenceClassification", {"num_labels": 5}),
        ("AutoModelForTokenClassification", {"num_labels": 5}),
    ],
)
def test_the_class_and_every_size_are_read_off(auto_class, changes_of_head, changes, tmp_path):
    model = tiny("hydra", auto_class, **changes, **changes_of_head)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    folder = convert(tmp_path / "weights.pt", tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    same(type(model).from_pretrained(folder).state_dict(), model.state_dict())


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_an_encoder_without_a_pooler(prefix, tmp_path):
    state = tiny("hydra", "AutoModelForMaskedLM").bert.state_dict()
    torch.save({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "weights.pt")
    same(weights(convert(tmp_path / "weights.pt", tmp_path / "out")), state)


def test_vocabulary_padded_to_a_multiple_of_8(tmp_path):
    """As published: 30522 in the configuration, 30528 rows in the weights."""
    source = tmp_path / "source"
    shutil.copytree(MASKED_LM / "postnorm", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 91}))
    folder = convert(source, tmp_path / "out")
    assert AutoModelForMaskedLM.from_pretrained(folder).config.vocab_size == 96
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 80}))
    with pytest.raises(UnknownCheckpoint, match=r"not of the sizes .*weight is \(96, 32\) and not \(80, 32\)"):
        convert(source, tmp_path / "other")


def test_number_of_labels_without_and_with_names(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(DATA / "hydra_sequence_classification" / "pool_all", source)
    config = json.loads((source / "config.json").read_text())
    del config["num_labels"]
    (source / "config.json").write_text(json.dumps(config))
    folder = convert(source, tmp_path / "numbered")
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 3
    names = {"0": "no", "1": "yes", "2": "perhaps"}
    (source / "config.json").write_text(json.dumps(config | {"id2label": names}))
    folder = convert(source, tmp_path / "named")
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.id2label[2] == "perhaps"


def test_dtype_tokenizer_and_command(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(MASKED_LM / "postnorm", source)
    (source / "tokenizer.json").write_text("{}")
    done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    dtypes = {name: t.dtype for name, t in weights(tmp_path / "out").items()}
    assert {t for name, t in dtypes.items() if not name.endswith(("A_log", "dt_bias"))} == {torch.bfloat16}
    assert {t for name, t in dtypes.items() if name.endswith(("A_log", "dt_bias"))} == {torch.float32}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_base_model_goes_back_too(tmp_path):
    model = tiny("hydra", "AutoModel", **PLAIN, use_position_embeddings=True)
    model.save_pretrained(tmp_path / "ours")
    back = convert(tmp_path / "ours", tmp_path / "back", to="original")
    assert json.loads((back / "config.json").read_text())["architectures"] == ["BertModel"]
    stored = torch.load(back / "pytorch_model.bin", weights_only=True)
    assert torch.equal(stored.pop("embeddings.position_ids"), torch.arange(64)[None])
    same(stored, model.state_dict())
    same(AutoModel.from_pretrained(convert(back, tmp_path / "again")).state_dict(), model.state_dict())


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(source: Path, tmp_path: Path, message: str, **kwargs) -> None:
    with pytest.raises(UnknownCheckpoint, match=message):
        convert(source, tmp_path / "out", **kwargs)
    assert not list(tmp_path.glob("*out*")), "nothing half-written"


class Anything:
    """A class that a training program might have pickled."""


def test_pickled_objects(tmp_path):
    torch.save({"state": {"model": {}, "rng": Anything()}}, tmp_path / "latest-rank0.pt")
    refused(tmp_path / "latest-rank0.pt", tmp_path, "could run code of whoever wrote it. If you trust them, keep only")


def test_files_that_are_something_else(tmp_path):
    file = tmp_path / "weights.pt"
    file.write_bytes(b"")
    refused(file, tmp_path, "cannot be read .*truncated or something else")
    torch.save([torch.zeros(3)], file)
    refused(file, tmp_path, "neither a state dict nor a checkpoint of Composer")
    torch.save({"state": {"optimizers": {}}}, file)
    refused(file, tmp_path, "neither a state dict nor a checkpoint of Composer")
    torch.save({"backbone.embeddings.weight": torch.zeros(3, 3)}, file)
    refused(file, tmp_path, "is no Hydra: it has no encoder.layer.0.layer.mixer.in_proj.weight")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    refused(tmp_path / "broken.safetensors", tmp_path, "cannot be read")
    with pytest.raises(FileNotFoundError, match="no config\\.json"):
        convert(tmp_path / "nowhere.pt", tmp_path / "out")


@pytest.mark.parametrize("change", ["missing keys", "unexpected keys", "not of the sizes"])
def test_weights_that_do_not_fit(change, tmp_path):
    state = weights(MASKED_LM / "postnorm")
    if change == "missing keys":
        del state["bert.encoder.layer.1.layer.mixer.fc_D.weight"]
    elif change == "unexpected keys":
        state["bert.pooler.dense.weight"] = torch.zeros(32, 32)
    else:
        state["bert.encoder.layer.1.layer.mixer.D"] = torch.zeros(5)
    torch.save(state, tmp_path / "weights.pt")
    refused(tmp_path / "weights.pt", tmp_path, change)


def test_a_configuration_of_another_mixer(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(MASKED_LM / "postnorm", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"matrix_mixer_type": "toeplitz"}))
    refused(source, tmp_path, "matrix_mixer_type='toeplitz'")


@pytest.mark.parametrize(
    ("auto_class", "changes", "message"),
    [
        ("AutoModelForMaskedLM", {"n_groups": 2}, "n_groups=2: the authors' code always has 1"),
        ("AutoModelForMaskedLM", {"time_step_limit": (0.1, 1.0)}, "time_step_limit"),
        ("AutoModelForMaskedLM", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ("AutoModelForTokenClassification", {}, "HydraForTokenClassification: the authors' code has no such model"),
        ("AutoModelForImageClassification", {}, "HydraForImageClassification: the authors' code has no such model"),
    ],
)
def test_what_the_authors_code_cannot_hold(auto_class, changes, message, tmp_path):
    tiny("hydra", auto_class, **{**PLAIN, **changes}).save_pretrained(tmp_path / "ours")
    refused(tmp_path / "ours", tmp_path, message, to="original")
