"""What DAG admission is compared with: Clockwork in two forms, Lambda, Clipper and FIFO."""

from __future__ import annotations

from headgate.core.actions import Action, Dispatch, Settle, StartInstance
from headgate.core.events import (
    BatchFinished,
    InstanceStarted,
    NodeJoined,
    NodeLost,
    RequestArrived,
    TimerFired,
)
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Tier, Variant
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Outcome, Rejection
from headgate.policies import find_policy

MS = 1_000_000


class Rig:
    """A Scheduler whose starts end at once, unless `starts` is False."""

    def __init__(self, app: App, policy: str, *, starts: bool = True, **settings: object) -> None:
        kind = find_policy(policy)
        self.scheduler = Scheduler(app, kind, kind.config(**settings), validate=True)
        self._starts = starts
        numbers = [pool.id for pool in app.pools for _ in range(pool.nodes)]
        for node, pool_id in enumerate(numbers):
            self.handle(0, NodeJoined(node, pool_id, f"node{node}"))

    def handle(self, at_ms: float, event: object) -> list[Action]:
        actions = self.scheduler.handle(int(at_ms * MS), event)  # type: ignore[arg-type]
        for action in list(actions):
            if self._starts and isinstance(action, StartInstance):
                assert action.node_id is not None
                actions = actions + self.handle(
                    at_ms, InstanceStarted(action.instance_id, action.node_id)
                )
        return actions

    def arrive(self, at_ms: float, request_id: int, pipeline: int = 0) -> list[Action]:
        return self.handle(at_ms, RequestArrived(request_id, pipeline))


def dispatches(actions: list[Action]) -> list[tuple[int | None, int]]:
    """Node and items of every batch."""
    return [(a.node_id, a.items) for a in actions if isinstance(a, Dispatch)]


def outcomes(actions: list[Action]) -> list[tuple[int, int, str]]:
    return [
        (a.request_id, a.settlement.outcome, a.settlement.reason)
        for a in actions
        if isinstance(a, Settle)
    ]


def function(id: int, times: dict[int, tuple[int, ...]], first: int, load_ms: int = 0) -> Function:
    """A function with times in milliseconds by batch size, on each of some pools."""
    variants = tuple(
        Variant(
            first + index,
            f"f{id}/{pool}",
            id,
            (pool,),
            Profile(tuple(ms * MS for ms in each), cold_start_ns=load_ms * MS),
        )
        for index, (pool, each) in enumerate(times.items())
    )
    return Function(id, f"f{id}", variants)


def one_function(
    times: tuple[int, ...], slo_ms: int, *, nodes: int = 1, load_ms: int = 0, slots: int = 1
) -> App:
    only = function(0, {0: times}, 0, load_ms)
    pool = Pool(0, "gpu", nodes=nodes, slots=slots)
    return App((only,), (Pipeline(0, "p", (Stage(only),), Slo(slo_ms * MS)),), (pool,))


def test_clockwork_takes_the_largest_batch_that_is_in_time() -> None:
    """Behind 10 ms, four wait: due at 23 and 24 ms. Three take 13 ms, four would take 14."""
    rig = Rig(one_function((10, 11, 13, 14), 23), "clockwork")
    assert dispatches(rig.arrive(0, 0)) == [(0, 1)]
    for request in range(1, 5):
        assert not dispatches(rig.arrive(request / 10, request))
    assert dispatches(rig.handle(10, BatchFinished(0))) == [(0, 3)]


def test_clockwork_rejects_at_once_what_no_node_can_finish_in_time() -> None:
    rig = Rig(one_function((10,), 19), "clockwork")
    rig.arrive(0, 0)
    (settle,) = outcomes(rig.arrive(0.5, 1))
    assert settle == (1, Outcome.REJECTED, Rejection.OVERLOADED)
    assert not outcomes(rig.arrive(1.5, 2))  # due at 20.5 ms, and done at 20


def test_clockwork_drops_what_cannot_start_in_time_any_more() -> None:
    """Two that were admitted wait for one place: the second one is dropped when it is too late."""
    rig = Rig(one_function((10,), 25), "clockwork")
    rig.arrive(0, 0)
    rig.arrive(0, 1)
    rig.arrive(1, 2)
    rig.handle(10, BatchFinished(0))
    (at_ns,) = [at for key, at in rig.scheduler.view.timers.items() if key[0] == "due"]
    assert 16 * MS < at_ns < 17 * MS
    (settle,) = outcomes(rig.scheduler.handle(at_ns, TimerFired(("due", 0))))
    assert settle[:2] == (2, Outcome.EXPIRED)


def test_clockwork_runs_one_batch_at_a_time_whatever_the_slots() -> None:
    rig = Rig(one_function((10,), 100, slots=4), "clockwork")
    assert [dispatches(rig.arrive(0, request)) for request in range(2)] == [[(0, 1)], []]


def test_clockwork_loads_what_has_demand_and_no_node() -> None:
    """Two nodes hold nothing; each of two models is loaded on one of them."""
    functions = (function(0, {0: (5,)}, 0, load_ms=2), function(1, {0: (5,)}, 1, load_ms=2))
    pipelines = tuple(Pipeline(f.id, f.name, (Stage(f),), Slo(50 * MS)) for f in functions)
    rig = Rig(App(functions, pipelines, (Pool(0, "gpu", nodes=2),)), "clockwork", starts=False)
    starts = [
        (action.variant_id, action.node_id)
        for request in range(2)
        for action in rig.arrive(0, request, pipeline=request)
        if isinstance(action, StartInstance)
    ]
    assert starts == [(0, 0), (1, 1)]


def two_kinds() -> App:
    """A DAG of two functions side by side; only the GPU node runs both."""
    functions = (function(0, {0: (6,), 1: (5,)}, 0), function(1, {1: (7,)}, 2))
    pools = (Pool(0, "cpu", Tier.DEDICATED), Pool(1, "gpu", Tier.GPU))
    stages = tuple(Stage(each) for each in functions)
    return App(functions, (Pipeline(0, "p", stages, Slo(20 * MS)),), pools)


def test_naive_clockwork_keeps_a_dag_on_one_node_and_rejects_nothing() -> None:
    rig = Rig(two_kinds(), "clockwork", form="naive")
    assert dispatches(rig.arrive(0, 0)) == [(1, 1)]  # node 1 is the GPU
    assert [dispatches(rig.arrive(0, request)) for request in (1, 2)] == [[], []]
    assert dispatches(rig.handle(5, BatchFinished(0))) == [(1, 1)]
    done = rig.handle(12, BatchFinished(1))
    assert outcomes(done) == [(0, Outcome.MET, "")]
    assert dispatches(done) == [(1, 1)]  # the CPU node stays idle


def test_fifo_sends_each_function_to_the_next_free_node_that_runs_it() -> None:
    rig = Rig(two_kinds(), "balance")
    assert dispatches(rig.arrive(0, 0)) == [(0, 1), (1, 1)]
    assert not dispatches(rig.arrive(1, 1))
    # The head of the second request goes to the CPU node; what only the GPU runs waits for it.
    assert dispatches(rig.handle(6, BatchFinished(0))) == [(0, 1)]
    assert not dispatches(rig.arrive(6, 2))
    assert dispatches(rig.handle(7, BatchFinished(1))) == [(1, 1)]


def test_lambda_takes_the_warm_instance_and_else_starts_one_anywhere() -> None:
    """The instance used last is taken first; a busy one is never shared."""
    rig = Rig(one_function((10,), 100, nodes=2), "lambda_like")
    assert dispatches(rig.arrive(0, 0)) == [(0, 1)]
    assert dispatches(rig.arrive(0, 1)) == [(1, 1)]  # a cold start on the other node
    assert not dispatches(rig.arrive(0, 2))  # no node is free: it waits
    assert dispatches(rig.handle(10, BatchFinished(0))) == [(0, 1)]
    rig.handle(11, BatchFinished(1))
    rig.handle(20, BatchFinished(2))
    actions = rig.arrive(21, 3)
    assert dispatches(actions) == [(0, 1)]
    assert not any(isinstance(action, StartInstance) for action in actions)


def test_lambda_starts_a_second_instance_on_a_node_with_room() -> None:
    rig = Rig(one_function((10,), 100, slots=4), "lambda_like")
    actions = [action for request in range(2) for action in rig.arrive(0, request)]
    assert sum(isinstance(action, StartInstance) for action in actions) == 2


def test_clipper_grows_by_one_and_shrinks_by_a_tenth() -> None:
    """Objective 20 ms. Batches of one and two are fast enough; one of three is not."""
    rig = Rig(one_function((10, 11, 12, 13), 20), "clipper")
    for request in range(20):
        rig.arrive(0, request)
    sizes = [1]
    at_ms = 0
    for batch, took_ms in enumerate((10, 11, 25, 11)):
        at_ms += took_ms
        ((_, items),) = dispatches(rig.handle(at_ms, BatchFinished(batch)))
        sizes.append(items)
    assert sizes == [1, 2, 3, 2, 3]  # 0.9 * 3 is 2.7, and so a batch of two; 3.7 one of three


def test_clipper_rejects_nothing() -> None:
    rig = Rig(one_function((10,), 5), "clipper")
    assert not any(outcomes(rig.arrive(0, request)) for request in range(20))


def test_clockwork_without_a_node_says_so_and_predicts_nothing() -> None:
    rig = Rig(one_function((5,), 30), "clockwork")
    rig.handle(0, NodeLost(0))
    (settle,) = [action for action in rig.arrive(1, 0) if isinstance(action, Settle)]
    assert settle.settlement.reason == Rejection.UNAVAILABLE
    assert settle.settlement.predicted_ns == 0
