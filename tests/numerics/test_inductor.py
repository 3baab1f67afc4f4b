"""Inductor's code has the bits of the oracle. Compiling takes long, so only a few cases, and not by default."""

from dataclasses import replace

import pytest
import torch

from nvfp4_train.numerics.inductor import OPTIONS, compiled, uses_inductor
from nvfp4_train.numerics.kernels import use
from nvfp4_train.numerics.quantize import Direction, compute_amax, keyed_quantize_matrix, quantize_matrix
from nvfp4_train.numerics.random import RandomStream, TensorStream, random_bytes
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, OperandSpec, Rounding
from tests.support.tensors import filled, operand_spec, same_bits

SPECS = {
    "nearest": operand_spec(),
    "stochastic": operand_spec(rounding=Rounding.stochastic),
    "tiles": operand_spec(block=Block.tile_16x16),
    "mxfp4": OperandSpec(format=Format.mxfp4, block=Block.row_1x32, rounding=Rounding.nearest_even),
    "fp8": OperandSpec(
        format=Format.fp8_e4m3, block=Block.none, rounding=Rounding.nearest_even, global_scale=GlobalScale.tensor
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_inductor_equals_the_oracle(name: str):
    spec = SPECS[name]
    for fill in ("normal", "wide", "ties", "sparse"):
        x = filled(64, 128, dtype=torch.bfloat16, fill=fill, seed=0).float()
        stream = RandomStream(key=2**63 + 5, row_offset=64, column_offset=32)
        drawn = TensorStream.of(stream, device=x.device) if spec.rounding is Rounding.stochastic else None
        with use("oracle"):
            amax = compute_amax(x, spec, direction=Direction.row)
            expected = quantize_matrix(x, spec, amax, None if drawn is None else stream)
            got = compiled(keyed_quantize_matrix)(x, spec, amax, drawn, key=repr(spec))
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.slow
def test_another_step_compiles_nothing_anew():
    x = filled(32, 64, dtype=torch.float32, fill="normal", seed=0)
    spec, amax = SPECS["stochastic"], torch.ones(1)
    function = compiled(keyed_quantize_matrix)
    results = []
    for step in range(3):
        segments = {"row_segment": 16, "row_stride": 64} if step == 2 else {}
        stream = TensorStream.of(RandomStream(key=step, row_offset=step, **segments), device=x.device)
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            results.append(function(x, spec, amax, stream, key=repr(spec))[0])
    assert not torch.equal(results[0], results[1])


def test_a_stream_in_tensors_has_the_same_bytes():
    contiguous = RandomStream(key=2**64 - 3, row_offset=17, column_offset=20)
    rows = replace(contiguous, row_segment=16, row_stride=40)
    for stream in (contiguous, rows, replace(rows, column_segment=8, column_stride=100)):
        on_device = TensorStream.of(stream, device=torch.device("cpu"))
        assert torch.equal(random_bytes(on_device, 39, 37), random_bytes(stream, 39, 37))


def test_the_options_exist_and_a_cpu_does_without():
    assert set(OPTIONS) <= set(torch._inductor.list_options())
    assert not uses_inductor(torch.ones(1))
