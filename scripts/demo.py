"""The whole main job in one go, for `make demo`: train a small Mamba-2 and a Hymba of the same size, save them, load
them back, generate, and compare; then a small Hydra, which fills masks.

The recipes say everything; this script runs them anew and prints what came out.
"""

import os

# Before torch is imported. Waiting OpenMP threads sleep instead of spinning: a fifth slower on two idle cores, but
# several times faster when something else runs on them, too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from transformers import pipeline

import hf_ssm  # noqa: F401  registers the architectures
from hf_ssm.objectives import objective_of
from hf_ssm.recipes import load_recipe
from hf_ssm.training import RunResult, plot_losses, train


def run(path: str) -> RunResult:
    try:
        recipe = load_recipe(path)
        result = train(recipe, restart=True)
    except (ValueError, OSError) as error:  # bad settings, a disk that is full or cannot be written
        raise SystemExit(f"error: {error}") from error
    for name in ("samples.md", "report.md"):
        print((result.folder / name).read_text(encoding="utf-8"))
    measured = result.metrics[objective_of(recipe).headline]
    if not measured["after"] < 0.8 * measured["before"]:  # NaN is no success either
        raise SystemExit(f"{path}: the loss did not fall clearly: something is broken")
    return result


mamba2 = run("configs/recipes/demo.yaml")
hymba = run("configs/recipes/hymba-demo.yaml")
both = {"Mamba-2": mamba2, "Hymba": hymba}
picture = hymba.folder / "beside-mamba2.png"
plot_losses(picture, {name: result.metrics for name, result in both.items()}, "nats per token")
for name, result in both.items():
    bits, seconds = result.metrics["bits_per_byte"]["after"], result.metrics["training_seconds"]
    print(
        f"{name:8} {result.metrics['parameters']:,} parameters, {bits:.3f} bits per byte, trained in {seconds:.0f} s"
    )
print(f"Both curves: {picture}\n")

hydra = run("configs/recipes/hydra-demo.yaml")

fill = pipeline("fill-mask", model=str(hydra.model_folder))
for answer in fill("def __init__(<|mask|>, name):", top_k=3):
    print(f"{answer['score']:.2f}  {answer['sequence']}")

print(f"\nEverything is in {mamba2.folder}/, {hymba.folder}/ and {hydra.folder}/. Go on with:")
print(f"  hf-ssm generate {mamba2.model_folder} 'class '")
