"""The compiled build decides as the interpreted one does: every action is the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("action_log.py")
COMPILE = ROOT / "tools" / "compile.py"
WHEEL = ROOT / "tools" / "wheel.py"


def _decided(source: Path) -> tuple[str, dict[str, str]]:
    """Return what `action_log.py` prints when the package is imported from `source`."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    printed = json.loads(done.stdout)
    return printed["build"], printed["runs"]


def _has_compiler() -> bool:
    compiler = os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc")
    return shutil.which(compiler.split()[0]) is not None


@pytest.mark.slow
@pytest.mark.skipif(not _has_compiler(), reason="there is no C compiler")
def test_both_builds_decide_alike() -> None:
    """All policies under fault plans, on nodes with one slot and with processor sharing."""
    done = subprocess.run([sys.executable, COMPILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kind, runs = _decided(Path(done.stdout.strip()))
    assert kind == "compiled"
    assert _decided(ROOT / "src") == ("interpreted", runs)


@pytest.mark.slow
@pytest.mark.skipif(not _has_compiler(), reason="there is no C compiler")
def test_every_module_of_the_compiled_build_is_imported() -> None:
    done = subprocess.run([sys.executable, COMPILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    script = """
import importlib, pkgutil, headgate
for module in pkgutil.walk_packages(headgate.__path__, "headgate."):
    if not module.name.endswith("__main__"):  # a program
        importlib.import_module(module.name)
"""
    environment = os.environ | {"PYTHONPATH": done.stdout.strip()}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.slow
@pytest.mark.skipif(not _has_compiler(), reason="there is no C compiler")
def test_the_wheel_has_the_compiled_build(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, WHEEL, "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    wheel = done.stdout.strip()
    subprocess.run([*command, "--target", installed, wheel], check=True)
    assert _decided(installed)[0] == "compiled"
    used = subprocess.run(
        [sys.executable, "-m", "headgate", "policies"],
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "headgate" in used.stdout


@pytest.mark.slow
@pytest.mark.skipif(not _has_compiler(), reason="there is no C compiler")
def test_servers_of_the_compiled_build_serve_as_others_do() -> None:
    """Live: clients, pipelines, logs that replay, several gateways; the gateway is compiled."""
    done = subprocess.run([sys.executable, COMPILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = ("serving", "live_pipelines", "logging", "gateways")
    files = [str(ROOT / "tests" / "live" / f"test_{name}.py") for name in names]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": done.stdout.strip()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout
