"""What arrivals need more of: instances to start, nodes to rent, and what stands from the start."""

from __future__ import annotations

from dataclasses import replace

from planning_rig import CLOUD, MS, NODES, PlanningRig, make_app

from headgate.core.clock import SECOND_NS
from headgate.core.events import GatewaysChanged
from headgate.core.model import App, Pool, Profile
from headgate.planning.dispatch.provisioning import Provisioner

COLD = Profile((10 * MS,), cold_start_ns=50 * MS)
RENTED = Pool(0, "rented", nodes=3, is_elastic=True, boot_ns=SECOND_NS)


def provisioner_of(rig: PlanningRig) -> Provisioner:
    return Provisioner(rig.view, rig.builds, rig.admission, rig.queues, rig.placement)


def prewarmed(app: App, *counts: int) -> App:
    """The same application, with so many instances of each function from the start."""
    pairs = zip(app.functions, counts, strict=True)
    return replace(app, functions=tuple(replace(f, prewarm_nodes=count) for f, count in pairs))


def test_where_nothing_is_rented_nothing_is_planned() -> None:
    provisioner = provisioner_of(PlanningRig(make_app([COLD], NODES)))
    assert (provisioner.rents, provisioner.plan_every_ns) == (False, 0)
    assert provisioner.targets() == ()


def test_what_was_refused_asks_for_what_takes_time_to_start() -> None:
    rig = PlanningRig(make_app([COLD, Profile((10 * MS,))], NODES))
    provisioner = provisioner_of(rig)
    cold, at_once = rig.ask(0, due_ms=100), rig.ask(1, due_ms=100)
    assert provisioner.on_arrival(cold, was_admitted=True) == []
    assert provisioner.on_arrival(cold, was_admitted=False) == [rig.build(0)]
    assert provisioner.on_arrival(at_once, was_admitted=False) == []


def test_calls_are_needed_by_what_is_admitted_too() -> None:
    rig = PlanningRig(make_app([COLD], NODES, CLOUD))
    provisioner = provisioner_of(rig)
    request = rig.ask(due_ms=100)
    assert provisioner.on_arrival(request, was_admitted=True) == [rig.faas()]
    assert provisioner.on_arrival(request, was_admitted=False) == [rig.build(), rig.faas()]


def test_what_has_no_objective_waits_for_what_there_is() -> None:
    rig = PlanningRig(make_app([COLD], NODES, CLOUD, latency_ms=None))
    assert provisioner_of(rig).on_arrival(rig.ask(), was_admitted=True) == []


def test_a_node_is_rented_once_for_a_request_that_can_wait() -> None:
    """The second function of the pipeline has lanes then, on the node that boots."""
    pipeline: list[tuple[int, tuple[int, ...]]] = [(0, ()), (1, (0,))]
    rig = PlanningRig(make_app([COLD] * 2, RENTED, latency_ms=60_000.0, pipelines=[pipeline]))
    provisioner = provisioner_of(rig)
    request = rig.ask(due_ms=60_000)
    start = provisioner.to_wake(request)
    assert start == (rig.build(0), rig.view.nodes[0])
    rig.start(0, start[1], is_ready=False)
    assert provisioner.to_wake(request) is None


def test_where_gateways_share_nodes_only_plans_rent() -> None:
    rig = PlanningRig(make_app([COLD], RENTED, latency_ms=60_000.0))
    rig.tell(GatewaysChanged(2))
    assert provisioner_of(rig).to_wake(rig.ask(due_ms=60_000)) is None


def test_nobody_is_woken_for_a_request_that_cannot_wait() -> None:
    rig = PlanningRig(make_app([COLD], RENTED, latency_ms=500.0))
    assert provisioner_of(rig).to_wake(rig.ask(due_ms=500)) is None


def test_the_first_instance_of_every_function_stands_before_the_second_of_any() -> None:
    app = prewarmed(make_app([COLD] * 2, RENTED), 2, 1)
    rig = PlanningRig(app)
    assert provisioner_of(rig).standing_orders() == []  # nodes that join start them
    rig.tell(GatewaysChanged(2))
    standing = provisioner_of(rig).standing_orders()
    assert [(nth, target.variant_id) for nth, target in standing] == [(1, 0), (1, 1), (2, 0)]
