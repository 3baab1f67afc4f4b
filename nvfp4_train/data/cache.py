"""A folder of prepared files that is made once, by whichever process comes first."""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from nvfp4_train.data.error import DataError
from nvfp4_train.data.progress import announce
from nvfp4_train.data.write import sync_directory


class Leftovers(StrEnum):
    """What becomes of a folder that was not completed."""

    discard = "discard"
    resume = "resume"  # ``make`` gets it again and goes on


def cached_folder(
    cache_dir: Path, *, key: str, make: Callable[[Path], None], leftovers: Leftovers = Leftovers.discard
) -> Path:
    """Return ``cache_dir/key``, letting ``make`` fill it if it does not exist.

    ``make`` fills a sibling folder that gets its name when it is complete, so a folder that exists is complete,
    whatever was killed before. One process at a time makes a folder; others wait for it.

    Args:
        cache_dir: Folder of all prepared folders; created if missing.
        key: Name of the folder, a hash of everything that its content depends on.
        make: Fills the folder that it is given.
        leftovers: What becomes of a folder that was not completed.

    Raises:
        DataError: ``cache_dir`` cannot be written.
    """
    folder = cache_dir / key
    if folder.is_dir():
        return folder
    with _exclusive(cache_dir, key):
        if not folder.is_dir():
            _make(folder, make, leftovers)
    return folder


def _make(folder: Path, make: Callable[[Path], None], leftovers: Leftovers) -> None:
    partial = folder.with_name(folder.name + ".partial")
    if leftovers is Leftovers.discard:
        # Under the lock nobody else works on it: this is what a killed process left.
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(exist_ok=leftovers is Leftovers.resume)
    try:
        make(partial)
        sync_directory(partial)
    except BaseException:
        if leftovers is Leftovers.discard:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its space back
        raise
    partial.rename(folder)
    sync_directory(folder.parent)


@contextmanager
def _exclusive(cache_dir: Path, key: str) -> Iterator[None]:
    lock_path = cache_dir / f"{key}.lock"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("w")
    except OSError as error:
        raise DataError(
            cache_dir,
            found=str(error),
            expected="a folder that can be written",
            fix="set data.cache_dir to such a folder",
        ) from error
    with lock:
        # The kernel releases the lock when the process ends, however it ends.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce(f"another process is preparing the data in {cache_dir}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
