#!/usr/bin/env bash
# Create .venv, or bring it up to date. `make setup` calls this; PYTHON chooses the interpreter of a new .venv.
# A torch that fits (below) is used as it is, in an existing .venv or in $PYTHON; only where there is none, pip installs one.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly python=${PYTHON:-python3}
readonly venv_python=.venv/bin/python
readonly stamp=.venv/.nvfp4_train_setup
fingerprint="$PWD $(cat pyproject.toml docker/constraints.txt scripts/setup.sh | cksum)"

# Print the version and the folder of the torch that an interpreter has, if it lies in pyproject.toml's range.
fitting_torch() {
    "$1" - <<'PY'
from importlib import metadata
try:
    torch = metadata.distribution("torch")
except metadata.PackageNotFoundError:
    raise SystemExit(0)
major, minor = (int(part) for part in torch.version.split(".")[:2])
if (2, 13) <= (major, minor) < (2, 15):
    print(torch.version, torch.locate_file(""))
PY
}

create_venv() {
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "setup: Python 3.11 or newer is needed, $python is $("$python" --version 2>&1). Try: make setup PYTHON=python3.11" >&2
        exit 1
    fi
    local version folder
    read -r version folder < <(fitting_torch "$python") || true
    if [[ -z ${version:-} ]]; then
        echo "setup: creating .venv with $("$python" --version)"
        "$python" -m venv .venv
        return
    fi
    echo "setup: creating .venv with $("$python" --version), which brings torch $version"
    "$python" -m venv --system-site-packages .venv
    if [[ -z $(fitting_torch "$venv_python") ]]; then # $PYTHON is itself a virtual environment: its packages are not the system's
        echo "$folder" > "$("$venv_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent_environment.pth"
    fi
}

if [[ -f $stamp && $(<"$stamp") == "$fingerprint" ]]; then
    touch "$stamp"
    exit 0
fi
[[ -x $venv_python ]] || create_venv
"$venv_python" -m pip --version > /dev/null 2>&1 || "$venv_python" -m ensurepip > /dev/null

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
read -r version _ < <(fitting_torch "$venv_python") || true
if [[ -n ${version:-} ]]; then
    { grep -v '^torch==' docker/constraints.txt; echo "torch==$version"; } > "$constraints"
    echo "setup: keeping torch $version, installing the rest (about a minute)"
else
    cp docker/constraints.txt "$constraints"
    echo "setup: installing torch and the rest (a few minutes)"
fi
"$venv_python" -m pip install -qq --disable-pip-version-check --constraint "$constraints" --editable '.[dev,plots,wandb,data,deepspeed]'
"$venv_python" -c 'import nvfp4_train, torch; print(f"setup: ready, torch {torch.__version__}")'
echo "$fingerprint" > "$stamp"
