"""The repository as a whole: nothing dead, nothing of one machine, news kept, exports explained."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from tidy_sources import DISCOVERED, ROOT, dotted, imported, kept_files, modules, name_of, tree

# Reached from outside the package, and from where.
ENTRIES = {
    "headgate": "the package itself",
    "headgate.__main__": "python -m headgate",
    "headgate.cli.main": "the `headgate` command",
    "headgate.functions.lambda_handler": "what AWS Lambda is told to call",
    "headgate.profiling.probe": "python -m headgate.profiling.probe",
    "headgate.live.gateway.__main__": "python -m headgate.live.gateway",
    "headgate.live.ray_host.__main__": "python -m headgate.live.ray_host",
    "headgate.live.worker.__main__": "python -m headgate.live.worker",
}


def test_no_module_is_dead() -> None:
    used = {name for path in modules() for name, _ in imported(path)}
    dead = [
        name_of(path)
        for path in modules()
        if dotted(path) not in used
        and dotted(path) not in ENTRIES
        and path.name != "__init__.py"
        and not any(path.parent == ROOT / "src" / "headgate" / place for place in DISCOVERED)
    ]
    assert not dead


@pytest.mark.parametrize(
    "path", [path for path in modules() if path.name == "__init__.py"], ids=name_of
)
def test_exports_are_documented(path: Path) -> None:
    assert ast.get_docstring(tree(path)), "a package says what it is"
    module = importlib.import_module(dotted(path))
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            told = set(re.findall(r"[a-z]+", (inspect.getdoc(thing) or "").lower()))
            told -= set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))
            assert len(told) >= 3, f"{name} is exported, and its docstring repeats the name"


def test_the_changelog_tells_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings, "no entries"
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared
    assert any(h.startswith(declared[1]) or h == "Unreleased" for h in headings), declared[1]
    try:
        assert version("headgate") == declared[1]
    except PackageNotFoundError:
        pytest.skip("headgate is not installed")


# Written in halves, so that this file is not found by its own search.
FOREIGN = re.compile(
    "|".join(
        (
            r"(?<![\w.])/(?:home|Us" + r"ers|root|work|mnt|opt|srv)/\w",
            r"\bpypi\." + r"(?:org|python)",
            r"pythonho" + r"sted",
            r"index-" + r"url",
            r"artif" + r"actory",
            r"\bnex" + r"us\b",
            r"\.inter" + r"nal\b",
            r"\blocal" + r"host:\d",
        )
    ),
    re.IGNORECASE,
)


def test_nothing_of_one_machine_is_kept() -> None:
    found = []
    for path in kept_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        found += [
            f"{name_of(path)}:{number}: {line.strip()}"
            for number, line in enumerate(lines, 1)
            if FOREIGN.search(line)
        ]
    assert not found
