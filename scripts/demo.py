"""The whole main job in one go, for `make demo`: train a small Mamba-2, save it, load it back, generate.

The recipe says everything; this script runs it and prints what came out. A demo that was interrupted is resumed, one
that is finished is done again.
"""

from pathlib import Path

from hf_ssm.recipes import load_recipe
from hf_ssm.training import train

recipe = load_recipe("configs/recipes/demo.yaml")
run = Path(recipe.output_dir)
result = train(recipe, restart=(run / "metrics.json").exists())
bits = result.metrics["bits_per_byte"]

print((run / "samples.md").read_text(encoding="utf-8"))
print((run / "report.md").read_text(encoding="utf-8"))
if bits["after"] > 0.9 * bits["before"]:
    raise SystemExit("the loss did not fall clearly: something is broken")
print(f"Written to {run}/. Try:  hf-ssm generate {result.model_folder} 'class '")
