"""Import paths become functions, and their files are recorded."""

import hashlib
import sys
from pathlib import Path

import pytest

from nvfp4_train.numerics.extension import call_fault, find_source, resolve


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "an_extension.py"
    file.write_text("def double(x, *, times=2):\n    return x * times\n\nNUMBER = 3\n")
    (tmp_path / "a_broken_one.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    return file


def test_a_path_names_an_object(module: Path):
    assert resolve("an_extension:double")(4) == 8
    assert resolve("an_extension:NUMBER") == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("not_there_at_all:double", "No module named 'not_there_at_all'; put its folder on PYTHONPATH"),
        ("an_extension:triple", "module an_extension has no triple"),
        ("a_broken_one:double", "No module named 'a_module_that_is_not_there'"),
    ],
)
def test_a_path_that_names_nothing_says_why(module: Path, path: str, message: str):
    with pytest.raises(ValueError, match=message):
        resolve(path)


def test_the_file_and_its_hash_are_found(module: Path):
    source = find_source("an_extension:double")
    assert Path(source.file) == module
    assert source.sha256 == hashlib.sha256(module.read_bytes()).hexdigest()


def test_a_call_that_does_not_fit_is_seen_without_calling(module: Path):
    double = resolve("an_extension:double")
    assert call_fault(double, 1, times=3) is None
    assert "unexpected keyword argument 'power'" in str(call_fault(double, 1, power=3))
    assert "missing a required argument" in str(call_fault(double))
    assert call_fault(resolve("an_extension:NUMBER"), 1) == "is a int, not a function"
