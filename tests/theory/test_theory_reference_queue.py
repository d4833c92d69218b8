"""The simulator and the reference queue give every request the same times, to the nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference_queue import fifo_starts_ns
from theory_systems import SERVICE_S, system

from headgate.core.model import App, Function, Pipeline, Pool, Profile, Stage, Variant
from headgate.metrics.columns import SpanKind
from headgate.policies import find_policy
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals, constant_column, poisson

LENGTHS_NS = (1, 7, 40)


def three_functions(servers: int) -> App:
    """Functions of three lengths on servers that are alike."""
    functions = tuple(
        Function(id, f"f{id}", (Variant(id, f"f{id}", id, (0,), Profile((length_ns,))),))
        for id, length_ns in enumerate(LENGTHS_NS)
    )
    pipelines = tuple(Pipeline(f.id, f.name, (Stage(f),)) for f in functions)
    return App(functions, pipelines, (Pool(0, "server", nodes=servers),))


@given(
    servers=st.integers(1, 5),
    requests=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=60),
)
def test_short_runs_with_many_ties(servers: int, requests: list[tuple[int, int]]) -> None:
    times_ns = np.cumsum([gap_ns for gap_ns, _ in requests], dtype=np.int64)
    pipeline = np.array([index for _, index in requests], dtype=np.int32)
    arrivals = Arrivals(
        times_ns,
        int(times_ns[-1]) + 1,
        pipeline,
        constant_column(len(requests)),
        pipelines=("f0", "f1", "f2"),
    )
    done = simulate(Setup(three_functions(servers), find_policy("balance")), arrivals).requests
    service_ns = np.array(LENGTHS_NS)[pipeline]
    starts_ns = fifo_starts_ns(times_ns, service_ns, servers)
    assert done.started_ns.tolist() == starts_ns.tolist()
    assert done.finished_ns.tolist() == (starts_ns + service_ns).tolist()


def _service_ns(setup: Setup, arrivals: Arrivals) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When each request began, and how long it really took."""
    done = simulate(setup, arrivals)
    ran = done.spans.kind == SpanKind.RUN
    order = np.argsort(done.spans.batch[ran])  # batches are sent in order of arrival
    took_ns = (done.spans.end_ns - done.spans.start_ns)[ran][order]
    return done.requests.started_ns, took_ns


def test_long_runs() -> None:
    """Thousands of random service times, on one server and on eight."""
    for servers, seed in ((1, 5), (8, 6)):
        arrivals = poisson(0.8 * servers / SERVICE_S, 4_000_000_000, seed=seed)
        setup = Setup(
            system(servers),
            find_policy("balance"),
            truth=GroundTruthConfig("lognormal", cv=1.5),
            seed=seed,
            records_spans=True,
        )
        started_ns, took_ns = _service_ns(setup, arrivals)
        expected_ns = fifo_starts_ns(arrivals.times_ns, took_ns, servers)
        assert np.array_equal(started_ns, expected_ns)
        assert np.any(started_ns > arrivals.times_ns)


def test_independent_runs_in_one_array() -> None:
    """Runs stacked on a leading axis are computed independently of each other."""
    rng = np.random.default_rng(1)
    arrival_ns = np.cumsum(rng.integers(0, 20, (3, 50)), axis=-1)
    service_ns = rng.integers(0, 40, (3, 50))
    for servers in (1, 3):
        together = fifo_starts_ns(arrival_ns, service_ns, servers)
        for row in range(3):
            alone = fifo_starts_ns(arrival_ns[row], service_ns[row], servers)
            assert together[row].tolist() == alone.tolist()
