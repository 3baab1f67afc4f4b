from tests.support.scripts import run_script, start_script

SCRIPT = "plan.py"


def test_a_plan():
    done = run_script(SCRIPT, "experiment=tiny", "--devices", "1", "--hardware", "GB200")
    assert done.returncode == 0, done.stderr
    assert "1 x GB200" in done.stdout


def test_mistakes_are_listed_without_a_traceback():
    done = start_script(SCRIPT, "experiment=tiny", "model.d_modell=3", "--devices", "1", "--hardware", "X")
    assert done.returncode == 2
    assert "model.d_modell" in done.stderr
    assert "--hardware" in done.stderr
    assert "Traceback" not in done.stderr
