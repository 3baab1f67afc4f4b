"""From overrides to a TrainConfig. The only file that knows Hydra and OmegaConf."""

from collections.abc import Mapping
from dataclasses import dataclass

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from nvfp4_train.config.build import REPORTED, build_config, build_partial, known_keys, plain_values
from nvfp4_train.config.convert import MISSING
from nvfp4_train.config.problem import NO_VALUE, ConfigError, Problem, require
from nvfp4_train.config.suggest import choice_fix, closest, key_fix
from nvfp4_train.config.train import TrainConfig
from nvfp4_train.config.tree import ROOT, config_dir, group_choices

OPEN_KEY = "args"  # keys that end so hold a mapping whose names an extension decides


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A valid configuration and where it came from.

    Args:
        cfg: The configuration.
        yaml: The same as YAML, resolved; ``from_yaml`` turns it into an equal configuration.
        overrides: What the user wrote on the command line.
        experiment: The chosen experiment, if any.
    """

    cfg: TrainConfig
    yaml: str
    overrides: list[str]
    experiment: str | None


def load_config(overrides: list[str]) -> LoadedConfig:
    """Compose the YAML tree with overrides and check it.

    Args:
        overrides: ``group=choice`` and ``key=value``, as on the command line.

    Raises:
        ConfigError: with every problem of the overrides, the YAML files and the values together.
    """
    problems: list[Problem] = []
    groups = group_choices()
    parsed = _parse(overrides, problems)
    choices = {override.key_or_group: override for override in parsed if _is_choice(override, groups)}
    names = {group: _choose(override, groups[group], problems) for group, override in choices.items()}
    lines = ["~experiment" if name == "null" else f"{group}={name}" for group, name in names.items() if name]
    tree = _compose(lines, problems)
    experiment = tree.pop("hydra").runtime.choices.get("experiment")
    keys = [*known_keys(_mapping(tree)), "experiment"]
    for override in parsed:
        if not _is_choice(override, groups):
            _apply(tree, override, keys, problems)
    values = _resolve(tree, problems)
    _name_run(values, experiment or "run")
    values |= {group: REPORTED for group, name in names.items() if name is None}
    cfg = build_partial(values, problems)
    require(problems)
    assert isinstance(cfg, TrainConfig)
    return LoadedConfig(cfg=cfg, yaml=to_yaml(cfg), overrides=list(overrides), experiment=experiment)


def to_yaml(cfg: TrainConfig) -> str:
    """Return a configuration as YAML, complete and without interpolations."""
    return OmegaConf.to_yaml(OmegaConf.create(plain_values(cfg)))


def from_yaml(text: str) -> TrainConfig:
    """Return the configuration that ``to_yaml`` wrote.

    Raises:
        ConfigError: if it does not fit this version of the program.
    """
    return build_config(load_yaml(text))


def load_yaml(text: str) -> dict[str, object]:
    """Return YAML as nested dicts, for example to compare a saved ``config.yaml`` with a new one."""
    return _mapping(OmegaConf.create(text))


def default_choices() -> dict[str, str | None]:
    """Return the choice that ``train.yaml`` makes in each group."""
    root = load_yaml((config_dir() / f"{ROOT}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in root["defaults"] if isinstance(entry, dict)]  # type: ignore[attr-defined]
    return {group: choice for entry in entries for group, choice in entry.items()}


def _parse(overrides: list[str], problems: list[Problem]) -> list[Override]:
    """Return the overrides that can be read; the rest are problems."""
    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        rule = ""
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            rule = f"must read key=value ({str(error).splitlines()[0]})"
        else:
            rule = _form_fault(override)
        if rule:
            fix = "write key=value or group=choice; quote a value with special characters: 'key=\"a, b\"'"
            problems.append(Problem(key=text, value=NO_VALUE, rule=rule, fix=fix))
        else:
            parsed.append(override)
    return parsed


def _form_fault(override: Override) -> str:
    if not override.key_or_group:
        return "must read key=value, and has no key"
    if override.is_sweep_override():
        return "must give one value; this program runs one configuration and sweeps over none"
    if override.package is not None:
        return "must not name a package (@); every group has its place"
    return ""


def _is_choice(override: Override, groups: Mapping[str, list[str]]) -> bool:
    is_plain = override.type is OverrideType.CHANGE and not isinstance(override.value(), dict | list)
    return is_plain and override.key_or_group in groups


def _choose(override: Override, choices: list[str], problems: list[Problem]) -> str | None:
    """Return the chosen file of a group, or the most similar one after noting the problem."""
    group, value = override.key_or_group, override.value()
    if value is None and group == "experiment":
        return "null"
    name = "" if value is None else str(value)
    if name in choices:
        return name
    rule = f"must be a file of configs/{group}"
    problems.append(Problem(key=group, value=value, rule=rule, fix=choice_fix(name, choices)))
    return closest(name, choices)


def _compose(choices: list[str], problems: list[Problem]) -> DictConfig:
    """Compose the files, without a schema, so that the tree can hold mistakes.

    Raises:
        ConfigError: if the files cannot be composed at all.
    """
    try:
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            tree = compose(ROOT, overrides=choices, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        rule = "its YAML files must compose: " + "\n          ".join(str(error).strip().splitlines())
        fix = "correct the file that the message names"
        raise ConfigError([*problems, Problem(key=str(config_dir()), value=NO_VALUE, rule=rule, fix=fix)]) from error
    OmegaConf.set_readonly(tree, False)
    OmegaConf.set_struct(tree, False)
    if "experiment" in tree:
        rule = "an experiment file sets keys of the root"
        problems.append(
            Problem(key="experiment", value=NO_VALUE, rule=rule, fix="its first line must be `# @package _global_`")
        )
        del tree["experiment"]
    return tree


def _apply(tree: DictConfig, override: Override, keys: list[str], problems: list[Problem]) -> None:
    """Set one value in the tree; an unknown key is added to it, for the builder to report with all others."""
    key, value = override.key_or_group, override.value()
    is_group = any(known.startswith(f"{key}.") for known in keys)
    if override.type is not OverrideType.CHANGE:
        rule = "keys are neither added nor removed"
        text = str(override.input_line).lstrip("+~")
        fix = (text if "=" in text else f"{key}=VALUE") if is_group or key in keys else key_fix(key, keys)
        problems.append(Problem(key=str(override.input_line), value=NO_VALUE, rule=rule, fix=fix))
    elif is_group and not isinstance(value, dict):
        fix = f"set its keys one by one: {key}.KEY=VALUE"
        problems.append(Problem(key=key, value=value, rule="must be a group of keys", fix=fix))
    elif "/" in key or any(key.startswith(f"{known}.") for known in keys if not known.endswith(OPEN_KEY)):
        problems.append(Problem(key=key, value=value, rule="unknown key", fix=key_fix(key, keys)))
    else:
        OmegaConf.update(tree, key, value, merge=key not in keys, force_add=True)


def _resolve(node: DictConfig, problems: list[Problem], *, prefix: str = "") -> dict[str, object]:
    """Return a tree as nested dicts with interpolations resolved; REPORTED where that fails."""
    values: dict[str, object] = {}
    for name in node:  # an unknown mapping may have keys that are not text
        key = prefix + str(name)
        if OmegaConf.is_missing(node, name):
            values[str(name)] = MISSING
            continue
        try:
            value = node[name]
            if isinstance(value, DictConfig):
                value = _resolve(value, problems, prefix=f"{key}.")
            elif isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            found = _mapping(node)[str(name)]
            rule = str(error).splitlines()[0]
            problems.append(Problem(key=key, value=found, rule=rule, fix="name a key that exists, or give a value"))
            value = REPORTED
        values[str(name)] = value
    return values


def _name_run(values: dict[str, object], name: str) -> None:
    """Give a run without a name this one."""
    run = values.get("run")
    if isinstance(run, dict) and run.get("name") is None:
        run["name"] = name.replace("/", "_")


def _mapping(node: object) -> dict[str, object]:
    container = OmegaConf.to_container(node, resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
