"""Loss curves of tiny runs, kept so that a change of the numerics is seen.

To write them anew, from the root of the repository: `python -m tests.support.golden_curves`. A commit that does so says
why.
"""

import json
import os
import tempfile
from pathlib import Path

from tests.support.runs import ROOT, RunDirs

CURVES = ROOT / "tests" / "golden" / "curves"
RECIPES = ("fp32", "bf16", "nvfp4")
STEPS = 20


def train_curve(dirs: RunDirs, recipe: str) -> list[dict[str, float]]:
    """Train the tiny model for 20 steps on the committed text and return its losses, row by row."""
    overrides = [f"recipe={recipe}", f"run.tokens={512 * STEPS}", "checkpoint.interval_steps=0"]
    assert dirs.train(f"curve_{recipe}", *overrides) == 0
    return [
        {key: value for key, value in row.items() if key == "step" or key.endswith(("loss", "loss_bf16"))}
        for row in dirs.rows(f"curve_{recipe}")
    ]


def read_curve(recipe: str) -> list[dict[str, float]]:
    """Return the curve that is kept."""
    return json.loads((CURVES / f"tiny_{recipe}.json").read_text())


def write_curves() -> None:
    """Train and keep every curve."""
    CURVES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        dirs = RunDirs(Path(folder) / "runs", cache=Path(folder) / "cache")
        for recipe in RECIPES:
            lines = ",\n".join(f"  {json.dumps(row)}" for row in train_curve(dirs, recipe))
            (CURVES / f"tiny_{recipe}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    write_curves()
