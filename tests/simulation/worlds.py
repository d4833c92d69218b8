"""Small worlds in which a general-purpose policy could fail, and what it must reach in each.

A world is an application, streams of requests and true service times. A row is a function of the
policy and the seed that runs one world, or two that must not differ, and returns its claims:
measurements with their bounds. `ROWS` has all rows by name.

Goodput counts requests that are answered in time, arrive after the first tenth of the arrivals and
end before the arrivals stop. The kept share is that of the admitted requests that were answered in
time, over the whole run: a policy may refuse what it cannot keep, also while everything is cold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from headgate.config import AppConfig, declare, load
from headgate.core.clock import SECOND_NS
from headgate.core.rng import stream
from headgate.core.states import Outcome
from headgate.metrics.columns import RunColumns
from headgate.policies import find_policy
from headgate.sim.faults import FaultPlan
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import SimClient, Simulation
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals, mix, named, parse_arrivals
from headgate.workload.arrivals import arrivals_at, constant_column

ENSEMBLE: Final = Path(__file__).parents[2] / "examples" / "ensemble.yaml"
MOST_URGENT: Final = -3  # what a gateway makes of the header `Priority: u=0`
SEEDS: Final = (7_001, 7_002)
_WARM_UP: Final = 0.1  # share of the arrivals' time that goodput leaves out

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one client for one pipeline. The client claims the same for all of them."""

    process: str | Sequence[float]  # an arrival process, or times in seconds
    pipeline: str
    client: str = "client"
    items: int = 1
    priority: int = 0
    timeout_s: float = 0.0  # how long the client waits; 0: as long as the objective of the pipeline
    begins_s: float = 0.0

    @property
    def has_claims(self) -> bool:
        return self.priority != 0 or self.timeout_s > 0

    def arrivals(self, duration_s: float, seed: int) -> Arrivals:
        duration_ns = int(duration_s * SECOND_NS)
        if isinstance(self.process, str):
            arrivals = parse_arrivals(self.process, duration_ns=duration_ns, seed=seed)
            assert isinstance(arrivals, Arrivals)
        else:
            times_ns = np.array([int(at_s * SECOND_NS) for at_s in self.process], dtype=np.int64)
            arrivals = arrivals_at(times_ns, duration_ns)
        if self.begins_s:
            times_ns = arrivals.times_ns[arrivals.times_ns >= self.begins_s * SECOND_NS]
            arrivals = arrivals_at(times_ns, duration_ns)
        items = constant_column(len(arrivals), self.items)
        return replace(named(arrivals, self.pipeline, self.client), items=items)


class ClaimingSender(SimClient):
    """Sends the requests of a stream with its priority and timeout, which arrivals do not have."""

    def __init__(self, config: AppConfig, stream: Stream, arrivals: Arrivals) -> None:
        pipelines = {pipeline.name: pipeline.id for pipeline in config.app.pipelines}
        clients = {client.name: client.id for client in config.app.clients}
        self._pipeline, self._client = pipelines[stream.pipeline], clients[stream.client]
        self._stream = stream
        self._times_ns: list[int] = arrivals.times_ns.tolist()

    def on_start(self, simulation: Simulation) -> None:
        for at_ns in self._times_ns:
            simulation.submit(
                at_ns,
                self._pipeline,
                self._client,
                self._stream.items,
                priority=self._stream.priority,
                timeout_ns=int(self._stream.timeout_s * SECOND_NS),
            )


@dataclass(frozen=True, slots=True)
class Score:
    """What became of the requests of a run."""

    columns: RunColumns

    @property
    def cost_usd(self) -> float:
        """What the nodes cost while they were held."""
        return sum(use.allocation_usd for use in self.columns.resources)

    def rows(self, pipeline: str | None = None, client: str | None = None) -> Bools:
        """Return which requests are of a pipeline and a client; None stands for all."""
        requests = self.columns.requests
        chosen = np.ones(len(requests), dtype=np.bool_)
        if pipeline is not None:
            chosen &= requests.pipeline == self.columns.pipelines.index(pipeline)
        if client is not None:
            chosen &= requests.client == self.columns.clients.index(client)
        return chosen

    def settled_rows(self, warm_up: float = _WARM_UP) -> Bools:
        """Return which requests arrive after the warm-up, a share of the arrivals' time."""
        return self.columns.requests.arrival_ns >= warm_up * self.columns.window_ns

    def goodput_per_s(
        self, pipeline: str | None = None, *, client: str | None = None, warm_up: float = _WARM_UP
    ) -> float:
        requests, window_ns = self.columns.requests, self.columns.window_ns
        counted = self.rows(pipeline, client) & self.settled_rows(warm_up)
        counted &= (requests.outcome == Outcome.MET) & (requests.finished_ns <= window_ns)
        return int(counted.sum()) * SECOND_NS / (window_ns * (1 - warm_up))

    def answered_per_s(self, pipeline: str) -> float:
        """Return responses per second, in time or late, before the arrivals stop."""
        requests, window_ns = self.columns.requests, self.columns.window_ns
        answered = self.rows(pipeline) & (requests.finished_ns <= window_ns)
        answered &= requests.outcome <= Outcome.LATE
        return int(answered.sum()) * SECOND_NS / window_ns

    def admitted(self, pipeline: str | None = None, client: str | None = None) -> int:
        chosen = self.rows(pipeline, client)
        return int((chosen & (self.columns.requests.outcome != Outcome.REJECTED)).sum())

    def kept(self, pipeline: str | None = None, client: str | None = None) -> float:
        """Return the share of admitted requests that were answered in time; 0 if none was."""
        met = self.rows(pipeline, client) & (self.columns.requests.outcome == Outcome.MET)
        return int(met.sum()) / max(1, self.admitted(pipeline, client))

    def attainment(
        self,
        pipeline: str | None = None,
        *,
        client: str | None = None,
        warm_up: float = _WARM_UP,
    ) -> float:
        """Return the share of all requests after the warm-up that were answered in time."""
        chosen = self.rows(pipeline, client) & self.settled_rows(warm_up)
        met = chosen & (self.columns.requests.outcome == Outcome.MET)
        return int(met.sum()) / int(chosen.sum())


@dataclass(frozen=True, slots=True)
class Claim:
    """A measurement and its bound."""

    what: str
    measured: float
    bound: float
    kind: Literal["least", "most"] = "least"

    @property
    def holds(self) -> bool:
        if self.kind == "least":
            return self.measured >= self.bound
        return self.measured <= self.bound

    @property
    def wanted(self) -> str:
        return f"{'>=' if self.kind == 'least' else '<='} {self.bound:g}"


Row = Callable[[str, int], list[Claim]]


def run_world(
    config: AppConfig,
    streams: Sequence[Stream],
    duration_s: float,
    *,
    policy: str,
    seed: int,
    truth: GroundTruthConfig = GroundTruthConfig(),  # noqa: B008 - frozen
    faults: FaultPlan = FaultPlan(),  # noqa: B008 - frozen
    gateways: int = 1,
) -> Score:
    """Run a world, with the application's overheads; each stream has a random stream of its own."""
    parts = [
        one.arrivals(duration_s, stream(seed, f"arrivals/{index}").getrandbits(63))
        for index, one in enumerate(streams)
    ]
    plain = [part for one, part in zip(streams, parts, strict=True) if not one.has_claims]
    senders = [
        ClaimingSender(config, one, part)
        for one, part in zip(streams, parts, strict=True)
        if one.has_claims
    ]
    options = config.simulation
    setup = Setup(
        config.app,
        find_policy(policy),
        seed=seed,
        truth=truth,
        decision_ns=options.decision_ns,
        work_unit_ns=options.per_work_unit_ns,
        faults=faults.actions(),
        schedulers=gateways,
    )
    columns = simulate(
        setup, mix(plain) if plain else None, clients=senders, window_ns=parts[0].duration_ns
    )
    return Score(columns)


def ensemble_with_right_profiles(policy: str, seed: int) -> list[Claim]:
    """The shipped ensemble at 6 times its load, Poisson arrivals and right profiles."""
    truth = GroundTruthConfig("lognormal", cv=0.1)
    streams = (
        Stream("poisson:rate=240/s", "ensemble"),
        Stream("poisson:rate=180/s", "cascade"),
    )
    return _ensemble_claims(streams, truth, 330.0, policy, seed)


def ensemble_as_shipped(policy: str, seed: int) -> list[Claim]:
    """The shipped ensemble at 6 times its load: bursts, and one profile is off by 10 %."""
    truth = GroundTruthConfig("lognormal", cv=0.1, scale=load(str(ENSEMBLE)).simulation.scale)
    streams = (
        Stream("poisson:rate=240/s", "ensemble"),
        Stream("gamma:rate=180/s,cv=2", "cascade"),
    )
    return _ensemble_claims(streams, truth, 300.0, policy, seed)


def _ensemble_claims(
    streams: Sequence[Stream], truth: GroundTruthConfig, least: float, policy: str, seed: int
) -> list[Claim]:
    config = load(str(ENSEMBLE))
    # 60 s as in the file: a tenth of it is longer than the longest cold start.
    score = run_world(config, streams, 60.0, policy=policy, seed=seed, truth=truth)
    claims = [Claim("goodput/s", score.goodput_per_s(), least)]
    for pipeline in config.app.pipelines:
        kept = score.kept(pipeline.name)
        claims.append(Claim(f"kept, {pipeline.name}", kept, pipeline.slo.quantile))
    return claims


DIAMOND: Final[Mapping[str, Sequence[str]]] = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}


def diamond_config(latency: str, order: Sequence[str] = ("a", "b", "c", "d")) -> AppConfig:
    """Return four functions of 20 ms on two nodes, with the stages listed in this order."""
    return declare(
        functions={name: {"exec_time": "20ms"} for name in DIAMOND},
        pools={"gpu": {"nodes": 2}},
        pipelines={
            "diamond": {
                "stages": {name: {"function": name, "after": [*DIAMOND[name]]} for name in order},
                "slo": {"latency": latency},
            }
        },
    )


def diamond(policy: str, seed: int) -> list[Claim]:
    """A diamond whose capacity is 25/s, at 80/s."""
    streams = (Stream("poisson:rate=80/s", "diamond"),)
    score = run_world(diamond_config("400ms"), streams, 60.0, policy=policy, seed=seed)
    return [Claim("goodput/s", score.goodput_per_s(), 24.0), Claim("kept", score.kept(), 0.99)]


def chain_with_a_narrow_end(policy: str, seed: int) -> list[Claim]:
    """A long stage on 100 nodes before a short one on a single node, at 4 times the capacity."""
    config = declare(
        functions={
            "a": {"exec_time": "500ms", "pools": ["many"]},
            "b": {"exec_time": "100ms", "pools": ["one"]},
        },
        pools={"many": {"nodes": 100}, "one": {"nodes": 1}},
        pipelines={
            "chain": {
                "stages": {"a": {"function": "a"}, "b": {"function": "b", "after": ["a"]}},
                "slo": {"latency": "2s"},
            }
        },
    )
    streams = (Stream("poisson:rate=40/s", "chain"),)
    # Long: what is answered in the first 2 s after the warm-up arrived before, and is not counted.
    score = run_world(config, streams, 400.0, policy=policy, seed=seed)
    return [Claim("goodput/s", score.goodput_per_s(), 9.8), Claim("kept", score.kept(), 0.99)]


def slow_second_build(policy: str, seed: int) -> list[Claim]:
    """A build of 10 ms on one GPU, and one of 1 s, twice the SLO, on nine CPUs."""
    variants = {
        "gpu": {"exec_time": "10ms", "pools": ["gpu"]},
        "cpu": {"exec_time": "1s", "pools": ["cpu"]},
    }
    config = declare(
        functions={"f": {"variants": variants}},
        pools={"gpu": {"nodes": 1}, "cpu": {"tier": "dedicated", "nodes": 9}},
        slo={"latency": "500ms"},
    )
    score = run_world(config, (Stream("poisson:rate=150/s", "f"),), 120.0, policy=policy, seed=seed)
    return [Claim("goodput/s", score.goodput_per_s(), 98.0), Claim("kept", score.kept(), 0.99)]


def bulk_with_an_objective(policy: str, seed: int) -> list[Claim]:
    """Interactive requests beside bulk that may wait for a minute, for 15 minutes."""
    score = _interactive_beside_bulk({"latency": "60s"}, 900.0, policy, seed)
    return [
        Claim("attainment, interactive", score.attainment("interactive"), 0.9),
        Claim("kept, bulk", score.kept("bulk"), 0.99),
        # What is answered at first arrived in the warm-up: 94/s is the most.
        Claim("goodput/s", score.goodput_per_s(), 85.0),
    ]


def bulk_without_an_objective(policy: str, seed: int) -> list[Claim]:
    """Interactive requests beside bulk without an objective, which has a small share all the same.

    The capacity is 100/s; best effort gets at least 5 % of it while any of it waits.
    """
    score = _interactive_beside_bulk({"latency": "never"}, 120.0, policy, seed)
    return [
        Claim("attainment, interactive", score.attainment("interactive"), 0.9),
        Claim("answered/s, bulk", score.answered_per_s("bulk"), 5.0),
    ]


def _interactive_beside_bulk(
    bulk: Mapping[str, object], duration_s: float, policy: str, seed: int
) -> Score:
    config = declare(
        functions={"f": {"exec_time": "10ms"}},
        pools={"gpu": {"nodes": 1}},
        pipelines={
            "interactive": {"function": "f", "slo": {"latency": "200ms"}},
            "bulk": {"function": "f", "slo": bulk},
        },
    )
    streams = (
        Stream("poisson:rate=10/s", "interactive"),
        Stream("poisson:rate=150/s", "bulk"),
    )
    return run_world(config, streams, duration_s, policy=policy, seed=seed)


def tenant_with_an_urgent_header(policy: str, seed: int) -> list[Claim]:
    """Client b sends 6 times the capacity with `Priority: u=0`, client a 40 % of its own share.

    The requests of a come at equal distances, so that none of them exceeds its share.
    """
    config = declare(
        functions={"f": {"exec_time": "10ms"}},
        pools={"gpu": {"nodes": 1}},
        clients={"a": {}, "b": {}},
        slo={"latency": "200ms"},
    )
    streams = (
        Stream("deterministic:rate=20/s", "f", "a"),
        Stream("poisson:rate=600/s", "f", "b", priority=MOST_URGENT),
    )
    score = run_world(config, streams, 30.0, policy=policy, seed=seed)
    return [
        Claim("attainment, a", score.attainment(client="a"), 1.0),
        Claim("goodput/s", score.goodput_per_s(), 95.0),
    ]


def tenant_that_claims_a_minute(policy: str, seed: int) -> list[Claim]:
    """Client b sends 5 times the capacity with the longest deadline and the highest priority.

    Client a begins 2 s later, with a tenth of the capacity and the objective of 300 ms. All that is
    admitted of b is in time as well, and so are 1,000 requests of it at once: 10 s of work.
    """
    urgent = Stream("poisson:rate=500/s", "f", "b", priority=MOST_URGENT, timeout_s=60.0)
    quiet = Stream("poisson:rate=10/s", "f", "a", begins_s=2.0)
    score = _two_tenants((quiet, urgent), 30.0, policy, seed)
    burst = Stream([0.1] * 1_000, "f", "b", timeout_s=60.0)
    beside = _two_tenants((replace(quiet, begins_s=0.0), burst), 10.0, policy, seed)
    return [
        Claim("attainment, a", score.attainment(client="a", warm_up=0.0), 0.99),
        Claim("kept, b", score.kept(client="b"), 0.99),
        Claim("admitted, b", score.admitted(client="b"), 0.9 * 100 * 30.0),
        Claim("attainment, a, beside a burst", beside.attainment(client="a", warm_up=0.0), 0.99),
        Claim("attainment, b, in a burst", beside.attainment(client="b", warm_up=0.0), 1.0),
    ]


def tenant_that_begins_to_flood(policy: str, seed: int) -> list[Claim]:
    """Client b has its share saved up when it begins to send 5 times the capacity."""
    streams = (
        Stream("poisson:rate=10/s", "f", "a", begins_s=6.0),
        Stream("poisson:rate=20/s", "f", "b"),
        Stream("poisson:rate=500/s", "f", "b", begins_s=5.0),
    )
    score = _two_tenants(streams, 40.0, policy, seed)
    return [
        Claim("attainment, a", score.attainment(client="a", warm_up=0.0), 0.99),
        Claim("goodput/s, in the second half", score.goodput_per_s(warm_up=0.5), 96.0),
    ]


def _two_tenants(streams: Sequence[Stream], duration_s: float, policy: str, seed: int) -> Score:
    config = declare(
        functions={"f": {"exec_time": "10ms"}},
        pools={"gpu": {"nodes": 1}},
        clients={"a": {}, "b": {}},
        slo={"latency": "300ms"},
    )
    return run_world(config, streams, duration_s, policy=policy, seed=seed)


def silent_second_client(policy: str, seed: int) -> list[Claim]:
    """A client that sends nothing changes nothing, be it in bursts of 140 ms or at load 1.5."""
    bursts = [0.2 * number for number in range(100) for _ in range(14)]
    claims = []
    for name, process in (("bursts", bursts), ("load 1.5", "poisson:rate=150/s")):
        alone, beside = (
            _with_clients(clients, process, policy, seed) for clients in (("a",), ("a", "silent"))
        )
        differing = alone.columns.requests.outcome != beside.columns.requests.outcome
        claims.append(Claim(f"outcomes that differ, {name}", int(differing.sum()), 0, "most"))
        if name == "bursts":
            claims.append(Claim("attainment, bursts", beside.attainment(warm_up=0.0), 1.0))
    return claims


def _with_clients(
    clients: Sequence[str], process: str | Sequence[float], policy: str, seed: int
) -> Score:
    config = declare(
        functions={"f": {"exec_time": "10ms"}},
        pools={"gpu": {"nodes": 1}},
        clients={name: {} for name in clients},
        slo={"latency": "200ms"},
    )
    return run_world(config, (Stream(process, "f", "a"),), 20.0, policy=policy, seed=seed)


def pool_behind_a_network(policy: str, seed: int) -> list[Claim]:
    """40 ms each way to 4 nodes that take 20 ms: 100 of the 120 ms that the SLO allows."""
    config = declare(
        functions={"f": {"exec_time": "20ms"}},
        pools={"gpu": {"nodes": 4, "network_delay": "40ms"}},
        slo={"latency": "120ms"},
    )
    # Three minutes: the most that any policy can reach is only 1.5 % above the bound.
    score = run_world(config, (Stream("poisson:rate=60/s", "f"),), 180.0, policy=policy, seed=seed)
    return [Claim("goodput/s", score.goodput_per_s(), 35.0), Claim("kept", score.kept(), 0.99)]


def stages_in_another_order(policy: str, seed: int) -> list[Claim]:
    """The order of stages in the file changes nothing, and admits nothing that cannot be in time.

    The longest path takes 60 ms. Of requests that look infeasible a few may be admitted, to find
    out whether the profile is right.
    """
    streams = (Stream("poisson:rate=20/s", "diamond"),)
    claims = []
    for latency in ("120ms", "55ms"):
        scores = [
            run_world(diamond_config(latency, order), streams, 60.0, policy=policy, seed=seed)
            for order in ("abcd", "dcba", "cadb", "bdac")
        ]
        outcomes = [score.columns.requests.outcome for score in scores]
        ends = [score.columns.requests.finished_ns for score in scores]
        differing = sum(
            int(((outcome != outcomes[0]) | (end != ends[0])).sum())
            for outcome, end in zip(outcomes, ends, strict=True)
        )
        claims.append(Claim(f"requests that differ, SLO {latency}", differing, 0, "most"))
        if latency == "55ms":
            share = scores[0].admitted() / len(outcomes[0])
            claims.append(Claim("infeasible and admitted", share, 0.02, "most"))
        else:
            claims.append(Claim("goodput/s, feasible", scores[0].goodput_per_s(), 10.0))
    return claims


def large_requests_on_a_rented_pool(policy: str, seed: int) -> list[Claim]:
    """Requests of 8 items, 80 ms each, need 3 of up to 10 nodes, which boot within 20 s."""
    config = declare(
        functions={"f": {"exec_time": {1: "10ms", 8: "80ms"}, "cpus": 1}},
        pools={
            "rented": {
                "tier": "dedicated",
                "nodes": 10,
                "cpus": 1,
                "elastic": True,
                "boot_time": "20s",
                "price": "$0.10/h",
            }
        },
        slo={"latency": "1s"},
    )
    streams = (Stream("poisson:rate=30/s", "f", items=8),)
    score = run_world(config, streams, 600.0, policy=policy, seed=seed)
    rented = sum(use.up_ns for use in score.columns.resources) / score.columns.end_ns
    return [
        Claim("attainment, second half", score.attainment(warm_up=0.5), 0.99),
        Claim("nodes rented on average", rented, 4.0, "most"),
    ]


def starts_count(policy: str, seed: int) -> list[Claim]:
    """32 nodes, 100 ms, SLO 130 ms at twice the capacity of 320/s, with exact times."""
    config = declare(
        functions={"f": {"exec_time": "100ms"}},
        pools={"gpu": {"nodes": 32}},
        slo={"latency": "130ms"},
    )
    score = run_world(config, (Stream("poisson:rate=640/s", "f"),), 20.0, policy=policy, seed=seed)
    return [Claim("goodput/s", score.goodput_per_s(), 314.0), Claim("kept", score.kept(), 1.0)]


def concurrency_below_the_slots(policy: str, seed: int) -> list[Claim]:
    """4 nodes with 8 slots, of which a function may use one: 80/s in batches of 4, at 200/s."""
    config = declare(
        functions={"f": {"exec_time": {"1": "80ms", "4": "200ms"}}, "g": {"exec_time": "20ms"}},
        pools={"gpu": {"nodes": 4, "slots": 8}},
        slo={"latency": "700ms"},
    )
    streams = (Stream("poisson:rate=200/s", "f"), Stream("poisson:rate=20/s", "g"))
    score = run_world(config, streams, 20.0, policy=policy, seed=seed)
    return [
        Claim("f's goodput/s", score.goodput_per_s("f"), 74.0),
        Claim("f's kept", score.kept("f"), 0.99),
        Claim("g's attainment", score.attainment("g"), 1.0),
    ]


def one_optimistic_profile(policy: str, seed: int) -> list[Claim]:
    """The profile of `bad` is ten times too optimistic, on 4 nodes with a true load of 0.7 and 0.9.

    At 0.7 the others are all in time. At 0.9 they are as good as if the profile were right.
    """
    claims = []
    wrong = _beside_a_bad_profile(10.0, 10.0, policy, seed)
    for name in _RIGHT:
        claims.append(Claim(f"attainment, {name}", wrong.attainment(name), 0.999))
        claims.append(Claim(f"kept, {name}", wrong.kept(name), 0.99))
    wrong = _beside_a_bad_profile(18.0, 10.0, policy, seed)
    right = _beside_a_bad_profile(18.0, 1.0, policy, seed)
    for name in _RIGHT:
        lost = right.attainment(name) - wrong.attainment(name)
        claims.append(Claim(f"lost at 0.9, {name}", lost, 0.01, "most"))
    return claims


_RIGHT: Final = ("f", "g", "h")


def _beside_a_bad_profile(bad_per_s: float, factor: float, policy: str, seed: int) -> Score:
    """Run four functions, of which `bad` takes 100 ms, `factor` times what its profile says."""
    config = declare(
        functions={
            "bad": {"exec_time": f"{100 / factor:g}ms"},
            **{name: {"exec_time": "10ms"} for name in _RIGHT},
        },
        pools={"gpu": {"nodes": 4}},
        slo={"latency": "200ms"},
    )
    streams = (
        Stream(f"poisson:rate={bad_per_s:g}/s", "bad"),
        *(Stream("poisson:rate=60/s", name) for name in _RIGHT),
    )
    truth = GroundTruthConfig(scale=(factor,))
    return run_world(config, streams, 60.0, policy=policy, seed=seed, truth=truth)


ROWS: Final[Mapping[str, Row]] = {
    row.__name__: row
    for row in (
        ensemble_with_right_profiles,
        ensemble_as_shipped,
        diamond,
        chain_with_a_narrow_end,
        slow_second_build,
        bulk_with_an_objective,
        bulk_without_an_objective,
        tenant_with_an_urgent_header,
        tenant_that_claims_a_minute,
        tenant_that_begins_to_flood,
        silent_second_client,
        pool_behind_a_network,
        stages_in_another_order,
        large_requests_on_a_rented_pool,
        starts_count,
        concurrency_below_the_slots,
        one_optimistic_profile,
    )
}
