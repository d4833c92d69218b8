"""Tries a package before anybody pays for it: does its handler import, as a runtime would do it?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import headgate
from headgate.core.errors import ConfigError

# What the runtime does when it starts, and then the user's own modules.
_IMPORTS: Final = """
import importlib, sys
module, _, name = sys.argv[1].rpartition(".")
found = importlib.import_module(module.replace("/", "."))
if not callable(getattr(found, name, None)):
    raise ImportError(f"module {module!r} has no function {name!r}")
for code in sys.argv[2:]:
    importlib.import_module(code.partition(":")[0])
print("\\nimported")
"""


def try_import(
    directory: Path,
    handler: str,
    environment: Mapping[str, str],
    *,
    codes: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> None:
    """Import the handler in a process of its own, from the package's directory.

    Raises `ConfigError` with what the import says.
    """
    directory = directory.resolve()  # the process has another working directory
    path = os.pathsep.join((str(directory), str(Path(headgate.__file__).resolve().parents[1])))
    variables = {**os.environ, **environment, "LAMBDA_TASK_ROOT": str(directory)}
    variables |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            (sys.executable, "-c", _IMPORTS, handler, *codes),
            cwd=directory,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"does not import within {timeout_s:g} s"
        raise ConfigError(problem, where="deploy", key="handler", value=handler) from None
    # One that ends the process while it is imported may do so with 0.
    if done.returncode or not done.stdout.endswith("\nimported\n"):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].strip() if lines else f"it exits with {done.returncode}"
        problem = f"does not import: {why.removeprefix('headgate.core.errors.')}"
        raise ConfigError(problem, where="deploy", key="handler", value=handler)
