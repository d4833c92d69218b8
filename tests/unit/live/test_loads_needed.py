"""Which functions must load before a gateway starts to serve."""

from __future__ import annotations

import pytest

from headgate.config import declare
from headgate.core.model import App
from headgate.functions.tensor import Signature
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.model_registry import LoadsFailed, LoadsNeeded, check_loads


def app() -> App:
    """One function with one variant, one with two."""
    build = {"exec_time": "1ms"}
    return declare(
        functions={
            "one": {"code": "m:F", "exec_time": "1ms"},
            "two": {"variants": {"a": build, "b": build}},
        },
        pools={"cpu": {}},
    ).app


def measured_functions(**problems: str) -> dict[str, MeasuredFunction]:
    names = ("one", "two/a", "two/b")
    return {
        name: MeasuredFunction(
            name, Signature(), (), 0, 0, problems.get(name.replace("/", "_"), "")
        )
        for name in names
    }


@pytest.mark.parametrize(
    ("problems", "served"),
    [
        ({}, {"all": True, "one": True, "none": True}),
        ({"one": "no"}, {"all": False, "one": True, "none": True}),
        ({"two_a": "no"}, {"all": False, "one": True, "none": True}),
        ({"one": "no", "two_a": "no"}, {"all": False, "one": True, "none": True}),
        ({"one": "no", "two_a": "no", "two_b": "no"}, {"all": False, "one": False, "none": True}),
    ],
)
def test_loads_needed(problems: dict[str, str], served: dict[LoadsNeeded, bool]) -> None:
    for needed, is_served in served.items():
        if is_served:
            check_loads(app(), measured_functions(**problems), needed)
        else:
            with pytest.raises(LoadsFailed) as failed:
                check_loads(app(), measured_functions(**problems), needed)
            names = [name.replace("_", "/") for name in problems]
            expected = [f"{name}: cannot be loaded: no" for name in names]
            assert failed.value.problems == expected
