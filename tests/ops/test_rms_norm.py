"""rms_norm and gated_rms_norm: against their float64 references, torch's own norm, and the original packages' numbers;
layouts, dtypes, threads. They have no tokens, so what holds for the other operators is not asked of them."""

from functools import partial

import pytest
import torch
from op_cases import (
    DEVICE,
    TOLERANCE,
    WITHOUT_FLOAT64,
    assert_near,
    cast,
    draw,
    dtypes_of,
    error,
    in_float32,
    outputs_and_grads,
    usable,
)
from published import assert_as_published, cases

from hf_ssm.ops import gated_rms_norm, rms_norm

BACKENDS = usable("rms_norm")
assert usable("gated_rms_norm") == BACKENDS
HALVES = (torch.bfloat16, torch.float16)

# gate: None, "first" or "last"
VARIANTS = {
    "plain": {"gate": None},
    "plain in groups": {"gate": None, "group_size": 12},
    "gate first": {"gate": "first"},
    "gate last": {"gate": "last"},
    "gate first, groups": {"gate": "first", "group_size": 8},
    "gate last, groups": {"gate": "last", "group_size": 12},
    "groups of one": {"gate": "last", "group_size": 1},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def norm(backend: str, variant: str | None = None):
    """`rms_norm`, or `gated_rms_norm` as `variant` says; a backend without float64 is given float32."""
    if variant is None:
        function = partial(rms_norm, eps=1e-5, backend=backend)
    else:
        options = {"group_size": VARIANTS[variant].get("group_size")}
        options["norm_before_gate"] = VARIANTS[variant]["gate"] == "last"
        function = partial(gated_rms_norm, eps=1e-5, backend=backend, **options)
    return in_float32(function) if backend in WITHOUT_FLOAT64 else function


def norm_inputs(*shape: int, gate: str | None = None, seed: int = 0, **_) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    tensors = {"x": draw(g, *shape), "weight": draw(g, shape[-1])}
    return tensors | ({"gate": draw(g, *shape)} if gate else {})


def variant_inputs(variant: str | None, *shape: int) -> dict[str, torch.Tensor]:
    return norm_inputs(*shape, gate=None if variant is None else VARIANTS[variant]["gate"])


@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 5, 24), (3, 7, 5, 48), (90, 744)], ids=str)
def test_agrees_with_reference(backend, dtype, variant, shape):
    tensors = cast(variant_inputs(variant, *shape), dtype)
    want = outputs_and_grads(norm("reference", variant), cast(tensors, torch.float64))
    assert_near(outputs_and_grads(norm(backend, variant), tensors), want)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("channels", [1, 3, 16, 31, 32, 33, 100])  # around whole vectors
def test_agrees_with_torch_rms_norm(backend, channels):
    def theirs(x, weight):
        return torch.nn.functional.rms_norm(x, (channels,), weight, eps=1e-5)

    tensors = norm_inputs(4, channels)
    assert_near(outputs_and_grads(norm(backend), tensors), outputs_and_grads(theirs, tensors))


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("case", cases("gated_rms_norm"))
def test_published_numbers(backend, case):
    def original_names(x, weight, z=None):
        return {"out": gated_rms_norm(x, weight, z, backend=backend, **({"eps": 1e-5} | case.arguments))}

    assert_as_published(case, original_names, dtypes_of(backend))


@every_backend
@every_variant
@pytest.mark.parametrize("weight", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("x", [torch.float32, *HALVES], ids=str)
def test_half_precision_is_as_good_as_the_reference(backend, variant, x, weight):
    tensors = variant_inputs(variant, 40, 96)
    tensors = cast(tensors, {"x": x, "gate": x, "weight": weight})
    check_against(backend, norm_of=partial(norm, variant=variant), tensors=tensors, out_dtype=x)


@every_backend
@pytest.mark.parametrize("weight", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("x", [torch.float32, *HALVES], ids=str)
def test_the_plain_norm_returns_its_weights_dtype(backend, x, weight):
    tensors = cast(norm_inputs(40, 96), {"x": x, "weight": weight})
    check_against(backend, norm_of=norm, tensors=tensors, out_dtype=weight)


def check_against(backend, norm_of, tensors, out_dtype):
    exact = outputs_and_grads(norm_of("reference"), cast(tensors, torch.float64))
    got, reference = (outputs_and_grads(norm_of(name), tensors) for name in (backend, "reference"))
    assert got["out"].dtype == out_dtype
    for name, want in exact.items():
        assert got[name].dtype == reference[name].dtype, name
        assert error(got[name], want) <= 2 * error(reference[name], want) + TOLERANCE[torch.float32], name


@every_backend
def test_a_gate_and_a_weight_of_other_dtypes(backend):
    """Whatever the gate comes in, a float64 one too."""
    tensors = variant_inputs("gate first", 5, 24)
    want = gated_rms_norm(**tensors, eps=1e-5, norm_before_gate=False, backend="reference")
    for gate, weight in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        given = cast(tensors, {"x": torch.float32, "gate": gate, "weight": weight})
        out = gated_rms_norm(**given, eps=1e-5, norm_before_gate=False, backend=backend)
        assert out.dtype == torch.float32
        assert error(out, want) < (2**-7 if gate == torch.bfloat16 else TOLERANCE[torch.float32])
    x, weight = tensors["x"].float(), tensors["weight"]
    out = rms_norm(x, weight, eps=1e-5, backend=backend)
    assert out.dtype == torch.float64  # as the weight, though computed in float32
    assert error(out, rms_norm(tensors["x"], weight, eps=1e-5, backend="reference")) < TOLERANCE[torch.float32]


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "every other": lambda t: torch.stack([t, -t], dim=-1)[..., 0],
    "slice of a projection": lambda t: torch.cat([t, t], dim=-1)[..., t.shape[-1] :],
    "storage offset": lambda t: torch.cat([t, t], dim=0)[t.shape[0] :],
    "expanded rows": lambda t: t[:1].expand(t.shape),
    "expanded channels": lambda t: t[..., :1].expand(t.shape),
}


@every_backend
@pytest.mark.parametrize("variant", [None, "gate first", "gate last, groups"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(backend, layout, variant):
    def laid_out(function, **tensors):
        return function(**{name: LAYOUTS[layout](t) for name, t in tensors.items()})

    tensors = variant_inputs(variant, 3, 4, 24)
    got, want = (outputs_and_grads(partial(laid_out, norm(name, variant)), tensors) for name in (backend, "reference"))
    assert_near(got, want)


@every_backend
@pytest.mark.parametrize("variant", [None, "gate first", "gate last, groups"])
def test_layout_of_cotangents_does_not_matter(backend, variant):
    tensors = {name: t.requires_grad_() for name, t in variant_inputs(variant, 4, 24).items()}
    grads = []
    for function in (norm(backend, variant), norm("reference", variant)):
        out = function(**tensors)
        weight = torch.arange(out.numel(), dtype=out.dtype, device=DEVICE).view(out.mT.shape).sin()
        loss = out.sum() + (out.mT.contiguous() * weight).sum() + out[:, 0].sum()
        grads.append(dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True)))
    assert_near(*grads, TOLERANCE[torch.float32])


@every_backend
@every_variant
@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24), (0, 0, 24)], ids=str)
def test_no_rows(backend, variant, shape):
    results = outputs_and_grads(norm(backend, variant), cast(variant_inputs(variant, *shape), torch.float32))
    assert results["out"].shape == shape
    assert not results["d_weight"].any()


@every_backend
@pytest.mark.parametrize("variant", [None, "gate first", "gate last"])
def test_large_and_small_values(backend, variant):
    """Squares of 1e15 fit into float32, those of 1e-20 do not: there eps is all there is."""
    for scale in (1e15, 1e-4, 1e-20):
        tensors = variant_inputs(variant, 6, 24)
        tensors["x"] = tensors["x"] * scale
        tensors = cast(tensors, torch.float32)
        want = norm("reference", variant)(**cast(tensors, torch.float64))
        assert error(norm(backend, variant)(**tensors), want) < TOLERANCE[torch.float32]
    tensors["x"][2] = 0
    assert not norm(backend, variant)(**tensors)[2].any()
    tensors["x"][3, 5] = torch.nan
    out = norm(backend, variant)(**tensors)
    assert out[3].isnan().all() and not out[4].isnan().any()


@every_backend
@pytest.mark.parametrize("count", [1, 2, 3])
def test_two_runs_are_bit_identical(backend, count):
    tensors = cast(norm_inputs(900, 96, gate="last"), torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        first, second = (outputs_and_grads(norm(backend, "gate last, groups"), tensors) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_near(first, outputs_and_grads(norm("reference", "gate last, groups"), cast(tensors, torch.float64)), 1e-5)


@every_backend
@every_variant
def test_inputs_are_left_as_they_are(backend, variant):
    tensors = cast(variant_inputs(variant, 5, 24), torch.float32)
    before = {name: t.clone() for name, t in tensors.items()}
    outputs_and_grads(norm(backend, variant), tensors)
    assert all(torch.equal(t, before[name]) for name, t in tensors.items())


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(backend, dtype):
    for variant in (None, "gate first", "gate last"):
        tensors = cast(variant_inputs(variant, 5, 24), dtype)

        def under_autocast(*, variant=variant, **given):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                return norm(backend, variant)(**given)

        want, got = outputs_and_grads(norm(backend, variant), tensors), outputs_and_grads(under_autocast, tensors)
        assert all(got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]) for name in want)


@every_backend
def test_compiles_without_graph_breaks(backend):
    torch.compiler.reset()
    compiled = {
        None: torch.compile(rms_norm, fullgraph=True, backend="aot_eager", dynamic=True),
        "gate first": torch.compile(gated_rms_norm, fullgraph=True, backend="aot_eager", dynamic=True),
    }
    for variant, function in compiled.items():
        options = {} if variant is None else {"norm_before_gate": False}
        for rows in (3, 20):
            tensors = cast(variant_inputs(variant, 2, rows, 24), torch.float32)
            got = outputs_and_grads(partial(function, eps=1e-5, backend=backend, **options), tensors)
            assert_near(got, outputs_and_grads(norm(backend, variant), tensors))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no native kernels")
@pytest.mark.parametrize("gate", [False, True])
def test_opcheck(gate):
    tensors = cast(norm_inputs(3, 24, gate="last" if gate else None), torch.float32)
    given = [tensors["x"].requires_grad_(), tensors["weight"].requires_grad_(), tensors.get("gate")]
    torch.library.opcheck(torch.ops.hf_ssm.rms_norm_cpu.default, (*given, 1e-5, 12, gate, torch.bfloat16))
    given = [None if t is None else t.detach() for t in given]
    torch.library.opcheck(torch.ops.hf_ssm.rms_norm_cpu_backward.default, (torch.ones(3, 24), *given, 1e-5, 12, gate))


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (rms_norm, {"weight": torch.ones(5)}, r"rms_norm: weight has shape \(5,\), expected \(channels,\) = \(6,\)"),
        (rms_norm, {"x": torch.zeros(())}, r"rms_norm: x has shape \(\), expected \(..., channels\)"),
        (gated_rms_norm, {"weight": torch.ones(6, 1)}, r"gated_rms_norm: weight has shape \(6, 1\)"),
        (gated_rms_norm, {"group_size": 4}, r"gated_rms_norm: group_size=4 does not divide channels=6 \(weight\)"),
        (gated_rms_norm, {"group_size": 0}, r"gated_rms_norm: group_size=0 does not divide"),
        (gated_rms_norm, {"gate": torch.ones(1, 6)}, r"gated_rms_norm: gate has shape \(1, 6\), .* x = \(2, 6\)"),
    ],
)
def test_errors(function, change, message):
    options = {} if function is rms_norm else {"norm_before_gate": True}
    with pytest.raises(ValueError, match="^" + message):
        function(**{"x": torch.zeros(2, 6), "weight": torch.ones(6), "eps": 1e-5, **options, **change})
