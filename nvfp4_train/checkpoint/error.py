"""What goes wrong with checkpoints."""

from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what to do."""


def damaged(path: Path, *causes: BaseException) -> CheckpointError:
    """Return the error of a checkpoint with its marker whose files cannot be read."""
    # The first sentence: PyTorch goes on with advice that does not apply here.
    reasons = sorted({f"{type(cause).__name__}: {str(cause).split('. ')[0]}".removesuffix(": ") for cause in causes})
    return CheckpointError(
        f"{path} could not be read: {'; '.join(reasons)}\n"
        "    fix: restore its files, or move the folder away: the run then resumes from the checkpoint before it"
    )
