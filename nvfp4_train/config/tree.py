"""The folder of YAML files: where it is and which choices its groups offer."""

from pathlib import Path

import nvfp4_train

ROOT = "train"


def config_dir() -> Path:
    """Return the folder that holds ``train.yaml`` and the groups: inside an installed wheel, or beside the package."""
    package = Path(nvfp4_train.__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def group_choices() -> dict[str, list[str]]:
    """Return the names of the YAML files of each group."""
    groups = sorted(path for path in config_dir().iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
    return {
        group.name: sorted(path.relative_to(group).with_suffix("").as_posix() for path in group.rglob("*.yaml"))
        for group in groups
    }
