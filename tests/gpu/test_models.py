"""Models on a GPU: what they give on the CPU, and decoding from a static cache as one captured graph."""

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

if Version(version("transformers")) < Version("5.21"):
    pytest.skip(f"models need transformers 5.21, here is {version('transformers')}", allow_module_level=True)

from gpu_cases import DEVICE, on_a_gpu
from models.helpers import DECODERS, assert_near, random_ids, tiny

EVERY = [*DECODERS, "hydra"]
# A model's shapes in small, where kernels see whole blocks; TINY's own are odd in every way.
LARGER = {
    "mamba": {"hidden_size": 64, "state_size": 16, "num_hidden_layers": 3},
    "mamba2": {"hidden_size": 64, "state_size": 32, "head_dim": 16, "n_groups": 1, "chunk_size": 64},
    "hydra": {"hidden_size": 64, "state_size": 32, "head_dim": 16, "n_groups": 1, "max_position_embeddings": 1024},
    "hymba": {"hidden_size": 64, "mamba_d_state": 16, "sliding_window": 32, "num_attention_heads": 4},
}
GREEDY = {"max_new_tokens": 20, "do_sample": False}

every_model = pytest.mark.parametrize("model_type", EVERY)
every_decoder = pytest.mark.parametrize("model_type", DECODERS)
every_size = pytest.mark.parametrize("larger", [False, True], ids=["tiny", "larger"])


def build(model_type: str, larger: bool):
    auto_class = "AutoModelForMaskedLM" if model_type == "hydra" else "AutoModelForCausalLM"
    return tiny(model_type, auto_class, **(LARGER[model_type] if larger else {}))


def logits_and_grads(model, ids, mask) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    ids, mask = ids.to(device), mask.to(device)
    model.zero_grad()
    logits = model(ids, attention_mask=mask).logits
    (logits * mask[..., None]).square().mean().backward()
    return {"logits": logits[mask.bool()]} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@every_model
@every_size
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_logits_and_gradients_are_the_cpus(model_type, larger, padded):
    """In float32; the CPU's own are in float64."""
    model = build(model_type, larger)
    ids = random_ids(2, 47 if not larger else 100)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
    want = logits_and_grads(model.double(), ids, mask)
    got = logits_and_grads(model.float().to(DEVICE), ids, mask)
    assert got.keys() == want.keys()
    for name in want:
        # a gradient of a deep model sums what cancels: tests/models allows as much between two backends of the CPU
        tolerance = 2e-5 if name == "logits" else 2.5e-4
        assert_near(name, got[name].cpu(), want[name], tolerance)


@every_model
@every_size
def test_bfloat16_is_near(model_type, larger):
    model, ids = build(model_type, larger), random_ids(2, 47)
    with torch.no_grad():
        want = model.double()(ids).logits
        got = model.to(DEVICE, torch.bfloat16)(ids.to(DEVICE)).logits.cpu()
    assert_near("logits", got, want, 1e-1)


@every_decoder
@every_size
@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_generation_is_the_cpus(model_type, larger, cache):
    model = build(model_type, larger)
    ids = random_ids(3, 40)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    want = model.generate(ids, attention_mask=mask, **GREEDY, use_cache=False)
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    got = model.to(DEVICE).generate(ids.to(DEVICE), attention_mask=mask.to(DEVICE), **GREEDY, **options)
    assert torch.equal(got.cpu(), want)


@on_a_gpu
@every_decoder
def test_compiled_generation(model_type):
    """transformers compiles the step of a static cache by itself, with CUDA graphs."""
    torch.compiler.reset()
    model, ids = build(model_type, larger=True), random_ids(2, 40)
    want = model.generate(ids, **GREEDY, use_cache=False)
    got = model.to(DEVICE).generate(ids.to(DEVICE), **GREEDY, cache_implementation="static")
    assert torch.equal(got.cpu(), want)


@on_a_gpu
@every_decoder
@every_size
@torch.no_grad()
def test_one_captured_step_serves_every_token(model_type, larger):
    """The next token is chosen inside the graph: nothing but replays between the prompt and the text."""
    model, ids = build(model_type, larger).to(DEVICE), random_ids(1, 40).to(DEVICE)
    want = model.generate(ids, **GREEDY, use_cache=False)

    def prompt():
        cache = model.cache_class.static()(model.config, max_cache_len=80)
        return cache, model(ids, past_key_values=cache).logits[:, -1:].argmax(dim=-1)

    token = torch.empty(1, 1, dtype=torch.long, device=DEVICE)

    def step(cache):
        token.copy_(model(token, past_key_values=cache).logits[:, -1:].argmax(dim=-1))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # on another cache: a step writes to its own
        cache, first = prompt()
        token.copy_(first)
        for _ in range(3):
            step(cache)
    torch.cuda.current_stream().wait_stream(stream)

    cache, first = prompt()
    token.copy_(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records the step and does not run it
        step(cache)
    text = [token.clone()]
    for _ in range(GREEDY["max_new_tokens"] - 1):
        graph.replay()
        text.append(token.clone())
    assert torch.equal(torch.cat(text, dim=1), want[:, ids.shape[1] :])
    assert cache.get_seq_length() == ids.shape[1] + GREEDY["max_new_tokens"] - 1
