"""The whole main job in one go, for `make demo`: train a small Mamba-2, save it, load it back, generate; then a small
Hydra, which fills masks.

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
from hf_ssm.training import RunResult, train


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
hydra = run("configs/recipes/hydra-demo.yaml")

fill = pipeline("fill-mask", model=str(hydra.model_folder))
for answer in fill("def __init__(<|mask|>, name):", top_k=3):
    print(f"{answer['score']:.2f}  {answer['sequence']}")

print(f"\nEverything is in {mamba2.folder}/ and {hydra.folder}/. Go on with:")
print(f"  hf-ssm generate {mamba2.model_folder} 'class '")
