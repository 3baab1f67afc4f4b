"""The error of a data file that cannot be used."""

from pathlib import Path


class DataError(ValueError):
    """A data file or folder that cannot be used: what was found, what was expected, and what the user can do.

    Args:
        path: File or folder at fault.
        found: What is there.
        expected: What should be there.
        fix: What the user can do about it.
    """

    def __init__(self, path: Path | str, *, found: str, expected: str, fix: str) -> None:
        self.path = str(path)
        self.found = found
        self.expected = expected
        self.fix = fix
        super().__init__(f"{path}\n    found:    {found}\n    expected: {expected}\n    fix:      {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        # The default rebuilds an exception from ``args``, which is the formatted text only.
        return _rebuild, (self.path, self.found, self.expected, self.fix)


def _rebuild(path: str, found: str, expected: str, fix: str) -> DataError:
    return DataError(path, found=found, expected=expected, fix=fix)
