"""Layers that lie on the disk until they are called, as accelerate arranges it for models larger than the memory."""

import pytest
import torch

from hf_ssm import HydraForMaskedLM

from .helpers import DECODERS, random_ids, tiny


def spread(model) -> dict[str, str]:
    """Every other layer on the disk."""
    prefix, base = model.base_model_prefix, model.base_model
    layers = "encoder.layer" if hasattr(base, "encoder") else "layers"
    places = {name: "cpu" for name, _ in model.named_children() if name != prefix}
    for name, _ in [*base.named_children(), *base.named_parameters(recurse=False)]:
        places[f"{prefix}.{name}"] = "cpu"
    del places[f"{prefix}.{layers.split('.')[0]}"]
    for i in range(len(base.get_submodule(layers))):
        places[f"{prefix}.{layers}.{i}"] = "disk" if i % 2 else "cpu"
    return places


@pytest.mark.filterwarnings("ignore:The following device_map keys:UserWarning")  # meta tokens are no submodule
@pytest.mark.parametrize("model_type", [*DECODERS, "hydra"])
def test_offloaded_layers_compute_the_same(model_type, tmp_path):
    auto_class = "AutoModelForMaskedLM" if model_type == "hydra" else "AutoModelForCausalLM"
    model, ids = tiny(model_type, auto_class), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map=spread(model), offload_folder=tmp_path / "offload")
    assert {p.device.type for p in loaded.parameters()} == {"cpu", "meta"}
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    if not isinstance(model, HydraForMaskedLM):
        greedy = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(loaded.generate(ids, **greedy), model.generate(ids, **greedy))
