"""Say what a run needs and takes on hardware that is not here: `python scripts/plan.py --help`."""

import gc
import sys

from nvfp4_train.config.problem import ConfigError, report


def main() -> int:
    """Print a plan; return 1 if no rank has the memory, 2 with every problem of the configuration and the layout."""
    try:
        from nvfp4_train.analysis.plan.command import run_command  # takes seconds to import

        return run_command(sys.argv[1:], say=print)
    except ConfigError as error:
        print(report(error.problems), file=sys.stderr)
        return 2


if __name__ == "__main__":
    gc.disable()  # a search makes millions of objects and hardly a cycle: collecting takes an eighth of its time
    sys.exit(main())
