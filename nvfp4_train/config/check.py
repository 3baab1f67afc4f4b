"""Composes every YAML file of the tree: ``python -m nvfp4_train.config.check``."""

import sys

from nvfp4_train.config.load import default_choices, load_config
from nvfp4_train.config.problem import ConfigError, report
from nvfp4_train.config.tree import group_choices

# What a choice leaves to the user.
USER_VALUES = {
    "data=text_files": ["data.paths=[README.md]"],
    "data=indexed": ["data.sources={a: {paths: [a]}}", "data.validation={a: {paths: [b]}}"],
}


def compositions() -> list[list[str]]:
    """Return overrides that use every file: all choices that are not the default, alone and with every experiment."""
    groups, defaults = group_choices(), default_choices()
    experiments = [[], *([f"experiment={name}"] for name in groups.pop("experiment"))]
    others = [
        [f"{group}={choice}"]
        for group, choices in groups.items()
        for choice in choices
        if choice != defaults.get(group)
    ]
    return [[*experiment, *other] for experiment in experiments for other in [[], *others]]


def main() -> int:
    """Compose them all, with one line each; return 1 if one is wrong."""
    failed = 0
    for overrides in compositions():
        name = " ".join(overrides) or "(defaults)"
        extra = [value for override in overrides for value in USER_VALUES.get(override, [])]
        try:
            load_config([*overrides, *extra])
        except ConfigError as error:
            failed += 1
            print(f"wrong  {name}\n{report(error.problems)}\n")
        else:
            print(f"ok     {name}")
    print(f"{len(compositions()) - failed}/{len(compositions())} configurations compose")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
