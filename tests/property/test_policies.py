"""Properties that hold for every policy under every workload.

The last three tests are metamorphic: a change of the input that means nothing must change no
decision. They replay the changed events of a run to a fresh Scheduler, so they are exact for
policies with timers and plans as well: all that a Scheduler knows of time, nodes and clients is in
its events. A failure prints the policy, the scenario and the first event whose actions differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
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
from headgate.sim.run import Setup, build_scheduler, simulate
from headgate.workload import Arrivals

MS = MILLISECOND_NS
every_policy = pytest.mark.parametrize("policy", policy_names())
few = settings(max_examples=20, deadline=None)

# Policies that use the order of node ids on purpose, so that relabelling nodes changes the input.
NODE_IDS_MATTER = {
    "round_robin": "it cycles through the nodes in order of id",
    "exclusive": "it assigns nodes in order of id",
    "static_partition": "its backends are in the order of nodes, the same for all gateways",
    "swayam": "its backends are in the order of nodes, the same for all gateways",
}


@dataclass(frozen=True)
class Scenario:
    """An application, its arrivals and its faults."""

    app: App
    arrivals: Arrivals
    plan: FaultPlan

    def setup(self, policy: str) -> Setup:
        kind = find_policy(policy)
        return Setup(self.app, kind, validate=True, faults=self.plan.actions())

    def __repr__(self) -> str:
        """Short enough to read in the message of a failed test."""
        app, pool = self.app, self.app.pools[0]
        functions = ", ".join(
            f"{f.name}: {f.reference_exec_ns // MS} ms, cold start "
            f"{f.variants[0].profile.cold_start_ns // MS} ms"
            for f in app.functions
        )
        slo = app.pipelines[0].slo
        latency = "none" if slo.latency_ns == NEVER_NS else f"{slo.latency_ns // MS} ms"
        requests = [
            (int(at_ns) // MS, app.pipelines[pipeline].name, app.clients[client].name)
            for at_ns, pipeline, client in zip(
                self.arrivals.times_ns, self.arrivals.pipeline, self.arrivals.client, strict=True
            )
        ]
        return (
            f"{pool.nodes} nodes with {pool.memory_bytes} bytes; {functions}; "
            f"objective {latency}, hard: {slo.is_hard}; "
            f"(ms, pipeline, client): {requests}; faults: {list(self.plan.faults)}"
        )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Up to three functions, three nodes, twenty requests and one fault."""
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
    return Scenario(app, draw(_arrivals(app)), draw(_plan(app)))


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


def record_run(scenario: Scenario, policy: str) -> tuple[Log, RunColumns]:
    log = Log()
    return log, simulate(scenario.setup(policy), scenario.arrivals, observer=log)


@every_policy
@few
@given(scenario=scenarios())
def test_every_request_has_exactly_one_outcome(policy: str, scenario: Scenario) -> None:
    log, columns = record_run(scenario, policy)
    arrived = [e.event.request_id for e in log.entries if isinstance(e.event, RequestArrived)]
    settled = Counter(a.request_id for e in log.entries for a in e.actions if isinstance(a, Settle))
    assert arrived == list(range(len(scenario.arrivals)))
    assert settled == Counter(arrived)
    assert (columns.requests.finished_ns < NEVER_NS).all()


@every_policy
@few
@given(scenario=scenarios())
def test_without_faults_or_deadlines_every_request_is_met(policy: str, scenario: Scenario) -> None:
    # A partition has no node for some models if there are too few, and rejects their requests.
    has_nodes = len(scenario.app.functions) <= scenario.app.pools[0].nodes
    assume(has_nodes or policy != "static_partition")
    slo = Slo()
    pipelines = tuple(replace(pipeline, slo=slo) for pipeline in scenario.app.pipelines)
    no_slo = replace(scenario, app=replace(scenario.app, pipelines=pipelines), plan=FaultPlan())
    log, columns = record_run(no_slo, policy)
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
@given(scenario=scenarios())
def test_the_same_input_gives_the_same_actions(policy: str, scenario: Scenario) -> None:
    assert record_run(scenario, policy)[0].wires() == record_run(scenario, policy)[0].wires()


Change = Callable[[Wire], Wire]


def replay(
    scenario: Scenario, policy: str, log: Log, shift_ns: int, change: Change
) -> list[list[Wire]]:
    """The actions of a fresh Scheduler for the events of a log, changed and shifted in time."""
    scheduler = build_scheduler(scenario.setup(policy), 0)
    answers = []
    for entry in log.entries:
        event = from_wire(change(to_wire(entry.event)))
        assert isinstance(event, Event)
        actions = scheduler.handle(entry.now_ns + shift_ns, event)
        answers.append([to_wire(action) for action in actions])
    return answers


def check_same_actions(
    policy: str,
    scenario: Scenario,
    log: Log,
    change: Change,
    actual: list[list[Wire]],
    description: str,
) -> None:
    """Fail, with the whole counter-example, unless the actions are those of the log, changed."""
    for number, (entry, got) in enumerate(zip(log.entries, actual, strict=True)):
        expected = [change(to_wire(action)) for action in entry.actions]
        if got != expected:
            pytest.fail(
                f"policy {policy} decides otherwise although only this changed: {description}.\n"
                f"scenario: {scenario}\n"
                f"event {number} at {entry.now_ns} ns: {to_wire(entry.event)}\n"
                f"expected actions: {expected}\n"
                f"actual actions:   {got}",
                pytrace=False,
            )


def unchanged(wire: Wire) -> Wire:
    return wire


@every_policy
@few
@given(scenario=scenarios(), shift_ns=st.integers(1, 10**15))
def test_shifting_all_times_changes_no_decision(
    policy: str, scenario: Scenario, shift_ns: int
) -> None:
    log, _ = record_run(scenario, policy)

    def later(wire: Wire) -> Wire:
        """Shift the one action that names a moment: `SetTimer(key, at_ns)`."""
        if wire[0] == "SetTimer":
            at_ns = wire[2]
            assert isinstance(at_ns, int)
            if 0 < at_ns < NEVER_NS:
                wire[2] = at_ns + shift_ns
        return wire

    actual = replay(scenario, policy, log, shift_ns, unchanged)
    check_same_actions(policy, scenario, log, later, actual, f"all times are {shift_ns} ns later")


# Index of the node id in each event and action.
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
@given(scenario=scenarios(), seed=st.integers(0, 5))
def test_relabelling_equal_nodes_changes_no_decision(
    policy: str, scenario: Scenario, seed: int
) -> None:
    log, _ = record_run(scenario, policy)
    labels = list(range(scenario.app.pools[0].nodes))
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

    actual = replay(scenario, policy, log, 0, relabel)
    check_same_actions(
        policy, scenario, log, relabel, actual, f"nodes 0, 1, ... are relabelled {labels}"
    )


@every_policy
@few
@given(scenario=scenarios(), labels=st.permutations(range(3)))
def test_relabelling_equal_clients_changes_no_decision(
    policy: str, scenario: Scenario, labels: list[int]
) -> None:
    log, _ = record_run(scenario, policy)

    def relabel(wire: Wire) -> Wire:
        if wire[0] == "RequestArrived":
            client = wire[3]
            assert isinstance(client, int)
            wire[3] = labels[client]
        return wire

    actual = replay(scenario, policy, log, 0, relabel)
    check_same_actions(
        policy, scenario, log, unchanged, actual, f"clients 0, 1, 2 are relabelled {labels}"
    )
