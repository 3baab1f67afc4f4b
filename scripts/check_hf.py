"""Compare our logits with those stored in a Hugging Face folder of NemotronH or Mamba2.

    python scripts/check_hf.py DIR [--tol 1e-5] [--dt-min X]

DIR holds config.json, model.safetensors (or shards and their index) and reference.safetensors with `input_ids` and
`logits`, in FP32. Exit code 0 within the tolerance, 1 above it, 2 if the folder cannot be compared.
"""

import argparse
import sys
from pathlib import Path

from nvfp4_train.export.parity import compare_logits


def main() -> int:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description="Compare our logits with those stored in a Hugging Face folder.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--tol", type=float, default=1e-5, help="largest difference that is fine (default: 1e-5)")
    parser.add_argument(
        "--dt-min", type=float, help="floor of dt (default: as transformers 5.18, time_step_min for NemotronH)"
    )
    arguments = parser.parse_args()
    try:
        parity = compare_logits(arguments.folder, dt_min=arguments.dt_min)
    except ValueError as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    print(f"{parity.pattern}, {parity.num_tokens} tokens: max |logit diff| = {parity.max_difference:.3e}")
    return 0 if parity.max_difference <= arguments.tol else 1  # NaN is above every tolerance


if __name__ == "__main__":
    sys.exit(main())
