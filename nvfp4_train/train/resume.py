"""Decides what a run starts from, before anything is built or written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvfp4_train.checkpoint.error import damaged
from nvfp4_train.checkpoint.folder import METADATA, is_complete, latest_checkpoint, read_metadata
from nvfp4_train.config.difference import Difference, config_difference, refused_differences
from nvfp4_train.config.indexed_data import OnChange
from nvfp4_train.config.train import ResumeMode
from nvfp4_train.data.build import TrainingData
from nvfp4_train.train.run_folder import RunFolder
from nvfp4_train.train.state import TrainState

# Keys that say what this start is; that they differ tells nobody anything.
EXPECTED = ("run.name", "run.dir", "resume", "resume_mode")
# What a checkpoint has to record for a start, and the keys of it.
NEEDED: dict[str, set[str]] = {
    "train_state": set(TrainState().to_dict()),
    "data": {"fingerprint", "sources"},
    "config": set(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for.

    Args:
        resume: auto, never, or the path of a checkpoint or of a run folder.
        mode: What may change where ``resume`` is a path.
        config: The new run's resolved configuration, as ``load_yaml`` gives it.
    """

    resume: str
    mode: ResumeMode
    config: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a run starts from.

    Args:
        checkpoint: A complete checkpoint; None starts from the initialization.
        metadata: What that checkpoint records: ``train_state``, ``data``, ``config``.
        is_own: Whether the checkpoint lies in the run's own folder, so that its metric rows go on.
        mode: What may differ from the checkpoint's run.
        differences: Keys that do differ, all of them allowed.
        lineage: What ``lineage.json`` records of a run that starts from another run's checkpoint.
    """

    checkpoint: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = False
    mode: ResumeMode = ResumeMode["continue"]
    differences: tuple[Difference, ...] = ()
    lineage: Mapping[str, object] | None = None

    def state(self) -> TrainState:
        """Return a new copy of where the checkpoint stands."""
        return TrainState(**self.metadata.get("train_state", {}))


def decide_start(request: Request, *, folder: RunFolder) -> Start:
    """Decide what the run in ``folder`` starts from. Reads only.

    Raises:
        ValueError: The folder is taken, or the configuration differs where it must not.
        CheckpointError: There is no usable checkpoint where ``resume`` points.
    """
    if request.resume == "never":
        return _start_afresh(folder)
    own = latest_checkpoint(folder.checkpoints)
    if request.resume != "auto":
        return _start_from_path(request, own=own, folder=folder)
    return Start() if own is None else _continue_own(own, request=request, folder=folder)


def resume_data(start: Start, data: TrainingData) -> tuple[int, list[str]]:
    """Bring the data to where the checkpoint stopped.

    Args:
        start: What the run starts from.
        data: What it reads.

    Returns:
        Sequences of the loader that were read before; and, where a fork or ``data.on_change: new_phase`` goes on with
        other data, what changed and where each source begins.

    Raises:
        ValueError: The data are not those that the checkpoint was trained on, and nobody said that they may change.
    """
    state = start.state()
    if start.checkpoint is None:
        return 0, []
    saved = start.metadata["data"]
    if "sources" not in saved:
        raise ValueError(
            f"{start.checkpoint} does not say what was read from each source: an older version saved it\n"
            "    fix: run.name=NEW_NAME starts another run"
        )
    changes = data.changes(saved, sequences=state.sequences)
    if not changes:
        return state.sequences, []
    if start.mode is ResumeMode.fork or data.starts_new_phase:
        cursors = data.begin_phase(saved, tokens=state.tokens)
        return 0, [*changes, *(f"source {name}: goes on at token {token:,}" for name, token in cursors.items())]
    lines = "\n".join(f"              {change}" for change in changes)
    raise ValueError(
        f"the data are not those that {start.checkpoint} was trained on\n"
        f"    found:    fingerprint {data.fingerprint}\n    expected: fingerprint {saved['fingerprint']}\n{lines}\n"
        "    fix:      restore them (text, data.cache_dir, weights or phases); or go on with the new ones: "
        f"data.on_change=new_phase for token files, or a fork: resume={start.checkpoint} resume_mode=fork "
        "run.name=NEW_NAME"
    )


def _start_afresh(folder: RunFolder) -> Start:
    if folder.is_used:
        raise ValueError(
            f"the run folder {folder.path} exists, and resume=never does not overwrite it\n"
            "    fix: run.name=NEW_NAME starts another run, resume=auto continues this one"
        )
    return Start()


def _continue_own(checkpoint: Path, *, request: Request, folder: RunFolder) -> Start:
    metadata = _read(checkpoint)
    differences = _compare(metadata, request.config, mode=ResumeMode["continue"], checkpoint=checkpoint)
    return Start(
        checkpoint=checkpoint, metadata=metadata, is_own=True, differences=differences, lineage=folder.read_lineage()
    )


def _start_from_path(request: Request, *, own: Path | None, folder: RunFolder) -> Start:
    checkpoint = _find_checkpoint(Path(request.resume))
    if own is not None:
        lineage = folder.read_lineage() or {}
        if lineage.get("resume") != request.resume and not (checkpoint.exists() and own.samefile(checkpoint)):
            raise ValueError(
                f"the run folder {folder.path} has checkpoints of its own, the newest is {own.name}; "
                f"it cannot start from {checkpoint}\n"
                "    fix: run.name=NEW_NAME starts another run from there, resume=auto continues this one"
            )
        return _continue_own(own, request=request, folder=folder)
    metadata = _read(checkpoint)
    differences = _compare(metadata, request.config, mode=request.mode, checkpoint=checkpoint)
    lineage = {
        "resume": request.resume,
        "resume_mode": request.mode.value,
        "checkpoint": str(checkpoint.resolve()),
        "step": metadata["train_state"]["step"],
        "tokens": metadata["train_state"]["tokens"],
        "differences": {item.key: {"old": item.old, "new": item.new} for item in differences},
    }
    return Start(checkpoint=checkpoint, metadata=metadata, mode=request.mode, differences=differences, lineage=lineage)


def _find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that is at ``path``, or the newest one of the run folder there."""
    if not is_complete(path):
        newest = latest_checkpoint(path / "checkpoints")
        if newest is not None:
            return newest
    return path


def _read(checkpoint: Path) -> dict[str, Any]:
    """Read the metadata; nothing that a start needs may be missing, or schedules would begin again in silence."""
    metadata = read_metadata(checkpoint)
    for key, names in NEEDED.items():
        part = metadata.get(key)
        if not isinstance(part, dict) or not part.keys() >= names:
            raise damaged(checkpoint / METADATA, KeyError(key))
    return metadata


def _compare(
    metadata: Mapping[str, Any], config: Mapping[str, object], *, mode: ResumeMode, checkpoint: Path
) -> tuple[Difference, ...]:
    differences = [item for item in config_difference(metadata["config"], config) if item.key not in EXPECTED]
    refused = refused_differences(differences, mode=mode, new_phase=_wants_new_phase(config))
    if not refused:
        return tuple(differences)
    lines = "\n".join(f"    {item}" for item in refused)
    if mode is ResumeMode.fork:
        raise ValueError(
            f"a fork cannot change what gives the weights their shape; it starts from {checkpoint}\n{lines}"
        )
    raise ValueError(
        f"the configuration is not the one of {checkpoint}, and these keys change its state or data order:\n{lines}\n"
        "    fix: put them back, or start another run with run.name=NEW_NAME; to keep these weights add "
        f"resume={checkpoint} resume_mode=fork"
    )


def _wants_new_phase(config: Mapping[str, Any]) -> bool:
    return config.get("data", {}).get("on_change") == OnChange.new_phase
