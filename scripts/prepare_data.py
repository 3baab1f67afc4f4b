"""Make, join, divide and check token files: `python scripts/prepare_data.py COMMAND --help`."""

import sys

from nvfp4_train.data.commands import run_command
from nvfp4_train.data.error import DataError


def main() -> int:
    """Run the subcommand; return 2 if a file, a record or an option cannot be used, 130 after Ctrl-C."""
    try:
        run_command(sys.argv[1:])
    except (DataError, OSError) as error:  # OSError: a full disk, a folder without rights; what was saved stays
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; `tokenize` goes on from here when the same command runs again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":  # worker processes import this file too
    sys.exit(main())
