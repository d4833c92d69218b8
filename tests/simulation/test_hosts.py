"""Pools that share the CPUs of a machine: what runs there slows down what runs beside it.

A request takes 10 ms on a CPU of its own, on the node as on the platform.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.config import from_spec
from headgate.core.errors import ConfigError
from headgate.core.model import ONE_CPU_MILLI, Host
from headgate.lab.harness import Environment, PolicyCase, RunResult
from headgate.sim.faults import Fault
from headgate.sim.host import SimHost
from headgate.workload import poisson

from .apps import CLOUD, GPU, MS, at_ms, make_app, run, waits_ms
from .policies import SPILL

S = 1_000 * MS


def waits(cpus: float, *times_ms: int) -> list[float]:
    """Times of requests, of which the node has the first and the platform the others."""
    host = Host(0, "laptop", round(cpus * ONE_CPU_MILLI))
    app = make_app(pools=(replace(GPU, host=host), replace(CLOUD, host=host)))
    columns, _ = run(app, at_ms(*times_ms), policy=SPILL)
    return waits_ms(columns)


@pytest.mark.parametrize(
    ("cpus", "times_ms", "expected_ms"),
    [
        (1, (0,), [10.0]),
        (1, (0, 0), [20.0, 20.0]),
        (1, (0, 0, 0), [30.0, 30.0, 30.0]),
        (2, (0, 0), [10.0, 10.0]),
        (2, (0, 0, 0), [15.0, 15.0, 15.0]),
        (1.5, (0, 0, 0), [20.0, 20.0, 20.0]),
        (1, (0, 5), [15.0, 15.0]),  # alone for 5 ms, then at half speed, then the other is alone
        (1, (0, 20), [10.0, 10.0]),
        (0.5, (0,), [20.0]),
    ],
)
def test_what_runs_has_equal_parts_of_the_cpus(
    cpus: float, times_ms: tuple[int, ...], expected_ms: list[float]
) -> None:
    assert waits(cpus, *times_ms) == expected_ms


def test_pools_without_a_host_have_cpus_of_their_own() -> None:
    host = Host(0, "laptop", ONE_CPU_MILLI)
    app = make_app(pools=(replace(GPU, host=host), CLOUD))
    columns, _ = run(app, at_ms(0, 0, 0), policy=SPILL)
    assert waits_ms(columns) == [10.0, 10.0, 10.0]


def test_a_crash_frees_the_cpus() -> None:
    """Both have done 2 ms at 4. The node's request is lost, and the call is alone from then on."""
    host = Host(0, "laptop", ONE_CPU_MILLI)
    app = make_app(pools=(replace(GPU, host=host), replace(CLOUD, host=host)))
    crash = Fault("crash", 4 * MS, until_ns=100 * MS, node=0)
    columns, _ = run(app, at_ms(0, 0), crash, policy=SPILL)
    assert waits_ms(columns) == [4.0, 12.0]


def test_members_are_told_of_each_other() -> None:
    told: list[str] = []

    class Member:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_host_changed(self, now_ns: int) -> None:
            told.append(f"{self.name} at {now_ns}")

    host = SimHost(Host(0, "laptop", 2 * ONE_CPU_MILLI))
    first, second = host.join(Member("first")), host.join(Member("second"))
    host.want(1, first, 2 * ONE_CPU_MILLI)
    assert (told, host.slowdown) == ([], 1.0)
    host.want(2, second, ONE_CPU_MILLI)
    assert (told, host.slowdown) == (["first at 2"], 1.5)
    host.want(3, first, 0)
    assert (told[1:], host.slowdown) == (["second at 3"], 1.0)


def shop(nodes: int, *, calls_on_host: bool, nodes_on_host: bool) -> dict[str, object]:
    """A function on nodes and as calls, 40 ms each, of which a machine has two CPUs."""
    host = {"host": "laptop"}
    return {
        "functions": {
            "f": {
                "variants": {
                    "node": {"exec_time": "40ms", "pools": ["nodes"]},
                    "call": {"exec_time": "40ms", "pools": ["calls"]},
                }
            }
        },
        "pools": {
            "nodes": {"tier": "dedicated", "nodes": nodes, **(host if nodes_on_host else {})},
            "calls": {
                "tier": "serverless",
                "memory": "1769MiB",
                "concurrency": 20,
                **(host if calls_on_host else {}),
            },
        },
        "hosts": {"laptop": {"cpus": 2}},
        "slo": {"latency": "200ms", "quantile": "95%"},
    }


def served(spec: dict[str, object], per_s: float) -> RunResult:
    arrivals = poisson(per_s, 60 * S, seed=1)
    app = from_spec(spec, "a test").app
    return Environment(app, arrivals).run(PolicyCase("headgate"), 0)


def test_the_default_policy_calls_no_more_than_the_cpus_can_run() -> None:
    """One node and two CPUs for calls have 75 requests a second. Twenty calls would all be late."""
    result = served(shop(1, calls_on_host=True, nodes_on_host=False), 68.0)
    assert result.attainment > 0.9


def test_the_default_policy_learns_what_pools_take_from_each_other() -> None:
    """Two nodes and the calls share two CPUs, which have 50 requests a second."""
    result = served(shop(2, calls_on_host=True, nodes_on_host=True), 42.0)
    assert result.attainment > 0.9


def test_an_unknown_host_is_named() -> None:
    spec = shop(1, calls_on_host=True, nodes_on_host=False) | {"hosts": {"laptops": {"cpus": 2}}}
    with pytest.raises(ConfigError, match=r"pools\.calls\.host: 'laptop': unknown host, did you"):
        from_spec(spec, "a test")
