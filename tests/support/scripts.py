"""The programs of scripts/, in this process or in one of their own."""

import os
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def start_script(name: str, *arguments: str) -> CompletedProcess[str]:
    """Run a script as a user starts it: seconds of imports, so once a script."""
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def run_script(name: str, *arguments: str) -> CompletedProcess[str]:
    """Run a script to its end in this process."""
    out, err = StringIO(), StringIO()
    command = [str(SCRIPTS / name), *arguments]
    with patch.object(sys, "argv", command), redirect_stdout(out), redirect_stderr(err):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        else:
            code = 0
    return CompletedProcess(command, code, out.getvalue(), err.getvalue())
