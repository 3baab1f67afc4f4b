import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvfp4_train.numerics.conformance import check_files, first_difference, load_golden, recompute
from nvfp4_train.numerics.kernels import Backend, loader
from tests.support.compiler import needs_compiler

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "nvfp4_reference" / "golden.safetensors"
BACKENDS = [Backend.oracle, Backend.compiled]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_golden_array_is_equal(backend: Backend):
    lines: list[str] = []
    assert check_files([GOLDEN], backend=backend, report=lines.append)
    assert lines[-1] == f"524/524 arrays equal ({backend})"
    assert lines[0] == f"g01_normal_bf16_16x16: 24/24 arrays equal ({backend})"
    assert all(f"({backend})" in line for line in lines)


@pytest.fixture
def golden() -> dict[str, torch.Tensor]:
    everything = load_file(GOLDEN)
    return {key: value for key, value in everything.items() if key.startswith("g01_")}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("field", ["data", "scale", "amax", "dequant"])
def test_a_changed_array_is_found_and_its_first_element_named(
    golden: dict[str, torch.Tensor], field: str, backend: Backend, tmp_path: Path
):
    key = f"g01_normal_bf16_16x16.1d.row.{field}"
    expected = golden[key].clone()
    expected.view(-1)[-1] += 1
    save_file(golden | {key: expected}, tmp_path / "changed.safetensors")
    lines: list[str] = []
    assert not check_files([tmp_path / "changed.safetensors"], backend=backend, report=lines.append)
    index = [size - 1 for size in expected.shape]
    got, wrong = golden[key].view(-1)[-1].item(), expected.view(-1)[-1].item()
    assert lines == [
        f"g01_normal_bf16_16x16: 23/24 arrays equal ({backend})",
        f"  {key}: first difference at {index}: got {got}, expected {wrong}",
        f"23/24 arrays equal ({backend})",
    ]


def test_a_wrong_shape_is_a_difference(golden: dict[str, torch.Tensor]):
    key = "g01_normal_bf16_16x16.2d.row.data"
    difference = first_difference(key, recompute(golden, key), golden[key][:8])
    assert difference is not None
    assert difference.description == "got torch.uint8 [16, 8], expected torch.uint8 [8, 8]"


def test_nan_equals_nan_and_zeros_keep_their_sign():
    nan = torch.tensor([float("nan"), 1.0])
    assert first_difference("a.amax", nan, -nan.abs().where(nan.isnan(), -nan)) is None
    assert first_difference("a.amax", torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    nan_bytes = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    assert first_difference("a.scale", nan_bytes, nan_bytes.flip(0)) is None
    assert first_difference("a.data", nan_bytes, nan_bytes.flip(0)) is not None


@pytest.mark.parametrize("key", ["g01.3d.row.data", "g01.1d.row.codes", "gemm_bf16.fprop.f64", "table.other", "x"])
def test_an_unknown_key_is_an_error(golden: dict[str, torch.Tensor], key: str, tmp_path: Path):
    save_file(golden | {key: torch.zeros(1)}, tmp_path / "unknown.safetensors")
    with pytest.raises(ValueError, match=f"unknown key {key}"):
        load_golden(tmp_path / "unknown.safetensors")


def test_a_missing_input_is_an_error(golden: dict[str, torch.Tensor]):
    key = "g01_normal_bf16_16x16.1d.row.data"
    with pytest.raises(ValueError, match=r"its input g01_normal_bf16_16x16\.x is not in the file"):
        recompute({key: golden[key]}, key)


def test_a_file_without_arrays_to_check_is_an_error(tmp_path: Path):
    save_file({"g01.x": torch.zeros(16, 16)}, tmp_path / "inputs.safetensors")
    with pytest.raises(ValueError, match="no array to recompute"):
        load_golden(tmp_path / "inputs.safetensors")


@pytest.mark.parametrize("x", [torch.ones(16, 16, dtype=torch.int32), torch.ones(16), torch.ones(16, 7)])
def test_an_input_that_cannot_be_quantized_names_the_array(x: torch.Tensor, tmp_path: Path):
    save_file({"odd.x": x, "odd.1d.row.data": torch.zeros(1)}, tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match=r"odd\.1d\.row\.data cannot be recomputed: "):
        check_files([tmp_path / "odd.safetensors"], backend=Backend.oracle, report=print)


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    script = ROOT / "scripts" / "conformance.py"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(script), run_name="__main__")
    return int(exit_info.value.code or 0)


@needs_compiler
def test_the_script_exits_with_0_1_or_2(
    golden: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    right, wrong, broken = (tmp_path / f"{name}.safetensors" for name in ("right", "wrong", "broken"))
    save_file(golden, right)
    save_file(golden | {"g01_normal_bf16_16x16.1d.row.amax": torch.zeros(1)}, wrong)
    broken.write_text("not a safetensors file")
    assert run_script(monkeypatch, str(right), "--compiled") == 0
    assert capsys.readouterr().out.endswith("\n24/24 arrays equal (compiled)\n")
    assert run_script(monkeypatch, str(right), str(wrong)) == 1
    assert capsys.readouterr().out.endswith("\n47/48 arrays equal (oracle)\n")
    for path in (broken, tmp_path / "missing.safetensors"):
        assert run_script(monkeypatch, str(path)) == 2
        output = capsys.readouterr()
        assert output.err.startswith(f"error: {path}: not a readable safetensors file")
        assert output.err.count("\n") == 1
        assert not output.out


def test_the_script_fails_rather_than_fall_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    loader.library.cache_clear()
    try:
        assert run_script(monkeypatch, str(GOLDEN), "--compiled") == 2
    finally:
        loader.library.cache_clear()
    assert capsys.readouterr().err.startswith("error: no C++ compiler")
