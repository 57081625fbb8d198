"""What every model class must do to be one of transformers' models; transformers' own common tests are not installed
with it."""

import copy
import pickle
import re

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from hf_ssm import registry
from hf_ssm.ops import backends

from .helpers import DECODERS, TOLERANCE, assert_near, mixers, random_ids, same_states, tiny, tiny_config, unused

every_model = pytest.mark.parametrize("model_type", DECODERS)
every_class = pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [(model_type, auto) for model_type in DECODERS for auto in registry.ARCHITECTURES[model_type].models],
)
LABELS = {
    "AutoModelForCausalLM": lambda ids: ids,
    "AutoModelForSequenceClassification": lambda ids: ids[:, 0] % 3,
    "AutoModelForTokenClassification": lambda ids: ids % 3,
}


def model_class(model_type: str, auto_class: str):
    return registry.load(registry.ARCHITECTURES[model_type].models[auto_class])


def first_tensor(output):
    return output[0] if isinstance(output, tuple) else next(iter(output.values()))


# --- initialisation --------------------------------------------------------------------------------------------------


def check_initialisation(model) -> None:
    """The papers' initialisation, parameter by parameter; the sizes are large enough for statistics."""
    config = model.config
    layers = config.num_hidden_layers
    step_range = [getattr(config, f"time_step_{end}", value) for end, value in (("min", 1e-3), ("max", 1e-1))]
    for name, p in model.named_parameters():
        assert p.device.type == "cpu" and p.isfinite().all(), name
        name = re.sub(r"\.0(?=\.weight$|\.bias$|$)", "", name)  # Hymba has lists of one
        leaf = ".".join(name.split(".")[-2:])
        if name.endswith("A_log"):
            A = p.exp()
            if config.model_type != "mamba2":
                assert_near(name, A, torch.arange(1.0, p.shape[1] + 1).expand_as(A), 1e-6)
            else:
                assert A.min() >= config.A_init_min - 1e-4 and A.max() <= config.A_init_max + 1e-4 and A.std() > 0.5, (
                    name
                )
        elif name.endswith(".D"):
            assert (p == 1).all(), name
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            dt = torch.nn.functional.softplus(p)
            assert dt.min() >= step_range[0] * 0.999 and dt.max() <= step_range[1] * 1.001, name
            assert dt.log().std() > 0.5, f"{name}: log-uniform over two decades has a deviation of 1.3"
        elif leaf == "dt_proj.weight":
            bound = p.shape[1] ** -0.5
            assert p.abs().max() <= bound and p.abs().max() > 0.8 * bound, name
        elif leaf == "out_proj.weight" and hasattr(config, "rescale_prenorm_residual"):
            bound = (p.shape[1] * layers) ** -0.5
            assert p.abs().max() <= bound, f"{name} is not divided by the square root of the number of layers"
            assert p.abs().max() > 0.9 * bound, name
        elif leaf == "conv1d.weight":
            bound = p.shape[-1] ** -0.5
            assert p.abs().max() <= bound and p.abs().max() > 0.8 * bound, name
        elif "norm" in name:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        elif name.endswith("memory_tokens"):
            assert 0.7 < p.std() < 1.3, name
        else:
            std = p.std().item()
            assert 0.7 * config.initializer_range < std < 1.3 * config.initializer_range, f"{name}: {std}"


BIGGER = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 97}


def bigger_config(model_type: str):
    extra = {
        "hymba": {"tie_word_embeddings": False, "mamba_dt_rank": 8, "intermediate_size": 40, "num_memory_tokens": 8},
        "mamba2": {"head_dim": 4, "tie_word_embeddings": False},
    }.get(model_type, {})
    return tiny_config(model_type, **BIGGER, **extra, num_labels=3)


@every_class
def test_initialisation(model_type, auto_class):
    check_initialisation(model_class(model_type, auto_class)(bigger_config(model_type)))


@every_class
def test_initialisation_after_the_meta_device(model_type, auto_class):
    with torch.device("meta"):
        model = model_class(model_type, auto_class)(bigger_config(model_type))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    check_initialisation(model)


@every_class
def test_initialising_twice_is_initialising_once(model_type, auto_class):
    model = model_class(model_type, auto_class)(bigger_config(model_type))
    before = copy.deepcopy(model.state_dict())
    model.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for module in model.modules():  # asked for anew, it is drawn anew, and not scaled down further
        module._is_hf_initialized = False
    model.init_weights()
    check_initialisation(model)


@every_class
def test_missing_keys_are_initialised_and_the_others_left_alone(model_type, auto_class, tmp_path):
    model = model_class(model_type, auto_class)(bigger_config(model_type))
    weights = {name: torch.full_like(value, 0.123) for name, value in model.state_dict().items()}
    endings = ("0.mixer.A_log", "1.mixer.D", "dt_bias", "dt_proj.bias", "2.mixer.out_proj.weight")
    endings += ("3.mixer.conv1d.weight", "score.weight", "memory_tokens")
    endings += ("0.mamba.A_log.0", "1.mamba.D.0", "dt_proj.0.bias", "2.mamba.in_proj.weight", "gate_proj.weight")
    dropped = [name for name in weights if name.endswith(endings)]
    model.save_pretrained(tmp_path, state_dict={n: v for n, v in weights.items() if n not in dropped})
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == set(dropped)
    again = copy.deepcopy(loaded.state_dict())
    for name, value in again.items():
        if name not in dropped:
            assert torch.equal(value, weights[name]), name
    reference = model_class(model_type, auto_class)(loaded.config)
    for name, p in reference.named_parameters():
        if name in dropped:
            p.data = again[name].clone()
    check_initialisation_except_rescaling(reference, loaded)
    loaded.init_weights()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, again[name]), f"{name} changed"


def check_initialisation_except_rescaling(model, loaded) -> None:
    """A saved configuration says that out_proj has been rescaled, so a missing one is drawn from the full range."""
    if not hasattr(model.config, "rescale_prenorm_residual"):
        return check_initialisation(model)
    assert not loaded.config.rescale_prenorm_residual
    model.config.rescale_prenorm_residual = True
    for mixer in mixers(model):
        out_proj = mixer.out_proj.weight
        if out_proj.abs().max() > (out_proj.shape[1] * model.config.num_hidden_layers) ** -0.5:
            assert out_proj.abs().max() <= out_proj.shape[1] ** -0.5
            out_proj.data /= model.config.num_hidden_layers**0.5
    check_initialisation(model)


# --- the surface -----------------------------------------------------------------------------------------------------


@every_class
def test_tuple_and_dict_outputs_agree(model_type, auto_class):
    model, ids = tiny(model_type, auto_class), random_ids(2, 7)
    with torch.no_grad():
        as_dict = model(ids, output_hidden_states=True)
        as_tuple = model(ids, output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(first_tensor(as_dict), as_tuple[0])
    assert len(as_dict.hidden_states) == model.config.num_hidden_layers + 1


@every_class
def test_inputs_embeds_are_the_embedded_ids(model_type, auto_class):
    model, ids = tiny(model_type, auto_class, pad_token_id=None), random_ids(2, 7)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        want = first_tensor(model(ids, attention_mask=mask))
        got = first_tensor(model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask))
    assert torch.equal(got, want)


@every_class
def test_training_reaches_every_parameter(model_type, auto_class):
    model, ids = tiny(model_type, auto_class, num_labels=3).train(), random_ids(2, 7)
    if auto_class == "AutoModel":
        model(ids).last_hidden_state.square().sum().backward()
    else:
        model(ids, labels=LABELS[auto_class](ids)).loss.backward()
    for name, parameter in model.named_parameters():
        if not unused(model, name):
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, f"{name} has no gradient"


@every_class
def test_the_same_call_gives_the_same_bits(model_type, auto_class):
    model, ids = tiny(model_type, auto_class), random_ids(2, 7)
    with torch.no_grad():
        assert torch.equal(first_tensor(model(ids)), first_tensor(model(ids)))


@every_class
def test_copies_and_pickles(model_type, auto_class):
    model, ids = tiny(model_type, auto_class), random_ids(2, 7)
    with torch.no_grad():
        want = first_tensor(model(ids))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(first_tensor(other(ids)), want)
    assert pickle.loads(pickle.dumps(model.config)).to_dict() == model.config.to_dict()


@every_model
def test_resize_token_embeddings(model_type):
    model, ids = tiny(model_type), random_ids(2, 7)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        want = model(ids).logits
        model.resize_token_embeddings(50, mean_resizing=False)
        assert model.config.vocab_size == 50 and model.lm_head.weight.shape[0] == 50
        assert_near("logits", model(ids).logits[..., :41], want, TOLERANCE[torch.float32])
        model(torch.full((1, 2), 49))
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        loss = model(ids, labels=ids).loss
        assert loss.isfinite()
        model.resize_token_embeddings(41)
        assert_near("logits", model(ids).logits, want, TOLERANCE[torch.float32])
    with pytest.raises(ValueError, match="token id 49 is outside the vocabulary of 41"):
        model(torch.full((1, 2), 49))


@every_class
def test_autocast(model_type, auto_class):
    model, ids = tiny(model_type, auto_class, num_labels=3).train(), random_ids(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, use_cache=True) if auto_class != "AutoModelForTokenClassification" else model(ids)
    with torch.no_grad():
        want = first_tensor(model.eval()(ids))
    if auto_class != "AutoModelForTokenClassification":  # its dropout
        assert_near("output", first_tensor(out), want, TOLERANCE[torch.bfloat16])
        for layer in out.past_key_values.layers:
            assert layer.recurrent_states[0].dtype == torch.float32
    first_tensor(out).float().sum().backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters() if p.grad is not None
    )


@every_model
def test_autocast_generates(model_type):
    with torch.autocast("cpu", torch.bfloat16):
        out = tiny(model_type).generate(
            random_ids(2, 5), max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=None
        )
    assert out.shape == (2, 9)


# --- compilation -----------------------------------------------------------------------------------------------------


@pytest.fixture
def new_process():
    """As in a process that has neither compiled nor run anything yet: no backend has been chosen."""
    torch.compiler.reset()
    for loaded in backends._LOADED.values():
        loaded.clear()


@every_model
@pytest.mark.parametrize("use_cache", [False, True])
def test_compiled_forward_has_one_graph(model_type, use_cache, new_process):
    model, ids = tiny(model_type), random_ids(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(ids, use_cache=use_cache)
        want = model(ids, use_cache=use_cache)
        assert_near("logits", got.logits, want.logits, TOLERANCE[torch.float32])
        if use_cache:
            same_states(got.past_key_values, want.past_key_values, TOLERANCE[torch.float32])
            got, want = (model(ids[:, :1], past_key_values=out.past_key_values).logits for out in (got, want))
            assert_near("next logits", got, want, TOLERANCE[torch.float32])


@every_model
def test_compiled_training_step_has_one_graph(model_type, new_process):
    model, ids = tiny(model_type).train(), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(ids, attention_mask=mask, labels=ids).loss.backward()
    got = {name: p.grad for name, p in model.named_parameters() if not unused(model, name)}
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    for name, grad in got.items():
        assert_near(name, grad, model.get_parameter(name).grad, 1e-4)


# --- heads -----------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("side", ["left", "right", "hole"])
@pytest.mark.parametrize("told", ["attention_mask", "pad_token_id"])
def test_classification_reads_the_last_real_token(model_type, side, told):
    model = tiny(model_type, "AutoModelForSequenceClassification", num_labels=3, dtype=torch.float64)
    rows = [random_ids(1, length, seed=length)[0] for length in (6, 2, 4)]
    ids, mask = torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.long)
    for i, row in enumerate(rows):
        places = {
            "left": range(6 - len(row), 6),
            "right": range(len(row)),
            "hole": [*range(len(row) - 1), 5],
        }[side]
        ids[i, list(places)], mask[i, list(places)] = row, 1
    with torch.no_grad():
        want = torch.cat([model(row[None]).logits for row in rows])
        kwargs = {"attention_mask": mask}
        if told == "pad_token_id":
            if side != "right":
                pytest.skip("without a mask, padding in front is read as tokens")
            kwargs = {}
        got = model(ids, **kwargs).logits
    assert_near("logits", got, want, TOLERANCE[torch.float64])


@every_model
def test_classification_losses(model_type):
    ids = random_ids(3, 5)
    single = tiny(model_type, "AutoModelForSequenceClassification", num_labels=3)
    out = single(ids, labels=torch.tensor([0, 2, 1]))
    want = torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 2, 1]))
    assert_near("loss", out.loss, want, 1e-6)
    regression = tiny(model_type, "AutoModelForSequenceClassification", num_labels=1)
    values = torch.tensor([0.3, -1.0, 2.0])
    out = regression(ids, labels=values)
    assert_near("loss", out.loss, (out.logits[:, 0] - values).square().mean(), 1e-6)
    multi = tiny(model_type, "AutoModelForSequenceClassification", num_labels=3)
    targets = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])
    out = multi(ids, labels=targets)
    want = torch.nn.functional.binary_cross_entropy_with_logits(out.logits, targets)
    assert_near("loss", out.loss, want, 1e-6)


@every_model
def test_classification_of_a_batch_needs_to_know_the_padding(model_type):
    model = tiny(model_type, "AutoModelForSequenceClassification", pad_token_id=None)
    with pytest.raises(ValueError, match="cannot tell padding"):
        model(random_ids(2, 5))
    assert model(random_ids(1, 5)).logits.shape == (1, 2)


@every_model
def test_token_classification_loss_leaves_out_padding(model_type):
    model = tiny(model_type, "AutoModelForTokenClassification", num_labels=3, dtype=torch.float64)
    ids, labels = random_ids(2, 6), random_ids(2, 6, seed=1) % 3
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        out = model(ids, attention_mask=mask, labels=labels)
        rows = [model(ids[i : i + 1, mask[i].bool()]).logits[0] for i in range(2)]
        want = torch.cat(rows)
        assert_near("logits", out.logits[mask.bool()], want, TOLERANCE[torch.float64])
        loss = torch.nn.functional.cross_entropy(want, labels[mask.bool()])
        assert_near("loss", out.loss, loss, TOLERANCE[torch.float64])


# --- tokenizer, pipelines, Trainer -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:38]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<pad>", "<bos>", "<eos>", *letters])}, "<bos>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<bos>"
    )


TEXTS = ["ABC%&", "+-0123456789", "A"]


@every_model
@pytest.mark.parametrize(
    ("task", "auto_class"),
    [
        ("text-classification", "AutoModelForSequenceClassification"),
        ("token-classification", "AutoModelForTokenClassification"),
        ("feature-extraction", "AutoModel"),
    ],
)
def test_pipelines_give_the_same_in_batches(model_type, task, auto_class, tokenizer, tmp_path):
    tiny(model_type, auto_class, num_labels=3).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert isinstance(AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast)
    pipe = pipeline(task, model=str(tmp_path), device="cpu")
    alone = [pipe(text) for text in TEXTS]
    together = pipe(TEXTS, batch_size=3)
    for a, b in zip(alone, together, strict=True):
        if task == "feature-extraction":
            a, b = torch.tensor(a), torch.tensor(b)[:, : len(a[0])]
            assert_near("features", b, a, TOLERANCE[torch.float32])
        elif task == "text-classification":
            a = a[0] if isinstance(a, list) else a
            assert a["label"] == b["label"] and abs(a["score"] - b["score"]) < 1e-5
        else:
            assert [x["entity"] for x in a] == [x["entity"] for x in b]


@every_model
def test_text_generation_pipeline(model_type, tokenizer, tmp_path):
    model = tiny(model_type)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path), device="cpu")
    kwargs = {"max_new_tokens": 5, "do_sample": False}
    alone = [pipe(text, **kwargs)[0]["generated_text"] for text in TEXTS]
    pipe.tokenizer.padding_side = "left"
    assert [out[0]["generated_text"] for out in pipe(TEXTS, batch_size=3, **kwargs)] == alone
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    assert alone[0] == tokenizer.decode(model.generate(ids, **kwargs)[0], skip_special_tokens=True)


@every_model
@pytest.mark.parametrize("auto_class", LABELS)
def test_trainer_takes_two_steps(model_type, auto_class, tmp_path):
    model = tiny(model_type, auto_class, num_labels=3)
    before = copy.deepcopy(model.state_dict())
    ids = random_ids(8, 9)
    labels = LABELS[auto_class](ids)
    rows = [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": n} for i, n in zip(ids, labels, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert trainer.state.log_history[-2]["eval_loss"] > 0
    checkpoint = tmp_path / "checkpoint-2"
    loaded = type(model).from_pretrained(checkpoint)
    assert torch.equal(next(loaded.parameters()), next(model.parameters()))
    assert getattr(model.config, "rescale_prenorm_residual", True), (
        "saving does not change the model's own configuration"
    )


@every_model
def test_auto_classes_build_ours(model_type):
    config = tiny_config(model_type)
    assert type(AutoModel.from_config(config)) is model_class(model_type, "AutoModel")
    assert type(AutoModelForCausalLM.from_config(config)) is model_class(model_type, "AutoModelForCausalLM")


@every_model
def test_cache_is_returned_when_asked_for(model_type):
    model, ids = tiny(model_type), random_ids(2, 5)
    with torch.no_grad():
        assert model(ids).past_key_values is not None
        assert model(ids, use_cache=False).past_key_values is None
        assert model.train()(ids).past_key_values is None
        assert model(ids, use_cache=True).past_key_values is not None
        cache = model.eval()(ids).past_key_values
        out = model(ids, past_key_values=cache, use_cache=False)
        assert out.past_key_values is None
        want = model(torch.cat([ids, ids], dim=1)).past_key_values
    same_states(cache, want, TOLERANCE[torch.float32])
