"""How many checkpoints stay."""

import shutil
from pathlib import Path

from nvfp4_train.checkpoint.folder import complete_checkpoints
from nvfp4_train.checkpoint.ranks import is_first_rank


def prune_checkpoints(directory: Path, *, keep_last: int) -> list[Path]:
    """Remove all complete checkpoints but the newest ones; every rank may call it, after a save has ended.

    Incomplete folders are left for the user to look at.

    Args:
        directory: Folder of the checkpoints.
        keep_last: Newest complete checkpoints that stay; 0 keeps all.

    Returns:
        The checkpoints that are gone, oldest first; only rank 0 removes any.
    """
    if keep_last == 0 or not is_first_rank():
        return []
    doomed = complete_checkpoints(directory)[:-keep_last]
    for path in doomed:
        # Renamed first: a removal that is killed half-way must not leave a folder with a marker and without its
        # tensors.
        hidden = path.with_name(f".{path.name}.removing")
        path.rename(hidden)
        shutil.rmtree(hidden)
    return doomed
