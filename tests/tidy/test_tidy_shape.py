"""Sources stay small enough to be read in one sitting, and hold no hidden state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tidy_sources import MUTATORS, ROOT, functions, imported, modules, name_of, tree

FILE_LINES_MAX = 600
LONG_FILE_LINES_MAX = 900  # of a file that opens with an essay
ESSAY_LINES_MIN = 15
FUNCTION_LINES_MAX = 70
EVERYWHERE = sorted(
    [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")],
)


@pytest.mark.parametrize("path", EVERYWHERE, ids=name_of)
def test_length(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    essay = (ast.get_docstring(tree(path)) or "").splitlines()
    lines_max = LONG_FILE_LINES_MAX if len(essay) >= ESSAY_LINES_MIN else FILE_LINES_MAX
    assert lines <= lines_max, f"{lines} lines"
    for function in functions(tree(path)):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= FUNCTION_LINES_MAX, f"{function.name}: {length} lines"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_no_mutable_globals(path: Path) -> None:
    """Tables at module level are declared `Final`, and no function writes to them."""
    tables = set()
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and _is_mutable(node.value):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            assert names == {"__all__"}, f"line {node.lineno}: {names} is not Final"
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            tables.add(node.target.id)
            if _is_mutable(node.value):
                assert "Final" in ast.unparse(node.annotation), f"line {node.lineno}: not Final"
    for function in functions(tree(path)):
        for name, line in _changed(function):
            assert name not in tables, f"line {line}: {function.name} changes {name}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_runs_at_exit_or_rebinds_a_global(path: Path) -> None:
    assert not any(name == "atexit" for name, _ in imported(path))
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree(path)))


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
