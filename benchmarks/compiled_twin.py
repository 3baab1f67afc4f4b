"""How much faster the compiled kernels quantize than the plain PyTorch numerics: `python benchmarks/compiled_twin.py`.

Every case turns one BF16 matrix into a GEMM operand. All variants run in turns in one process; times are medians, as
multiples of a copy of the matrix.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from nvfp4_train.numerics.kernels import Backend, use
from nvfp4_train.numerics.quantize import Direction, quantize_operand
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, HadamardSigns, OperandSpec, Rounding

nvfp4 = partial(OperandSpec, format=Format.nvfp4, global_scale=GlobalScale.tensor)
rotated = partial(nvfp4, hadamard_size=16, hadamard_signs=HadamardSigns.fixed)
CASES = {
    "1x16, nearest even": (nvfp4(block=Block.row_1x16, rounding=Rounding.nearest_even), Direction.row),
    "1x16, stochastic": (nvfp4(block=Block.row_1x16, rounding=Rounding.stochastic), Direction.row),
    "16x16, nearest even": (nvfp4(block=Block.tile_16x16, rounding=Rounding.nearest_even), Direction.row),
    "columns, RHT, stochastic": (rotated(block=Block.row_1x16, rounding=Rounding.stochastic), Direction.column),
}


def median_seconds(variants: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Run all variants in turns after one warm-up, and return the median time of each."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(case: str, x: torch.Tensor, *, repeats: int) -> dict[str, float]:
    """Return the time of a copy in seconds, and the times of both backends as multiples of it."""
    spec, direction = CASES[case]

    def run(backend: Backend) -> None:
        with use(backend):
            quantize_operand(x, spec, direction=direction, stream=RandomStream(key=1))

    backends = (Backend.oracle, Backend.compiled)
    variants = {"copy": x.clone} | {backend.value: partial(run, backend) for backend in backends}
    seconds = median_seconds(variants, repeats=repeats)
    ratios = {backend.value: seconds[backend.value] / seconds["copy"] for backend in backends}
    return {"copy_seconds": seconds["copy"], **ratios}


def main() -> None:
    """Measure every case, print a table, and write it as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description="Time of quantization, as multiples of the time of a copy.")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the matrix")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="smallest sizes, one round: whether it runs, not how fast")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.repeats = 64, 1
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(arguments.size, arguments.size, generator=rng).to(torch.bfloat16)
    results = {case: measure(case, x, repeats=arguments.repeats) for case in CASES}
    print(f"{arguments.size} x {arguments.size} BF16, {torch.get_num_threads()} threads; multiples of a copy")
    print(f"{'':<26}{'PyTorch':>9}{'compiled':>10}{'speed-up':>10}")
    for case, row in results.items():
        oracle, compiled = row["oracle"], row["compiled"]
        print(f"{case:<26}{oracle:>9.1f}{compiled:>10.1f}{oracle / compiled:>9.1f}x")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
