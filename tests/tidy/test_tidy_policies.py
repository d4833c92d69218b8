"""A policy is one file with idea, example, settings, class; it reads the view, writes itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from tidy_sources import MUTATORS, PACKAGE, functions, name_of, policies, tree

from headgate.core.policy import PolicyConfig
from headgate.policies import describe_policy, find_policy, policy_names


def test_all_files_are_policies() -> None:
    assert [path.stem for path in policies()] == policy_names()


@pytest.mark.parametrize("path", policies(), ids=name_of)
def test_it_has_an_idea_and_an_example(path: Path) -> None:
    text = ast.get_docstring(tree(path)) or ""
    assert ">>> " in text, "no example that runs"
    assert "Cost per decision" in text, "does not say what a decision costs"
    assert len(describe_policy(path.stem)) < 100


@pytest.mark.parametrize("path", policies(), ids=name_of)
def test_it_has_settings_with_defaults(path: Path) -> None:
    kind = find_policy(path.stem)
    assert issubclass(kind.config, PolicyConfig)
    assert is_dataclass(kind.config)
    assert kind.config() == kind.config(), "every setting needs a default"
    if fields(kind.config):
        assert kind.config.__name__ == "Config"
        assert kind.config.__module__ == kind.make.__module__


@pytest.mark.parametrize("path", policies(), ids=name_of)
def test_it_writes_only_itself(path: Path) -> None:
    """No assignment, deletion or mutating call reaches the view or a record of the core."""
    module = tree(path)
    own = _fields_of(module) - _record_fields()
    for function in functions(module):
        borrowed = _borrowed(function)
        for target in _written(function):
            written = ast.unparse(target)
            assert _is_own(target, own, borrowed), (
                f"{name_of(path)}:{target.lineno} writes {written}: a field of a record or of the "
                "view, or an attribute of the policy that is named like one"
            )


def test_the_rule_bites() -> None:
    """What the rule is there to catch, it catches."""
    for line in (
        "task.state = 3",
        "node.running += 1",
        "self.view.now_ns = 0",
        "self.view.free_nodes.pop(1)",
        "del self.view.nodes[1]",
        "free = self.view.free_nodes; free.clear()",
        "node.instances[1] = None",
    ):
        function = next(functions(ast.parse(f"def f(self, task, node): {line}")))
        borrowed = _borrowed(function)
        written = list(_written(function))
        assert not all(_is_own(target, {"queue"}, borrowed) for target in written), line
    function = next(functions(ast.parse("def f(self, flow): flow.queue.append(1); self.x = 1")))
    assert all(_is_own(t, {"queue"}, _borrowed(function)) for t in _written(function))


def _written(function: ast.AST) -> Iterator[ast.Attribute | ast.Subscript | ast.Name]:
    """Whatever a function stores into, deletes, or calls a mutating method of."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            yield node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
            and isinstance(node.func.value, ast.Attribute | ast.Subscript | ast.Name)
        ):
            yield node.func.value


def _chain(node: ast.expr) -> list[str]:
    """`self.view.nodes[1].name` as ["self", "view", "nodes", "name"]."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    if isinstance(node, ast.Subscript):
        return _chain(node.value)
    if isinstance(node, ast.Call):
        return _chain(node.func)[:-1]  # what a method returns belongs to whom it was asked of
    return [node.id] if isinstance(node, ast.Name) else ["?"]


def _borrowed(function: ast.AST) -> set[str]:
    """Local names for something in the view."""
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)
        for target in node.targets
        if isinstance(target, ast.Name) and "view" in _chain(node.value)
    }


def _is_own(target: ast.expr, own: set[str], borrowed: set[str]) -> bool:
    root, *rest = _chain(target)
    if root in borrowed or "view" in rest:
        return False
    if root == "self" or not rest:
        rest = rest[1:]  # a field of the policy itself, or a local variable
    return all(field in own for field in rest)


def _fields_of(module: ast.Module) -> set[str]:
    """Every field that the classes of a module give themselves."""
    return {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _record_fields() -> set[str]:
    """Every field of the core's records and of the view."""
    return _fields_of(tree(PACKAGE / "core" / "records.py")) | _fields_of(
        tree(PACKAGE / "core" / "view.py")
    )
