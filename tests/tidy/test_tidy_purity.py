"""What decides is pure: no clock, no chance but the given one, no files, no waiting."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tidy_sources import functions, imported, modules, name_of, tree

IMPURE = frozenset(
    [
        "asyncio",
        "concurrent",
        "datetime",
        "fcntl",
        "gzip",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "queue",
        "random",
        "secrets",
        "select",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "sqlite3",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "uuid",
        "http",
    ]
)
IMPURE_CALLS = frozenset(("open", "input", "print", "breakpoint", "exec", "eval"))

# What is let through, and why.
ALLOWED = {
    "src/headgate/core/rng.py": {"random": "makes the named streams that all others are given"},
    "src/headgate/core/event_log.py": {
        "gzip": "opens the file it is told to, compressed or not",
        "io": "opens the file it is told to, compressed or not",
        "pathlib": "opens the file it is told to, compressed or not",
    },
}
PURE = modules("core", "planning", "policies")


def test_nothing_impure_is_imported() -> None:
    for path in PURE:
        allowed = ALLOWED.get(name_of(path), {})
        for name, line in imported(path):
            top = name.partition(".")[0]
            if name == "random.Random" or (top == "random" and _only_type(path)):
                continue  # the type of a stream; the functions of the module share a hidden one
            assert top not in IMPURE or top in allowed, f"{name_of(path)}:{line} imports {name}"


def test_nothing_impure_is_called() -> None:
    for path in PURE:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in IMPURE_CALLS, f"{name_of(path)}:{node.lineno}"


def test_nothing_waits() -> None:
    for path in PURE:
        for function in functions(tree(path)):
            is_async = isinstance(function, ast.AsyncFunctionDef)
            assert not is_async, f"{name_of(path)}: {function.name}"


def test_the_core_needs_the_standard_library_alone() -> None:
    for path in modules("core"):
        for name, line in imported(path):
            top = name.partition(".")[0]
            is_ours = name in ("headgate", "headgate.core") or name.startswith("headgate.core.")
            problem = f"{name_of(path)}:{line} imports {name}"
            assert is_ours or top in sys.stdlib_module_names, problem


def _only_type(path: Path) -> bool:
    """Whether all that a module takes from `random` is the class."""
    taken = [
        alias.name
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.module == "random"
        for alias in node.names
    ]
    plain = [
        alias.name
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "random"
    ]
    return taken == ["Random"] and not plain
