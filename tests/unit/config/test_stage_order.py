"""The order of stages in a file makes no difference to any decision."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from headgate.config import from_spec
from headgate.core.actions import Action
from headgate.core.event_log import to_wire
from headgate.core.events import Event
from headgate.core.model import App
from headgate.planning.pools.concurrency import budgets_ns
from headgate.policies import find_policy, policy_names
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, simulate
from headgate.workload.arrivals import arrivals_at

# Two first stages, a fork, a join and a cascade: files may list them in 120 orders.
STAGES: dict[str, dict[str, object]] = {
    "resize": {"function": "small"},
    "decode": {"function": "large"},
    "detect": {"function": "large", "after": ["resize"]},
    "join": {"function": "small", "after": ["detect", "decode"]},
    "refine": {
        "function": "large",
        "after": ["join"],
        "only_if_unsure": True,
        "unsure_probability": "50%",
    },
}


def load(names: tuple[str, ...]) -> App:
    spec = {
        "functions": {
            "small": {"exec_time": "3ms", "cold_start": "4ms"},
            "large": {"exec_time": "10ms", "cold_start": "20ms"},
        },
        "pipelines": {
            "p": {"stages": {name: STAGES[name] for name in names}, "slo": {"latency": "90ms"}}
        },
        "pools": {"gpu": {"tier": "gpu", "nodes": 2}},
    }
    return from_spec(spec, "here").app


def test_the_order_is_topological_and_the_same_for_every_order_in_the_file() -> None:
    apps = [load(names) for names in permutations(STAGES)]
    names = [stage.name for stage in apps[0].pipelines[0].stages]
    assert names == ["decode", "resize", "detect", "join", "refine"]
    assert all(app == apps[0] for app in apps)


def test_three_stages_in_series_take_the_sum_of_their_times() -> None:
    """Listed last first: a critical path that depends on the order in the file finds only one."""
    spec = {
        "functions": {"f": {"exec_time": "100ms"}},
        "pipelines": {
            "p": {
                "stages": {
                    "a": {"function": "f", "after": ["b"]},
                    "b": {"function": "f", "after": ["c"]},
                    "c": {"function": "f"},
                },
                "slo": {"latency": "600ms"},
            }
        },
    }
    app = from_spec(spec, "here").app
    (pipeline,) = app.pipelines
    times_ns = [100, 100, 100]
    assert pipeline.critical_path(times_ns) == [0, 1, 2]
    assert pipeline.longest_to(times_ns) == [100, 200, 300]
    assert pipeline.longest_from(times_ns) == [300, 200, 100]
    assert budgets_ns(app) == [200_000_000]


class Log(Observer):
    """Everything that a Scheduler is told and decides."""

    def __init__(self) -> None:
        self.lines: list[object] = []

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.lines.append((now_ns, to_wire(event), [to_wire(action) for action in actions]))


def decisions(app: App, policy: str) -> list[object]:
    log = Log()
    times_ns = np.cumsum(np.random.default_rng(3).exponential(25e6, 60)).astype(np.int64)
    arrivals = arrivals_at(times_ns, int(times_ns[-1]) + 1)
    simulate(Setup(app, find_policy(policy), validate=True), arrivals, observer=log)
    return log.lines


@pytest.mark.parametrize("policy", policy_names())
def test_decisions_do_not_depend_on_the_order_in_the_file(policy: str) -> None:
    if not find_policy(policy).capabilities.pipelines:
        pytest.skip("serves no pipelines")
    given, *others = (load(names) for names in (tuple(STAGES), tuple(reversed(STAGES))))
    expected = decisions(given, policy)
    assert len(expected) > 200
    assert all(decisions(app, policy) == expected for app in others)
