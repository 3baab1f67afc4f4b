import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def convert(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    done = convert(str(tmp_path / "missing"), str(tmp_path / "step_00000001"))
    assert done.returncode == 1
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_says_what_it_does():
    done = convert("--help")
    assert done.returncode == 0
    assert "engine=deepspeed" in done.stdout
