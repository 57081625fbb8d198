"""The whole main job in one go, for `make demo`: train a small Mamba-2, save it, load it back, generate.

The recipe says everything; this script runs it anew and prints what came out.
"""

import os

# Before torch is imported. Waiting OpenMP threads sleep instead of spinning: a fifth slower on two idle cores, but
# several times faster when something else runs on them, too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hf_ssm.recipes import load_recipe
from hf_ssm.training import train

try:
    result = train(load_recipe("configs/recipes/demo.yaml"), restart=True)
except (ValueError, OSError) as error:  # bad settings, a disk that is full or cannot be written
    raise SystemExit(f"error: {error}") from error

for name in ("samples.md", "report.md"):
    print((result.folder / name).read_text(encoding="utf-8"))
bits = result.metrics["bits_per_byte"]
if bits["after"] > 0.8 * bits["before"]:
    raise SystemExit("the loss did not fall clearly: something is broken")
print(f"Everything is in {result.folder}/. Go on with:  hf-ssm generate {result.model_folder} 'class '")
