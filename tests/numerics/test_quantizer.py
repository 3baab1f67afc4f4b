"""Quantizers from outside get what the built-in formats get, and what they return is checked."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_train.numerics import quantizer
from nvfp4_train.numerics.quantize import Direction, QuantizedTensor, compute_amax, quantize
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import HadamardSigns, OperandSpec, Rounding
from tests.support.tensors import filled, operand_spec, same_bits

BUILT_IN = "nvfp4_train.numerics.quantizer:built_in"
HERE = {"quantizer": "a_quantizer:rounds"}


def outside(x: Tensor, spec: OperandSpec, *, direction: Direction = Direction.row) -> Tensor | QuantizedTensor:
    stream = RandomStream(key=5, row_offset=32, column_offset=16) if spec.rounding is Rounding.stochastic else None
    amax = compute_amax(x, spec, direction=direction)
    return quantizer.round_outside(x, spec, direction=direction, amax=amax, stream=stream)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("signs", [None, HadamardSigns.fixed])
def test_the_built_in_formats_use_the_interface(direction: Direction, rounding: Rounding, signs: HadamardSigns | None):
    x = filled(48, 64, dtype=torch.bfloat16, fill="normal", seed=0)
    spec = operand_spec(rounding=rounding, hadamard=signs)
    stream = RandomStream(key=5, row_offset=32, column_offset=16) if rounding is Rounding.stochastic else None
    expected = quantize(x, spec, direction=direction, stream=stream)
    got = outside(x, replace(spec, quantizer=BUILT_IN), direction=direction)
    assert isinstance(got, QuantizedTensor)
    assert same_bits(got.codes, expected.codes)
    assert same_bits(got.block_scale, expected.block_scale)
    assert same_bits(got.amax, expected.amax)


def write(tmp_path, monkeypatch: pytest.MonkeyPatch, body: str, name: str) -> OperandSpec:
    (tmp_path / f"{name}.py").write_text(f"import torch\ndef rounds(x, spec, stream, *, amax, **args):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    return operand_spec(hadamard=HadamardSigns.fixed)


def test_a_quantizer_is_given_the_transformed_matrix_its_maximum_and_its_arguments(tmp_path, monkeypatch):
    body = "assert (x.abs().max(), stream) == (amax, None); return (x * args['times']).to(torch.bfloat16)"
    spec = replace(write(tmp_path, monkeypatch, body, "q_given"), quantizer="q_given:rounds", args={"times": 2})
    x = filled(32, 64, dtype=torch.bfloat16, fill="normal", seed=0)
    got = outside(x, spec, direction=Direction.column)
    assert isinstance(got, Tensor)
    assert got.shape == (64, 32)
    # the transform keeps lengths
    torch.testing.assert_close(got.float().norm(), 2 * x.float().norm(), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return x[:1]", r"torch.float32 \(1, 64\)"),
        ("return x.double()", "torch.float64"),
        ("return None", "NoneType"),
    ],
)
def test_what_a_quantizer_returns_is_checked(tmp_path, monkeypatch, body: str, found: str):
    name = f"q_wrong_{len(body)}"
    spec = replace(write(tmp_path, monkeypatch, body, name), quantizer=f"{name}:rounds")
    with pytest.raises(ValueError, match=f"expected bf16 or fp32 \\(32, 64\\).*found {found}"):
        outside(filled(32, 64, dtype=torch.bfloat16, fill="normal", seed=0), spec)
