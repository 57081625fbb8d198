"""What Hymba's configuration can express beyond the published checkpoints, against the definition written out: one
row, one token and one head at a time, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .helpers import TOLERANCE, assert_near, random_ids, tiny

EXACT = TOLERANCE[torch.float64]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def producer(config, layer: int) -> int:
    if config.kv_reuse_group is not None:
        return next((group[0] for group in config.kv_reuse_group if layer in group), layer)
    while config.kv_reuse_every_i_layer > 0 and layer % config.kv_reuse_every_i_layer:
        layer -= 1
    return layer


def angles(config, tokens: int) -> Tensor:
    """(tokens, head size / 2)"""
    size, base, original = config.hidden_size // config.num_attention_heads, config.rope_theta, None
    if config.rope_type == "ntk":
        original, length = config.orig_max_position_embeddings, config.max_position_embeddings
    elif config.rope_type == "dynamic_ntk":
        original = config.orig_max_position_embeddings
        length = max(tokens, original)
    if original is not None:
        base *= (2 * length / original - 1) ** (size / (size - 2))
    rows = [[t / base ** (2 * k / size) for k in range(size // 2)] for t in range(tokens)]
    return torch.tensor(rows, dtype=torch.float64)


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """x (tokens, head size): numbers k and k + half are one complex number."""
    half = x.shape[1] // 2
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=1)


@torch.no_grad()
def definition(model, ids: Tensor) -> Tensor:
    """ids (tokens,) -> logits."""
    c, w = model.config, model.state_dict()
    heads, kv_heads, meta = c.num_attention_heads, c.num_key_value_heads, c.num_memory_tokens
    size, d_inner = c.hidden_size // heads, int(c.mamba_expand * c.hidden_size)
    value_size, rank, n = d_inner // heads, c.mamba_dt_rank, c.mamba_d_state
    h = w["model.embed_tokens.weight"][ids]
    if meta:
        h = torch.cat([w["model.memory_tokens"], h])
    tokens, kept = len(h), {}
    for i in range(c.num_hidden_layers):

        def p(name, layer=f"model.layers.{i}.mamba."):
            return w[layer + name]

        def linear(x, name, p=p):
            bias = p(name + ".bias") if c.mamba_proj_bias else 0
            return x @ p(name + ".weight").T + bias

        u = rms(h, w[f"model.layers.{i}.input_layernorm.weight"], c.rms_norm_eps)
        own = producer(c, i) == i
        widths = [heads * size, *([kv_heads * size, kv_heads * value_size] if own else []), d_inner, d_inner]
        query, *rest, x, gate = linear(u, "in_proj").split(widths, dim=-1)

        def prepared(vector, head, norm, p=p):
            if c.kq_norm != "none":
                weight = p(f"self_attn.{norm}.weight")
                vector = rms(vector, weight if c.kq_norm == "rms" else weight[0, head, 0], 1e-6)
            return rotated(vector, angles(c, tokens)) if c.rope else vector

        if own:
            keys, values = rest
            keys = [prepared(part, head, "k_norm") for head, part in enumerate(keys.split(size, dim=1))]
            kept[i] = keys, values.split(value_size, dim=1)
        keys, values = kept[producer(c, i)]
        everything = c.sliding_window is None or i in c.global_attn_idx
        attended = []
        for head, part in enumerate(query.split(size, dim=1)):
            part, group = prepared(part, head, "q_norm"), head // (heads // kv_heads)
            rows = []
            for t in range(tokens):
                seen = [s for s in range(t + 1) if everything or t - s <= c.sliding_window or s < meta]
                weights = torch.softmax(keys[group][seen] @ part[t] / math.sqrt(size), dim=0)
                rows.append(weights @ values[group][seen])
            attended.append(torch.stack(rows))

        taps = p("conv1d.weight")[:, 0]
        padded = F.pad(x.T, (c.mamba_d_conv - 1, 0))
        bias = p("conv1d.bias") if c.mamba_conv_bias else 0
        x = torch.stack([(padded[:, t : t + c.mamba_d_conv] * taps).sum(1) for t in range(tokens)]) + bias
        x = x * torch.sigmoid(x)
        dt, B, C = (x @ p("x_proj.0.weight").T).split([rank, n, n], dim=1)
        if c.mamba_inner_layernorms:
            names = ("dt", "B", "C")
            dt, B, C = (
                rms(v, p(f"{k}_layernorm.weight"), c.rms_norm_eps) for k, v in zip(names, (dt, B, C), strict=True)
            )
        dt = torch.log1p(torch.exp(dt @ p("dt_proj.0.weight").T + p("dt_proj.0.bias")))
        state, scanned = torch.zeros(d_inner, n, dtype=torch.float64), []
        for t in range(tokens):
            decay = torch.exp(-torch.exp(p("A_log.0")) * dt[t, :, None])
            state = decay * state + (dt[t] * x[t])[:, None] * B[t]
            scanned.append(state @ C[t] + p("D.0") * x[t])
        scanned = torch.stack(scanned) * gate * torch.sigmoid(gate)

        one = rms(torch.cat(attended, dim=1), p("pre_avg_layernorm1.weight"), c.rms_norm_eps)
        two = rms(scanned, p("pre_avg_layernorm2.weight"), c.rms_norm_eps)
        h = h + linear((one + two) / 2, "out_proj")
        if c.intermediate_size:
            layer = f"model.layers.{i}."
            expert = {k: w[f"{layer}moe.experts.0.{k}_proj.weight"] for k in ("gate", "up", "down")}
            v = rms(h, w[layer + "pre_moe_layernorm.weight"], c.rms_norm_eps)
            act = {"silu": F.silu, "gelu": F.gelu}[c.mlp_hidden_act]
            h = h + (act(v @ expert["gate"].T) * (v @ expert["up"].T)) @ expert["down"].T
    return rms(h, w["model.final_layernorm.weight"], c.rms_norm_eps)[meta:] @ w["lm_head.weight"].T


OPTIONS = {
    "as in the tests of all decoders": {},
    "shared by every second layer": {
        "num_hidden_layers": 5, "kv_reuse_group": None, "kv_reuse_every_i_layer": 2, "global_attn_idx": [4],
    },
    "shared by every third layer": {
        "num_hidden_layers": 5, "kv_reuse_group": None, "kv_reuse_every_i_layer": 3, "sliding_window": None,
    },
    "shared by layers apart, global ones, too": {
        "num_hidden_layers": 5, "kv_reuse_group": [[1, 4], [0, 2], [3]], "global_attn_idx": [0, 2],
    },
    "a group goes before every i layers": {"kv_reuse_group": [[1, 2]], "kv_reuse_every_i_layer": 2},
    "not shared": {"kv_reuse_group": None},
    "no window": {"sliding_window": None},
    "a window of one": {"sliding_window": 1},
    "a window and no global layer": {"global_attn_idx": None},
    "no meta tokens": {"num_memory_tokens": 0},
    "no rotation": {"rope": False},
    "default rotation": {"rope_type": "default"},
    "unnamed rotation": {"rope_type": None},
    "dynamic_ntk": {"rope_type": "dynamic_ntk", "orig_max_position_embeddings": 8},
    "no norm of keys": {"kq_norm": "none"},
    "one norm of keys": {"kq_norm": "rms"},
    "a key for every head": {"num_key_value_heads": None},
    "one key for all heads": {"num_key_value_heads": 1},
    "automatic rank": {"mamba_dt_rank": "auto"},
    "no MLP": {"intermediate_size": 0},
    "another MLP": {"mlp_hidden_act": "gelu"},
    "values as wide as keys": {"mamba_expand": 1},
    "values of half as much more": {"mamba_expand": 1.5},
    "no inner norms": {"mamba_inner_layernorms": False},
    "no biases": {"mamba_conv_bias": False, "mamba_proj_bias": False},
    "a matrix of its own": {"tie_word_embeddings": False},
    "another epsilon": {"rms_norm_eps": 0.1},
}  # fmt: skip
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_option
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_one_pass_is_the_definition(options, implementation):
    model, ids = tiny("hymba", dtype=torch.float64, **options), random_ids(2, 13)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        got = model(ids, use_cache=False).logits
    assert_near("logits", got, torch.stack([definition(model, row) for row in ids]), EXACT)


@every_option
def test_pieces_padding_and_packing_are_the_definition(options):
    if options.get("rope_type") == "dynamic_ntk":  # a cache holds keys as they were rotated
        options = options | {"orig_max_position_embeddings": 16}
    model, ids = tiny("hymba", dtype=torch.float64, **options), random_ids(1, 13)
    want = definition(model, ids[0])
    rows, mask = torch.zeros(2, 13, dtype=torch.long), torch.zeros(2, 13, dtype=torch.long)
    rows[0], mask[0] = ids, 1
    rows[1, 4:], mask[1, 4:] = ids[0, :9], 1
    with torch.no_grad():
        cache, pieces = None, []
        for piece in (slice(0, 2), slice(2, 3), slice(3, 9), slice(9, 10), slice(10, 13)):
            out = model(rows[:, piece], attention_mask=mask[:, : piece.stop], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
        got = torch.cat(pieces, dim=1)
        assert_near("row in pieces", got[0], want, EXACT)
        assert_near("padded row in pieces", got[1, 4:], want[:9], EXACT)
        packed = torch.cat([ids, ids[:, :6], ids], dim=1)
        positions = torch.cat([torch.arange(13), torch.arange(6), torch.arange(13)])[None]
        got = model(packed, position_ids=positions, use_cache=False).logits[0]
    assert_near("packed rows", got, torch.cat([want, want[:6], want]), EXACT)


def test_dynamic_ntk_follows_each_sequence():
    """Beyond orig_max_position_embeddings the rotation is that of the sequence's own length, in every batch."""
    model = tiny("hymba", dtype=torch.float64, rope_type="dynamic_ntk", orig_max_position_embeddings=8)
    rows = [random_ids(1, length, seed=length)[0] for length in (14, 4, 9)]
    want = [definition(model, row) for row in rows]
    ids, mask = torch.zeros(3, 14, dtype=torch.long), torch.zeros(3, 14, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 14 - len(row) :], mask[i, 14 - len(row) :] = row, 1
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, use_cache=False).logits
        index = torch.cat([torch.full((len(row),), i) for i, row in enumerate(rows)])[None]
        packed = model(torch.cat(rows)[None], seq_idx=index, use_cache=False).logits[0]
    assert_near("packed", packed, torch.cat(want), EXACT)
    for got, row, alone in zip(padded, rows, want, strict=True):
        assert_near("padded", got[-len(row) :], alone, EXACT)
    with torch.no_grad():  # and uncached generation sees it grow
        out = model.generate(rows[1][None], max_new_tokens=8, do_sample=False, use_cache=False)[0]
    for at in range(4, 12):
        assert out[at] == definition(model, out[:at])[-1].argmax()
