"""Attention with a window and meta tokens: every implementation against the definition, key by key."""

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import TOLERANCE, error

from hf_ssm.ops import attention, flash
from hf_ssm.ops.attention import Pattern, Places, attend

HEADS, KV_HEADS, SIZE, VALUE_SIZE = 4, 2, 8, 20  # values in two and a half key heads


class Module(torch.nn.Module):
    num_key_value_groups = HEADS // KV_HEADS


def places(rows: list[str]) -> Places:
    """A letter per token of a sequence, its capital for a meta token, a dot for padding; positions as they count."""
    positions, meta, sequences, real = (torch.zeros(len(rows), len(rows[0]), dtype=torch.long) for _ in range(4))
    for r, row in enumerate(rows):
        seen: dict[str, int] = {}
        for i, letter in enumerate(row):
            name = letter.lower()
            real[r, i], meta[r, i] = letter != ".", letter.isupper()
            if letter != ".":
                positions[r, i] = seen.get(name, 0)
                seen[name] = seen.get(name, 0) + 1
            sequences[r, i] = max(0, len(seen) - 1)
    packed = any(len(set(row.lower()) - {"."}) > 1 for row in rows)
    padded = any("." in row for row in rows)
    return Places(positions, meta.bool(), sequences if packed else None, real.bool() if padded else None)


def tensors(rows: int, queries: int, keys: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, queries, SIZE), (KV_HEADS, keys, SIZE), (KV_HEADS, keys, VALUE_SIZE))
    return [torch.randn(rows, *shape, generator=g, dtype=torch.float64) for shape in shapes]


def one_by_one(query, key, value, rows: list[str], count: int, window: int | None) -> torch.Tensor:
    """(b, q, h, e): the definition, in words of the letters; 0 for padded queries."""
    out = query.new_zeros(len(rows), count, HEADS, value.shape[-1])
    total = len(rows[0])
    for r, row in enumerate(rows):
        for i in range(total - count, total):
            if row[i] == ".":
                continue
            mine = [j for j in range(total) if row[j].lower() == row[i].lower() and j <= i]
            near = mine if window is None else mine[-window - 1 :]
            seen = [j for j in mine if j in near or row[j].isupper()]
            for h in range(HEADS):
                keys, values = key[r, h * KV_HEADS // HEADS, seen], value[r, h * KV_HEADS // HEADS, seen]
                weights = torch.softmax(keys @ query[r, h, i - total + count] * SIZE**-0.5, dim=0)
                out[r, i - total + count, h] = weights @ values
    return out


ROWS = {
    "plain": ["aaaaaaaaaaaaaa"],
    "meta": ["AAAaaaaaaaaaaa", "AAAaaaaaaaaaaa"],
    "padded left": ["AAA....aaaaaaa", "AAAaaaaaaaaaaa", "AAA..........a"],
    "padded right": ["AAAaaaa.......", "AAAaaaaaaaaaaa"],
    "holes": ["AAAa.a..aaa.aa", "AAA.aaa.a.a.aa"],
    "packed": ["AAaaaaBBbbbbbb", "AAaBBbCCccDDdd"],
    "packed and padded": ["AAaa..BBbbb.b.", "AA..aBBb..bbbb"],
    "only meta tokens": ["AAAA", "AAAA"],
    "padding only": ["AAA...", "AAAaaa"],
}
CALLS = [
    (name, count) for name, rows in ROWS.items() for count in sorted({1, 5, len(rows[0])}) if count <= len(rows[0])
]


def pattern_of(rows: list[str], count: int, window: int | None) -> Pattern:
    keys = places(rows)
    front = min(len(row) - len(row.lstrip("ABCDEFGH")) for row in rows)
    return Pattern(keys.at(slice(len(rows[0]) - count, None)), keys, window, front)


def compare(got: torch.Tensor, want: torch.Tensor, rows: list[str], count: int, tolerance: float) -> None:
    real = torch.tensor([[letter != "." for letter in row[len(row) - count :]] for row in rows])
    assert error(got[real], want[real]) <= tolerance


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("name", "count"), CALLS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_query_sees_its_keys(implementation, name, count, window):
    rows = ROWS[name]
    query, key, value = tensors(len(rows), count, len(rows[0]))
    got, weights = attend(Module(), query, key, value, pattern_of(rows, count, window), implementation)
    assert (weights is not None) == (implementation == "eager")
    compare(got, one_by_one(query, key, value, rows, count, window), rows, count, TOLERANCE[torch.float64])


@pytest.mark.parametrize("by", ["sdpa", "matrix products"])
@pytest.mark.parametrize("window", [None, 2, 5, 30])
@pytest.mark.parametrize("count", [5, 12, 29])
def test_blocks_of_queries_change_nothing(monkeypatch, window, count, by):
    monkeypatch.setattr(attention, "_BLOCK", 4)
    monkeypatch.setattr(attention, "_QUERIES", 4)
    if by == "sdpa":
        monkeypatch.setattr(attention, "_SCORES", 0)
    rows = ["AAA" + "a" * 26] * 2
    query, key, value = tensors(2, count, 29)
    pattern = pattern_of(rows, count, window)
    assert len(pattern.blocks(4)) == -(-count // 4)
    got, _ = attend(Module(), query, key, value, pattern, "sdpa")
    compare(got, one_by_one(query, key, value, rows, count, window), rows, count, TOLERANCE[torch.float64])
    if window == 2 and count == 29:  # 3 meta tokens, 2 tokens before a block, 4 in it
        assert max(len(block.keys) for block in pattern.blocks(4) if torch.is_tensor(block.keys)) <= 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_on_a_cpu(monkeypatch, dtype):
    """By matrix products, unless a gradient is wanted; no further from the exact result than the definition is when it
    runs in that dtype."""
    rows = ["AAA" + "a" * 90, "..AAA" + "a" * 40 + "b" * 48]
    exact = tensors(2, 80, 93)
    given = [t.to(dtype) for t in exact]
    pattern = pattern_of(rows, 80, 20)
    want, _ = attend(Module(), *(t.double() for t in given), pattern, "eager")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    got, _ = attend(Module(), *given, pattern, "sdpa")
    plain, _ = attend(Module(), *given, pattern, "eager")
    assert got.dtype == dtype
    assert error(got, want) <= error(plain, want) + 1e-6
    monkeypatch.undo()
    with_gradient = [t.clone().requires_grad_() for t in given]
    assert attend(Module(), *with_gradient, pattern, "sdpa")[0].requires_grad


@pytest.mark.parametrize("name", ROWS)
def test_flex_attention_has_the_same_mask(name):
    from torch.nn.attention.flex_attention import flex_attention

    rows = ROWS[name]
    count = len(rows[0])
    pattern = pattern_of(rows, count, 2)
    query, key, value = (t.float() for t in tensors(len(rows), count, count))
    out = flex_attention(query, key, value, block_mask=pattern.block_mask, enable_gqa=True).transpose(1, 2)
    want = one_by_one(query.double(), key.double(), value.double(), rows, count, 2)
    compare(out, want, rows, count, TOLERANCE[torch.float32])


@st.composite
def random_rows(draw):
    length = draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        meta = draw(st.integers(0, 2))
        kinds = draw(st.lists(st.sampled_from("..++++|"), min_size=length, max_size=length))
        row, letter = "", "a"
        for i, kind in enumerate(kinds):
            if kind == "|" and i:
                letter = chr(ord(letter) + 1)
            row += "." if kind == "." else letter
        rows.append("A" * meta + row)
    width = max(map(len, rows))
    return [row.ljust(width, ".") for row in rows]


# --- flash-attn ----------------------------------------------------------------------------------------------------


def seen_by_flash(lengths: tuple[int, int], causal: bool, left: int, right: int) -> torch.Tensor:
    """(q, k) bool as flash-attn documents it: window and causality aligned to the bottom right, both ends included."""
    q, k = lengths
    distance = torch.arange(q)[:, None] + (k - q) - torch.arange(k)[None]
    seen = torch.ones(q, k, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= distance >= -right
    return seen


class FlashAttn:
    """flash_attn.flash_attn_interface of version 2.8 and flash_attn_interface of version 3.0 by their published
    signatures, one sequence at a time."""

    def __init__(self, dtype: torch.dtype | None):
        self.dtype = dtype  # what it computes in; None for that of its inputs

    def _each(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, left, right
    ):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and len(cu_seqlens_q) == len(cu_seqlens_k)
        assert q.shape[-1] == k.shape[-1] == v.shape[-1], "one head size"
        assert all(t.is_contiguous() for t in (q, k, v))
        assert (cu_seqlens_q.diff() <= max_seqlen_q).all() and (cu_seqlens_k.diff() <= max_seqlen_k).all()
        groups = q.shape[1] // k.shape[1]
        for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
            if a == b:
                continue
            dtype = self.dtype or q.dtype
            qs, ks, vs = q[a:b].to(dtype), k[c:d].to(dtype), v[c:d].to(dtype)
            ks, vs = (t.repeat_interleave(groups, dim=1) for t in (ks, vs))
            scores = torch.einsum("qhd,khd->hqk", qs, ks) * softmax_scale
            scores = scores.masked_fill(~seen_by_flash((len(qs), len(ks)), causal, left, right), -torch.inf)
            yield slice(a, b), slice(c, d), scores, qs, ks, vs

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0,
    ):  # fmt: skip
        assert dropout_p == 0 and softcap == 0 and alibi_slopes is None
        out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=self.dtype or q.dtype)
        sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        for queries, _, scores, _, _, vs in self._each(q, k, v, *sizes, window_size_left, window_size_right):
            lse[:, queries] = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - lse[:, queries, None]).nan_to_num()
            out[queries] = torch.einsum("hqk,khd->qhd", weights, vs).to(q.dtype)
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        for t in (dq, dk, dv):
            t.zero_()
        groups = q.shape[1] // k.shape[1]
        sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        for queries, keys, scores, qs, ks, vs in self._each(q, k, v, *sizes, window_size_left, window_size_right):
            weights = torch.exp(scores - softmax_lse[:, queries, None]).nan_to_num()
            d_out = dout[queries].to(qs.dtype)
            share = (d_out * out[queries].to(qs.dtype)).sum(-1).T[..., None]
            d_scores = weights * (torch.einsum("qhd,khd->hqk", d_out, vs) - share) * softmax_scale
            dq[queries] = torch.einsum("hqk,khd->qhd", d_scores, ks).to(q.dtype)
            d_k, d_v = torch.einsum("hqk,qhd->khd", d_scores, qs), torch.einsum("hqk,qhd->khd", weights, d_out)
            dk[keys], dv[keys] = (t.unflatten(1, (-1, groups)).sum(2).to(k.dtype) for t in (d_k, d_v))
        return softmax_lse

    def _flash_attn_forward(
        self, q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
        sm_margin=0,
    ):  # fmt: skip
        out, lse, *_ = self._flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
            window_size_left, window_size_right,
        )  # fmt: skip
        return out, lse, torch.tensor([]), torch.tensor([])

    def _flash_attn_backward(
        self, dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        return self._flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0,
            softmax_scale, is_causal, window_size_left, window_size_right, 0.0, None, deterministic,
        )  # fmt: skip


FLASH = {  # which module has a version's kernels
    "flash_attention_2": (
        "flash_attn.flash_attn_interface",
        ["_flash_attn_varlen_forward", "_flash_attn_varlen_backward"],
    ),
    "flash_attention_3": ("flash_attn_interface", ["_flash_attn_forward", "_flash_attn_backward"]),
}


def install(monkeypatch, dtype: torch.dtype | None) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    stand_in = FlashAttn(dtype)
    for name, functions in FLASH.values():
        module = types.ModuleType(name)
        for function in functions:
            setattr(module, function, getattr(stand_in, function))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", *FLASH])
def test_keys_to_come_are_not_seen(monkeypatch, implementation, count, window):
    """As a static cache has them: behind the queries are slots that no token is in yet, of each row another number."""
    install(monkeypatch, torch.float64)
    monkeypatch.setattr(flash, "_DTYPES", (torch.float64,))
    rows = ["AAaaaaa...", "AAaaaaaa..", "AAaaaaaaaa"]
    keys = places(rows)
    ends = keys.real.sum(dim=1, keepdim=True)
    queries = Places(ends - count + torch.arange(count), torch.zeros(3, count, dtype=torch.bool))
    query, key, value = tensors(3, count, 10)
    got, _ = attend(Module(), query, key, value, Pattern(queries, keys, window, 2), implementation)
    for r, row in enumerate(rows):
        alone = row.rstrip(".")
        q, k, v = query[r : r + 1], key[r : r + 1, :, : len(alone)], value[r : r + 1, :, : len(alone)]
        compare(got[r : r + 1], one_by_one(q, k, v, [alone], count, window), [alone], count, TOLERANCE[torch.float32])


def with_gradients(function, inputs, real):
    """`function(*inputs)` at real queries, and the gradients of all inputs for a cotangent there."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    g = torch.Generator().manual_seed(1)
    cotangent = (torch.randn(out.shape, generator=g, dtype=torch.float64) * real[..., None, None]).to(out.dtype)
    return [out.detach() * real[..., None, None].to(out.dtype), *torch.autograd.grad((out * cotangent).sum(), leaves)]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("name", "count"), CALLS)
@pytest.mark.parametrize("version", FLASH)
def test_flash_attention_merges_to_the_definition(monkeypatch, version, name, count, window):
    """Values and gradients; float64 in and inside, float32 in between."""
    install(monkeypatch, torch.float64)
    monkeypatch.setattr(flash, "_DTYPES", (torch.float64,))
    rows = ROWS[name]
    inputs = tensors(len(rows), count, len(rows[0]))
    real = torch.tensor([[letter != "." for letter in row[len(row) - count :]] for row in rows]).double()
    pattern = pattern_of(rows, count, window)
    got = with_gradients(lambda *t: attend(Module(), *t, pattern, version)[0], inputs, real)
    want = with_gradients(lambda *t: one_by_one(*t, rows, count, window), inputs, real)
    for mine, theirs in zip(got, want, strict=True):
        assert error(mine, theirs) <= TOLERANCE[torch.float32]


@settings(max_examples=40)
@given(rows=random_rows(), window=st.sampled_from([None, 1, 2, 4]), data=st.data())
def test_any_rows(rows, window, data):
    """eager, sdpa in blocks, matrix products in blocks, and flash-attn agree with the definition."""
    total = len(rows[0])
    count = data.draw(st.integers(1, total), label="queries")
    query, key, value = tensors(len(rows), count, total)
    want = one_by_one(query, key, value, rows, count, window)
    pattern = pattern_of(rows, count, window)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, torch.float64)
        patch.setattr(flash, "_DTYPES", (torch.float64,))
        patch.setattr(attention, "_BLOCK", 3)
        patch.setattr(attention, "_QUERIES", 3)
        for implementation in ("eager", "sdpa", "sdpa alone", *FLASH):
            if implementation == "sdpa alone":
                patch.setattr(attention, "_SCORES", 0)
                implementation = "sdpa"
            got, _ = attend(Module(), query, key, value, pattern, implementation)
            tolerance = TOLERANCE[torch.float32 if "flash" in implementation else torch.float64]
            compare(got, want, rows, count, tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("version", FLASH)
def test_flash_attention_in_half_precision(monkeypatch, version, dtype):
    """Merging two calls costs no more than eager attention in the same dtype."""
    install(monkeypatch, torch.float32)
    rows = ["AAAA" + "a" * 60] * 2
    inputs = [t.to(dtype) for t in tensors(2, 64, 64)]
    pattern, real = pattern_of(rows, 64, 9), torch.ones(2, 64)
    exact = with_gradients(lambda *t: one_by_one(*t, rows, 64, 9), [t.double() for t in inputs], real)
    got, eager = (
        with_gradients(lambda *t: attend(Module(), *t, pattern, name)[0], inputs, real)  # noqa: B023
        for name in (version, "eager")
    )
    for mine, theirs, want in zip(got, eager, exact, strict=True):
        assert mine.dtype == dtype
        assert error(mine, want) <= 2 * error(theirs, want)


@pytest.mark.parametrize(
    ("implementation", "dtype", "dropout", "message"),
    [
        (
            "flash_attention_4",
            torch.bfloat16,
            0.0,
            "of flash-attn, flash_attention_2 and flash_attention_3 are supported",
        ),
        ("flash_attention_3", torch.float32, 0.0, "float16 and bfloat16, not torch.float32"),
        ("flash_attention_2", torch.bfloat16, 0.1, "attention_dropout: two merged calls"),
    ],
)
def test_flash_attention_errors(implementation, dtype, dropout, message):
    inputs = [t.to(dtype) for t in tensors(1, 4, 4)]
    with pytest.raises(ValueError, match=message):
        attend(Module(), *inputs, pattern_of(["Aaaa"], 4, 2), implementation, dropout=dropout)
