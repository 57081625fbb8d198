"""Importing the package: what it costs, and what it changes in transformers, in whatever order things are imported."""

import subprocess
import sys
import textwrap

import pytest

KERNELS = ["mamba_ssm", "causal_conv1d", "flash_attn", "triton", "fla", "kernels"]


def run(code: str) -> str:
    """In a fresh interpreter; what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_import_is_light():
    new = run("""
        import sys, torch, transformers
        before = set(sys.modules)
        import hf_ssm
        print(*sorted(set(sys.modules) - before))
    """).split()
    assert "hf_ssm.registry" in new
    heavy = {"transformers.modeling_utils", "transformers.generation", "peft", "accelerate", "datasets", *KERNELS}
    assert not heavy & {name for module in new for name in (module, module.split(".")[0])}
    # the package's own modules come when they are asked for
    assert not {"hf_ssm.ops", "hf_ssm.decoder", "hf_ssm.cache"} & set(new)


def test_models_and_operators_import_no_kernel_package():
    new = run("""
        import sys, transformers, transformers.modeling_utils
        import torch._dynamo  # looks for triton by importing it
        before = set(sys.modules)
        import hf_ssm
        hf_ssm.MambaForCausalLM, hf_ssm.Mamba2ForCausalLM, hf_ssm.HydraForMaskedLM, hf_ssm.ops.explain
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
    """).split()
    assert not set(KERNELS) & set(new)


ORDERS = {
    "hf_ssm first": "import hf_ssm; from transformers import AutoConfig, AutoModelForCausalLM",
    "hf_ssm last": "from transformers import AutoConfig, AutoModelForCausalLM; import hf_ssm",
    "configurations between": (
        "from transformers import AutoConfig; import hf_ssm; from transformers import AutoModelForCausalLM"
    ),
    "transformers' models loaded before": (
        "from transformers import AutoConfig, AutoModelForCausalLM, MambaForCausalLM, Mamba2ForCausalLM; "
        "AutoModelForCausalLM.from_config(AutoConfig.for_model('mamba', hidden_size=8, num_hidden_layers=1)); "
        "import hf_ssm"
    ),
    "modules directly": (
        "from transformers.models.mamba.modeling_mamba import MambaForCausalLM; import hf_ssm; "
        "from transformers.models.auto.modeling_auto import AutoModelForCausalLM; from transformers import AutoConfig"
    ),
    "twice": (
        "import hf_ssm; hf_ssm.registry.register(); hf_ssm.registry.register(); "
        "from transformers import AutoConfig, AutoModelForCausalLM"
    ),
    "a model module first": (
        "from hf_ssm.modeling.mamba.modeling_mamba import MambaForCausalLM; "
        "from transformers import AutoConfig, AutoModelForCausalLM"
    ),
}


OFTEN = ("hf_ssm first", "hf_ssm last", "transformers' models loaded before")


@pytest.mark.parametrize(
    "order", [order if order in OFTEN else pytest.param(order, marks=pytest.mark.slow) for order in ORDERS]
)
def test_auto_classes_build_ours_in_any_order(order):
    printed = run(f"""
        {ORDERS[order]}
        sizes = dict(hidden_size=8, num_hidden_layers=1, vocab_size=16, state_size=4)
        for kind, more in (("mamba", dict()), ("mamba2", dict(head_dim=8, num_heads=2, n_groups=1))):
            config = AutoConfig.for_model(kind, **sizes, **more)
            print(type(config).__module__, type(AutoModelForCausalLM.from_config(config)).__module__)
    """).split()
    assert printed == [
        "hf_ssm.modeling.mamba.configuration_mamba",
        "hf_ssm.modeling.mamba.modeling_mamba",
        "hf_ssm.modeling.mamba2.configuration_mamba2",
        "hf_ssm.modeling.mamba2.modeling_mamba2",
    ]


def test_transformers_own_classes_stay_themselves(tmp_path):
    printed = run(f"""
        import hf_ssm, torch, transformers
        from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM
        theirs = MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16, state_size=4)).eval()
        print(type(theirs).__module__, type(theirs.config).__module__, type(theirs.backbone).__module__)
        theirs.save_pretrained(r"{tmp_path}")
        again = MambaForCausalLM.from_pretrained(r"{tmp_path}")
        print(type(again).__module__, type(again.config).__module__)
        assert again.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=3).shape == (1, 6)
        print(type(AutoModelForCausalLM.from_pretrained(r"{tmp_path}")).__module__)
        assert AutoModelForCausalLM.from_config(transformers.LlamaConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16, intermediate_size=8
        )).config.model_type == "llama"
    """).split()
    mamba = "transformers.models.mamba."
    assert printed[:3] == [mamba + "modeling_mamba", mamba + "configuration_mamba", mamba + "modeling_mamba"]
    assert printed[3:5] == [mamba + "modeling_mamba", mamba + "configuration_mamba"]
    assert printed[5:] == ["hf_ssm.modeling.mamba.modeling_mamba"]


@pytest.mark.parametrize("first", ["hf_ssm", "transformers"])
def test_encoders_and_their_image_processor_in_either_order(first, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "hydra"}')
    (tmp_path / "preprocessor_config.json").write_text("{}")
    imports = ["import hf_ssm", "from transformers import AutoConfig, AutoImageProcessor, AutoModelForMaskedLM"]
    printed = run(f"""
        {"; ".join(imports if first == "hf_ssm" else imports[::-1])}
        sizes = dict(hidden_size=16, head_dim=8, num_hidden_layers=1, vocab_size=16, state_size=4)
        model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("hydra", **sizes))
        print(type(model).__module__)
        print(type(AutoImageProcessor.from_pretrained(r"{tmp_path}", backend="pil")).__name__)
    """).split()
    assert printed == ["hf_ssm.modeling.hydra.modeling_hydra", "ViTImageProcessorPil"]


def test_names_of_the_package():
    printed = run("""
        import hf_ssm
        names = dir(hf_ssm)
        assert {"MambaConfig", "Mamba2ForCausalLM", "HydraForMaskedLM", "RecurrentCache", "ops"} <= set(names)
        assert all(getattr(hf_ssm, name) is not None for name in names if not name.startswith("__"))
        try:
            hf_ssm.Mamba7
        except AttributeError as error:
            print(error)
    """)
    assert printed == "module 'hf_ssm' has no attribute 'Mamba7'"
