import pytest

from tests.support.scripts import ROOT, run_script, start_script

SCRIPT = "check_hf.py"
GOLDEN = ROOT / "tests" / "golden" / "nemotron_h"


def test_a_folder_that_agrees():
    done = run_script(SCRIPT, str(GOLDEN / "c_moe"))
    assert "max |logit diff| = " in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("arguments", [["--tol", "1e-12"], ["--dt-min", "0"]])
def test_above_the_tolerance(arguments):
    done = run_script(SCRIPT, str(GOLDEN / "c_moe"), *arguments)
    assert "max |logit diff| = " in done.stdout
    assert done.returncode == 1


def test_a_folder_without_a_model(tmp_path):
    done = start_script(SCRIPT, str(tmp_path))
    assert done.returncode == 2
    assert "config.json is missing" in done.stderr
    assert "Traceback" not in done.stderr
