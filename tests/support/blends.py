"""Token files whose tokens say where they come from, and runs over them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_train.config.batch import BatchConfig, RampConfig
from nvfp4_train.config.blend import PhaseConfig, SourceConfig, ValidationConfig
from nvfp4_train.config.indexed_data import (
    FimConfig,
    IndexedDataConfig,
    MegatronOrderConfig,
    OnChange,
    Order,
    Packing,
)
from nvfp4_train.config.run import Device, RunConfig
from tests.support.token_files import write_pair

SIZES = {"web": 403, "code": 151, "math": 61}  # tokens; 50, 18 and 7 rows of LENGTH
LENGTH = 8
VOCAB_SIZE = 1000


def write_sources(folder: Path) -> dict[str, Path]:
    """Write one pair a source; no token occurs twice. Documents have 1 to 12 tokens."""
    prefixes, first = {}, 0
    for number, (name, size) in enumerate(SIZES.items()):
        rng = np.random.default_rng(number)
        cuts = np.cumsum(rng.integers(1, 13, size=size))
        documents = np.split(np.arange(first, first + size), cuts[cuts < size])
        write_pair(folder / name, [document.tolist() for document in documents])
        prefixes[name] = folder / name
        first += size
    return prefixes


def source_config(prefix: Path, **changes: Any) -> SourceConfig:
    """One source of one pair."""
    return SourceConfig(**({"paths": [str(prefix)]} | changes))


def indexed_config(folder: Path, prefixes: dict[str, Path], **changes: Any) -> IndexedDataConfig:
    """A blend of all sources with weights 6, 3 and 1; ``changes`` replaces fields."""
    weights = dict(zip(prefixes, (6.0, 3.0, 1.0), strict=False))
    cfg = IndexedDataConfig(
        cache_dir=str(folder / "cache"),
        prefetch=2,
        sources={name: source_config(prefix, weight=weights[name]) for name, prefix in prefixes.items()},
        phases={},
        validation={"held_out": ValidationConfig(paths=[str(next(iter(prefixes.values())))])},
        order=Order.prefix_stable,
        packing=Packing.concatenate,
        pad_token=0,
        count_document_ends=False,
        on_change=OnChange.refuse,
        staging_gib=1.0,
        fim=FimConfig(prefix_token=None, middle_token=None, suffix_token=None, document_end_token=None),
        megatron=MegatronOrderConfig(split="100,0,0", num_samples=None, extra_token=True),
    )
    return replace(cfg, **changes)


def phases(*parts: tuple[float, dict[str, float]]) -> dict[str, PhaseConfig]:
    """Phases that end at these fractions of the run."""
    return {f"p{index}": PhaseConfig(end_fraction=end, weights=weights) for index, (end, weights) in enumerate(parts)}


def batch_config(*, micro: int = 1, size: int = 4, length: int = LENGTH) -> BatchConfig:
    """Sizes of a step without ramp-up."""
    ramp = RampConfig(start=micro, increment=micro, tokens=0)
    return BatchConfig(sequence_length=length, micro_batch_size=micro, global_batch_size=size, ramp=ramp)


def run_config(*, sequences: int = 200, seed: int = 5, length: int = LENGTH) -> RunConfig:
    """A run of so many sequences."""
    return RunConfig(
        name="run", dir="runs", seed=seed, tokens=sequences * length, stop_after_steps=None, device=Device.cpu
    )
