"""Builds a TrainConfig from plain values and collects every violated rule on the way.

OmegaConf's own conversion stops at the first wrong value, and a dataclass at the first wrong part. Here an object with
a wrong value is made without that value, so that the rest of it, and what contains it, is still checked.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from nvfp4_train.config.convert import MISSING, convert_value, mismatch
from nvfp4_train.config.data import DataConfig, PythonStdlibDataConfig, TextFilesDataConfig
from nvfp4_train.config.engine import EngineConfig, TorchEngineConfig
from nvfp4_train.config.hub_data import HubDataConfig
from nvfp4_train.config.indexed_data import IndexedDataConfig
from nvfp4_train.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig
from nvfp4_train.config.problem import NO_VALUE, ConfigError, Problem, is_complete, require
from nvfp4_train.config.scheduler import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    SchedulerConfig,
    WsdConfig,
)
from nvfp4_train.config.suggest import choice_fix, key_fix
from nvfp4_train.config.train import TrainConfig

# A group with several leaf classes says in its key `type` which of them its YAML describes.
LEAVES: dict[type, dict[str, type]] = {
    DataConfig: {
        "python_stdlib": PythonStdlibDataConfig,
        "text_files": TextFilesDataConfig,
        "hub": HubDataConfig,
        "indexed": IndexedDataConfig,
    },
    OptimizerConfig: {"adamw": AdamWConfig, "muon": MuonConfig},
    SchedulerConfig: {
        "wsd": WsdConfig,
        "cosine": CosineConfig,
        "linear": LinearConfig,
        "constant": ConstantConfig,
        "inverse_sqrt": InverseSqrtConfig,
    },
    EngineConfig: {"torch": TorchEngineConfig},
}

# Between the problems that numerics joins: the next one begins with its field.
_OPERAND_SEPARATOR = re.compile(r"; (?=[a-z_]+: )")

REPORTED = object()  # stands for a value that is wrong and reported already


def build_config(values: Mapping[str, object]) -> TrainConfig:
    """Build the configuration of a run.

    Args:
        values: Nested mappings as YAML holds them, without interpolations; ``REPORTED`` where a problem is known.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[Problem] = []
    cfg = build_partial(values, problems)
    require(problems)
    assert isinstance(cfg, TrainConfig)
    return cfg


def build_partial(values: Mapping[str, object], problems: list[Problem]) -> object:
    """Build what can be built and append every problem to ``problems``; wrong values are left unset."""
    return _Builder(known_keys(values), problems).build(TrainConfig, values, prefix="")


def plain_values(cfg: object) -> dict[str, object]:
    """Return a config as nested mappings that ``build_config`` turns into an equal config."""
    leaf_types = {leaf: name for leaves in LEAVES.values() for name, leaf in leaves.items()}
    values: dict[str, object] = {"type": leaf_types[type(cfg)]} if type(cfg) in leaf_types else {}
    for field in fields(cfg):  # type: ignore[arg-type]
        value = getattr(cfg, field.name)
        if is_dataclass(value):
            value = plain_values(value)
        elif isinstance(value, dict):
            value = {name: plain_values(item) if is_dataclass(item) else item for name, item in value.items()}
        elif isinstance(value, Enum):
            value = value.name
        values[field.name] = value
    return values


def known_keys(values: Mapping[str, object]) -> list[str]:
    """Return every dotted key that a run may set, given the leaf types that ``values`` chooses."""
    return _keys_below(TrainConfig, values, prefix="")


class _Builder:
    """Builds dataclasses recursively; ``problems`` collects what is wrong."""

    def __init__(self, keys: list[str], problems: list[Problem]) -> None:
        self.keys = keys
        self.problems = problems

    def build(self, cls: type, values: Mapping[str, object], *, prefix: str) -> object:
        """Return an object of ``cls`` (or of the leaf class that ``values`` names), or REPORTED."""
        leaf = self._choose_leaf(cls, values, prefix=prefix)
        if leaf is None:
            return REPORTED
        cfg: object = object.__new__(leaf)
        hints = get_type_hints(leaf)
        for key in values:
            if key not in hints and not (key == "type" and cls in LEAVES):
                self._report_unknown(_join(prefix, key), values[key], leaves=LEAVES.get(cls, {}))
        for field in fields(leaf):
            value = values.get(field.name, MISSING if field.default is NO_DEFAULT else field.default)
            value = self._field_value(hints[field.name], value, key=_join(prefix, field.name))
            if value is not REPORTED:
                setattr(cfg, field.name, value)
        self._check(cfg, prefix=prefix)
        return cfg

    def _choose_leaf(self, cls: type, values: Mapping[str, object], *, prefix: str) -> type | None:
        leaves = LEAVES.get(cls)
        if leaves is None:
            return cls
        name = values.get("type", MISSING)
        if isinstance(name, str) and name in leaves:
            return leaves[name]
        rule = f"must be one of {', '.join(leaves)}"
        self.problems.append(
            Problem(key=_join(prefix, "type"), value=name, rule=rule, fix=choice_fix(str(name), leaves))
        )
        return None

    def _field_value(self, hint: Any, value: object, *, key: str) -> object:
        if value is REPORTED:
            return REPORTED
        if value == MISSING:
            self.problems.append(Problem(key=key, value=NO_VALUE, rule="needs a value", fix=f"give one: {key}=..."))
            return REPORTED
        if is_dataclass(hint):
            if isinstance(value, Mapping):
                return self.build(hint, value, prefix=key)  # type: ignore[arg-type]
            rule = "must be a group of keys"
            self.problems.append(
                Problem(key=key, value=value, rule=rule, fix=f"set its keys one by one: {key}.KEY=VALUE")
            )
            return REPORTED
        entry = named_entry(hint)
        if entry is not None and isinstance(value, Mapping):
            entries = {str(name): self._field_value(entry, value[name], key=_join(key, str(name))) for name in value}
            return REPORTED if REPORTED in entries.values() else entries
        try:
            return convert_value(value, hint)
        except TypeError:
            self.problems.append(mismatch(key, value, hint))
            return REPORTED

    def _report_unknown(self, key: str, value: object, *, leaves: dict[str, type]) -> None:
        if value is REPORTED:
            return
        name = key.rpartition(".")[2]
        others = [leaf for leaf, cls in leaves.items() if name in get_type_hints(cls)]
        while isinstance(value, Mapping) and len(value) == 1:
            ((child, value),) = value.items()
            key = _join(key, str(child))
        fix = key_fix(key, self.keys)
        if others:
            group = key.partition(".")[0]
            fix = f"it belongs to {' and '.join(f'{group}={leaf}' for leaf in others)}; choose that or leave it out"
        self.problems.append(Problem(key=key, value=value, rule="unknown key", fix=fix))

    def _check(self, cfg: object, *, prefix: str) -> None:
        check = getattr(cfg, "__post_init__", None)
        if check is None:
            return
        try:
            check()
        except ConfigError as error:
            self.problems += [problem.below(prefix) for problem in error.problems]
        except ValueError as error:  # numerics knows nothing of problems: "field: found ..., expected ...; field: ..."
            self.problems += [
                _operand_problem(cfg, text, prefix=prefix) for text in _OPERAND_SEPARATOR.split(str(error))
            ]
        except AttributeError:
            if is_complete(cfg):
                raise


def _operand_problem(cfg: object, text: str, *, prefix: str) -> Problem:
    field, _, rule = text.partition(": ")
    value = getattr(cfg, field)
    shown = value.name if isinstance(value, Enum) else value
    return Problem(key=_join(prefix, field), value=shown, rule=rule, fix="change it, or the value that the rule names")


def _keys_below(cls: type, values: object, *, prefix: str) -> list[str]:
    values = values if isinstance(values, Mapping) else {}
    leaf = LEAVES[cls].get(str(values.get("type"))) if cls in LEAVES else cls
    if leaf is None:
        return []
    keys = []
    for name, hint in get_type_hints(leaf).items():
        key, value, entry = _join(prefix, name), values.get(name), named_entry(hint)
        if is_dataclass(hint):
            keys += _keys_below(hint, value, prefix=key)  # type: ignore[arg-type]
        elif entry is not None:  # the user chooses the names
            for item, inner in value.items() if isinstance(value, Mapping) else ():
                keys += _keys_below(entry, inner, prefix=_join(key, str(item)))
        else:
            keys.append(key)
    return keys


def named_entry(hint: Any) -> type | None:
    """Return the dataclass that ``dict[str, dataclass]`` holds, or None for any other type."""
    if get_origin(hint) is dict and is_dataclass(get_args(hint)[1]):
        return get_args(hint)[1]
    return None


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
