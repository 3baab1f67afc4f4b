import numpy as np
import pytest

from nvfp4_train.data import spool as module
from nvfp4_train.data.error import DataError
from nvfp4_train.data.spool import Spool


def read(spool):
    return [number for piece in spool.pieces() for number in piece.tolist()]


@pytest.mark.parametrize("dtype", ["i1", "<i4", "<i8"])
def test_numbers_come_back_in_order(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(module, "_PENDING", 4)
    monkeypatch.setattr(module, "_PIECE", 3)
    spool = Spool(tmp_path / "spool", dtype=dtype)
    for number in range(10):
        spool.add(number)
    spool.extend(np.arange(10, 15))
    spool.add(15)
    assert read(spool) == list(range(16))
    spool.close(delete=True)
    assert not (tmp_path / "spool").exists()


def test_what_was_written_after_the_kept_part_is_forgotten(tmp_path):
    spool = Spool(tmp_path / "spool", dtype="<i4")
    spool.extend(np.arange(5))
    spool.flush_to_disk()
    spool.extend(np.arange(100, 103))
    spool.close(delete=False)
    again = Spool(tmp_path / "spool", dtype="<i4", keep=5)
    again.add(7)
    assert read(again) == [0, 1, 2, 3, 4, 7]
    again.close(delete=False)
    fresh = Spool(tmp_path / "spool", dtype="<i4")
    assert read(fresh) == []
    fresh.close(delete=True)


def test_a_file_that_holds_less_is_refused(tmp_path):
    (tmp_path / "spool").write_bytes(b"\0" * 15)
    with pytest.raises(DataError, match="3 numbers"):
        Spool(tmp_path / "spool", dtype="<i4", keep=4)
