from tests.support.scripts import run_script, start_script

SCRIPT = "convert_checkpoint.py"


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    done = start_script(SCRIPT, str(tmp_path / "missing"), str(tmp_path / "step_00000001"))
    assert done.returncode == 1
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_says_what_it_does():
    done = run_script(SCRIPT, "--help")
    assert done.returncode == 0
    assert "engine=deepspeed" in done.stdout
