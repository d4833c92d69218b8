"""Keep-warm from the policy through the driver; remote calls, what is accounted, the breaker."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

import pytest

from headgate.core.actions import (
    Action,
    Dispatch,
    KeepWarm,
    PlacedAction,
    ReportWouldReject,
    Settle,
)
from headgate.core.clock import NEVER_NS
from headgate.core.events import NodeJoined, RequestArrived
from headgate.core.model import (
    App,
    BreakerConfig,
    Client,
    FaasPlatform,
    Function,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.policy import Capabilities, Policy, PolicyConfig, PolicyKind
from headgate.core.records import STAGES_MAX, Node, Task
from headgate.core.scheduler.scheduler import Scheduler
from headgate.functions.tensor import TaskInputs
from headgate.live.call import Call
from headgate.live.cost_accounting import CostAccounting, breakers
from headgate.live.driver import Driver
from headgate.live.pools.remote_pool import RemoteCall, make_remote_call
from headgate.live.telemetry.metrics import FaasPoolGauges, GaugeSnapshot, Metrics
from headgate.live.telemetry.prometheus import Exposition

MS = 1_000_000
PLATFORM = FaasPlatform(1 << 30, usd_per_request=0.5)


def make_app() -> App:
    variant = Variant(0, "f", 0, (0, 1), Profile(exec_ns=(MS,) * 4))
    function = Function(0, "f", (variant,))
    pools = (
        Pool(0, "local", Tier.DEDICATED),
        Pool(1, "cloud", Tier.SERVERLESS, nodes=0, faas=PLATFORM),
    )
    pipeline = Pipeline(0, "f", (Stage(function),), Slo(100 * MS))
    return App((function,), (pipeline,), pools, (Client(0, "ann"), Client(1, "bob")))


class Spills(Policy):
    """A policy that keeps two instances warm from the start, and sends everything to the cloud."""

    def on_node_joined(self, node: Node) -> None:
        app = self.view.app
        self.orders.keep_warm(app.variants[0], app.pools[1], 2)

    def on_capacity(self, node: Node) -> None:
        """Nothing ever waits for a node."""

    def on_task_ready(self, task: Task) -> None:
        self.orders.dispatch_to_pool([task], self.view.app.pools[1])


KIND = PolicyKind(Spills, PolicyConfig, Capabilities(mixed_pools=True, serverless=True))


class RecordingExecutor:
    def __init__(self) -> None:
        self.done: list[Action] = []
        loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(make_app(), KIND)
        self.driver = Driver(self.scheduler, self, loop)

    def open_requests(self) -> Collection[int]:
        return ()

    def fail(self, request_ids: Collection[int]) -> None:
        raise AssertionError(request_ids)

    def abort(self, error: BaseException) -> None:
        raise error

    def settle(self, now_ns: int, action: Settle) -> None:
        self.done.append(action)

    def dispatch(self, now_ns: int, action: Dispatch) -> None:
        self.done.append(action)

    def execute(self, action: PlacedAction) -> None:
        self.done.append(action)

    def count_would_reject(self, action: ReportWouldReject) -> None:
        raise AssertionError(action.request_id)

    def keep_warm(self, action: KeepWarm) -> None:
        self.done.append(action)


def test_driver_passes_on_keep_warm() -> None:
    async def scenario() -> None:
        executor = RecordingExecutor()
        executor.driver.post(NodeJoined(0, 0, "local1"))
        await asyncio.sleep(0.01)
        executor.driver.stop()
        (action,) = executor.done
        assert isinstance(action, KeepWarm)
        assert (action.pool_id, action.variant_id, action.count, action.is_provisioned) == (
            1,
            0,
            2,
            False,
        )

    asyncio.run(scenario())


def ignore(call: Call) -> None:
    """Ignore the result."""


def remote_call(*calls: Call, answered: Collection[int] = ()) -> RemoteCall:
    """Return the remote call for these calls as one batch, of which some are answered already."""
    scheduler = Scheduler(make_app(), KIND)
    task_ids: list[int] = []
    for number, call in enumerate(calls):
        call.request_id = number
        event = RequestArrived(
            number, 0, call.client_id, 1, 0, call.deadline_ns, is_hard=call.is_hard
        )
        (dispatch,) = [a for a in scheduler.handle(MS, event) if isinstance(a, Dispatch)]
        task_ids += dispatch.task_ids
    action = Dispatch(9, 0, task_ids, len(task_ids), 1, None, None)
    open_calls = {id: call for id, call in enumerate(calls) if id not in answered}
    tasks = [TaskInputs(id, 1, []) for id in task_ids if id // STAGES_MAX in open_calls]
    return make_remote_call(scheduler.view, action, tasks, open_calls)


def test_call_has_the_latest_deadline() -> None:
    call = remote_call(
        Call(0, [], 1, ignore, deadline_ns=20 * MS, is_hard=True),
        Call(0, [], 1, ignore, deadline_ns=50 * MS, is_hard=True),
    )
    assert call.time_left_ms(10 * MS) == 40.0
    assert call.is_hard
    assert (call.function, call.batch_id, call.tenant) == ("f", 9, "ann")


def test_call_without_deadline() -> None:
    call = remote_call(
        Call(0, [], 1, ignore, deadline_ns=20 * MS, is_hard=True),
        Call(0, [], 1, ignore, client_id=1, deadline_ns=NEVER_NS),
    )
    assert call.time_left_ms(0) is None
    assert not call.is_hard
    assert call.tenant is None  # two tenants share the call
    assert call.shares == ((0, 0, 1), (0, 1, 1))


def test_call_goes_out_without_what_is_answered_already() -> None:
    ann, bob = (Call(0, [], 1, ignore, client_id=number) for number in range(2))
    call = remote_call(ann, bob, answered=(0,))
    assert [task.task_id // STAGES_MAX for task in call.tasks] == [1]
    assert (call.tenant, call.shares) == ("bob", ((0, 1, 1),))


def test_slo_is_a_soft_deadline() -> None:
    call = remote_call(Call(0, [], 1, ignore))
    assert call.time_left_ms(MS) == 100.0
    assert not call.is_hard


def test_traceparent_of_calls() -> None:
    class Context:
        trace_id, span_id, trace_flags = 0xABC, 0xDEF, 1

    class Span:
        def get_span_context(self) -> Context:
            return Context()

    plain, traced, spanned = (Call(0, [], 1, ignore) for _ in range(3))
    traced.trace = b"00-1-2-01"
    spanned.trace = Span()
    assert remote_call(plain).traceparent is None
    assert remote_call(plain, traced).traceparent == "00-1-2-01"
    assert remote_call(spanned).traceparent == f"00-{0xABC:032x}-{0xDEF:016x}-01"


def test_call_cost_is_shared_by_items() -> None:
    accounting = CostAccounting(make_app())
    accounting.on_call_billed(1, ((0, 0, 1), (0, 1, 3)), 10 * MS)
    accounting.on_call_billed(0, ((0, 0, 1),), 10 * MS)  # that pool is paid by the hour
    accounting.on_keep_warm_billed(1, "f", 0.25)
    costs = accounting.gauge_snapshot(None, []).cost_usd
    assert costs == {
        ("f", "ann", "serverless", "usage"): pytest.approx(0.125),
        ("f", "bob", "serverless", "usage"): pytest.approx(0.375),
        ("f", "", "serverless", "warm"): 0.25,
    }


def test_prediction_errors_of_the_variants_of_a_function_stand_apart() -> None:
    fast = Variant(0, "f/fast", 0, (0,), Profile(exec_ns=(MS,)))
    slow = Variant(1, "f/slow", 0, (1,), Profile(exec_ns=(5 * MS,)))
    accounting = CostAccounting(replace(make_app(), functions=(Function(0, "f", (fast, slow)),)))
    accounting.on_batch_ran(0, 1, 0, 4 * MS)
    accounting.on_batch_ran(1, 1, 0, 4 * MS)
    errors = accounting.gauge_snapshot(None, []).prediction_error_s
    assert errors == {
        ("f", "f/fast"): pytest.approx(0.003),
        ("f", "f/slow"): pytest.approx(-0.001),
    }


def test_breaker_state_is_reported() -> None:
    assert breakers(Scheduler(make_app(), KIND).view) == {"cloud": "closed"}
    spill = FaasPoolGauges(1, "breaker", 3, {"finished": 5, "throttled": 2}, 4, 0.25)
    readings = GaugeSnapshot(faas_pools={"cloud": spill})
    text = Exposition(Metrics(make_app()), lambda: readings).text()[0].decode()
    for line in (
        'headgate_faas_breaker_state{pool="cloud"} 1.0',
        'headgate_faas_calls_allowed{pool="cloud"} 0.0',
        'headgate_faas_calls_blocked{pool="cloud",reason="breaker"} 1.0',
        'headgate_faas_calls_blocked{pool="cloud",reason="budget"} 0.0',
        'headgate_faas_spent_usd_total{pool="cloud"} 0.25',
        'headgate_faas_inflight{pool="cloud"} 3.0',
        'headgate_faas_calls_total{outcome="throttled",pool="cloud"} 2.0',
        'headgate_faas_pings_total{pool="cloud"} 4.0',
    ):
        assert line in text


def test_other_blocking_reason_is_reported() -> None:
    """A budget of zero is spent from the start."""
    app = make_app()
    cloud = replace(app.pools[1], breaker=BreakerConfig(usd_per_day=0.0))
    view = Scheduler(replace(app, pools=(app.pools[0], cloud)), KIND).view
    assert breakers(view) == {"cloud": "closed, budget"}
