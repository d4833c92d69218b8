"""What must hold for every policy, whatever the workload.

The last three are metamorphic: a change of the input that should mean nothing changes nothing.
They replay a run's events, changed, to a fresh Scheduler, so they are exact for policies with
timers and plans, too: all that a Scheduler knows of time, nodes and clients is in its events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.actions import Action, Dispatch, Settle
from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.event_log import LogEntry, Wire, from_wire, to_wire
from headgate.core.events import Event, RequestArrived
from headgate.core.model import App, Client, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.states import Outcome
from headgate.metrics.columns import RunColumns
from headgate.policies import find_policy, policy_names
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, build_schedulers, simulate
from headgate.workload import Arrivals

MS = MILLISECOND_NS
every_policy = pytest.mark.parametrize("policy", policy_names())
few = settings(max_examples=50, deadline=None)

# Policies that go by the ids of nodes on purpose, so that relabelling nodes is another input.
NODE_IDS_MATTER = {
    "round_robin": "its ring is in order of id",
    "exclusive": "nodes are shared out in order of id",
}


@dataclass(frozen=True)
class World:
    """An application, what arrives, and what goes wrong."""

    app: App
    arrivals: Arrivals
    plan: FaultPlan

    def setup(self, policy: str) -> Setup:
        kind = find_policy(policy)
        return Setup(self.app, kind, validate=True, faults=self.plan.actions())


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Up to three functions on up to three nodes, twenty requests, and a fault."""
    exec_ms = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    functions = tuple(_function(i, ms, draw(st.integers(0, 5))) for i, ms in enumerate(exec_ms))
    slo = Slo(draw(st.sampled_from((NEVER_NS, 30 * MS))), is_hard=draw(st.booleans()))
    single = [Pipeline(f.id, f"p{f.id}", (Stage(f),), slo) for f in functions]
    chain = tuple(Stage(f, (f.id - 1,) if f.id else ()) for f in functions)
    pipelines = (*single, Pipeline(len(single), "chain", chain, slo))
    room = draw(st.sampled_from((NEVER_NS, 3)))
    pool = Pool(0, "gpu", nodes=draw(st.integers(1, 3)), memory_bytes=room, host_memory_bytes=2)
    clients = tuple(Client(i, f"c{i}") for i in range(3))
    app = App(functions, pipelines, (pool,), clients)
    return World(app, draw(_arrivals(app)), draw(_plan(app)))


def _function(id: int, exec_ms: int, start_ms: int) -> Function:
    profile = Profile(
        (exec_ms * MS,), cold_start_ns=start_ms * MS, swap_in_ns=MS, memory_bytes=1 + id % 2
    )
    return Function(id, f"f{id}", (Variant(id, f"v{id}", id, (0,), profile),))


@st.composite
def _arrivals(draw: st.DrawFn, app: App) -> Arrivals:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 100),
                st.integers(0, len(app.pipelines) - 1),
                st.integers(0, len(app.clients) - 1),
            ),
            min_size=1,
            max_size=20,
        )
    )
    times_ms, pipelines, clients = zip(*sorted(rows), strict=True)
    return Arrivals(
        np.array(times_ms, dtype=np.int64) * MS,
        101 * MS,
        np.array(pipelines, dtype=np.int32),
        np.array(clients, dtype=np.int32),
        tuple(pipeline.name for pipeline in app.pipelines),
        tuple(client.name for client in app.clients),
    )


@st.composite
def _plan(draw: st.DrawFn, app: App) -> FaultPlan:
    if draw(st.booleans()):
        return FaultPlan()
    at_ns = draw(st.integers(0, 80)) * MS
    until_ns = at_ns + 20 * MS
    kind = draw(st.sampled_from(("crash", "refuse", "break", "cannot_load", "poison")))
    if kind == "poison":
        return FaultPlan((Fault(kind, at_ns, share=0.5),))
    if kind == "cannot_load":
        function = draw(st.integers(0, len(app.functions) - 1))
        return FaultPlan((Fault(kind, at_ns, until_ns=until_ns, function=function),))
    node = draw(st.integers(0, app.pools[0].nodes - 1))
    return FaultPlan((Fault(kind, at_ns, until_ns=until_ns, node=node),))


class Log(Observer):
    """Every event and the actions it led to."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.entries.append(LogEntry(len(self.entries), now_ns, event, actions))

    def wires(self) -> list[tuple[int, Wire, list[Wire]]]:
        return [(e.now_ns, to_wire(e.event), [to_wire(a) for a in e.actions]) for e in self.entries]


def logged(world: World, policy: str) -> tuple[Log, RunColumns]:
    log = Log()
    return log, simulate(world.setup(policy), world.arrivals, observer=log)


# --- one run -----------------------------------------------------------------------------------


@every_policy
@few
@given(world=worlds())
def test_every_request_ends_once_and_nothing_is_lost_or_doubled(policy: str, world: World) -> None:
    log, columns = logged(world, policy)
    arrived = [e.event.request_id for e in log.entries if isinstance(e.event, RequestArrived)]
    settled = Counter(a.request_id for e in log.entries for a in e.actions if isinstance(a, Settle))
    assert arrived == list(range(len(world.arrivals)))
    assert settled == Counter(arrived)
    assert (columns.requests.finished_ns < NEVER_NS).all()


@every_policy
@few
@given(world=worlds())
def test_without_faults_or_deadlines_every_request_is_answered(policy: str, world: World) -> None:
    slo = Slo()
    pipelines = tuple(replace(pipeline, slo=slo) for pipeline in world.app.pipelines)
    patient = replace(world, app=replace(world.app, pipelines=pipelines), plan=FaultPlan())
    log, columns = logged(patient, policy)
    assert set(columns.requests.outcome.tolist()) == {Outcome.MET}
    sent = Counter(
        task_id
        for entry in log.entries
        for action in entry.actions
        if isinstance(action, Dispatch)
        for task_id in action.task_ids
    )
    assert set(sent.values()) == {1}  # nothing runs twice when nothing fails


@every_policy
@few
@given(world=worlds())
def test_the_same_input_gives_the_same_actions(policy: str, world: World) -> None:
    assert logged(world, policy)[0].wires() == logged(world, policy)[0].wires()


# --- changes that mean nothing -----------------------------------------------------------------

Change = Callable[[Wire], Wire]


def replayed(
    world: World, policy: str, log: Log, shift_ns: int, change: Change
) -> list[list[Wire]]:
    """What a fresh Scheduler does when it is told all that, changed and so much later."""
    (scheduler,) = build_schedulers(world.setup(policy))
    answers = []
    for entry in log.entries:
        event = from_wire(change(to_wire(entry.event)))
        assert isinstance(event, Event)
        actions = scheduler.handle(entry.now_ns + shift_ns, event)
        answers.append([to_wire(action) for action in actions])
    return answers


def changed(log: Log, change: Change) -> list[list[Wire]]:
    return [[change(to_wire(action)) for action in entry.actions] for entry in log.entries]


def unchanged(wire: Wire) -> Wire:
    return wire


@every_policy
@few
@given(world=worlds(), shift_ns=st.integers(1, 10**15))
def test_all_times_may_be_shifted(policy: str, world: World, shift_ns: int) -> None:
    log, _ = logged(world, policy)

    def later(wire: Wire) -> Wire:
        """Shift the one action that names a moment: `SetTimer(key, at_ns)`."""
        if wire[0] == "SetTimer":
            at_ns = wire[2]
            assert isinstance(at_ns, int)
            if 0 < at_ns < NEVER_NS:
                wire[2] = at_ns + shift_ns
        return wire

    assert replayed(world, policy, log, shift_ns, unchanged) == changed(log, later)


# Where each event and action speaks of a node.
_NODE_AT: Mapping[str, int] = {
    "NodeJoined": 1,
    "NodeLost": 1,
    "InstanceStarted": 2,
    "LoadFailed": 2,
    "StartInstance": 4,
    "StopInstance": 2,
    "LoadWeights": 2,
    "EvictWeights": 2,
    "Dispatch": 6,
    "CancelBatch": 3,
}


@pytest.mark.parametrize("policy", [name for name in policy_names() if name not in NODE_IDS_MATTER])
@few
@given(world=worlds(), seed=st.integers(0, 5))
def test_nodes_that_are_alike_may_be_relabelled(policy: str, world: World, seed: int) -> None:
    log, _ = logged(world, policy)
    labels = list(range(world.app.pools[0].nodes))
    Random(seed).shuffle(labels)

    def relabel(wire: Wire) -> Wire:
        place = _NODE_AT.get(str(wire[0]))
        if place is not None:
            node_id = wire[place]
            assert isinstance(node_id, int)
            wire[place] = labels[node_id]
        key = wire[1] if wire[0] in ("SetTimer", "CancelTimer", "TimerFired") else None
        if isinstance(key, list) and key[0] == "unblock":
            key[1] = labels[key[1]]
        return wire

    assert replayed(world, policy, log, 0, relabel) == changed(log, relabel)


@every_policy
@few
@given(world=worlds(), labels=st.permutations(range(3)))
def test_clients_that_are_alike_may_be_relabelled(
    policy: str, world: World, labels: list[int]
) -> None:
    log, _ = logged(world, policy)

    def relabel(wire: Wire) -> Wire:
        if wire[0] == "RequestArrived":
            client = wire[3]
            assert isinstance(client, int)
            wire[3] = labels[client]
        return wire

    assert replayed(world, policy, log, 0, relabel) == changed(log, unchanged)
