import multiprocessing
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nvfp4_train.numerics.kernels import Backend, is_compiled, loader, use
from nvfp4_train.numerics.quantize import Direction, quantize
from tests.support.compiler import needs_compiler
from tests.support.tensors import operand_spec, same_bits


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a fresh process on a machine without a compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    loader.library.cache_clear()
    loader.is_available.cache_clear()
    yield
    loader.library.cache_clear()
    loader.is_available.cache_clear()


def build_and_load(barrier: object, names: object, source: Path) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    program = loader.Program("small", (source,), ())
    names.put(loader.library.__wrapped__(program)._name)  # type: ignore[attr-defined]


@needs_compiler
def test_processes_that_build_at_once_all_load_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    context = multiprocessing.get_context("fork")
    barrier, names = context.Barrier(3), context.SimpleQueue()
    processes = [context.Process(target=build_and_load, args=(barrier, names, source)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len({names.get() for _ in processes}) == 1
    assert [path.suffix for path in (tmp_path / "nvfp4_train" / "kernels").iterdir()] == [".so"]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_plain_pytorch_computes_after_one_warning():
    x = torch.arange(256.0).view(16, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [quantize(x, operand_spec(), direction=Direction.row) for _ in range(3)]
    assert [str(warning.message)[:15] for warning in caught] == ["no C++ compiler"]
    with use(Backend.oracle):
        expected = quantize(x, operand_spec(), direction=Direction.row)
    assert same_bits(results[0].codes, expected.codes)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_compiled_backend_is_an_error():
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler: none of \\$CXX"), use(Backend.compiled):
        pass


@needs_compiler
def test_a_compiler_that_fails_says_why_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "broken.cpp").write_text("this is not C++")
    program = loader.Program("broken", (tmp_path / "broken.cpp",), ())
    compiler = loader.find_compiler()
    assert compiler is not None
    with pytest.raises(RuntimeError, match=r"(?s)failed: .*error"):
        loader.build(compiler, tmp_path / "cache" / "kernels.so", program)
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "nvfp4_train").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="could not be built or loaded"):
        loader.library.__wrapped__()


@needs_compiler
def test_what_decides_the_bits_decides_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = loader.find_compiler()
    assert compiler is not None
    changed = tmp_path / "changed"
    changed.write_text("// changed")
    program = loader.NUMERICS
    others = ({"flags": (*program.flags, "-DX")}, {"sources": (changed,)}, {"headers": (changed,)})
    names = [loader._fingerprint(compiler, replace(program, **other)) for other in ({}, *others)]
    monkeypatch.setattr(loader, "_cpu", lambda: "another CPU")
    names.append(loader._fingerprint(compiler, program))
    assert len(set(names)) == 5


def test_fused_multiply_add_and_fast_math_are_off():
    assert "-ffp-contract=off" in loader.NUMERICS.flags
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & set(loader.NUMERICS.flags)


@needs_compiler
def test_the_backend_is_chosen_by_context():
    x = torch.zeros(1)
    assert is_compiled(x)
    with use(Backend.oracle):
        assert not is_compiled(x)
        with use("compiled"):
            assert is_compiled(x)
        assert not is_compiled(x)
    assert is_compiled(x)
    assert not is_compiled(torch.zeros(1, device="meta"))
