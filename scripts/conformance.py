"""Check this machine's numerics against golden files: `python scripts/conformance.py FILE... [--compiled]`."""

import argparse
import sys
from pathlib import Path

from nvfp4_train.numerics.conformance import check_files
from nvfp4_train.numerics.kernels import Backend


def main() -> int:
    """Return 0 if every array is equal, 1 on a difference, 2 if a file or the compiled kernels cannot be used."""
    parser = argparse.ArgumentParser(
        description="Recompute every array of golden NVFP4 files and compare byte for byte."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="safetensors file with golden arrays")
    parser.add_argument(
        "--compiled", action="store_true", help="check the compiled CPU kernels; fail if there are none"
    )
    arguments = parser.parse_args()
    backend = Backend.compiled if arguments.compiled else Backend.oracle
    try:
        equal = check_files(arguments.files, backend=backend, report=print)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
