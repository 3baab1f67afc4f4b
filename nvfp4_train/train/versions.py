"""What a run was made with."""

import platform
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

import nvfp4_train

RECORDED_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "tokenizers", "safetensors")
OPTIONAL_PACKAGES = ("deepspeed",)  # recorded where they are installed


def collect_versions() -> dict[str, str | int | None]:
    """Collect the code's revision, package versions and the machine, for ``versions.json``."""
    versions: dict[str, str | int | None] = {
        "nvfp4_train": nvfp4_train.__version__,
        "git_revision": git_revision(Path(nvfp4_train.__file__).parent),
        "python": sys.version.split()[0],
    }
    versions |= {name: metadata.version(name) for name in RECORDED_PACKAGES}
    versions |= {name: metadata.version(name) for name in OPTIONAL_PACKAGES if find_spec(name) is not None}
    versions |= {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        versions |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return versions


def git_revision(folder: Path) -> str | None:
    """Return the commit checked out in ``folder``, with ``-dirty`` if files differ from it; None without one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
