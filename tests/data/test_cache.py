import pytest

from nvfp4_train.data.cache import Leftovers, cached_folder
from nvfp4_train.data.error import DataError


def test_folder_is_made_once(tmp_path):
    calls = []

    def make(folder):
        calls.append(folder)
        (folder / "content").write_text("x")

    for _ in range(2):
        folder = cached_folder(tmp_path / "new" / "cache", key="k", make=make)
        assert folder == tmp_path / "new" / "cache" / "k"
        assert (folder / "content").read_text() == "x"
    assert len(calls) == 1


def test_folder_has_its_name_only_when_it_is_complete(tmp_path):
    def make(folder):
        assert not (tmp_path / "k").exists()
        assert folder.parent == tmp_path

    cached_folder(tmp_path, key="k", make=make)
    assert (tmp_path / "k").is_dir()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_leaves_nothing_and_can_be_repeated(tmp_path, error):
    def fail(folder):
        (folder / "half").write_text("x")
        raise error

    with pytest.raises(type(error)):
        cached_folder(tmp_path, key="k", make=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["k.lock"]
    folder = cached_folder(tmp_path, key="k", make=lambda path: (path / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_what_a_killed_process_left_is_not_used(tmp_path):
    (tmp_path / "k.partial").mkdir()
    (tmp_path / "k.partial" / "half").write_text("x")
    folder = cached_folder(tmp_path, key="k", make=lambda path: (path / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert not (tmp_path / "k.partial").exists()


def test_place_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        cached_folder(tmp_path / "file", key="k", make=lambda path: None)


def test_what_was_left_is_given_to_who_goes_on(tmp_path):
    def make(folder):
        names = {path.name for path in folder.iterdir()}
        (folder / f"part{len(names)}").touch()
        if not names:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder(tmp_path, key="k", make=make, leftovers=Leftovers.resume)
    assert not (tmp_path / "k").exists()
    folder = cached_folder(tmp_path, key="k", make=make, leftovers=Leftovers.resume)
    assert {path.name for path in folder.iterdir()} == {"part0", "part1"}
