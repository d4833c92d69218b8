"""Headgate and what it needs, put into a package, for platforms that do not have it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import headgate
from headgate.core.errors import ConfigError


def bundle(directory: Path, *, has_onnx: bool) -> None:
    """Put Headgate beside the user's files, and install there what it depends on.

    Raises `ConfigError` with what pip says if that fails.
    """
    package = Path(headgate.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(package, directory / "headgate", ignore=ignored, dirs_exist_ok=True)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    command = (*pip, "--target", str(directory), *requirements(has_onnx=has_onnx))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip failed"]
        raise ConfigError(said[-1].removeprefix("ERROR: "), where="deploy", key="--bundle")


def requirements(*, has_onnx: bool) -> list[str]:
    """What Headgate depends on, in the very versions that it has been tried with here."""
    package = Path(headgate.__file__).resolve()
    declared = package.parents[2] / "pyproject.toml"
    try:
        wanted = [line for line in metadata.requires("headgate") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:  # run from its sources
        wanted = tomllib.loads(declared.read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in wanted]
    names += ["onnxruntime"] if has_onnx else []
    return [f"{name}=={metadata.version(name)}" for name in names]
