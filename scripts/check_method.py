"""Measure a quantizer before a run uses it: `python scripts/check_method.py my_repo.quant:my_fn`."""

import argparse
import sys

from nvfp4_train.analysis.method import check_method, format_method
from nvfp4_train.config.load import load_yaml
from nvfp4_train.numerics.spec import Rounding


def main() -> int:
    """Print bias, error, shard invariance, gradients and speed; return 2 if the quantizer cannot be used."""
    parser = argparse.ArgumentParser(description="Compare a quantizer with NVFP4, nearest even and stochastic.")
    parser.add_argument("path", metavar="PACKAGE.MODULE:FUNCTION", help="in a folder on PYTHONPATH, or installed")
    parser.add_argument("--rounding", choices=list(Rounding), default=Rounding.nearest_even, type=Rounding)
    parser.add_argument("--args", default={}, type=load_yaml, help="its keyword arguments: '{bits: 4}'")
    parser.add_argument("--draws", default=32, type=int, help="random streams to average over")
    arguments = parser.parse_args()
    try:
        report = check_method(arguments.path, rounding=arguments.rounding, args=arguments.args, draws=arguments.draws)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_method(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
