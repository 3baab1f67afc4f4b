"""Build C++ kernels on first use, load them, and say whether they are used.

A plain shared object called through ctypes builds in seconds, an extension with PyTorch's headers takes half a
minute. It is built for this CPU into a user cache, named by everything that decides its content, and moved into place
in one step, so that processes which build at the same time cannot read half a file.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

COMPILERS = ("c++", "g++", "clang++")
# No flag changes a result (contraction to FMA would); the last ones let compilers vectorize branch-free code.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    # 16 FP32 lanes at once where the CPU has them, 10 to 30 % faster; compilers prefer half of that by default
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)


@dataclass(frozen=True)
class Program:
    """What one shared object is built from.

    Args:
        name: What messages call it.
        sources: C++ files, compiled together.
        headers: Files that they include.
        flags: Of the compiler.
    """

    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    flags: tuple[str, ...] = FLAGS

    @classmethod
    def of(cls, name: str, folder: Path, *, sources: str, headers: str, flags: tuple[str, ...] = FLAGS) -> "Program":
        """Name the files of a folder in strings, apart by spaces."""
        paths = [tuple(folder / file for file in files.split()) for files in (sources, headers)]
        return cls(name, paths[0], paths[1], flags)


NUMERICS = Program.of(
    "NVFP4",
    Path(__file__).parent,
    sources="quantize.cpp amax.cpp decode.cpp gemm.cpp",
    headers="formats.h lanes.h pages.h vectors.h wide.h quantize_wide.h narrow.h",
)


class Backend(StrEnum):
    """Which implementation computes on a CPU.

    Both give the same bits in the numerics; in the model, sums in another order.
    """

    auto = "auto"  # compiled, or the oracle with a warning where nothing can be compiled
    oracle = "oracle"  # plain PyTorch
    compiled = "compiled"  # the C++ twin; an error where it cannot be built


_backend: ContextVar[Backend] = ContextVar("nvfp4_train_backend", default=Backend.auto)


@contextmanager
def use(backend: Backend | str) -> Iterator[None]:
    """Choose the implementation for the calls inside the context.

    Raises:
        RuntimeError: for `compiled` where the kernels cannot be built.
    """
    chosen = Backend(backend)
    if chosen is Backend.compiled:
        library()
    token = _backend.set(chosen)
    try:
        yield
    finally:
        _backend.reset(token)


def is_compiled(x: Tensor, program: Program = NUMERICS) -> bool:
    """Say whether the compiled kernels handle x: if it is on a CPU, and they can be built and were not ruled out."""
    return x.device.type == "cpu" and _is_selected(program)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_selected(program: Program) -> bool:
    backend = _backend.get()
    return backend is Backend.compiled or (backend is Backend.auto and is_available(program))


@cache
def is_available(program: Program = NUMERICS) -> bool:
    """Say whether kernels can be built and loaded; the first time they cannot, warn."""
    try:
        library(program)
    except RuntimeError as error:
        warnings.warn(f"{error}; {program.name} runs in plain PyTorch, with the same results, but slowly", stacklevel=2)
        return False
    return True


@cache
def library(program: Program = NUMERICS) -> ctypes.CDLL:
    """Return loaded kernels, building them if the cache does not hold them.

    Raises:
        RuntimeError: if there is no compiler, or it fails; the message says which and why.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(f"no C++ compiler: none of $CXX, {', '.join(COMPILERS)} is on the PATH")
    path = cache_dir() / f"{_fingerprint(compiler, program)}.so"
    try:
        if not path.exists():
            build(compiler, path, program)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"the {program.name} CPU kernels could not be built or loaded: {error}") from error


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: $CXX if set, else the first of the usual names."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


def cache_dir() -> Path:
    """Return where built kernels are kept: below $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nvfp4_train" / "kernels"


def build(compiler: str, path: Path, program: Program) -> None:
    """Compile the kernels to `path`, which appears complete or not at all.

    Raises:
        RuntimeError: if the compiler reports an error.
        OSError: if the cache cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    try:
        command = [compiler, *program.flags, "-o", temporary, *map(str, program.sources)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"`{' '.join(command)}` failed: {result.stderr.strip()[-500:]}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _fingerprint(compiler: str, program: Program) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [path.read_text() for path in (*program.sources, *program.headers)]
    parts = (*texts, *program.flags, compiler, version, _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """What -march=native depends on: a cache in a shared home may serve machines with different CPUs."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)}))
