"""Files of policies that are wrong: one line says which, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate import policies
from headgate.core.errors import ConfigError
from headgate.policies import find_policy


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\n\ndef policy(:\n", r"wrong1\.py:3: policy wrong1: SyntaxError: invalid syntax"),
        ("import nothere\n", r"wrong2\.py:1: policy wrong2: ModuleNotFoundError: No module"),
        ("\n1 / 0\n", r"wrong3\.py:2: policy wrong3: ZeroDivisionError: division by zero"),
        ("x = 1\n", r"wrong4\.py: POLICY: has no policy \(allowed: POLICY = PolicyKind"),
        ("POLICY = 1\n", r"wrong5\.py: POLICY: has no policy"),
    ],
)
def test_a_wrong_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    name = problem.partition("\\")[0]
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    with pytest.raises(ConfigError, match=problem) as caught:
        find_policy(name)
    assert "\n" not in str(caught.value)
