"""SECURITY.md keeps its word: every promise names tests, and the tests that it names exist.

A promise is an item of a list in any section but those that promise nothing. A test is named by
its file under `tests/`, or by its file and its function: `unit/test_x.py::test_it_holds`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tidy_sources import ROOT, functions, imported, modules, name_of, tree

DOCUMENT = ROOT / "SECURITY.md"
PROMISE_NOTHING = ("Reporting", "Who is trusted", "What is not defended against")
TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")
# Modules whose bytes are code to whoever reads them.
UNPICKLES = frozenset(("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"))
UNPICKLES |= {"multiprocessing", "concurrent.futures.process"}  # they pickle by themselves


def promises(text: str) -> Iterator[tuple[int, str]]:
    """The promises of a document, each with its line."""
    section, line, item = "", 0, ""
    for number, each in enumerate([*text.splitlines(), "#"], 1):
        if item and not each.startswith("  "):
            yield line, item
            item = ""
        if each.startswith("#"):
            section = each.lstrip("# ")
        elif each.startswith("- ") and section not in PROMISE_NOTHING:
            line, item = number, each[2:]
        elif item:
            item += f" {each.strip()}"


def missing(file: str, function: str) -> str:
    """What is wrong with the name of a test; nothing if it is there."""
    path = ROOT / "tests" / file
    if not path.name.startswith("test_") or not path.is_file():
        return f"there is no tests/{file}"
    found = {each.name for each in functions(tree(path)) if each.name.startswith("test_")}
    if not found:
        return f"there is no test in tests/{file}"
    return f"there is no {function} in tests/{file}" if function and function not in found else ""


def problems(text: str) -> list[str]:
    """Promises without a test, and tests that are not there."""
    found = [
        f"line {line}: no test is named: {item[:60]}"
        for line, item in promises(text)
        if not TEST.search(item)
    ]
    for file, function in TEST.findall(text):
        problem = missing(file, function)
        if problem:
            found.append(problem)
    return found


def test_every_promise_names_tests_that_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert len(list(promises(text))) > 30
    assert problems(text) == []


def test_the_rule_bites() -> None:
    here = "tidy/test_tidy_security.py"
    held = (
        f"# A\n\n- It holds,\n  always. `{here}::test_the_rule_bites`\n- So does this: `{here}`.\n"
    )
    assert problems(held + "\n## What is not defended against\n\n- Whatever.\n") == []
    assert problems("# A\n- It holds.\n\nNo promise.\n- Nor\n  this.") == [
        "line 2: no test is named: It holds.",
        "line 5: no test is named: Nor this.",
    ]
    for name in ("tidy/test_nobody.py", "tidy/tidy_sources.py", f"{here}::test_nothing"):
        (problem,) = problems(f"- It holds. `{name}`\n")
        assert problem.startswith("there is no ")


def test_nothing_is_unpickled() -> None:
    """Between processes, from files or from clients; the harness shares work with its children."""
    found = [
        f"{name_of(path)}:{line}: imports {name}"
        for path in modules()
        if name_of(path) != "src/headgate/lab/harness.py"
        for name, line in imported(path)
        if name.partition(".")[0] in UNPICKLES or name in UNPICKLES
    ]
    assert found == []
    loads = re.compile(r"\b(?:np|numpy)\.load\(|allow_pickle|yaml\.(?:unsafe_load|full_load)\b")
    assert [name_of(p) for p in modules() if loads.search(p.read_text(encoding="utf-8"))] == []


def test_the_gateway_calls_aws_for_what_is_documented() -> None:
    """The permissions that SECURITY.md lists are those that it needs, and no others."""
    called = {
        node.func.attr
        for path in modules("live")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "client"
    }
    needed = {"".join(map(str.title, name.split("_"))) for name in called}
    documented = re.findall(r"`(?:lambda|sagemaker):(\w+)`", DOCUMENT.read_text(encoding="utf-8"))
    assert {name.removesuffix("Function") for name in documented} == needed
