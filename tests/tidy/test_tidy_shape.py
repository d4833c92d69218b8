"""Sources stay small enough to be read in one sitting, and hold no hidden state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tidy_sources import MUTATORS, ROOT, functions, imported, modules, name_of, tree

FILE_LINES_MAX = 600
LONG_FILE_LINES_MAX = 900  # of a file that opens with an essay
ESSAY_LINES_MIN = 15
FUNCTION_LINES_MAX = 70
EVERYWHERE = sorted(
    [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")],
)


def test_length() -> None:
    assert not [problem for path in EVERYWHERE for problem in _too_long(path)]


def _too_long(path: Path) -> Iterator[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    essay = (ast.get_docstring(tree(path)) or "").splitlines()
    lines_max = LONG_FILE_LINES_MAX if len(essay) >= ESSAY_LINES_MIN else FILE_LINES_MAX
    if lines > lines_max:
        yield f"{name_of(path)}: {lines} lines"
    for function in functions(tree(path)):
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > FUNCTION_LINES_MAX:
            yield f"{name_of(path)}: {function.name}: {length} lines"


def test_no_mutable_globals() -> None:
    """Tables at module level are declared `Final`, and no function writes to them."""
    assert not [problem for path in modules() for problem in _mutable_globals(path)]


def _mutable_globals(path: Path) -> Iterator[str]:
    tables = set()
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and _is_mutable(node.value):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if names != {"__all__"}:
                yield f"{name_of(path)}:{node.lineno}: {names} is not Final"
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            tables.add(node.target.id)
            if _is_mutable(node.value) and "Final" not in ast.unparse(node.annotation):
                yield f"{name_of(path)}:{node.lineno}: {node.target.id} is not Final"
    for function in functions(tree(path)):
        for name, line in _changed(function):
            if name in tables:
                yield f"{name_of(path)}:{line}: {function.name} changes {name}"


def test_nothing_runs_at_exit_or_rebinds_a_global() -> None:
    for path in modules():
        assert not any(name == "atexit" for name, _ in imported(path)), name_of(path)
        rebound = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Global)]
        assert not rebound, f"{name_of(path)}:{rebound[0]}"


def _is_mutable(value: ast.expr) -> bool:
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    makers = ("list", "dict", "set", "deque", "defaultdict", "OrderedDict", "Counter", "array")
    return isinstance(value, displays) or (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in makers
    )


def _changed(function: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a function stores into, or calls a mutating method of."""
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            if isinstance(node.value, ast.Name):
                yield node.value.id, node.lineno
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
            and isinstance(node.func.value, ast.Name)
        ):
            yield node.func.value.id, node.lineno
