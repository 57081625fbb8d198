"""What the model tests share: tiny models of every architecture with weights that make mistakes visible, and each
tolerance with its reason."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import transformers
from torch import Tensor

from hf_ssm import registry
from hf_ssm.ops import use_backend
from hf_ssm.ops.backends import OPERATORS

DECODERS = ["mamba", "mamba2", "hymba"]

# Largest |got - want| allowed, as a fraction of max(1, max |want|).
# float64: two layers of sums of at most some hundred terms of order 1 in another order, 2e-16 each.
# float32: 5 times the worst error measured over the suite, 2e-6.
# bfloat16: 8 bits, two layers whose every intermediate result is rounded; the worst measured is 3.8e-2.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-1}
# Gradients, in float32 again 5 times the worst measured, 5e-5: of the convolution in front of Mamba-2's gated norm,
# where a group of 12 channels is divided by a root mean square that can be small.
GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2.5e-4}

# Everything that an architecture can do differently is on, in sizes that are not each other's multiples by accident.
TINY = {
    "hydra": {
        "vocab_size": 41, "hidden_size": 12, "state_size": 5, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 5,
        "head_dim": 6, "n_groups": 2, "chunk_size": 4, "use_bias": True, "time_step_limit": (0.01, 2.0),
        "learnable_initial_states": True, "max_position_embeddings": 64, "pad_token_id": 0,
        "image_size": 8, "patch_size": 2, "num_channels": 2,
    },
    "hymba": {
        "vocab_size": 41, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_memory_tokens": 3, "sliding_window": 3, "global_attn_idx": [0],
        "kv_reuse_group": [[1, 2]], "kq_norm": "perhead-rms", "max_position_embeddings": 128,
        "orig_max_position_embeddings": 32, "mamba_d_state": 5, "mamba_dt_rank": 3, "mamba_proj_bias": True,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    },
    "mamba": {
        "vocab_size": 41, "hidden_size": 12, "state_size": 5, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 4,
        "time_step_rank": 3, "use_bias": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    },
    "mamba2": {
        "vocab_size": 41, "hidden_size": 12, "state_size": 5, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 4,
        "head_dim": 6, "n_groups": 2, "chunk_size": 4, "use_bias": True, "time_step_limit": (0.01, 2.0),
        "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    },
}  # fmt: skip
# What other architectures call by other names than Mamba and Mamba-2.
NAMES = {
    "hymba": {"state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "layer_norm_epsilon": "rms_norm_eps",
        "use_bias": "mamba_proj_bias", "mlp_intermediate_size": "intermediate_size"},
}  # fmt: skip


def named(model_type: str, field: str) -> str:
    """An architecture's own name of a configuration field."""
    return NAMES.get(model_type, {}).get(field, field)


def backends() -> list[str]:
    """The backends that every operator has on this machine; not triton, which wants tensors on a GPU, and without one
    is interpreted, too slowly for models."""
    rows = [
        {row.name for row in rows if row.obstacle() is None and row.name != "triton"} for rows in OPERATORS.values()
    ]
    return sorted(set.intersection(*rows))


def on(backend: str | None):
    """Run on a backend; the native kernels have no float64, so they are not forced but first choice where they can."""
    return nullcontext() if backend in (None, "cpu") else use_backend(backend)


def tiny_config(model_type: str, **changes):
    changes = {named(model_type, field): value for field, value in changes.items()}
    return registry.load(registry.ARCHITECTURES[model_type].config)(**{**TINY[model_type], **changes})


def one_layer(model_type: str) -> dict:
    """Changes that leave one layer."""
    return {"num_hidden_layers": 1} | ({"kv_reuse_group": None} if model_type == "hymba" else {})


def tiny(model_type: str, auto_class: str = "AutoModelForCausalLM", *, seed: int = 0, dtype=torch.float32, **changes):
    """A small model in eval mode with vivid weights: logits of order 1, and every parameter matters."""
    model = registry.load(registry.ARCHITECTURES[model_type].models[auto_class])(tiny_config(model_type, **changes))
    return vivid(model, seed).to(dtype).eval()


@torch.no_grad()
def vivid(model, seed: int = 0):
    """Random weights in place of the initial ones, at which half of the parameters hardly matter yet: no biases, D and
    norms of 1, steps so small that nothing is forgotten."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for name, parameter in model.named_parameters():
        if name.endswith(("dt_bias", "dt_proj.bias", "dt_proj.0.bias")):
            new = normal(parameter.shape) - 1  # softplus(dt) of 0.05 to 1.5: from hardly anything to nearly all
        elif "norm" in name.lower() and name.endswith("weight"):
            new = 1 + 0.3 * normal(parameter.shape)
        elif name.endswith(("A_log", "A_log.0")):
            new = 0.7 * normal(parameter.shape)
        elif name.endswith("conv1d.weight") or "embed" in name:
            new = 0.6 * normal(parameter.shape)
        elif parameter.ndim == 2:
            new = normal(parameter.shape) * parameter.shape[1] ** -0.5
        else:
            new = 0.5 * normal(parameter.shape)
        parameter.copy_(new)
    return model


def random_ids(batch: int, seqlen: int, seed: int = 0, vocab_size: int = 41) -> Tensor:
    """Token ids; never 0, which is the padding token."""
    return torch.randint(1, vocab_size, (batch, seqlen), generator=torch.Generator().manual_seed(seed))


def assert_near(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not want.numel():
        return
    got, want = got.detach().double(), want.detach().double()
    assert got.isfinite().all(), f"{name}: not finite"
    scale = max(1.0, want.abs().max().item())
    error = (got - want).abs().max().item() / scale
    assert error <= tolerance, f"{name}: off by {error:.2e} of {scale:.2g}, allowed {tolerance:.0e}"


def new_cache(model):
    return model.cache_class(model.config)


def mixers(model) -> list:
    """Of every layer of a decoder or of its base model."""
    return [layer.mamba if hasattr(layer, "mamba") else layer.mixer for layer in model.base_model.layers]


def unused(model, parameter: str) -> bool:
    """A layer of Hymba that attends to another's keys has a norm for its own, which it does not have: the published
    files hold it."""
    owners = [i for i, mixer in enumerate(mixers(model)) if getattr(mixer, "owns_keys", True)]
    layer = parameter.partition("layers.")[2].partition(".")[0]
    return "k_norm" in parameter and int(layer) not in owners


def states(cache) -> list[Tensor]:
    """Of the recurrence, two per layer."""
    return [state for layer in cache.layers for state in (layer.conv_states[0], layer.recurrent_states[0])]


def keys_and_values(cache) -> list[Tensor]:
    """Of the attention, two for each layer that has its own."""
    owners = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [tensor for layer in owners for tensor in (layer.keys, layer.values)]


def keys_held(cache, config) -> list[list[Tensor]]:
    """Of every row, what each attention has of the real tokens that later ones can see, (heads, tokens, head size)."""
    owners = [(layer, i) for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
    rows: list[list[Tensor]] = [[] for _ in range(cache.batch_size)]
    for layer, i in owners:
        real = cache.real(layer.keys.shape[2])
        for row, held in enumerate(rows):
            which = slice(None) if real is None else real[row]
            held += [t[row][:, which][:, -(config.windows[i] or t.shape[2]) :] for t in (layer.keys, layer.values)]
    return rows


def same_states(got, want, tolerance: float) -> None:
    """Of caches that were fed the same tokens, padding included."""
    assert len(keys_and_values(got)) == len(keys_and_values(want))
    for i, (a, b) in enumerate(zip(keys_and_values(got), keys_and_values(want), strict=True)):
        assert_near(f"{'values' if i % 2 else 'keys'} of attention {i // 2}", a, b, tolerance)
    got, want = states(got), states(want)
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_near(f"{'conv' if i % 2 == 0 else 'recurrent'} state of layer {i // 2}", a, b, tolerance)


@contextmanager
def tokens_fed(model) -> Iterator[list[int]]:
    """The number of positions of every call of the embedding inside the block."""
    fed: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    try:
        yield fed
    finally:
        hook.remove()


def transformers_class(model_type: str, auto_class: str = "AutoModelForCausalLM"):
    """transformers' own class, whatever the Auto classes build now."""
    name = registry.ARCHITECTURES[model_type].models[auto_class]
    return getattr(transformers, name)
