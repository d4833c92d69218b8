"""Running a simulation: from an application, a policy and arrivals to the columns of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from headgate.core.clock import HOUR_NS, NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import TIER_NAMES, App
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.metrics.columns import (
    InstanceUse,
    RequestColumns,
    ResourceUse,
    RunColumns,
    with_client_overhead,
)
from headgate.sim.clients import LoggedClients, id_of
from headgate.sim.engine import Engine
from headgate.sim.event_queue import ArrivalCursor, EventQueue
from headgate.sim.faas import SimFaasPlatform
from headgate.sim.faults import FaultAction
from headgate.sim.gateways import Gateways, GatewayWork
from headgate.sim.ground_truth import GroundTruth, GroundTruthConfig, has_cascades
from headgate.sim.host import SimHost
from headgate.sim.interfaces import Observer, SimClient
from headgate.sim.node import SimNode
from headgate.sim.recorder import Recorder
from headgate.workload.arrivals import Arrivals

_NAMED_MAX: Final = 5  # pipelines whose requests wait for ever


@dataclass(frozen=True)
class Setup:
    """Everything that determines a run except its arrivals. Runs of one setup are identical."""

    app: App
    policy: PolicyKind
    config: PolicyConfig | None = None
    seed: int = 0
    truth: GroundTruthConfig = field(default=GroundTruthConfig())
    schedulers: int = 1  # gateways that share the pools
    platforms: App | None = None  # FaaS platforms as they are, if `app` has one gateway's part
    membership_delay_ns: int = 0  # until the others know of a gateway that crashed, or came
    decision_ns: int = 0  # time per decision
    work_unit_ns: int = 0  # time per unit of work that the policy reports
    arrival_ns: int = 0  # by which an arriving request lengthens the batches on nodes
    refusal_ns: int = 0  # and a refused one besides
    # Client-side latency on top of what the Scheduler sees: equally likely values, or none.
    client_overheads_ns: tuple[int, ...] = ()
    announces: bool = False  # announce every open-loop request to the policy before the run
    validate: bool = False  # check the invariants of the whole state after every event
    records_spans: bool = False
    faults: tuple[tuple[int, FaultAction], ...] = field(default=())
    limit_ns: int = NEVER_NS  # stop at this time even if requests are still open
    survives_faults: bool = False  # continue after a PolicyError, as a live gateway does


def simulate(
    setup: Setup,
    arrivals: Arrivals | None = None,
    *,
    clients: Sequence[SimClient] = (),
    observer: Observer | None = None,
    window_ns: int | None = None,
    on_chunk: Callable[[int], None] | None = None,
) -> RunColumns:
    """Run to the end and return the columns of the run. Deterministic in `setup` and `arrivals`.

    Raises `ConfigError` if the policy starves a request, unless the run has a time limit.

    `on_chunk` is called once per chunk of arrivals with the number of arrivals read so far.
    """
    app = setup.app
    has_terms = arrivals is not None and arrivals.terms is not None
    if arrivals is not None and has_terms:
        clients = (LoggedClients(arrivals, app), *clients)
    queue = EventQueue()
    recorder = Recorder(
        records_arrivals=bool(clients or setup.faults or has_cascades(app)),
        records_spans=setup.records_spans,
        size=0 if arrivals is None else len(arrivals),
    )
    cursor = _cursor(app, None if has_terms else arrivals, on_chunk)
    truth = GroundTruth(setup.truth, setup.seed)
    nodes, platforms = _places(setup, queue, truth, recorder)
    engine = Engine(
        app,
        Gateways(partial(build_scheduler, setup), setup.schedulers),
        nodes,
        platforms,
        queue,
        recorder,
        cursor,
        truth,
        clients=clients,
        observer=observer,
        decision_ns=setup.decision_ns,
        work_unit_ns=setup.work_unit_ns,
        gateway_work=_gateway_work(setup, nodes),
        limit_ns=setup.limit_ns,
        survives_faults=setup.survives_faults,
        membership_delay_ns=setup.membership_delay_ns,
    )
    for at_ns, fault in setup.faults:
        engine.schedule_fault(at_ns, partial(fault.apply, engine))
    if setup.announces and arrivals is not None:
        _announce(engine, app, arrivals)
    engine.run()
    if window_ns is None:
        window_ns = engine.now_ns if arrivals is None else arrivals.duration_ns
    columns = _columns(engine, cursor, window_ns, setup)
    if setup.limit_ns == NEVER_NS and recorder.ended < recorder.count:
        raise _starvation(columns, recorder.open_rows())
    return columns


def _starvation(columns: RunColumns, open_rows: list[int]) -> ConfigError:
    """Return the error that names the requests which are still waiting."""
    requests = columns.requests
    names = Counter(columns.pipelines[requests.pipeline[row]] for row in open_rows)
    waiting = [f"{count:,} of {name}" for name, count in names.most_common(_NAMED_MAX)]
    if len(names) > _NAMED_MAX:
        waiting.append("...")
    arrived_s, end_s = requests.arrival_ns[open_rows[0]] / SECOND_NS, columns.end_ns / SECOND_NS
    return ConfigError(
        f"requests wait for ever: {', '.join(waiting)}; the first is request {open_rows[0]}, which "
        f"arrived at {arrived_s:.6g} s; the simulation was ended at {end_s:.6g} s"
    )


def _gateway_work(setup: Setup, nodes: Sequence[SimNode]) -> GatewayWork | None:
    if not setup.arrival_ns and not setup.refusal_ns:
        return None
    return GatewayWork(nodes, setup.arrival_ns, setup.refusal_ns)


def _places(
    setup: Setup, queue: EventQueue, truth: GroundTruth, recorder: Recorder
) -> tuple[list[SimNode], dict[int, SimFaasPlatform]]:
    """Return the nodes of all pools, and the FaaS platforms by the ids of their pools."""
    app = setup.app
    nodes: list[SimNode] = []
    platforms: dict[int, SimFaasPlatform] = {}
    hosts = {pool.host.id: SimHost(pool.host) for pool in app.pools if pool.host is not None}
    for pool in app.pools:
        host = None if pool.host is None else hosts[pool.host.id]
        if pool.faas is not None:
            row = sum(p.nodes for p in app.pools if p.faas is None) + len(platforms)
            whole = (setup.platforms or app).pools[pool.id]
            assert whole.faas is not None
            platforms[pool.id] = SimFaasPlatform(
                row, whole, whole.faas, app, queue, truth, recorder, host
            )
        else:
            for number in range(pool.nodes):
                name = f"{pool.name}{number + 1}"
                nodes.append(SimNode(len(nodes), name, pool, app, queue, truth, recorder, host))
    return nodes, platforms


def build_scheduler(setup: Setup, index: int) -> Scheduler:
    """Return a Scheduler of a run in its initial state, to drive it or to replay its log.

    Indices beyond `setup.schedulers` are those of gateways that replace crashed ones.
    """
    return Scheduler(
        setup.app,
        setup.policy,
        setup.config,
        rng=stream(setup.seed, f"policy/{index}"),
        index=index,
        peers=setup.schedulers,
        validate=setup.validate,
    )


def _cursor(
    app: App, arrivals: Arrivals | None, on_chunk: Callable[[int], None] | None = None
) -> ArrivalCursor:
    if arrivals is None:
        return ArrivalCursor(None, [], [])
    return ArrivalCursor(
        arrivals,
        [id_of(name, app.pipelines, "pipeline") for name in arrivals.pipelines],
        [id_of(name, app.clients, "client") for name in arrivals.clients],
        on_chunk,
    )


def _announce(engine: Engine, app: App, arrivals: Arrivals) -> None:
    times_ns, pipelines, clients = _cursor(app, arrivals).columns()
    for request_id in range(len(arrivals)):
        pipeline, client = int(pipelines[request_id]), int(clients[request_id])
        engine.announce(request_id, pipeline, client, int(times_ns[request_id]))


def _columns(engine: Engine, cursor: ArrivalCursor, window_ns: int, setup: Setup) -> RunColumns:
    app = engine.app
    end_ns = engine.now_ns
    nodes: list[ResourceUse] = []
    instances: list[InstanceUse] = []
    for node in engine.nodes:
        uses = [] if node.meter is None else node.meter.uses(end_ns)
        nodes.append(_node_use(node, end_ns, uses))
        instances += uses
    platforms = [_platform_use(p, end_ns) for p in engine.platforms.values()]
    requests = engine.recorder.requests(app, *cursor.columns())
    return RunColumns(
        requests=_as_clients_see(requests, setup),
        spans=engine.recorder.spans(),
        resources=tuple(nodes + platforms),
        pipelines=tuple(p.name for p in app.pipelines),
        functions=tuple(f.name for f in app.functions),
        clients=tuple(c.name for c in app.clients),
        pools=tuple(p.name for p in app.pools),
        window_ns=window_ns,
        end_ns=end_ns,
        admission_margins=_admission_margins(engine.gateways.schedulers),
        instances=tuple(sorted(instances, key=lambda use: use.id)),
        work=sum(scheduler.work for scheduler in engine.gateways.schedulers),
    )


def _as_clients_see(requests: RequestColumns, setup: Setup) -> RequestColumns:
    """Return the requests with the client-side latency, drawn from a stream of its own."""
    overheads_ns = np.array(setup.client_overheads_ns, np.int64)
    if not overheads_ns.any():
        return requests
    rng = np.random.default_rng([setup.seed, 0x636C69656E74])  # "client" in ASCII
    drawn = overheads_ns[rng.integers(len(overheads_ns), size=len(requests))]
    return with_client_overhead(requests, drawn)


def _admission_margins(schedulers: Sequence[Scheduler]) -> tuple[float, ...]:
    """Return, by pipeline, the widest margin among the gateways' policies."""
    margins = [scheduler.policy.admission_margins for scheduler in schedulers]
    return tuple(max(each) for each in zip(*margins, strict=True))


def _node_use(node: SimNode, end_ns: int, instances: Sequence[InstanceUse]) -> ResourceUse:
    up_ns = node.up_ns + (end_ns - node.up_since_ns if node.is_up else 0)
    if node.rental is not None:
        up_ns = node.rental.paid_ns(end_ns)
    busy_ns = node.busy_ns // node.pool.slots
    rate = node.pool.usd_per_hour / HOUR_NS
    return ResourceUse(
        name=node.name,
        pool=node.pool.name,
        tier=TIER_NAMES[node.pool.tier],
        up_ns=up_ns,
        busy_ns=busy_ns,
        cold_starts=node.cold_starts,
        loads=node.loads,
        usage_usd=busy_ns * rate + sum(use.usage_usd for use in instances),
        allocation_usd=up_ns * rate + sum(use.allocation_usd for use in instances),
        is_rented_at_start=node.rental is not None and node.rental.is_from_start,
    )


def _platform_use(platform: SimFaasPlatform, end_ns: int) -> ResourceUse:
    cost_usd = platform.cost_usd(end_ns)
    return ResourceUse(
        name=platform.pool.name,
        pool=platform.pool.name,
        tier=TIER_NAMES[platform.pool.tier],
        up_ns=platform.up_ns,
        busy_ns=platform.busy_ns,
        cold_starts=platform.cold_starts,
        loads=0,
        usage_usd=cost_usd,
        allocation_usd=cost_usd,
    )
