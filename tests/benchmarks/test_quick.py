"""Every benchmark starts and ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name != "race.py")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_writes_its_results(script: str, tmp_path: Path):
    results = tmp_path / "results.json"
    command = [sys.executable, f"benchmarks/{script}", "--quick", "--json", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(results.read_text())
