"""Masked language modelling: which tokens are masked, the tokenizer, a whole run, resuming, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, TrainingArguments, pipeline
from typer.testing import CliRunner

import hf_ssm  # noqa: F401  registers the architectures
from hf_ssm import data, training
from hf_ssm.data import DataError, MaskedLMCollator, PackedBlocks, pack, train_tokenizer
from hf_ssm.objectives import masked_accuracy
from hf_ssm.recipes import RecipeError, load_recipe, recipe_from_dict
from hf_ssm.training import SSMTrainer, train

ROOT = Path(__file__).parents[1]
MASK = data.MASK
TEXTS = [f"def f{number}(x):\n    return x + {number}\n" * 4 for number in range(30)]
TINY = {
    "bert": {
        "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "hidden_dropout_prob": 0.1,
    },
    "hydra": {
        "model_type": "hydra", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "head_dim": 16,
        "chunk_size": 16, "hidden_dropout_prob": 0.1,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models gain nothing from threads, and on a busy machine lose much by waiting for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300, masked=True)


@pytest.fixture(scope="module")
def blocks(tokenizer):
    packed = PackedBlocks(np.stack(list(pack(TEXTS * 10, tokenizer, 64, framed=True))))
    return [packed[index] for index in range(len(packed))]


# ---------------------------------------------------------------- tokenizer and packing


def test_the_tokenizer_frames_texts_and_pairs_as_an_encoder_expects(tokenizer):
    cls, end = tokenizer.cls_token_id, tokenizer.eos_token_id
    a, b = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("def f", "(x)"))
    assert tokenizer("def f")["input_ids"] == [cls, *a, end]
    assert tokenizer("def f", "(x)")["input_ids"] == [cls, *a, end, *b, end]
    assert tokenizer.sep_token_id == end and len(tokenizer) == 300
    ids = tokenizer(f"def {MASK}(x)")["input_ids"]
    assert ids.count(tokenizer.mask_token_id) == 1 and tokenizer.decode(ids[1:-1]) == f"def {MASK}(x)"


def test_framed_packing_keeps_the_texts_apart(tokenizer):
    texts = ["def f", "", f"a {MASK} in the text", "(x)"]
    cls, end = tokenizer.cls_token_id, tokenizer.eos_token_id
    chain = np.concatenate(list(pack(texts, tokenizer, 8, framed=True))).tolist()
    assert tokenizer.mask_token_id not in chain  # text that looks like a special token stays text
    decoded = tokenizer.decode(chain).rstrip(data.END_OF_TEXT)
    assert decoded.split(data.CLS)[1:] == ["def f<|endoftext|>", f"a {MASK} in the text<|endoftext|>", "(x)"]
    assert chain[0] == cls and chain.count(cls) == 3 and end in chain


def bert_like_tokenizer(**special):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_a_tokenizer_without_end_of_text_closes_documents_with_sep():
    bert = bert_like_tokenizer(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", unk_token="[UNK]")
    (block,) = pack(["a b a", "   ", "b"], bert, 10, framed=True)  # nothing but space gives no token
    assert block.tolist() == [2, 5, 6, 5, 3, 2, 6, 3, 3, 3]
    batch = MaskedLMCollator(bert, 0.5)([{"input_ids": torch.from_numpy(block).long()}])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0]]
    with pytest.raises(DataError, match="no end-of-text token"):
        next(pack(["a"], bert, 8))


def test_a_vocabulary_needs_room_for_the_special_tokens():
    with pytest.raises(DataError, match="at least 260"):
        train_tokenizer(TEXTS, 259, masked=True)


# ---------------------------------------------------------------- masking


def test_masking_has_the_shares_of_bert_and_spares_special_tokens(tokenizer, blocks):
    batch = MaskedLMCollator(tokenizer, 0.3)(blocks)
    original = torch.stack([block["input_ids"] for block in blocks])
    special = torch.isin(original, torch.tensor(tokenizer.all_special_ids))
    chosen = batch["labels"] != -100
    assert not (chosen & special).any()
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])

    ids, count = batch["input_ids"][chosen], int(chosen.sum())
    masked, kept = ids == tokenizer.mask_token_id, ids == original[chosen]
    # Four standard deviations of a share p of n tokens; one random token in 300 is the token itself.
    for found, total, share in (
        (chosen.sum(), (~special).sum(), 0.3), (masked.sum(), count, 0.8), (kept.sum(), count, 0.1 + 0.1 / 300),
        ((~masked & ~kept).sum(), count, 0.1 - 0.1 / 300),
    ):  # fmt: skip
        assert float(found / total) == pytest.approx(share, abs=4 * (share * (1 - share) / int(total)) ** 0.5)


def test_masks_are_a_function_of_the_seed_and_the_tokens(tokenizer, blocks):
    def mask(rows, **options):
        return MaskedLMCollator(tokenizer, 0.3, **options)(rows)["labels"]

    torch.manual_seed(1)
    first = mask(blocks[:8])
    state = torch.get_rng_state()
    assert torch.equal(mask(blocks[:8]), first) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(mask(blocks[:8], seed=1), first)
    assert not torch.equal(mask(blocks[4:12])[:4], first[4:])  # another batch: the block is masked anew
    fixed = mask(blocks[:8], fixed=True)
    for size in (1, 3):  # but not in evaluation
        assert torch.equal(torch.cat([mask(blocks[i : i + size], fixed=True) for i in range(0, 8, size)])[:8], fixed)


def test_at_least_one_token_is_masked(tokenizer):
    cls, end = tokenizer.cls_token_id, tokenizer.eos_token_id
    rows = [{"input_ids": torch.tensor([cls, 70 + number, end, end])} for number in range(50)]
    batch = MaskedLMCollator(tokenizer, 0.01, fixed=True)(rows)
    assert ((batch["labels"] != -100).sum(1) == 1).all()
    assert torch.equal(batch["labels"][:, 1], torch.arange(70, 120))
    assert (batch["input_ids"][:, 1] == tokenizer.mask_token_id).float().mean() > 0.9


def test_a_tokenizer_without_a_mask_is_refused():
    with pytest.raises(DataError, match="no mask token"):
        MaskedLMCollator(train_tokenizer(TEXTS, 300), 0.3)


# ---------------------------------------------------------------- a run


def tiny_recipe(text_folder, output_dir, model_type="bert", **changes):
    content = {
        "output_dir": str(output_dir),
        "objective": "masked_lm",
        "model": TINY[model_type],
        "tokenizer": {"vocab_size": 300},
        "data": {"source": str(text_folder), "block_length": 64, "validation_fraction": 0.1, "validation_blocks": 6},
        "training": {
            "max_steps": 14, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2, "warmup_steps": 2, "logging_steps": 3, "save_steps": 4, "disable_tqdm": True,
            "use_cpu": True,
        },
        "samples": {"prompts": [f"def {MASK}3(x):", f"{MASK} x + {MASK}"], "top_k": 3},
    }  # fmt: skip
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(value, dict) and key in content else value
    return recipe_from_dict(content)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.py").write_text(text)
    return folder


@pytest.fixture(scope="module", params=TINY)
def model_type(request):
    return request.param


@pytest.fixture(scope="module")
def finished(text_folder, tmp_path_factory, model_type):
    torch.set_num_threads(1)
    return train(tiny_recipe(text_folder, tmp_path_factory.mktemp("runs") / "whole", model_type))


def test_a_run_leaves_everything_it_promises(finished):
    metrics, folder = finished.metrics, finished.folder
    assert metrics["loss"]["after"] < 0.8 * metrics["loss"]["before"]
    assert metrics["accuracy"]["after"] > metrics["accuracy"]["before"] + 0.05
    report = (folder / "report.md").read_text()
    assert f"fell by {metrics['loss']['before'] - metrics['loss']['after']:.3f} nats per masked token" in report
    assert "| masked | 30% in training, 15% in evaluation |" in report
    samples = (folder / "samples.md").read_text()
    assert samples.count("⟶") == 1 + 1 + 2  # the heading, one mask, two masks
    assert (folder / "loss.png").exists() and json.loads((folder / "metrics.json").read_text()) == metrics


def test_the_command_says_what_was_measured(finished):
    from hf_ssm.cli import app

    path = finished.folder / "recipe.yaml"  # of a finished run, which is not repeated
    result = CliRunner().invoke(app, ["train", str(path), "--set", f"output_dir={finished.folder}"])
    loss = finished.metrics["loss"]
    assert f"nats per masked token: {loss['before']:.3f} before, {loss['after']:.3f} after training" in result.output


def test_the_saved_model_fills_masks(finished):
    fill = pipeline("fill-mask", model=str(finished.model_folder))
    answers = fill(f"def {MASK}3(x):", top_k=2)
    assert [set(answer) for answer in answers] == [{"score", "token", "token_str", "sequence"}] * 2
    tokenizer = AutoTokenizer.from_pretrained(finished.model_folder)
    assert fill.model.config.pad_token_id == tokenizer.pad_token_id
    assert fill.model.config.vocab_size == 304  # 300 rounded up to a multiple of 8


def test_the_model_card_can_be_read_by_the_hub(finished, model_type):
    from huggingface_hub import ModelCard

    card = ModelCard.load(finished.model_folder / "README.md")
    assert card.data.pipeline_tag == "fill-mask" and "{{" not in card.text and "{%" not in card.text
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == (
        "loss", pytest.approx(finished.metrics["loss"]["after"], abs=1e-4),
    )  # fmt: skip
    assert "masked language model" in card.text and 'pipeline("fill-mask"' in card.text
    assert f"a loss of {finished.metrics['loss']['after']:.3f} nats per masked token" in card.text.replace("\n", " ")


def test_evaluation_is_the_likelihood_of_the_masked_tokens_whatever_the_batch(finished, tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(finished.model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(finished.model_folder)
    packed = PackedBlocks(np.stack(list(pack(TEXTS[:8], tokenizer, 64, framed=True))))
    collator = MaskedLMCollator(tokenizer, 0.15, fixed=True)
    nats = found = total = 0
    for index in range(len(packed)):
        batch = collator([packed[index]])
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0].double()
        for position in (batch["labels"][0] != -100).nonzero().flatten().tolist():
            label = int(batch["labels"][0, position])
            nats -= float(logits[position].log_softmax(-1)[label])
            found += int(logits[position].argmax()) == label
            total += 1
    for batch_size in (3, 100):
        arguments = TrainingArguments(
            str(tmp_path), per_device_eval_batch_size=batch_size, use_cpu=True, disable_tqdm=True, report_to="none"
        )
        trainer = SSMTrainer(
            model, arguments, eval_collator=collator, eval_dataset=packed, **masked_accuracy()
        )  # fmt: skip
        for _ in range(2):
            result = trainer.evaluate()
            assert result["eval_loss_per_token"] == pytest.approx(nats / total, rel=1e-5)
            assert result["eval_accuracy"] == pytest.approx(found / total)


class Stop(Exception):
    """Stands for a killed process where starting one would be slow."""


# The run reads these texts four times, so the stream begins anew before and after the interruption.
@pytest.mark.parametrize("changes", [{}, {"data": {"streaming": True}}], ids=["in-memory", "streaming"])
def test_an_interrupted_run_goes_on_with_the_same_losses(
    finished, text_folder, tmp_path, monkeypatch, model_type, changes
):
    def stop(self, args, state, control, **kwargs):
        if state.global_step == 9:
            raise Stop

    whole = train(tiny_recipe(text_folder, tmp_path / "whole", model_type, **changes)) if changes else finished
    recipe = tiny_recipe(text_folder, tmp_path / "run", model_type, **changes)
    with monkeypatch.context() as patch:
        patch.setattr(training.CompleteCheckpoints, "on_step_begin", stop, raising=False)
        with pytest.raises(Stop):
            train(recipe)
    torch.rand(7)
    resumed = train(recipe)
    assert [entry["loss"] for entry in resumed.metrics["history"]] == [
        entry["loss"] for entry in whole.metrics["history"]
    ]
    assert resumed.metrics["loss"] == whole.metrics["loss"]
    assert resumed.metrics["accuracy"] == whole.metrics["accuracy"]


def test_a_saved_model_is_trained_further(finished, text_folder, tmp_path):
    changes = {"model": str(finished.model_folder), "tokenizer": None, "training": {"learning_rate": 1e-3}}
    result = train(tiny_recipe(text_folder, tmp_path / "run", **changes))
    assert result.metrics["loss"]["before"] == finished.metrics["loss"]["after"]
    assert result.metrics["loss"]["after"] < result.metrics["loss"]["before"]


@pytest.mark.slow
def test_the_demo_with_fewer_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    changes = ["training.max_steps=30", "data.validation_blocks=8", f"output_dir={tmp_path / 'demo'}"]
    result = train(load_recipe("configs/recipes/hydra-demo.yaml", changes))
    assert result.metrics["loss"]["after"] < 0.9 * result.metrics["loss"]["before"]


def test_the_papers_optimiser_and_schedule():
    from transformers import get_scheduler

    recipe = load_recipe(ROOT / "configs/recipes/hydra-base-c4.yaml")
    settings = dict(recipe.training)
    arguments = TrainingArguments("unused", use_cpu=True, **settings | {"bf16": False})
    blocks_per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    assert arguments.max_steps * blocks_per_step == pytest.approx(286_720_048, rel=1e-6)
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.AdamW([weight], lr=arguments.learning_rate, weight_decay=arguments.weight_decay)
    scheduler = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.get_warmup_steps(arguments.max_steps),
        num_training_steps=arguments.max_steps,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
    (shape,) = scheduler.lr_lambdas  # of the peak
    want = {0: 0.0, 2_100: 0.5, 4_200: 1.0, 37_100: 0.51, 70_000: 0.02}
    assert {step: shape(step) for step in want} == pytest.approx(want)
    # A step at the peak takes 1e-5 of a weight away, as MosaicML's decoupled AdamW does.
    optimizer.param_groups[0]["lr"] = arguments.learning_rate
    weight.grad = torch.zeros(1)
    optimizer.step()
    assert 1 - weight.item() == pytest.approx(1e-5, rel=0.05)  # float32 near 1 has steps of 6e-8


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"objective": "masked_ml"}, "unknown objective 'masked_ml'; did you mean 'masked_lm'"),
        ({"objective": ["masked_lm"]}, "unknown objective"),
        ({"objective": "causal_lm", "masking": {}, "samples": {}}, "masking belongs to objective: masked_lm"),
        ({"masking": {"mlm_probability": 0}}, r"mlm_probability must lie between 0 and 1, not 0\.0"),
        ({"masking": {"eval_mlm_probability": 1.0}}, r"eval_mlm_probability must lie between 0 and 1, not 1\.0"),
        ({"masking": {"mask_replace_prob": 0.95}}, r"together at most 1, not 0\.95 and 0\.1"),
        ({"masking": {"random_replace_prob": -0.1}}, r"together at most 1, not 0\.8 and -0\.1"),
        ({"masking": {"share": 0.1}}, r"unknown key 'masking\.share'"),
        ({"masking": 0.3}, "masking is a mapping of keys to values"),
        ({"samples": {"temperature": 0.5}}, r"unknown key 'samples\.temperature'"),
        ({"samples": {"top_k": 0}}, r"samples\.top_k must be at least 1"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path, changes, complaint):
    with pytest.raises(RecipeError, match=complaint):
        tiny_recipe(tmp_path, tmp_path / "run", **changes)


def test_what_does_not_fit_the_tokenizer_is_refused_before_training(text_folder, tmp_path):
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path / "causal")
    with pytest.raises(DataError, match="no mask token"):
        train(tiny_recipe(text_folder, tmp_path / "run", tokenizer=str(tmp_path / "causal")))
    with pytest.raises(RecipeError, match=r"samples.prompts: 'def f' holds no <\|mask\|>"):
        train(tiny_recipe(text_folder, tmp_path / "run", samples={"prompts": ["def f"]}))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_recipe_survives_being_written(tmp_path):
    recipe = tiny_recipe(tmp_path, tmp_path / "run", masking={"mlm_probability": 0.4})
    assert recipe_from_dict(recipe.to_dict()) == recipe
    assert recipe.masking.mlm_probability == 0.4 and recipe.masking.eval_mlm_probability == 0.15
