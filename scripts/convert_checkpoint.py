"""Turn a checkpoint of engine=deepspeed into one of engine=torch, or the other way round.

python scripts/convert_checkpoint.py runs/a/checkpoints/step_00000100 runs/b/checkpoints/step_00000100
"""

import argparse
import sys
from pathlib import Path

from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.engine.convert import convert_checkpoint


def main() -> int:
    """Convert and say what to do next; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="FROM", type=Path, help="folder of a complete checkpoint")
    parser.add_argument("target", metavar="TO", type=Path, help="folder that does not exist yet")
    arguments = parser.parse_args()
    try:
        print(convert_checkpoint(arguments.source, arguments.target))
    except (CheckpointError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
