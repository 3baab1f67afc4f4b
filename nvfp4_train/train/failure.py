"""Tells the user's mistakes from ours."""

import sys
import time
from pathlib import Path
from types import TracebackType

import nvfp4_train
from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.config.problem import ConfigError, report
from nvfp4_train.train.anomaly import NonFiniteError

EXIT_RUN = 1
EXIT_CONFIG = 2

# A launcher ends the other ranks as soon as one has left: rank 0 must have spoken before. Where it has the same
# problem, the others are ended while they wait; where it has not (another machine lacks a module), they speak.
WAIT_FOR_MAIN_SECONDS = 10.0

# What may end a run without a stack trace; see `describe_failure`.
USER_FACING = (ValueError, OSError, CheckpointError, NonFiniteError)


class FailedElsewhereError(Exception):
    """Rank 0 failed and tells the user; the other ranks leave without a word."""


def describe_failure(error: Exception) -> str | None:
    """Return what to tell the user, or None for a bug, which needs its stack trace.

    A ``ValueError`` that this package raises is the user's to mend, one that another library raises is ours. Errors
    of the system (a full disk, a missing file) are nobody's.
    """
    if isinstance(error, ConfigError):
        return report(error.problems)
    if isinstance(error, ValueError) and not _is_raised_here(error.__traceback__):
        return None
    return str(error)


def report_failure(error: Exception, *, rank: int) -> int:
    """Write to stderr what went wrong, and return the exit code.

    Every rank writes its own; a configuration is mostly wrong on all alike, so that the others let rank 0 speak.

    Raises:
        Exception: ``error`` itself, if it is a bug.
    """
    message = describe_failure(error)
    if message is None:
        raise error
    if isinstance(error, ConfigError) and rank:
        time.sleep(WAIT_FOR_MAIN_SECONDS)
    sys.stderr.write(f"{f'rank {rank}: ' if rank else ''}error: {message}\n")
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_RUN


def _is_raised_here(frames: TracebackType | None) -> bool:
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    package = Path(nvfp4_train.__file__).parent
    return frames is not None and Path(frames.tb_frame.f_code.co_filename).is_relative_to(package)
