"""Code outside the package that a recipe names: the one place where a string becomes a function."""

import hashlib
import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ExtensionSource:
    """Where an extension comes from, for the record of a run.

    Args:
        path: Import path, `package.module:name`.
        file: The module's file.
        sha256: Hash of that file.
    """

    path: str
    file: str
    sha256: str


def resolve(path: str) -> Any:
    """Return the object that an import path `package.module:name` names.

    Raises:
        ValueError: if there is no such module or name, or the module fails while it is imported.
    """
    module_name, _, name = path.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ValueError(f"{path}: {error}; put its folder on PYTHONPATH, or install it") from error
    if not hasattr(module, name):
        raise ValueError(f"{path}: module {module_name} has no {name}")
    return getattr(module, name)


def find_source(path: str) -> ExtensionSource:
    """Return the file that an import path names, and its hash."""
    resolve(path)
    file = inspect.getsourcefile(sys.modules[path.partition(":")[0]])
    assert file is not None, f"{path} has no source file"
    return ExtensionSource(path=path, file=file, sha256=hashlib.sha256(Path(file).read_bytes()).hexdigest())


def call_fault(function: Any, *arguments: object, **options: object) -> str | None:
    """Say why `function` cannot be called in this way, or return None if it can."""
    if not callable(function):
        return f"is a {type(function).__name__}, not a function"
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        return str(error)
    return None
