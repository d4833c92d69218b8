"""The sources as the tidy tests see them: paths and syntax trees."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "headgate"
# Packages whose modules are found by their place rather than imported by name.
DISCOVERED = ("cli/commands", "lab/bench", "lab/experiments", "policies", "workload/readers")
# Methods that change what they are called on.
MUTATORS = frozenset(("add", "append", "appendleft", "clear", "discard", "extend", "insert"))
MUTATORS |= {"pop", "popitem", "popleft", "remove", "setdefault", "sort", "update"}


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def modules(*folders: str) -> list[Path]:
    """The modules in these folders of the package; in all of it without any."""
    roots = [PACKAGE / folder for folder in folders] or [PACKAGE]
    return sorted(path for root in roots for path in root.rglob("*.py"))


def policies() -> list[Path]:
    """One file each."""
    return [path for path in modules("policies") if not path.name.startswith("_")]


def name_of(path: Path) -> str:
    """How tests and messages call a file."""
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    """How a module of the package is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Everything a module imports, with the line: both `a.b` and `a.b.c` for `from a.b import c`.

    Relative imports do not occur in the package.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def kept_files() -> list[Path]:
    """Every file that is under version control, or would be if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file()]
