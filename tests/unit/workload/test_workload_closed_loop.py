from __future__ import annotations

import pytest

from headgate.core.errors import ConfigError
from headgate.workload import ClosedLoop, ConcurrencyStep


def test_no_clients_before_the_first_step() -> None:
    loop = ClosedLoop((ConcurrencyStep(10, 5),), duration_ns=20)
    assert [loop.clients_at(ns) for ns in (0, 9, 10, 19, 20)] == [0, 0, 5, 5, 0]


@pytest.mark.parametrize(
    ("steps", "duration_ns", "think_ns", "requests_max"),
    [
        ([], 10, 0, None),
        ([(5, 1), (5, 2)], 10, 0, None),
        ([(5, 1), (4, 2)], 10, 0, None),
        ([(-1, 1)], 10, 0, None),
        ([(0, -1)], 10, 0, None),
        ([(0, 1)], 0, 0, None),
        ([(0, 1)], 10, -1, None),
        ([(0, 1)], 10, 0, 0),
    ],
)
def test_an_invalid_closed_loop_is_refused(
    steps: list[tuple[int, int]], duration_ns: int, think_ns: int, requests_max: int | None
) -> None:
    with pytest.raises(ConfigError):
        ClosedLoop(
            tuple(ConcurrencyStep(*step) for step in steps),
            duration_ns,
            think_ns,
            requests_max=requests_max,
        )
