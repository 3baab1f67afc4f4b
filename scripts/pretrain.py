"""Train a model: `python scripts/pretrain.py --help`."""

import os
import sys
import time

from nvfp4_train.config.command import parse_command
from nvfp4_train.config.help import help_text
from nvfp4_train.config.load import load_config
from nvfp4_train.config.problem import ConfigError, report


def main() -> int:
    """Parse the command line, check the configuration and train; return the exit code."""
    try:
        command = parse_command(sys.argv[1:])
        if command.shows_help:
            print(help_text())
            return 0
        loaded = load_config(command.overrides)
        if command.shows_config:
            print(loaded.yaml, end="")
            return 0
        from nvfp4_train.analysis.report import report_run  # after the checks: these take seconds to import
        from nvfp4_train.train.main import main as train

        return train(loaded, report=report_run)
    except ConfigError as error:
        rank = os.environ.get("RANK", "0")  # torchrun starts this program once a rank
        if rank != "0":
            time.sleep(10)  # as WAIT_FOR_MAIN_SECONDS in train/failure.py, which takes seconds to import
        print(f"{'' if rank == '0' else f'rank {rank}: '}{report(error.problems)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
