"""What every Hydra class must do to be one of transformers' models."""

import copy
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    ViTImageProcessorPil,
    pipeline,
)
from transformers.models.auto import modeling_auto

import hf_ssm
from hf_ssm import registry
from hf_ssm.ops import backends

from .helpers import GRADIENT_TOLERANCE, TOLERANCE, assert_near, random_ids, tiny, tiny_config, vivid

CLASSES = registry.ARCHITECTURES["hydra"].models
LABELS = {
    "AutoModelForMaskedLM": lambda ids: ids,
    "AutoModelForSequenceClassification": lambda ids: ids[:, 0] % 3,
    "AutoModelForTokenClassification": lambda ids: ids % 3,
    "AutoModelForQuestionAnswering": None,
    "AutoModelForMultipleChoice": lambda ids: ids[:, 0, 0] % 2,
    "AutoModelForImageClassification": lambda ids: torch.arange(len(ids)) % 3,
}
every_class = pytest.mark.parametrize("auto_class", CLASSES)
every_head = pytest.mark.parametrize("auto_class", LABELS)
every_text_class = pytest.mark.parametrize("auto_class", [name for name in CLASSES if "Image" not in name])
ROOT = Path(__file__).parents[2]


def build(auto_class: str, **changes):
    """A tiny model with positions and three labels."""
    return tiny("hydra", auto_class, **{"num_labels": 3, "use_position_embeddings": True, **changes})


def example(auto_class: str, batch: int = 2, labels: bool = False) -> dict[str, torch.Tensor]:
    if auto_class == "AutoModelForImageClassification":
        inputs = {"pixel_values": torch.randn(batch, 2, 8, 8, generator=torch.Generator().manual_seed(0))}
    elif auto_class == "AutoModelForMultipleChoice":
        inputs = {"input_ids": random_ids(batch * 2, 7).view(batch, 2, 7)}
    else:
        inputs = {"input_ids": random_ids(batch, 7)}
    if labels and auto_class == "AutoModelForQuestionAnswering":
        inputs |= {"start_positions": torch.arange(batch), "end_positions": torch.arange(batch) + 1}
    elif labels and auto_class in LABELS:
        inputs["labels"] = LABELS[auto_class](next(iter(inputs.values())))
    return inputs


def first_tensor(output):
    return output[0] if isinstance(output, tuple) else next(iter(output.values()))


# --- configurations --------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_published_base_model():
    with torch.device("meta"):
        model = hf_ssm.HydraForMaskedLM(hf_ssm.HydraConfig())
    assert sum(p.numel() for p in model.parameters()) == 112_086_712  # "112M"
    file = json.loads((ROOT / "configs" / "models" / "hydra-base.json").read_text())
    assert hf_ssm.HydraConfig(**file).to_dict() == hf_ssm.HydraConfig().to_dict()


def test_the_base_size_of_images():
    file = json.loads((ROOT / "configs" / "models" / "hydra-image-base.json").read_text())
    with torch.device("meta"):
        model = hf_ssm.HydraForImageClassification(hf_ssm.HydraConfig(**file, num_labels=1000))
    assert len(model.bert.encoder.layer) == 24
    assert 91e6 < sum(p.numel() for p in model.parameters()) < 95e6


def test_configurations_in_files_have_only_fields_that_exist():
    fields = set(hf_ssm.HydraConfig().to_dict())
    for file in (ROOT / "configs" / "models").glob("hydra*.json"):
        assert set(json.loads(file.read_text())) <= fields, file.name


# --- initialisation --------------------------------------------------------------------------------------------------


def check_initialisation(model) -> None:
    """That of the authors' code, parameter by parameter; the sizes are large enough for statistics."""
    config = model.config
    for name, p in model.named_parameters():
        assert p.device.type == "cpu" and p.isfinite().all(), name
        if name.endswith(("A_log", "init_states")):
            assert (p == 0).all(), name
        elif name.endswith("mixer.D"):
            assert (p == 1).all(), name
        elif name.endswith("dt_bias"):
            dt = F.softplus(p)
            assert dt.min() >= config.time_step_min * 0.999 and dt.max() <= config.time_step_max * 1.001, name
            assert dt.log().std() > 0.5, f"{name}: log-uniform over two decades has a deviation of 1.3"
        elif "conv1d" in name:
            bound = config.conv_kernel**-0.5
            assert p.abs().max() <= bound and p.abs().max() > 0.8 * bound, name
        elif "norm" in name.lower():
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            if name.endswith("word_embeddings.weight"):
                assert (p[config.pad_token_id] == 0).all()
                p = p[1:]
            std = p.std().item()
            assert 0.7 * config.initializer_range < std < 1.3 * config.initializer_range, f"{name}: {std}"


def bigger(auto_class: str):
    changes = {"hidden_size": 32, "head_dim": 4, "vocab_size": 97, "tie_word_embeddings": False, "num_labels": 3}
    config = tiny_config("hydra", **changes, use_position_embeddings=True)
    return registry.load(CLASSES[auto_class])(config)


@every_class
def test_initialisation(auto_class):
    check_initialisation(bigger(auto_class))


@every_class
def test_initialisation_after_the_meta_device(auto_class):
    with torch.device("meta"):
        model = bigger(auto_class)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    check_initialisation(model)


@every_class
def test_missing_keys_are_initialised_and_the_others_left_alone(auto_class, tmp_path):
    model = bigger(auto_class)
    weights = {name: torch.full_like(value, 0.123) for name, value in model.state_dict().items()}
    endings = ("mixer.A_log", "0.layer.mixer.init_states", "1.layer.mixer.D", "dt_bias", "conv1d.bias", "fc_D.weight")
    dropped = [name for name in weights if name.endswith((*endings, "embeddings.position_embeddings"))]
    model.save_pretrained(tmp_path, state_dict={n: v for n, v in weights.items() if n not in dropped})
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == set(dropped)
    state = loaded.state_dict()
    for name in set(weights) - set(dropped):
        assert torch.equal(state[name], weights[name]), name
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in dropped:
                parameter.copy_(state[name])
    check_initialisation(model)


# --- the surface -----------------------------------------------------------------------------------------------------


@every_class
def test_tuple_and_dict_outputs_agree(auto_class):
    model, inputs = build(auto_class), example(auto_class, labels=True)
    with torch.no_grad():
        as_dict = model(**inputs, output_hidden_states=True)
        as_tuple = model(**inputs, output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(first_tensor(as_dict), as_tuple[0])
    assert len(as_dict.hidden_states) == model.config.num_hidden_layers + 1


@every_text_class
def test_inputs_embeds_are_the_embedded_ids(auto_class):
    model, inputs = build(auto_class), example(auto_class)
    with torch.no_grad():
        want = first_tensor(model(**inputs))
        got = first_tensor(model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"])))
    assert torch.equal(got, want)


@every_class
def test_training_reaches_every_parameter(auto_class):
    model = build(auto_class, is_prenorm=True).train()
    inputs = example(auto_class, labels=True)
    if "input_ids" in inputs:
        inputs["token_type_ids"] = inputs["input_ids"] % 2
    out = model(**inputs)
    if "loss" in out:
        out.loss.backward()
    else:
        (out.pooler_output.square().sum() + out.last_hidden_state[:, 1:].pow(3).sum()).backward()
    for name, parameter in model.named_parameters():
        if auto_class == "AutoModelForMultipleChoice" and name == "classifier.bias":
            continue  # adds the same to every choice
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, f"{name} has no gradient"


@every_class
def test_gradient_checkpointing_changes_nothing(auto_class):
    grads = []
    for checkpointing in (False, True):
        model = build(auto_class, hidden_dropout_prob=0.0).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        out = model(**example(auto_class, labels=True))
        (out.loss if "loss" in out else out.last_hidden_state.pow(3).sum()).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad), name


@every_class
def test_copies_and_pickles(auto_class):
    model, inputs = build(auto_class), example(auto_class)
    with torch.no_grad():
        want = first_tensor(model(**inputs))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(first_tensor(other(**inputs)), want)


def test_dropout_acts_where_the_original_has_it():
    model, ids = build("AutoModelForSequenceClassification", hidden_dropout_prob=0.5).train(), random_ids(1, 7)
    with torch.no_grad():
        hidden = model.bert(ids, output_hidden_states=True).hidden_states[0]
    assert 0.3 < (hidden == 0).float().mean() < 0.7
    assert model.dropout.p == 0.5
    assert build("AutoModelForSequenceClassification", classifier_dropout=0.25).dropout.p == 0.25


def test_resize_token_embeddings():
    model, ids = build("AutoModelForMaskedLM"), random_ids(2, 7)
    with torch.no_grad():
        want = model(ids).logits
        model.resize_token_embeddings(50, mean_resizing=False)
        predictions = model.cls["predictions"]
        assert model.config.vocab_size == 50 and predictions.decoder.bias.shape == (50,)
        assert predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
        assert_near("logits", model(ids).logits[..., :41], want, TOLERANCE[torch.float32])
        assert model(torch.full((1, 2), 49), labels=torch.full((1, 2), 49)).loss.isfinite()


@every_class
def test_autocast(auto_class):
    model, inputs = build(auto_class).train(), example(auto_class)
    with torch.autocast("cpu", torch.bfloat16):
        first_tensor(model(**inputs)).float().sum().backward()
        out = first_tensor(model.eval()(**inputs))
    assert_near("output", out, first_tensor(model(**inputs)), TOLERANCE[torch.bfloat16])
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


class OnlyFloat64(TorchDispatchMode):
    """Fails at the first operation that gives a floating-point tensor of another type."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                assert leaf.dtype == torch.float64, f"{func} gives {leaf.dtype}"
        return out


@every_class
def test_float64_is_float64_throughout(auto_class):
    model, inputs = build(auto_class, dtype=torch.float64), example(auto_class, labels=True)
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    if auto_class in ("AutoModel", "AutoModelForMaskedLM", "AutoModelForTokenClassification"):
        inputs["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    with OnlyFloat64():
        out = model(**inputs)
        (out.loss if "loss" in out else out.last_hidden_state.sum()).backward()


# --- compilation -----------------------------------------------------------------------------------------------------


@pytest.fixture
def new_process():
    """As in a process that has neither compiled nor run anything yet: no backend has been chosen."""
    torch.compiler.reset()
    for loaded in backends._LOADED.values():
        loaded.clear()


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_training_step_has_one_graph(padded, new_process):
    model, ids = build("AutoModelForMaskedLM", hidden_dropout_prob=0.0).train(), random_ids(2, 9)
    inputs = {"input_ids": ids, "labels": ids}
    if padded:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, :3] = 0
        inputs["labels"] = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(**inputs).loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(**inputs).loss.backward()
    for name, grad in got.items():
        assert_near(name, grad, model.get_parameter(name).grad, GRADIENT_TOLERANCE[torch.float32])


def test_static_shapes_after_dynamic_ones(new_process):
    """The first call marks the tensors that its backward pass keeps, so that in the second one the ids' sizes are
    symbolic and the mask's are not."""
    model, ids = tiny("hydra", "AutoModel", hidden_dropout_prob=0.0, num_hidden_layers=1).train(), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    inputs["position_ids"] = torch.arange(9).expand(2, 9).contiguous()
    want = model(**inputs).last_hidden_state
    for dynamic in (True, False):
        compiled = torch.compile(model, dynamic=dynamic, fullgraph=True, backend="aot_eager")
        assert_near(f"{dynamic=}", compiled(**inputs).last_hidden_state, want, TOLERANCE[torch.float32])


# --- losses ----------------------------------------------------------------------------------------------------------


def test_classification_losses():
    ids, build_head = random_ids(3, 5), lambda **more: build("AutoModelForSequenceClassification", **more)
    out = build_head()(ids, labels=torch.tensor([0, 2, 1]))
    assert_near("loss", out.loss, F.cross_entropy(out.logits, torch.tensor([0, 2, 1])), 1e-6)
    values = torch.tensor([0.3, -1.0, 2.0])
    out = build_head(num_labels=1)(ids, labels=values)
    assert_near("loss", out.loss, (out.logits[:, 0] - values).square().mean(), 1e-6)
    targets = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])
    out = build_head()(ids, labels=targets)
    assert_near("loss", out.loss, F.binary_cross_entropy_with_logits(out.logits, targets), 1e-6)
    out = build_head(problem_type="regression")(ids, labels=targets)
    assert_near("loss", out.loss, F.mse_loss(out.logits, targets), 1e-6)


def test_token_classification_loss_leaves_out_padding():
    model = build("AutoModelForTokenClassification", dtype=torch.float64)
    ids, labels = random_ids(2, 6), random_ids(2, 6, seed=1) % 3
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        out = model(ids, attention_mask=mask, labels=labels)
        want = torch.cat([model(ids[i : i + 1, mask[i].bool()]).logits[0] for i in range(2)])
    assert_near("loss", out.loss, F.cross_entropy(want, labels[mask.bool()]), TOLERANCE[torch.float64])


def test_question_answering_loss():
    model, ids = build("AutoModelForQuestionAnswering"), random_ids(3, 6)
    start, end = torch.tensor([0, 2, 6]), torch.tensor([1, 5, 9])  # the last answer was cut off
    out = model(ids, start_positions=start, end_positions=end)
    want = (F.cross_entropy(out.start_logits[:2], start[:2]) + F.cross_entropy(out.end_logits[:2], end[:2])) / 2
    assert_near("loss", out.loss, want, 1e-6)
    assert torch.equal(model(ids, start_positions=start.int(), end_positions=end.int()).loss, out.loss)
    assert torch.equal(model(ids, start_positions=start - torch.tensor([1, 0, 0]), end_positions=end).loss, out.loss)


def test_multiple_choice_scores_every_choice_by_itself():
    model, ids = build("AutoModelForMultipleChoice"), random_ids(6, 5).view(2, 3, 5)
    mask = torch.ones_like(ids)
    mask[0, 1, 3:] = 0
    labels = torch.tensor([2, 0])
    with torch.no_grad():
        out = model(ids, attention_mask=mask, labels=labels)
        short = model(ids[:1, 1:2, :3]).logits
    assert out.logits.shape == (2, 3)
    assert_near("a padded choice", out.logits[:1, 1:2], short, TOLERANCE[torch.float32])
    assert_near("loss", out.loss, F.cross_entropy(out.logits, labels), 1e-6)


@pytest.mark.parametrize("auto_class", ["AutoModelForMaskedLM", "AutoModelForTokenClassification"])
def test_accumulated_batches_count_every_label_once(auto_class):
    model, inputs = build(auto_class), example(auto_class, batch=4, labels=True)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][0, 2:] = -100
    count = (inputs["labels"] != -100).sum()
    with torch.no_grad():
        whole = model(**inputs).loss
        parts = [
            model(**{name: t[half] for name, t in inputs.items()}, num_items_in_batch=count).loss
            for half in (slice(0, 1), slice(1, 4))
        ]
    assert_near("loss", sum(parts), whole, 1e-6)


# --- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [False, True])
def test_image_logits_by_hand(positions):
    """Patches row by row, the encoder, their mean, LayerNorm, a linear layer."""
    model = build("AutoModelForImageClassification", use_position_embeddings=positions, dtype=torch.float64)
    pixels = example("AutoModelForImageClassification")["pixel_values"].double()
    embeddings = model.bert.embeddings
    patches = [pixels[:, :, r : r + 2, c : c + 2].flatten(1) for r in range(0, 8, 2) for c in range(0, 8, 2)]
    tokens = torch.stack(patches, dim=1) @ embeddings.projection.weight.flatten(1).T + embeddings.projection.bias
    if positions:
        tokens = tokens + embeddings.position_embeddings
    with torch.no_grad():
        want = model.classifier(model.layernorm(model.bert.encoder(tokens).mean(dim=1)))
        assert_near("logits", model(pixels).logits, want, TOLERANCE[torch.float64])


# --- files -----------------------------------------------------------------------------------------------------------


@every_class
def test_save_and_load(auto_class, tmp_path):
    model = build(auto_class)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    auto = getattr(modeling_auto, auto_class).from_pretrained(tmp_path)
    assert type(auto) is type(model)
    saved = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert saved == loaded.config.to_dict() | {"_name_or_path": saved["_name_or_path"]}


def test_saved_names_are_the_originals(tmp_path):
    model = tiny("hydra", "AutoModelForMaskedLM", learnable_initial_states=False, use_bias=False, is_prenorm=True)
    model.save_pretrained(tmp_path)
    theirs = load_file(ROOT / "tests/data/models/hydra_masked_lm/prenorm/model.safetensors")
    names = {name for name in theirs if "layer.2." not in name} - {"cls.predictions.decoder.weight"}
    assert set(load_file(tmp_path / "model.safetensors")) == names


def test_bfloat16_folders(tmp_path):
    model = build("AutoModelForMaskedLM", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype="auto")
    dtypes = {name: p.dtype for name, p in loaded.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {name for name in dtypes if name.endswith(("A_log", "dt_bias"))}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    with torch.no_grad():
        out = loaded(random_ids(2, 7))
    assert out.logits.dtype == torch.bfloat16 and out.logits.isfinite().all()


def test_heads_read_the_language_models_encoder(tmp_path):
    lm = build("AutoModelForMaskedLM")
    lm.save_pretrained(tmp_path)
    head, info = hf_ssm.HydraForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert {name.split(".")[0] for name in info["missing_keys"] if "pooler" not in name} == {"classifier"}
    assert torch.equal(head.bert.encoder.layer[1].layer["mixer"].D, lm.bert.encoder.layer[1].layer["mixer"].D)
    encoder, info = hf_ssm.HydraModel.from_pretrained(tmp_path, add_pooling_layer=False, output_loading_info=True)
    assert not info["missing_keys"] and encoder.pooler is None


@pytest.mark.parametrize("part", ["whole", "encoder"])
def test_a_model_of_images_is_not_taken_for_one_of_text(part, tmp_path):
    model = build("AutoModelForImageClassification")
    (model if part == "whole" else model.bert).save_pretrained(tmp_path)
    for auto_class in ("AutoModel", "AutoModelForMaskedLM"):
        with pytest.raises(ValueError, match=r"reads text and .* holds a Hydra.*Image.*: load it with AutoModelForIm"):
            getattr(modeling_auto, auto_class).from_pretrained(tmp_path)
    loaded = modeling_auto.AutoModelForImageClassification.from_pretrained(tmp_path)
    same = zip(loaded.bert.parameters(), model.bert.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


# --- tokenizer, pipelines, Trainer -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "unk": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{f"{name}_token": t for name, t in special.items()})


@pytest.fixture
def folder(tokenizer, tmp_path):
    """Saves a model with its tokenizer."""

    def save(auto_class: str, **changes) -> str:
        build(auto_class, **changes).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        assert isinstance(AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast)
        return str(tmp_path)

    return save


TEXTS = ["a b [MASK] d e", "x y z 0 1 2 3 4 [MASK] 6", "[MASK]"]


def scores_agree(a: list[dict], b: list[dict]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert abs(one["score"] - other["score"]) < 1e-5
        assert {k: v for k, v in one.items() if k != "score"} == {k: v for k, v in other.items() if k != "score"}


@pytest.mark.parametrize(
    ("task", "auto_class", "side"),
    [
        ("fill-mask", "AutoModelForMaskedLM", "right"),
        ("fill-mask", "AutoModelForMaskedLM", "left"),
        ("text-classification", "AutoModelForSequenceClassification", "right"),
        ("text-classification", "AutoModelForSequenceClassification", "left"),
        ("token-classification", "AutoModelForTokenClassification", "right"),  # it takes offsets by position: not left
    ],
)
def test_text_pipelines_give_the_same_in_batches(task, auto_class, side, folder):
    pipe = pipeline(task, model=folder(auto_class), device="cpu")
    pipe.tokenizer.padding_side = side
    alone = [pipe(text) for text in TEXTS]
    for a, b in zip(alone, pipe(TEXTS, batch_size=3), strict=True):
        scores_agree(*(x if isinstance(x, list) else [x] for x in (a, b)))


def test_feature_extraction(folder):
    pipe = pipeline("feature-extraction", model=folder("AutoModel"), device="cpu")
    for a, b in zip([pipe(text) for text in TEXTS], pipe(TEXTS, batch_size=3), strict=True):
        a, b = torch.tensor(a), torch.tensor(b)
        assert_near("features", b[:, : a.shape[1]], a, TOLERANCE[torch.float32])


def test_image_classification(tmp_path):
    from PIL import Image

    build("AutoModelForImageClassification", num_channels=3).save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (3, 20, 30, 3), dtype=np.uint8)
    images = [Image.fromarray(pixels) for pixels in noise]
    pipe = pipeline("image-classification", model=str(tmp_path), device="cpu")
    for a, b in zip([pipe(image) for image in images], pipe(images, batch_size=3), strict=True):
        scores_agree(a, b)


def test_an_image_processor_is_found_by_the_configuration_alone(tmp_path):
    build("AutoModelForImageClassification").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 8, "width": 8}}')
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert type(processor) is ViTImageProcessorPil
    assert processor(np.zeros((20, 30, 3), np.uint8), return_tensors="pt").pixel_values.shape == (1, 3, 8, 8)


@every_head
def test_trainer_takes_two_steps(auto_class, tmp_path):
    model = build(auto_class)
    before = copy.deepcopy(model.state_dict())
    columns = example(auto_class, batch=8, labels=True)
    rows = [{name: column[i] for name, column in columns.items()} for i in range(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert trainer.state.log_history[-2]["eval_loss"] > 0
    loaded = type(model).from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(next(loaded.parameters()), next(model.parameters()))


# --- LoRA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [["in_proj", "out_proj", "fc_D"], "all-linear"], ids=["a list", "all-linear"])
def test_lora_reaches_every_projection_and_merges(targets, tmp_path):
    peft = pytest.importorskip("peft")
    build_base = lambda: build("AutoModelForMaskedLM", dtype=torch.float64)  # noqa: E731
    model = peft.get_peft_model(build_base(), peft.LoraConfig(r=2, target_modules=targets)).train()
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    reached = {name.split(".lora_")[0].split(".")[-1] for name in adapters}
    assert reached == {"in_proj", "out_proj", "fc_D"} | ({"dense"} if targets == "all-linear" else set())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in adapters.values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    ids = random_ids(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 1e-7 for p in adapters.values())
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(input_ids=ids).logits
        loaded = peft.PeftModel.from_pretrained(build_base(), tmp_path).double().eval()
        assert_near("loaded", loaded(input_ids=ids).logits, want, TOLERANCE[torch.float64])
        merged = model.merge_and_unload()
        assert_near("merged", merged(ids).logits, want, TOLERANCE[torch.float64])
        assert (build_base()(ids).logits - want).abs().max() > 1e-2


# --- length ----------------------------------------------------------------------------------------------------------


def peak_mb(tokens: int) -> float:
    code = f"""
        import resource, sys, torch
        torch.set_num_threads(1)
        import hf_ssm
        sizes = dict(hidden_size=128, num_hidden_layers=2, state_size=16, head_dim=32, vocab_size=64)
        model = hf_ssm.HydraModel(hf_ssm.HydraConfig(**sizes)).eval()
        with torch.no_grad():
            assert model(torch.ones(1, {tokens}, dtype=torch.long)).last_hidden_state.isfinite().all()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


def test_memory_is_linear_in_the_length():
    """A token's values in one layer of this size take 2.4 KB behind in_proj and 1.3 KB behind the convolution, and a
    few of their kind are alive at once: 16 KB are allowed. One matrix of 32768^2 would take 4 GB."""
    pytest.importorskip("resource")
    short, long = peak_mb(2048), peak_mb(32768)
    assert long - short < 16 * (32768 - 2048) / 1024, f"{long:.0f} MB, against {short:.0f} MB for 2048 tokens"


# --- sentence-transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
def test_sentence_transformers_wraps_a_saved_model(folder, side, tmp_path):
    import sentence_transformers as library

    model = library.SentenceTransformer(folder("AutoModel"), device="cpu")  # adds mean pooling
    model.tokenizer.padding_side = side
    alone = torch.stack([torch.tensor(model.encode(text)) for text in TEXTS])
    assert alone.shape == (3, 12)
    assert_near("embeddings", torch.tensor(model.encode(TEXTS, batch_size=3)), alone, TOLERANCE[torch.float32])
    model.save(str(tmp_path / "wrapped"))
    again = library.SentenceTransformer(str(tmp_path / "wrapped"), device="cpu")
    again.tokenizer.padding_side = side
    assert_near("loaded", torch.tensor(again.encode(TEXTS)), alone, TOLERANCE[torch.float32])


def test_vivid_leaves_no_parameter_out():
    """The helpers' weights must make every parameter matter."""
    model = vivid(bigger("AutoModelForMaskedLM"))
    assert all(p.std() > 0.05 for p in model.parameters() if p.numel() > 1)
