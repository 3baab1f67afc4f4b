import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "nemotron_h"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "check_hf.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)


def test_a_folder_that_agrees():
    done = check(str(GOLDEN / "c_moe"))
    assert "max |logit diff| = " in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("arguments", [["--tol", "1e-12"], ["--dt-min", "0"]])
def test_above_the_tolerance(arguments):
    done = check(str(GOLDEN / "c_moe"), *arguments)
    assert "max |logit diff| = " in done.stdout
    assert done.returncode == 1


def test_a_folder_without_a_model(tmp_path):
    done = check(str(tmp_path))
    assert done.returncode == 2
    assert "config.json is missing" in done.stderr
    assert "Traceback" not in done.stderr
