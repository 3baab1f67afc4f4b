"""Speed of quantization next to a plain copy and, where it is installed, torchao.

    python benchmarks/quantize.py [--json FILE] [--quick] [--rounds 15] [--threads 2] [--compiled-peer]

There are two copies to compare with. `clone()` is what a user calls, and what quantizations are like: it reads x and
writes a tensor that the allocator hands out, whose pages the system may have to provide first. `copy_()` writes into
memory that the process has used before, which takes no more than the traffic. Whether the allocator gives memory back
to the system in between differs from process to process; both stand in the table. Quantizations write new tensors, and
include their amax.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from race import Result, choose_clock, print_table, race, save
from torch import Tensor

from nvfp4_train.numerics.both import Cell, compute_amax_both, quantize_both
from nvfp4_train.numerics.quantize import Direction, compute_amax, quantize, quantize_operand
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, HadamardSigns, OperandSpec, Rounding, ScaleRule

STREAM = RandomStream(key=1234)


def nvfp4(block: Block = Block.row_1x16, rounding: Rounding = Rounding.nearest_even, **options: object) -> OperandSpec:
    """Return an NVFP4 cell."""
    return OperandSpec(format=Format.nvfp4, block=block, rounding=rounding, global_scale=GlobalScale.tensor, **options)


RHT = {"hadamard_size": 16, "hadamard_signs": HadamardSigns.fixed}
MXFP4 = OperandSpec(format=Format.mxfp4, block=Block.row_1x32, rounding=Rounding.nearest_even)
MXFP8 = OperandSpec(format=Format.mxfp8_e4m3, block=Block.row_1x32, rounding=Rounding.nearest_even)
FP8 = OperandSpec(
    format=Format.fp8_e4m3, block=Block.none, rounding=Rounding.nearest_even, global_scale=GlobalScale.tensor
)
SPECS = {
    "NVFP4 1x16 nearest": (nvfp4(), Direction.row),
    "NVFP4 1x16 stochastic": (nvfp4(rounding=Rounding.stochastic), Direction.row),
    "NVFP4 16x16": (nvfp4(Block.tile_16x16), Direction.row),
    "NVFP4 RHT on columns": (nvfp4(**RHT), Direction.column),
    "NVFP4 RHT on columns, stochastic": (nvfp4(rounding=Rounding.stochastic, **RHT), Direction.column),
    "NVFP4 four over six": (nvfp4(scale_rule=ScaleRule.four_over_six_mse), Direction.row),
    "MXFP4 1x32 nearest": (MXFP4, Direction.row),
    "MXFP8 1x32 nearest": (MXFP8, Direction.row),
    "FP8 tensor": (FP8, Direction.row),
}


def our_functions(x: Tensor) -> dict[str, Callable[[], object]]:
    """Return every format, to GEMM operands and to packed codes, and both directions in one call."""
    functions: dict[str, Callable[[], object]] = {}
    for name, (spec, direction) in SPECS.items():
        stream = STREAM if spec.rounding is Rounding.stochastic else None
        options = {"spec": spec, "direction": direction, "stream": stream}
        functions[f"{name} -> operand"] = lambda options=options: quantize_operand(x, **options)
        functions[f"{name} -> codes"] = lambda options=options: quantize(x, **options)
    row = Cell(spec=nvfp4(), direction=Direction.row)
    column = Cell(spec=nvfp4(**RHT), direction=Direction.column)
    functions["NVFP4 x: rows, and RHT on columns -> codes"] = lambda: quantize_both(
        x, row, column, amax=compute_amax_both(x, row, column)
    )
    functions["amax"] = lambda: compute_amax(x, nvfp4(), direction=Direction.row)
    return functions


def torchao_functions(x: Tensor, *, compiled: bool) -> dict[str, Callable[[], object]]:
    """Return torchao's NVFP4 quantization, or nothing where it is not installed."""
    try:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    except ImportError:
        return {}

    def eager(x: Tensor = x) -> Tensor:
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())).qdata

    functions: dict[str, Callable[[], object]] = {"torchao eager -> codes": eager}
    if compiled:
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            return nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))

        fast = torch.compile(step, dynamic=False)
        functions["torchao compiled -> codes"] = lambda: fast(x)
    return functions


def measure(
    rows: int, columns: int, *, rounds: int, compiled: bool, peers: bool, clock: Callable[[], float]
) -> list[Result]:
    """Time everything on one matrix."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    old = torch.empty_like(x)
    functions: dict[str, Callable[[], object]] = {"clone()": x.clone, "copy_()": lambda: old.copy_(x)}
    functions |= our_functions(x)
    if peers:
        functions |= torchao_functions(x, compiled=compiled)
    return race(functions, references=("clone()", "copy_()"), rounds=rounds, elements=x.numel(), clock=clock)


def main() -> None:
    """Print two tables: a tensor larger than the caches, and one inside them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu-time", action="store_true", help="time of one thread, for a busy machine")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compiled-peer", action="store_true", help="also torchao under torch.compile: a slow start")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, one round: whether it runs, not how fast")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    clock = choose_clock(arguments.threads, cpu_time=arguments.cpu_time)
    tables = {}
    for rows, columns in ((256, 256),) if arguments.quick else ((4096, 4096), (1024, 2576)):
        title = f"BF16 {rows} x {columns}, {arguments.threads} threads"
        tables[title] = measure(
            rows, columns, rounds=rounds, compiled=arguments.compiled_peer, peers=rows != 1024, clock=clock
        )
        print_table(title, tables[title])
    if arguments.json:
        save(arguments.json, tables)


if __name__ == "__main__":
    main()
