"""The layout: small packages without cycles, files that earn their place, one class per name."""

from __future__ import annotations

import ast
import runpy
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from pathlib import Path

import pytest
from tidy_sources import DISCOVERED, PACKAGE, ROOT, dotted, imported, modules, name_of, tree

MODULES_MAX = 350  # of the whole package, those that are called `__init__` not counted
PACKAGE_MODULES_MAX = 20
# A module that only one other imports is a file of its own if it is this long, if a test imports
# it directly, if its package exports it, or if it is run as a program or found by its place.
ONE_IMPORTER_LINES_MIN = 100
PROGRAMS = frozenset(("__main__.py", "process.py", "probe.py", "trial_load.py"))
SHARED_CLASS_NAMES = frozenset(("Config",))  # every policy has settings of its own


def _is_discovered(path: Path) -> bool:
    return path.parent.relative_to(PACKAGE).as_posix() in DISCOVERED


@cache
def _imports() -> dict[str, set[str]]:
    """For each module, the modules of the package that it imports, for types alone as well."""
    names = {dotted(path) for path in modules()}
    found: dict[str, set[str]] = {}
    for path in modules():
        wanted = [name for name, _ in imported(path)]
        direct = {name for name in wanted if name in names}
        # `from headgate.a import b` imports the module `headgate.a.b` where there is one, and
        # the package `headgate.a` only for what the package itself defines.
        packages = {name for name in direct if any(w.startswith(f"{name}.") for w in direct)}
        found[dotted(path)] = direct - packages - {dotted(path)}
    return found


def test_the_whole_can_be_known() -> None:
    count = sum(path.name != "__init__.py" for path in modules())
    assert count <= MODULES_MAX, f"{count} modules"


def test_packages_are_small() -> None:
    for folder, paths in groupby(sorted(modules(), key=_folder), key=_folder):
        count = sum(path.name != "__init__.py" for path in paths)
        is_discovered = folder.relative_to(PACKAGE).as_posix() in DISCOVERED
        assert is_discovered or count <= PACKAGE_MODULES_MAX, f"{name_of(folder)}: {count} modules"


def _folder(path: Path) -> Path:
    return path.parent


def test_there_is_no_import_cycle() -> None:
    assert _cycle(_imports()) is None


def test_a_cycle_would_be_found() -> None:
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])


def _cycle(graph: Mapping[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_a_module_earns_its_file() -> None:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, wanted in _imports().items():
        for each in wanted:
            importers[each].add(name)
    tested = {name for path in (ROOT / "tests").rglob("*.py") for name, _ in imported(path)}
    found = [
        f"{name_of(path)} ({lines} lines) has one importer: {next(iter(importers[dotted(path)]))}"
        for path in modules()
        if len(importers[dotted(path)]) == 1
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) < ONE_IMPORTER_LINES_MIN
        and dotted(path) not in tested
        and dotted(path.parent / "__init__.py") not in importers[dotted(path)]
        and path.name not in PROGRAMS
        and path.name != "__init__.py"
        and not _is_discovered(path)
    ]
    assert not found, "\n".join(["merge, or test it by itself:", *found])


def _classes() -> Iterator[tuple[str, str]]:
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                yield node.name, name_of(path)


def test_a_name_stands_for_one_class() -> None:
    counts = Counter(name for name, _ in _classes())
    twice = {name for name, count in counts.items() if count > 1} - SHARED_CLASS_NAMES
    assert not sorted(found for found in _classes() if found[0] in twice)


def test_no_interpreted_class_extends_a_compiled_one() -> None:
    """Such a class fails in the compiled build, and so does every command that imports it."""
    hot_modules = runpy.run_path(str(ROOT / "tools" / "compile.py"))["hot_modules"]
    compiled = {dotted(path) for path in hot_modules(PACKAGE)}
    found = [
        f"{name_of(path)}: {node.name} extends {base.id}"
        for path in modules()
        if dotted(path) not in compiled
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name) and _origin(path, base.id) in compiled
    ]
    assert not found, "\n".join(found)


def test_no_compiled_slice_has_an_effect() -> None:
    """Mypyc may evaluate the bounds of a slice twice: a call there would happen twice."""
    hot_modules = runpy.run_path(str(ROOT / "tools" / "compile.py"))["hot_modules"]
    found = [
        f"{name_of(path)}:{node.lineno}: {ast.unparse(call)}"
        for path in hot_modules(PACKAGE)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Slice)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and not (isinstance(call.func, ast.Name) and call.func.id in ("len", "max", "min"))
    ]
    assert not found, "\n".join(found)


def _origin(path: Path, name: str) -> str | None:
    """The module that a module imports a name from."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return node.module
    return None


@pytest.mark.parametrize("name", DISCOVERED)
def test_what_is_discovered_is_there(name: str) -> None:
    assert any((PACKAGE / name).glob("*.py"))
