"""Recipes and model configurations: what is refused, and that every file in configs/ is accepted."""

import json
from pathlib import Path

import pytest

import hf_ssm  # noqa: F401  registers the architectures
from hf_ssm.recipes import RecipeError, load_recipe, model_config, parse_yaml, recipe_from_dict

ROOT = Path(__file__).parent.parent
SMALLEST = {"output_dir": "out", "model": {"model_type": "mamba2"}, "tokenizer": {"vocab_size": 300}}


@pytest.mark.parametrize("path", sorted((ROOT / "configs/recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_accepted(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(path)
    if recipe.starts_from_scratch:
        model_config(recipe.model)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.json")), ids=lambda path: path.name)
def test_every_model_configuration_is_accepted(path):
    config = model_config(str(path))
    for key, value in json.loads(path.read_text()).items():
        assert getattr(config, key) == value, key


# With tied embeddings, as in the published checkpoints; the names are rounded.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mamba-130m", 129_135_360),
        ("mamba-370m", 371_516_416),
        ("mamba-790m", 793_204_224),
        ("mamba-1.4b", 1_372_178_432),
        ("mamba-2.8b", 2_768_345_600),
        ("mamba2-130m", 128_989_632),
    ],
)
def test_published_sizes(name, parameters):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(str(ROOT / f"configs/models/{name}.json")))
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"trainin": {}}, "unknown key 'trainin'; did you mean 'training'"),
        ({"data": {"block_lenght": 8}}, r"unknown key 'data\.block_lenght'; did you mean 'data\.block_length'"),
        ({"training": {"learning_rat": 1}}, r"'training\.learning_rat'; did you mean 'training\.learning_rate'"),
        ({"training": {"output_dir": "x"}}, r"training\.output_dir is decided by the run"),
        ({"samples": {"prompts": "text"}}, r"samples\.prompts must be a list of texts, found 'text'"),
        ({"samples": {"prompts": [1]}}, r"samples\.prompts must be a list of texts, found \[1\]"),
        ({"samples": {"prompts": [""]}}, "a prompt is empty"),
        ({"samples": {"max_new_tokens": 0}}, "at least 1"),
        ({"data": {"streaming": "yes please"}}, r"data\.streaming must be true or false"),
        ({"data": {"block_length": True}}, r"data\.block_length must be an integer"),
        ({"data": {"streaming": True, "validation_blocks": 4}}, r"training\.max_steps: a stream has no known length"),
        ({"data": None}, "data is a mapping"),
        ({"model": 3}, "model must be text or a mapping, found 3"),
        ({"tokenizer": None}, "a new model needs one"),
        ({"tokenizer": {"size": 3}}, "a mapping holds vocab_size alone"),
        ({"model": "pretrained/folder"}, "was trained with its own"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be at least 1"),
    ],
)
def test_a_wrong_recipe_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        recipe_from_dict(SMALLEST | change)


def test_a_missing_key_is_named():
    with pytest.raises(RecipeError, match="key 'output_dir' is missing"):
        recipe_from_dict({"model": SMALLEST["model"]})


def test_overrides_win_over_the_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "output_dir: out\nmodel: {model_type: mamba2}\ntokenizer: {vocab_size: 300}\nkeep_checkpoints: 3\n"
    )
    changes = ["training.learning_rate=3e-4", "data.block_length=64", "samples.prompts=[a, b]", "keep_checkpoints=1"]
    recipe = load_recipe(path, changes)
    assert recipe.training == {"learning_rate": 3e-4}
    assert (recipe.data.block_length, recipe.samples.prompts, recipe.keep_checkpoints) == (64, ("a", "b"), 1)
    for change, complaint in [
        ("keep_checkpoints", "expected key=value"),
        ("output_dir.x=1", "'output_dir' is a value"),
        ("data.x=[1", "not valid YAML"),
        ("data.blocklength=1", "did you mean 'data.block_length'"),
    ]:
        with pytest.raises(RecipeError, match=complaint):
            load_recipe(path, [change])


@pytest.mark.parametrize(("text", "complaint"), [("- a\n", "a recipe is a mapping"), ("a: [\n", "not valid YAML")])
def test_a_file_that_is_no_recipe(tmp_path, text, complaint):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=complaint):
        load_recipe(path)


def test_numbers_are_numbers():
    assert parse_yaml("[3e-4, 1E3, -2.5e+1, .5e1, 3, 1.5, 1e, e3]", "x") == [3e-4, 1e3, -25.0, 5.0, 3, 1.5, "1e", "e3"]


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ({"model_type": "mamba3"}, "unknown model_type 'mamba3'; did you mean 'mamba"),
        ({"model_type": "mamba2", "hidden_sise": 64}, "no setting 'hidden_sise'; did you mean 'hidden_size'"),
        ({"model_type": "mamba2", "hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "mamba2", "hidden_size": 100, "head_dim": 64}, "head_dim"),
        ({"hidden_size": 64}, "model_type"),
        ("nowhere.json", "nowhere.json does not exist"),
    ],
)
def test_a_wrong_model_configuration_is_refused(model, complaint):
    with pytest.raises(RecipeError, match=complaint):
        model_config(model)


def test_a_model_file_that_is_no_json(tmp_path):
    path = tmp_path / "model.json"
    path.write_text("{")
    with pytest.raises(RecipeError, match="not valid JSON"):
        model_config(str(path))
