"""Requests above the payload limit of a platform: never sent there, failed if nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from headgate.core.actions import Dispatch, Settle
from headgate.core.circuit_breaker import BreakerState
from headgate.core.event_log import from_wire
from headgate.core.events import BatchFinished, BatchRefused, NodeJoined, Refusal, RequestArrived
from headgate.core.model import App, BreakerConfig, FaasPlatform, Function, Pool, Stage
from headgate.core.scheduler.requests import payload_bytes_max
from headgate.core.states import Failure, Outcome, Rejection, Settlement

from .rig import Rig, wires
from .sample_apps import Scripted, make_app, make_function

GPU = Pool(0, "gpu")
TERMS = FaasPlatform(1, usd_per_request=1.0, payload_bytes_max=1_000)
CLOUD = Pool(
    1, "cloud", nodes=0, faas=TERMS, breaker=BreakerConfig(failure_threshold=1, usd_per_day=10.0)
)
LARGE = Pool(2, "large", nodes=0, faas=replace(TERMS, payload_bytes_max=2_000))
BOTH = make_function(0, pool_ids=(0, 1))
CALLS = make_function(0, pool_ids=(1,))


def call(*task_ids: int, pool: Pool = CLOUD) -> Callable[[Scripted], object]:
    return lambda policy: policy.orders.dispatch_to_pool([policy.task(id) for id in task_ids], pool)


def make(make_rig: type[Rig], app: App, *sizes: int) -> Rig:
    """Requests of these sizes wait; request n has task 256 n."""
    rig = make_rig(app, Scripted)
    rig.at(0, NodeJoined(0, 0, "n0"))
    for id, size in enumerate(sizes):
        rig.at(0, RequestArrived(id, 0, payload_bytes=size))
    return rig


@pytest.mark.parametrize(("size", "is_legal"), [(0, True), (1_000, True), (1_001, False)])
def test_what_a_call_cannot_carry_is_not_sent_there(
    make_rig: type[Rig], size: int, is_legal: bool
) -> None:
    rig = make(make_rig, make_app(BOTH, pools=[GPU, CLOUD]), size)
    task, variant = rig.scripted.task(0), BOTH.variants[0]
    assert rig.view.fits_call(task, CLOUD, variant) == is_legal
    assert not rig.view.fits_call(task, GPU, variant)
    if is_legal:
        assert rig.order(1, call(0)) != []
    else:
        rig.forbids(call(0), "a call of pool cloud cannot carry 1001 bytes")
        assert rig.order(1, lambda p: p.send(0, 0)) != []


def test_those_of_a_batch_must_fit_together(make_rig: type[Rig]) -> None:
    rig = make(make_rig, make_app(BOTH, pools=[GPU, CLOUD]), 600, 400, 401)
    rig.forbids(call(0, 512), "cannot carry 1001 bytes")
    assert rig.order(1, call(0, 256)) != []


def test_more_items_than_a_call_takes_do_not_fit_either(make_rig: type[Rig]) -> None:
    rig = make(make_rig, make_app(BOTH, pools=[GPU, CLOUD]))
    rig.at(0, RequestArrived(0, 0, items=4))
    assert not rig.view.fits_call(rig.scripted.task(0), CLOUD, BOTH.variants[0])


@pytest.mark.parametrize(
    ("pool_ids", "most"), [((1,), 1_000), ((1, 2), 2_000), ((0, 1), 1 << 60), ((0,), 1 << 60)]
)
def test_the_largest_place_of_its_first_function_bounds_a_request(
    pool_ids: tuple[int, ...], most: int
) -> None:
    app = make_app(make_function(0, pool_ids=pool_ids), pools=[GPU, CLOUD, LARGE])
    found = payload_bytes_max(app, app.pipelines[0])
    assert found == most if most < 1 << 60 else found > most


def test_of_several_first_stages_the_tightest_bounds_a_request_and_later_ones_do_not() -> None:
    free, tight, wide = (
        make_function(0, pool_ids=(0,)),
        make_function(1, pool_ids=(1,)),
        make_function(2, pool_ids=(2,)),
    )
    stages = [Stage(free), Stage(wide), Stage(tight, (0, 1))]
    app = make_app(free, tight, wide, stages=stages, pools=[GPU, CLOUD, LARGE])
    assert payload_bytes_max(app, app.pipelines[0]) == 2_000


def test_what_only_functions_could_run_and_cannot_carry_is_rejected_at_the_door(
    make_rig: type[Rig],
) -> None:
    rig = make(make_rig, make_app(CALLS, pools=[GPU, CLOUD]), 1_000)
    rejected = wires(Settle(1, Settlement(Outcome.REJECTED, Rejection.TOO_LARGE)))
    assert rig.at(1, RequestArrived(1, 0, payload_bytes=1_001)) == rejected
    assert rig.scripted.hooks_called[-1] == ("ready", 0)


def test_a_task_that_turns_out_too_large_is_tried_on_a_node(make_rig: type[Rig]) -> None:
    """That says nothing of the platform: no back-off, no failure, nothing spent."""
    rig = make(make_rig, make_app(BOTH, pools=[GPU, CLOUD]), 0, 0)
    rig.order(1, call(0))
    assert rig.at(2, BatchRefused(0, Refusal.TOO_LARGE)) == []
    assert ("returned", 0) in rig.scripted.hooks_called
    breaker = rig.view.breakers[1]
    assert breaker is not None
    assert (breaker.state, breaker.allows_call(2)) == (BreakerState.CLOSED, True)
    assert breaker.spent_usd(2) == 0.0
    rig.forbids(call(0), "cannot carry 1001 bytes")
    assert rig.order(3, call(256)) != []
    rig.order(3, lambda p: p.send(0, 0))
    assert rig.at(9, BatchFinished(2)) == wires(Settle(0, Settlement(Outcome.MET)))


def test_a_task_that_turns_out_too_large_is_tried_on_a_platform_that_carries_more(
    make_rig: type[Rig],
) -> None:
    rig = make(make_rig, make_app(make_function(0, pool_ids=(1, 2)), pools=[GPU, CLOUD, LARGE]), 0)
    rig.order(1, call(0))
    rig.at(2, BatchRefused(0, Refusal.TOO_LARGE))
    rig.order(3, call(0, pool=LARGE))
    failed = wires(Settle(0, Settlement(Outcome.FAILED, Failure.TOO_LARGE)))
    assert rig.at(4, BatchRefused(1, Refusal.TOO_LARGE)) == failed


def test_it_has_failed_where_nothing_else_can_run_it(make_rig: type[Rig]) -> None:
    rig = make(make_rig, make_app(CALLS, pools=[GPU, CLOUD]), 0)
    rig.order(1, call(0))
    failed = wires(Settle(0, Settlement(Outcome.FAILED, Failure.TOO_LARGE)))
    assert rig.at(2, BatchRefused(0, Refusal.TOO_LARGE)) == failed


def test_of_several_together_none_fails_before_it_was_alone(make_rig: type[Rig]) -> None:
    """Three do not go together again, nor does the pair; the one that is too large goes alone."""
    rig = make(make_rig, make_app(CALLS, pools=[GPU, CLOUD]), 0, 0, 0)
    rig.order(1, call(0, 256, 512))
    rig.at(2, BatchRefused(0, Refusal.TOO_LARGE))
    rig.forbids(call(0, 256, 512), "cannot carry")
    rig.order(3, call(0, 256))
    rig.at(4, BatchRefused(1, Refusal.TOO_LARGE))
    rig.forbids(call(0, 256), "cannot carry")
    rig.order(5, call(0))
    rig.order(5, call(256))
    failed = wires(Settle(0, Settlement(Outcome.FAILED, Failure.TOO_LARGE)))
    assert rig.at(6, BatchRefused(2, Refusal.TOO_LARGE)) == failed
    assert rig.at(6, BatchFinished(3)) == wires(Settle(1, Settlement(Outcome.MET)))


def test_a_node_that_says_so_is_left_alone_like_one_that_is_busy(make_rig: type[Rig]) -> None:
    """No node should. But if it does, it is not offered the same batch at the same instant."""
    rig = make(make_rig, make_app(BOTH, pools=[GPU, CLOUD]), 0)
    rig.order(1, lambda p: p.send(0, 0))
    rig.at(2, BatchRefused(0, Refusal.TOO_LARGE))
    assert 0 not in rig.view.free_nodes
    assert rig.view.fits_call(rig.scripted.task(0), CLOUD, BOTH.variants[0])


def test_a_task_whose_answer_cannot_be_carried_is_repeated_elsewhere(make_rig: type[Rig]) -> None:
    """It ran, so it is repeated only because it may be; its neighbour has its answer."""
    rig = make(make_rig, make_app(BOTH, pools=[GPU, CLOUD]), 0, 0)
    rig.order(1, call(0, 256))
    assert rig.at(2, BatchFinished(0, too_large=(256,))) == wires(
        Settle(0, Settlement(Outcome.MET))
    )
    breaker = rig.view.breakers[1]
    assert breaker is not None
    assert (breaker.state, breaker.spent_usd(2)) == (BreakerState.CLOSED, 1.0)
    assert ("returned", 256) in rig.scripted.hooks_called
    (sent,) = [w for w in rig.order(3, lambda p: p.send(0, 256)) if w[0] == "Dispatch"]
    dispatch = from_wire(sent)
    assert isinstance(dispatch, Dispatch)
    assert rig.at(9, BatchFinished(dispatch.batch_id)) == wires(Settle(1, Settlement(Outcome.MET)))


@pytest.mark.parametrize(
    "function",
    [CALLS, make_function(0, pool_ids=(0, 1), is_idempotent=False)],
    ids=["functions only", "not idempotent"],
)
def test_where_it_may_not_be_repeated_it_has_failed(
    make_rig: type[Rig], function: Function
) -> None:
    rig = make(make_rig, make_app(function, pools=[GPU, CLOUD]), 0)
    rig.order(1, call(0))
    failed = wires(Settle(0, Settlement(Outcome.FAILED, Failure.TOO_LARGE)))
    assert rig.at(2, BatchFinished(0, too_large=(0,))) == failed
