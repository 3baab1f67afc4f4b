import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)


def test_a_plan():
    done = plan("experiment=tiny", "--devices", "1", "--hardware", "GB200")
    assert done.returncode == 0, done.stderr
    assert "1 x GB200" in done.stdout


def test_mistakes_are_listed_without_a_traceback():
    done = plan("experiment=tiny", "model.d_modell=3", "--devices", "1", "--hardware", "X")
    assert done.returncode == 2
    assert "model.d_modell" in done.stderr
    assert "--hardware" in done.stderr
    assert "Traceback" not in done.stderr
