import json
import subprocess
import sys
from pathlib import Path

from tests.support.compiler import needs_compiler

ROOT = Path(__file__).resolve().parents[2]


@needs_compiler
def test_it_measures_every_case_and_writes_what_it_prints(tmp_path: Path):
    results = tmp_path / "results.json"
    command = [sys.executable, "benchmarks/compiled_twin.py", "--quick", "--json", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = json.loads(results.read_text())
    assert len(rows) == 4
    for case, row in rows.items():
        assert case in done.stdout
        assert all(row[name] > 0 for name in ("copy_seconds", "oracle", "compiled"))
