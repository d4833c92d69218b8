"""Settings of a policy, from plain data to its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from headgate.config import make_config
from headgate.core.errors import ConfigError
from headgate.core.policy import NOT_NEGATIVE, POSITIVE, PolicyConfig


@dataclass(frozen=True)
class Config(PolicyConfig):
    batch_max: int = 8
    slack: float = field(default=1.0, metadata=NOT_NEGATIVE)
    is_strict: bool = False
    label: str = ""
    order: Literal["fifo", "edf"] = "fifo"
    window_ns: int = field(default=1_000_000_000, metadata=POSITIVE)
    pause_ns: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_max < 1:
            raise ValueError("batch_max must be positive")


def line_of(settings: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(Config, settings, "app.yaml")
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_settings_of_every_type() -> None:
    settings = {
        "batch_max": 4,
        "slack": 2,
        "is_strict": True,
        "label": "x",
        "order": "edf",
        "window": "5s",
        "pause": "1ms",
    }
    expected = Config(4, 2.0, True, "x", "edf", 5_000_000_000, 1_000_000)
    assert make_config(Config, settings, "app.yaml") == expected


def test_no_settings_are_the_defaults() -> None:
    assert make_config(Config, {}, "app.yaml") == Config()
    assert make_config(Config, {"pause": None}, "app.yaml") == Config()
    assert make_config(PolicyConfig, {}, "app.yaml") == PolicyConfig()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"batchmax": 4},
            "policy: 'batchmax': unknown setting, did you mean batch_max? "
            "(allowed: batch_max, slack, is_strict, label, order, window, pause)",
        ),
        ({"window_ns": 4}, "policy: 'window_ns': unknown setting, did you mean window? (allowed: "),
        ({"batch_max": "4"}, "policy.batch_max: '4': is text (allowed: a whole number)"),
        ({"batch_max": 1.5}, "policy.batch_max: 1.5: is not valid (allowed: a whole number)"),
        ({"batch_max": None}, "policy.batch_max: is empty (allowed: a whole number)"),
        ({"batch_max": True}, "policy.batch_max: True: is true or false (allowed: a whole number)"),
        ({"slack": "2"}, "policy.slack: '2': is text (allowed: a number)"),
        ({"is_strict": 1}, "policy.is_strict: 1: is a number (allowed: true or false)"),
        ({"label": 1}, "policy.label: 1: is a number (allowed: text)"),
        ({"label": {}}, "policy.label: is a map (allowed: text)"),
        ({"order": "lifo"}, "policy.order: 'lifo': is not valid (allowed: edf, fifo)"),
        (
            {"window": 5},
            "policy.window: 5: is a number (allowed: a duration such as 5ms, 1.5s",
        ),
        ({"batch_max": 0}, "policy: batch_max must be positive"),
        ({"slack": -1}, "policy.slack: -1: is out of range (allowed: 0 or more)"),
        ({"window": "0s"}, "policy.window: '0s': is out of range (allowed: above 0)"),
        ({"label": object}, "policy.label: has the unsupported type type"),
    ],
)
def test_wrong_settings(settings: dict[str, object], line: str) -> None:
    assert line_of(settings).startswith(f"app.yaml: {line}")


def test_a_setting_of_a_policy_without_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'x': unknown setting \(allowed: none\)"):
        make_config(PolicyConfig, {"x": 1}, "app.yaml")
