"""Forward and backward of a QuantizedLinear next to a BF16 `nn.Linear`, in time and in memory kept for backward.

    python benchmarks/linear.py [--json FILE] [--quick] [--rounds 11] [--threads 2] [--tokens 2048] [--width 2048]

The weight is quantized anew in every call, as in the first microbatch of a step.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from race import choose_clock, print_table, race, save
from torch import Tensor, nn

from nvfp4_train.config.load import load_config
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.precision.apply import compute_dtype_recipe
from nvfp4_train.precision.linear import LinearPrecision, QuantizedLinear
from nvfp4_train.precision.position import RoundingPosition

RECIPES = (
    "bf16", "nvfp4", "nvfp4_no_rht", "nvfp4_no_sr", "nvfp4_four_over_six", "mxfp4", "mxfp8", "fp8", "fp8_delayed",
    "fp8_block", "nvfp4_outer128",
)  # fmt: skip


def build(cfg: RecipeConfig, width: int) -> QuantizedLinear:
    """Return a Linear that runs a recipe."""
    precision = LinearPrecision(
        layer="linear",
        recipe_name=cfg.name,
        recipe=cfg.linear,
        high_precision=compute_dtype_recipe(cfg.compute_dtype),
        gemm=cfg.gemm,
    )
    return QuantizedLinear(width, width, bias=False, precision=precision, position=RoundingPosition(seed=0))


def call(linear: nn.Linear, x: Tensor, dy: Tensor) -> None:
    """Run one forward and backward."""
    x.grad = linear.weight.grad = None
    if isinstance(linear, QuantizedLinear):
        linear.position.weights_changed()
    linear(x).backward(dy)


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu-time", action="store_true", help="time of one thread, for a busy machine")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--quick", action="store_true", help="smallest sizes, one round: whether it runs, not how fast")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens, arguments.width = 1, 128, 128
    clock = choose_clock(arguments.threads, cpu_time=arguments.cpu_time)
    tokens, width = arguments.tokens, arguments.width
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator).to(torch.bfloat16).requires_grad_()
    dy = torch.randn(tokens, width, generator=generator).to(torch.bfloat16)
    linears: dict[str, nn.Linear] = {"nn.Linear BF16": nn.Linear(width, width, bias=False, dtype=torch.bfloat16)}
    linears |= {name: build(load_config([f"recipe={name}"]).cfg.recipe, width) for name in arguments.recipes}
    functions: dict[str, Callable[[], object]] = {
        name: lambda linear=linear: call(linear, x, dy) for name, linear in linears.items()
    }
    results = race(functions, references=("nn.Linear BF16",), rounds=arguments.rounds, clock=clock)
    title = f"forward + backward, {tokens} tokens, {width} -> {width}, {arguments.threads} threads"
    print_table(title, results)
    print("\nkept for backward, bytes an input element (BF16: 2)")
    for name, linear in linears.items():
        if isinstance(linear, QuantizedLinear):
            kept = linear.saved_bytes / x.numel()
            print(f"{name:22} {kept:8.4f} {kept / 2:8.3f} x BF16")
    if arguments.json:
        save(arguments.json, {title: results})


if __name__ == "__main__":
    main()
