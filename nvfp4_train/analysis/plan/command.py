"""The command line of ``scripts/plan.py``."""

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nvfp4_train.analysis.plan.calibration import compare, load_efficiency, load_points, stored_comparisons
from nvfp4_train.analysis.plan.hardware import hardware_names, load_hardware
from nvfp4_train.analysis.plan.layout import Layout, Schedule, filled, layout_of
from nvfp4_train.analysis.plan.planner import Plan, Planner
from nvfp4_train.analysis.plan.report import (
    format_calibration,
    format_plan,
    format_search,
    plan_values,
    search_values,
)
from nvfp4_train.analysis.plan.search import search
from nvfp4_train.analysis.plan.step_time import Machine
from nvfp4_train.config.load import load_config
from nvfp4_train.config.parallel import ActivationCheckpoint, StageBalance
from nvfp4_train.config.problem import NO_VALUE, ConfigError, Problem, require
from nvfp4_train.config.train import TrainConfig

EXIT_DOES_NOT_FIT = 1
DEFAULT_HARDWARE = "H100"  # for checks that do not depend on it

T = TypeVar("T")


def run_command(arguments: list[str], *, say: Callable[[str], None]) -> int:
    """Plan what the arguments ask for.

    Args:
        arguments: As on the command line.
        say: Prints text.

    Returns:
        Exit code: 0, or 1 where no rank of that hardware has the memory.

    Raises:
        ConfigError: with everything that is wrong with the configuration, the layout and the flags.
    """
    options, overrides = _parser().parse_known_args(arguments)
    require([_unknown_flag(word) for word in overrides if word.startswith("-")])
    if options.calibration:
        require(_alone_problems(options, overrides))
        say(format_calibration(compare(load_points(), load_efficiency())))
        return 0
    problems = _flag_problems(options)
    hardware = _collect(
        problems, lambda: load_hardware(DEFAULT_HARDWARE if options.hardware is None else options.hardware)
    )
    loaded = _collect(problems, lambda: load_config(overrides))
    start = None if loaded is None else _collect(problems, lambda: layout_of(loaded.cfg))
    if loaded is None or start is None:
        raise ConfigError(problems)
    machine = Machine(hardware=hardware or load_hardware(DEFAULT_HARDWARE), efficiency=load_efficiency())
    planner = _planner(loaded.cfg, machine)
    devices = _whole(options.devices) or 0
    if options.search or devices < 1:  # what is wrong on one rank is wrong in every layout
        problems += planner.problems(_alone(start), devices=1)
    else:
        problems += planner.problems(filled(start, devices=devices), devices=devices)
    require(problems)
    if options.price is not None:
        planner.machine = replace(machine, hardware=machine.hardware.with_price(float(options.price)))
    if loaded.cfg.parallel.stage_balance is StageBalance.time:
        say("parallel.stage_balance = time is measured when a run starts; here stages are divided by FLOPs\n")
    return _plan(planner, start, devices=devices, options=options, say=say)


def _plan(
    planner: Planner, start: Layout, *, devices: int, options: argparse.Namespace, say: Callable[[str], None]
) -> int:
    values: dict[str, Any] = {}
    if options.search:
        found = search(planner, start, devices=devices)
        say(format_search(found) + "\n")
        values["search"] = search_values(found)
        plan = found.plans[0] if found.plans else None
    else:
        plan = planner.plan(filled(start, devices=devices))
    if plan is not None:
        kept, comparisons = _kept_by_mode(planner, plan), stored_comparisons()
        say(format_plan(plan, kept=kept, comparisons=comparisons))
        values["plan"] = plan_values(plan, kept=kept, comparisons=comparisons)
    if options.json:
        _write(options.json, json.dumps(values, indent=2) + "\n")
    return 0 if plan is not None and plan.fits else EXIT_DOES_NOT_FIT


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        rule, fix = f"cannot be written ({error.strerror})", "name another file"
        raise ConfigError([Problem(key="--json", value=str(path), rule=rule, fix=fix)]) from error


def _collect(problems: list[Problem], action: Callable[[], T]) -> T | None:
    """Return what ``action`` returns, or None after noting the problems that it raises."""
    try:
        return action()
    except ConfigError as error:
        problems += error.problems
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/plan.py",
        allow_abbrev=False,
        description="Say what a run needs and takes on hardware that is not here; needs no GPU and no ranks.",
        epilog="Other arguments are overrides, as scripts/pretrain.py takes them. docs/plan.md says how to read it.",
    )
    parser.add_argument("--devices", metavar="N", help="devices, all with one rank")
    parser.add_argument("--hardware", metavar="NAME", help=", ".join(hardware_names()))
    parser.add_argument("--search", action="store_true", help="propose layouts instead of taking the configured one")
    parser.add_argument("--price", metavar="USD", help="of a device and hour, instead of the listed one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON too")
    parser.add_argument("--calibration", action="store_true", help="compare with published runs and stop")
    return parser


def _planner(cfg: TrainConfig, machine: Machine) -> Planner:
    return Planner(
        model=cfg.model,
        recipe=cfg.recipe,
        optimizer=cfg.optimizer,
        machine=machine,
        total_tokens=cfg.run.tokens,
    )


def _alone(layout: Layout) -> Layout:
    """One rank: what is wrong then is wrong in every layout."""
    return replace(
        layout, pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1, num_virtual_stages=1, schedule=Schedule.one_f_one_b
    )


def _kept_by_mode(planner: Planner, plan: Plan) -> dict[ActivationCheckpoint, float]:
    """Activations of the rank that holds most, for each way of checkpointing."""
    return {
        mode: max(
            planner.memory_of(replace(plan.layout, checkpoint=mode), rank=rank).activations
            for rank in {0, plan.layout.pp - 1}
        )
        for mode in ActivationCheckpoint
    }


def _flag_problems(options: argparse.Namespace) -> list[Problem]:
    problems = []
    if options.devices is None:
        problems.append(_missing("--devices", "N"))
    elif (_whole(options.devices) or 0) < 1:
        rule = "must be a whole number of at least 1"
        problems.append(Problem(key="--devices", value=options.devices, rule=rule, fix="give a positive number"))
    if options.hardware is None:
        problems.append(_missing("--hardware", f"one of {', '.join(hardware_names())}"))
    if options.price is not None and not _is_price(options.price):
        rule = "must be a number that is not negative"
        problems.append(Problem(key="--price", value=options.price, rule=rule, fix="give USD of a device and hour"))
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        rule = "is a folder" if options.json.is_dir() else f"there is no folder {options.json.parent}"
        problems.append(Problem(key="--json", value=str(options.json), rule=rule, fix="name a file in one that exists"))
    return problems


def _whole(text: str | None) -> int | None:
    """Return the number that a text is, or None."""
    return int(text) if text is not None and re.fullmatch(r"[+-]?[0-9]+", text) else None


def _is_price(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def _alone_problems(options: argparse.Namespace, overrides: list[str]) -> list[Problem]:
    """The published runs bring their own models, layouts and hardware."""
    given = [f"--{name}" for name in ("devices", "hardware", "search", "price", "json") if getattr(options, name)]
    rule, fix = "is not read with --calibration, which compares published runs as they are", "leave one of them out"
    return [Problem(key=word, value=NO_VALUE, rule=rule, fix=fix) for word in (*given, *overrides)]


def _missing(flag: str, what: str) -> Problem:
    return Problem(key=flag, value=NO_VALUE, rule="needs a value", fix=f"give one: {flag} {what}")


def _unknown_flag(word: str) -> Problem:
    return Problem(key=word, value=NO_VALUE, rule="unknown flag", fix="see --help; keys have no dashes")
