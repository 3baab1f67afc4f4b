import multiprocessing

import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.tokenizing.state import JobState, load_state, locked, remove_unused, save_state

JOB = {"source": [{"name": "a"}], "tokenizer": "t", "max_tokens": 0}


def test_state_comes_back(tmp_path):
    state = JobState(job=JOB, cursor={"file": 1}, output={"x": {}}, text_digest="ab", num_errors=2, errors=["e"])
    save_state(tmp_path, state)
    assert load_state(tmp_path, JOB) == state


def test_no_state_is_the_beginning(tmp_path):
    assert load_state(tmp_path, JOB) == JobState(job=JOB)


def test_another_job_is_refused_with_what_differs(tmp_path):
    save_state(tmp_path, JobState(job=JOB))
    with pytest.raises(DataError, match="another max_tokens, tokenizer") as caught:
        load_state(tmp_path, JOB | {"tokenizer": "u", "max_tokens": 5})
    assert str(tmp_path) in caught.value.fix


@pytest.mark.parametrize("content", ["", "{}", '{"unknown": 1}'])
def test_damaged_state_is_named(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    with pytest.raises(DataError, match="no readable state"):
        load_state(tmp_path, JOB)


def test_unused_folder_goes_and_used_one_stays(tmp_path):
    for name in ("unused", "used"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    save_state(tmp_path / "used", JobState(job=JOB))
    for name in ("unused", "used"):
        remove_unused(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def try_to_lock(folder, results):
    try:
        with locked(folder):
            results.put("")
    except DataError as error:
        results.put(error.found)


def test_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    for expected in ("another process that writes there", ""):
        with locked(tmp_path / ("a" if expected else "b")):
            process = context.Process(target=try_to_lock, args=(tmp_path / "a", results))
            process.start()
            process.join()
        assert results.get() == expected


def test_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="a folder that can be written"), locked(tmp_path / "file" / "x"):
        pass
