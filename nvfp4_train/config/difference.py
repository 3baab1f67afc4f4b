"""How two configurations differ, and which differences a run that resumes may have."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nvfp4_train.config.train import ResumeMode

# Keys that change neither the state a checkpoint holds nor the order of data. A longer budget moves the end of the
# schedule only; ranks, microbatches, kernels and the device change how a step is computed, not its tokens.
MAY_CHANGE_ON_CONTINUE = (
    "run.name",
    "run.dir",
    "run.tokens",
    "run.stop_after_steps",
    "run.device",
    "batch.micro_batch_size",
    "model.mamba.kernels",
    "data.cache_dir",
    "data.prefetch",
    "data.staging_gib",
    # The data themselves say whether these change what was read so far; the plan of the future may change.
    "data.sources.*",
    "data.phases.*",
    "data.validation.*",
    "data.on_change",
    "parallel.*",
    "engine.*",
    "evaluation.*",
    "checkpoint.*",
    "logging.*",
    "resume",
    "resume_mode",
)

# data.on_change: new_phase goes on with other data, whatever is different about them.
MAY_CHANGE_IN_NEW_PHASE = (*MAY_CHANGE_ON_CONTINUE, "data.*", "batch.sequence_length")

# A fork starts a run of its own from the weights and optimizer state of another; what gives these their shape stays.
MAY_CHANGE_ON_FORK = (
    *MAY_CHANGE_ON_CONTINUE,
    "run.seed",
    "batch.*",
    "recipe.*",
    "data.*",
    "scheduler.*",
    "optimizer.weight_decay*",
    "optimizer.clip_grad_norm",
    "optimizer.beta?",
    "optimizer.eps",
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key with another value; None where a side does not have it."""

    key: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def config_difference(old: Mapping[str, object], new: Mapping[str, object]) -> list[Difference]:
    """Return every key whose value differs between two configurations (``load_yaml``), in the order of ``new``."""
    old_values, new_values = flatten(old), flatten(new)
    keys = [*new_values, *(key for key in old_values if key not in new_values)]
    return [
        Difference(key=key, old=old_values.get(key), new=new_values.get(key))
        for key in keys
        if old_values.get(key) != new_values.get(key)
    ]


def refused_differences(
    differences: list[Difference], *, mode: ResumeMode, new_phase: bool = False
) -> list[Difference]:
    """Return the differences that a resumed run must not have; ``new_phase`` says that its data may be others."""
    allowed: tuple[str, ...] = MAY_CHANGE_IN_NEW_PHASE if new_phase else MAY_CHANGE_ON_CONTINUE
    if mode is ResumeMode.fork:
        allowed = MAY_CHANGE_ON_FORK
    return [difference for difference in differences if not any(fnmatchcase(difference.key, glob) for glob in allowed)]


def flatten(values: Mapping[str, object], *, prefix: str = "") -> dict[str, object]:
    """Return nested mappings as one mapping from dotted keys to values; lists are values."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, prefix=f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
