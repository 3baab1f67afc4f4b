import time
from collections.abc import Callable

import pytest
import torch

from nvfp4_train.analysis.runs import load_run
from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.checkpoint.folder import read_info
from nvfp4_train.config.problem import ConfigError, Problem
from nvfp4_train.train.anomaly import NonFiniteError
from nvfp4_train.train.failure import EXIT_CONFIG, EXIT_RUN, WAIT_FOR_MAIN_SECONDS, report_failure


def raised(action: Callable[[], object]) -> Exception:
    try:
        action()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def test_every_problem_of_a_configuration_is_told_with_exit_code_2(capsys: pytest.CaptureFixture[str]):
    problems = [Problem(key=key, value=1, rule="must be more", fix="give more") for key in ("model.a", "model.b")]
    assert report_failure(ConfigError(problems), rank=0) == EXIT_CONFIG
    told = capsys.readouterr().err
    assert "model.a" in told
    assert "model.b" in told


def test_other_ranks_let_rank_0_speak_first_of_a_wrong_configuration(monkeypatch, capsys):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    problem = Problem(key="parallel.tp_degree", value=3, rule="must divide", fix="lower it")
    assert report_failure(ConfigError([problem]), rank=1) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith("rank 1: error: ")
    assert waited == [WAIT_FOR_MAIN_SECONDS]


def test_our_value_error_is_the_users_to_mend(tmp_path, capsys: pytest.CaptureFixture[str]):
    error = raised(lambda: load_run(tmp_path))
    assert report_failure(error, rank=0) == EXIT_RUN
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_value_error_from_elsewhere_is_a_bug():
    error = raised(lambda: torch.optim.SGD([], lr=0.1))
    assert isinstance(error, ValueError)
    with pytest.raises(ValueError, match="empty parameter list") as caught:
        report_failure(error, rank=0)
    assert caught.value is error


@pytest.mark.parametrize("error", [OSError("no space left"), CheckpointError("damaged"), NonFiniteError("loss nan")])
def test_other_failures_are_told_in_a_line(error: Exception, capsys: pytest.CaptureFixture[str]):
    assert report_failure(error, rank=0) == EXIT_RUN
    assert capsys.readouterr().err == f"error: {error}\n"


def test_other_ranks_sign_what_they_say(tmp_path, capsys: pytest.CaptureFixture[str]):
    report_failure(raised(lambda: read_info(tmp_path)), rank=3)
    assert capsys.readouterr().err.startswith("rank 3: error: ")
