"""LoRA on every projection: it trains, it changes the output, it merges to the same output, it is saved and loaded."""

import pytest
import torch

from .helpers import DECODERS, TOLERANCE, assert_near, random_ids, tiny

peft = pytest.importorskip("peft")

PROJECTIONS = {
    "hymba": ["in_proj", "x_proj.0", "dt_proj.0", "out_proj", "gate_proj", "up_proj", "down_proj"],
    "mamba": ["in_proj", "x_proj", "dt_proj", "out_proj"],
    "mamba2": ["in_proj", "out_proj"],
}
every_model = pytest.mark.parametrize("model_type", DECODERS)
TARGETS = ["a list", "all-linear"]


def adapted(model_type: str, targets: str, **changes):
    target_modules = PROJECTIONS[model_type] if targets == "a list" else "all-linear"
    config = peft.LoraConfig(r=2, target_modules=target_modules, task_type="CAUSAL_LM", **changes)
    model = peft.get_peft_model(tiny(model_type, dtype=torch.float64), config)
    return model


def adapters(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


@torch.no_grad()
def train_by_hand(model) -> None:
    """Both halves of every adapter away from zero, where B begins."""
    generator = torch.Generator().manual_seed(0)
    for parameter in adapters(model).values():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


@every_model
@pytest.mark.parametrize("targets", TARGETS)
def test_every_adapter_is_there_and_gets_a_gradient(model_type, targets):
    model = adapted(model_type, targets)
    reached = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in adapters(model)}
    modules = tiny(model_type).named_modules()
    assert reached == {name for name, m in modules if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    assert all(any(name.endswith(f".{projection}") for name in reached) for projection in PROJECTIONS[model_type])
    train_by_hand(model)
    ids = random_ids(2, 8)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in adapters(model).items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6, name
    assert all(p.grad is None for name, p in model.named_parameters() if "lora_" not in name)


@every_model
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_gradient_checkpointing_reaches_every_adapter(model_type, checkpointing):
    model = adapted(model_type, "all-linear")
    train_by_hand(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    ids = random_ids(2, 8)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad.abs().max() > 1e-6 for parameter in adapters(model).values())


@pytest.mark.parametrize(
    ("model_type", "projection"), [(model_type, name) for model_type in DECODERS for name in PROJECTIONS[model_type]]
)
def test_every_single_adapter_changes_the_output(model_type, projection):
    ids = random_ids(2, 8)
    model = peft.get_peft_model(
        tiny(model_type, dtype=torch.float64), peft.LoraConfig(r=2, target_modules=[projection], task_type="CAUSAL_LM")
    ).eval()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        train_by_hand(model)
        assert (model(input_ids=ids).logits - before).abs().max() > 1e-2
        with model.disable_adapter():
            assert_near("without adapter", model(input_ids=ids).logits, before, TOLERANCE[torch.float64])


@every_model
@pytest.mark.parametrize("targets", TARGETS)
def test_merged_saved_and_loaded_adapters_give_the_same(model_type, targets, tmp_path):
    model, ids = adapted(model_type, targets).eval(), random_ids(2, 8)
    train_by_hand(model)
    with torch.no_grad():
        want = model(input_ids=ids).logits
        greedy = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(tiny(model_type, dtype=torch.float64), tmp_path).double().eval()
        assert_near("loaded", loaded(input_ids=ids).logits, want, TOLERANCE[torch.float64])
        assert torch.equal(loaded.generate(input_ids=ids, max_new_tokens=5, do_sample=False), greedy)
        merged = model.merge_and_unload()
        assert type(merged) is type(tiny(model_type))
        assert_near("merged", merged(input_ids=ids).logits, want, TOLERANCE[torch.float64])
        assert torch.equal(merged.generate(ids, max_new_tokens=5, do_sample=False), greedy)


@every_model
def test_the_convolution_is_still_refused(model_type):
    """Its weight goes to the operator: an adapter around the module would be ignored."""
    with pytest.raises(ValueError, match="conv1d: its weight goes to an operator"):
        peft.get_peft_model(tiny(model_type), peft.LoraConfig(target_modules=["conv1d"], task_type="CAUSAL_LM"))


def test_other_implementations_are_still_refused():
    from transformers import MambaConfig, MambaForCausalLM

    theirs = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=10, state_size=4))
    with pytest.raises(ValueError, match="out_proj"):
        peft.get_peft_model(theirs, peft.LoraConfig(target_modules=["out_proj"], task_type="CAUSAL_LM"))
