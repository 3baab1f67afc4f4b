import os
import subprocess
import sys
from pathlib import Path

from nvfp4_train.config.load import from_yaml
from tests.support.configs import composed

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain.py"


def pretrain(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_mistakes_exit_with_2_and_without_a_stack_trace(tmp_path):
    mistakes = ("model.d_modle=5", "scheduler.decay_shape=zigzag", "model.pattern=M-X*", "model.d_model=250")
    result = pretrain("experiment=demo", *mistakes, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "4 problems" in result.stderr
    assert all(mistake.replace("=", " = ") in result.stderr for mistake in mistakes)
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_rank_signs_what_is_wrong_on_its_machine_only(tmp_path):
    result = pretrain("foo", cwd=tmp_path, RANK="1")
    assert result.returncode == 2
    assert result.stderr.startswith("rank 1: ")


def test_cfg_job_prints_the_resolved_config_and_writes_nothing(tmp_path):
    result = pretrain("experiment=tiny", "recipe=bf16", "--cfg", "job", cwd=tmp_path)
    assert result.returncode == 0
    assert from_yaml(result.stdout) == composed("experiment=tiny", "recipe=bf16")
    assert list(tmp_path.iterdir()) == []


def test_help(tmp_path):
    result = pretrain("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "usage: python scripts/pretrain.py" in result.stdout


def test_an_unknown_flag(tmp_path):
    result = pretrain("--confg", cwd=tmp_path)
    assert result.returncode == 2
    assert "unknown flag" in result.stderr
