"""The constants of the default policy stand in one place, and none is dead."""

from __future__ import annotations

import ast
import re
import runpy

from tidy_sources import PACKAGE, ROOT, modules

from headgate.planning import constants


def _chosen() -> set[str]:
    tree = ast.parse((PACKAGE / "planning" / "constants.py").read_text(encoding="utf-8"))
    return {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_every_constant_is_read() -> None:
    read = {
        node.id
        for path in modules("planning", "policies")
        if path.name != "constants.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name)
    }
    assert _chosen() <= read


def test_constants_are_read_when_they_are_used() -> None:
    """Not while modules are imported: `tools/sensitivity.py` could not change them any more."""
    early = [
        f"{path}:{node.lineno}: {node.id}"
        for path in modules("planning", "policies")
        if path.name != "constants.py"
        for node in _outside_functions(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id in _chosen()
    ]
    assert not early


def test_the_tool_scales_every_constant() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "sensitivity.py"))
    assert set(tool["values"]()) == _chosen()
    for name in _chosen():
        half, double = (tool["scaled"](name, factor) for factor in tool["FACTORS"])
        assert half != double
        assert type(half) in (type(getattr(constants, name)), float)


def test_the_document_names_every_constant() -> None:
    """In its table, or among those that have no row in it."""
    text = (ROOT / "docs" / "constants.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", text)) == _chosen()


def _outside_functions(tree: ast.AST) -> list[ast.AST]:
    """Every node that runs when a module is imported: defaults of parameters as well."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.Lambda):
            for default in (*child.args.defaults, *filter(None, child.args.kw_defaults)):
                found += ast.walk(default)
        else:
            found += [child, *_outside_functions(child)]
    return found
