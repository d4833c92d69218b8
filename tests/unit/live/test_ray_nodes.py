"""The nodes of a Ray pool on a scripted cluster, without Ray, as real gateways see them."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.config import AppConfig, from_spec
from headgate.core.actions import Action, StartInstance, StopInstance
from headgate.core.errors import ConfigError
from headgate.core.event_log import to_wire
from headgate.core.events import (
    BatchLost,
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
    Refusal,
)
from headgate.core.model import Pool, Variant
from headgate.functions.tensor import Signature, TaskInputs, TaskResult, Tensor, TensorSpec
from headgate.live.deployment import NodeSpec, listen, socket_path
from headgate.live.ipc.messages import BatchRan, MeasuredFunction, RunBatch
from headgate.live.ipc.worker_link import WorkerLink, WorkerLinks
from headgate.live.pools import registry
from headgate.live.pools.registry import check_ray
from headgate.live.pools.remote_pool import CallResult, Done, Lost
from headgate.live.ray_host.node import (
    POLL_S,
    ClusterNode,
    Enter,
    OnActorGone,
    Place,
    RayMembership,
    RayNode,
    StartResult,
)
from headgate.live.worker.begun_requests import BegunRequests, create_memory
from headgate.system.threads import BlockingCalls

APP: dict[str, Any] = {
    "functions": {"f": {"exec_time": "5ms", "cpus": 1}},
    "pools": {
        "ray": {
            "tier": "dedicated",
            "provider": "ray",
            "address": "10.0.0.1:6379",
            "nodes": 2,
            "cpus": 2,
            "compute": "resident",
        }
    },
}
SIGNATURE = Signature((TensorSpec("x", "UINT8", (-1,)),))
ARENA_BYTES = 1 << 20
LARGE = bytes(number % 251 for number in range(100_000))


def node(id: str, cpus: int = 2) -> ClusterNode:
    return ClusterNode(id, "10.0.0.1", 1, 1000 * cpus, 0)


class ScriptedCluster:
    """A cluster whose nodes, starts and results the test says."""

    def __init__(self) -> None:
        self.up = [node("a")]
        self.unreachable: set[str] = set()
        self.start_result = StartResult(signature=SIGNATURE)
        self.outcome: CallResult | None = None  # of a call; None: its inputs
        self.may_return = threading.Event()
        self.may_return.set()
        self.may_start = threading.Event()
        self.may_start.set()
        self.on_gone: dict[int, OnActorGone] = {}
        self.stopped: list[int] = []
        self.ran: list[int] = []  # tasks
        self.is_closed = False

    def nodes(self, doubtful: Collection[str]) -> list[ClusterNode]:
        return [n for n in self.up if n.id not in doubtful or n.id not in self.unreachable]

    def start(
        self,
        instance_id: int,
        variant: Variant,
        pool: Pool,
        shape_id: int,
        node_id: str,
        on_gone: OnActorGone,
    ) -> StartResult:
        self.may_start.wait(10)
        if not self.start_result.problem:
            self.on_gone[instance_id] = on_gone
        return self.start_result

    def stop(self, instance_id: int, *, unloads: bool) -> None:
        self.stopped.append(instance_id)

    def call(
        self, instance_id: int, function: str, tasks: list[TaskInputs], enter: Enter
    ) -> CallResult:
        new, begun_before = enter(tasks)
        self.ran += [task.task_id for task in new]
        self.may_return.wait(10)
        if self.outcome is not None:
            return self.outcome
        results = [
            TaskResult(
                task.task_id,
                [Tensor(t.name, t.datatype, t.shape, bytes_of(t)) for t in task.inputs],
            )
            for task in new
        ]
        return Done(results + begun_before, 1_000_000)

    def inspect(self, variant: Variant) -> MeasuredFunction:
        raise NotImplementedError

    def close(self) -> None:
        self.is_closed = True


def bytes_of(tensor: Tensor) -> memoryview:
    assert isinstance(tensor.data, memoryview)
    return memoryview(bytes(tensor.data))


class Gateway:
    """The connections of a gateway, and what it sees."""

    def __init__(self, run_dir: Path, specs: list[NodeSpec]) -> None:
        self.seen: list[str] = []
        self.events: list[Event] = []
        self.results: list[TaskResult] = []
        self.links: dict[int, WorkerLink] = {}  # by node id
        self.worker_links = WorkerLinks(run_dir, specs, self, arena_bytes=ARENA_BYTES)
        self.worker_links.start()

    def on_worker_joined(self, link: WorkerLink) -> None:
        self.links[link.node.id] = link
        ids = [instance.id for instance in link.hello.instances]
        self.seen.append(f"{link.node.name} joined" + (f" with {ids}" if ids else ""))

    def on_worker_lost(self, link: WorkerLink, batch_ids: list[int]) -> None:
        self.seen.append(f"{link.node.name} lost" + (f" with {batch_ids}" if batch_ids else ""))

    def on_worker_event(self, link: WorkerLink, event: Event) -> None:
        self.on_event(event)

    def on_event(self, event: Event) -> None:
        self.seen.append(type(event).__name__)
        self.events.append(event)

    def on_batch_ran(self, pool_id: int, message: BatchRan) -> None:
        self.seen.append("ran")
        self.results += message.results

    def on_function_loaded(self, function: MeasuredFunction) -> None:
        self.seen.append(f"{function.function} loaded")
        assert function.signature == SIGNATURE

    def keeps_on_node(self, task_id: int, is_unsure: bool) -> bool:
        return False

    def abort(self, error: BaseException) -> None:
        raise error

    def order(self, action: Action) -> None:
        self.links[0].send_action(to_wire(action))

    def run(self, batch_id: int, instance_id: int, data: bytes = b"", key: bytes = b"") -> None:
        tensor = Tensor("x", "UINT8", (len(data),), memoryview(data))
        task = TaskInputs(batch_id, 1, [tensor], key)
        self.links[0].run(RunBatch(batch_id, 0, instance_id, 1, [task]))

    async def until(self, *seen: str) -> None:
        """Wait until exactly this has been seen since the last time."""
        async with asyncio.timeout(10):
            while len(self.seen) < len(seen):
                await asyncio.sleep(0.005)
        assert self.seen == list(seen)
        self.seen.clear()

    async def start(self, instance_id: int) -> None:
        self.order(StartInstance(instance_id, 0, 0, 0))
        await self.until("InstanceStarted")


class Rig:
    """A pool of places on a scripted cluster, and gateways that use it."""

    def __init__(self, run_dir: Path, places: int, gateways: int) -> None:
        self.cluster = ScriptedCluster()
        self.config = from_spec(APP, "app.yaml")
        self.specs = [NodeSpec(number, 0, f"ray{number + 1}", []) for number in range(places)]
        self.measured = {0: MeasuredFunction("f", Signature(), (), 0, 0)}
        self.membership = RayMembership(self.cluster)
        self._threads = BlockingCalls(16, asyncio.get_running_loop())
        self._begun = BegunRequests(create_memory())
        for spec in self.specs:
            listener = listen(socket_path(run_dir, spec.id))
            pool = self.config.app.pools[0]
            self.membership.places.append(Place(spec, pool, listener, self._make_node, ARENA_BYTES))
        self._run_dir = run_dir
        self.gateways = [self.new_gateway() for _ in range(gateways)]

    def new_gateway(self) -> Gateway:
        return Gateway(self._run_dir, self.specs)

    def _make_node(self, place: Place, taken_by: ClusterNode) -> RayNode:
        return RayNode(
            place.spec.id,
            place.pool,
            self.config.app,
            self.measured,
            name=place.spec.name,
            ray_id=taken_by.id,
            cluster=self.cluster,
            threads=self._threads,
            begun=self._begun,
            on_doubt=self.membership.doubt,
            on_news=place.flush,
        )

    async def run_held(self, gateway: Gateway) -> None:
        """Run batch 5 of a gateway on instance 1, without a result until `may_return` is set."""
        self.cluster.may_return.clear()
        gateway.run(5, 1)
        while not self.cluster.ran:
            await asyncio.sleep(0.005)

    async def until_all(self, *seen: str) -> None:
        for gateway in self.gateways:
            await gateway.until(*seen)


Story = Callable[[Rig], Coroutine[Any, Any, None]]


def scenario(
    story: Story, *, up: Sequence[str] = ("a",), places: int = 2, gateways: int = 2
) -> None:
    async def play(run_dir: Path) -> None:
        rig = Rig(run_dir, places, gateways)
        rig.cluster.up = [node(id) for id in up]
        if up:
            rig.membership.ask()
            await rig.until_all("ray1 joined")
        await story(rig)
        for gateway in rig.gateways:
            await gateway.worker_links.stop()
        await rig.membership.stop()
        assert rig.cluster.is_closed

    with tempfile.TemporaryDirectory() as run_dir:  # the path of a socket is short
        asyncio.run(play(Path(run_dir)))


def test_nodes_take_places_and_leave_them() -> None:
    """A third node waits for a place, and one that is too small never gets one."""

    async def story(rig: Rig) -> None:
        rig.cluster.up = [node("a"), node("small", cpus=1), node("b"), node("c")]
        await rig.until_all("ray2 joined")
        rig.cluster.up = [node("b"), node("c")]
        await rig.until_all("ray1 lost", "ray1 joined")

    scenario(story)


def test_free_places_keep_no_gateway_from_the_others() -> None:
    """More of them than a gateway has threads: it waits for each without one."""

    async def story(rig: Rig) -> None:
        rig.membership.places.reverse()  # the last place is the first that is taken
        rig.membership.ask()
        await asyncio.sleep(POLL_S)  # gateways connect to all of them
        rig.cluster.up = [node("a")]
        await rig.until_all("ray100 joined")

    scenario(story, up=(), places=100)


def test_gateways_share_an_instance() -> None:
    """One starts it; both run batches on it, small and large; one stops it."""

    async def story(rig: Rig) -> None:
        first, second = rig.gateways
        await first.start(1)
        await second.until("InstanceAppeared")
        first.run(5, 1, b"small")
        await first.until("ran")
        second.run(6, 1, LARGE)
        await second.until("ran")
        contents = [bytes_of(gateway.results[0].outputs[0]).tobytes() for gateway in rig.gateways]
        assert contents == [b"small", LARGE]
        second.order(StopInstance(1, 0))
        await rig.until_all("InstanceStopped")
        while rig.cluster.stopped != [1]:
            await asyncio.sleep(0.005)

    scenario(story)


def test_a_gateway_that_leaves_takes_nothing_along() -> None:
    """Its batch runs on, and its result is dropped. Whoever comes finds the instance."""

    async def story(rig: Rig) -> None:
        first = rig.gateways.pop(0)
        await first.start(1)
        await rig.until_all("InstanceAppeared")
        await rig.run_held(first)
        await first.worker_links.stop()
        rig.gateways.append(rig.new_gateway())
        await rig.gateways[1].until("ray1 joined with [1]")
        rig.cluster.may_return.set()
        answer = "BatchRefused"
        while answer == "BatchRefused":  # the slot is not free yet
            rig.gateways[1].run(6, 1)
            while not rig.gateways[1].seen:
                await asyncio.sleep(0.005)
            answer = rig.gateways[1].seen.pop()
        assert answer == "ran"
        assert not rig.gateways[0].seen and not rig.cluster.stopped

    scenario(story)


def test_a_second_batch_waits_for_no_slot() -> None:
    """One slot and no queue: the Backend refuses what cannot begin, of another gateway as well."""

    async def story(rig: Rig) -> None:
        first, second = rig.gateways
        await first.start(1)
        await second.until("InstanceAppeared")
        await rig.run_held(first)
        second.run(6, 1)
        await second.until("BatchRefused")
        refused = second.events[-1]
        assert isinstance(refused, BatchRefused) and refused.reason == Refusal.BUSY
        rig.cluster.may_return.set()
        await first.until("ran")

    scenario(story)


def test_a_failed_start_says_why_and_a_later_one_the_signature() -> None:
    async def story(rig: Rig) -> None:
        first, second = rig.gateways
        rig.cluster.start_result = StartResult("OSError: no weights")
        first.order(StartInstance(1, 0, 0, 0))
        await rig.until_all("InstanceStopped")
        stopped = second.events[-1]
        assert isinstance(stopped, InstanceStopped) and stopped.reason == "OSError: no weights"
        assert rig.measured[0].problem == "OSError: no weights"
        rig.cluster.start_result = StartResult(signature=SIGNATURE)
        first.order(StartInstance(2, 0, 0, 0))
        await first.until("InstanceStarted", "f loaded")
        await second.until("InstanceAppeared", "f loaded")

    scenario(story)


def test_the_batch_of_a_dead_actor_is_reported_before_its_instance() -> None:
    """The Scheduler must know which tasks may have killed it; then the instance is gone."""

    async def story(rig: Rig) -> None:
        first, second = rig.gateways
        await first.start(1)
        await second.until("InstanceAppeared")
        rig.cluster.outcome = Lost("the process of its actor died", node_died=True)
        first.run(5, 1)
        await first.until("BatchLost", "InstanceStopped")
        await second.until("InstanceStopped")
        lost, stopped = first.events[-2:]
        assert isinstance(lost, BatchLost) and lost.node_died
        assert isinstance(stopped, InstanceStopped)
        assert stopped.reason == "the process of its actor died"
        first.run(6, 1)
        await first.until("BatchRefused")

    scenario(story)


def test_an_idle_actor_that_dies_has_stopped() -> None:
    async def story(rig: Rig) -> None:
        await rig.gateways[0].start(1)
        await rig.gateways[1].until("InstanceAppeared")
        rig.cluster.on_gone[1]("the process of its actor died", False)
        await rig.until_all("InstanceStopped")

    scenario(story)


def test_an_unreachable_node_is_lost_before_ray_says_so() -> None:
    """Ray still lists it: it does not join again until it can be reached."""

    async def story(rig: Rig) -> None:
        await rig.gateways[0].start(1)
        rig.cluster.unreachable = {"a"}
        rig.cluster.on_gone[1]("its actor cannot be reached", True)
        await rig.until_all("InstanceStopped", "ray1 lost")
        await asyncio.sleep(2 * POLL_S)
        assert rig.gateways[0].seen == []
        rig.cluster.unreachable = set()
        await rig.until_all("ray1 joined")

    scenario(story, gateways=1)


def test_a_start_on_a_node_that_is_gone_is_no_load_failure() -> None:
    """The node is lost, and with it the start: the function itself is not to blame."""

    async def story(rig: Rig) -> None:
        rig.cluster.start_result = StartResult("it cannot be reached", is_unavailable=True)
        rig.cluster.unreachable = {"a"}
        rig.gateways[0].order(StartInstance(1, 0, 0, 0))
        await rig.until_all("ray1 lost")

    scenario(story)


def test_a_start_that_fails_on_a_node_that_is_up_is_a_failure() -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.start_result = StartResult("it cannot be reached", is_unavailable=True)
        rig.gateways[0].order(StartInstance(1, 0, 0, 0))
        await rig.until_all("InstanceStopped")

    scenario(story)


def test_what_runs_on_a_lost_node_is_lost_without_suspicion() -> None:
    async def story(rig: Rig) -> None:
        first, second = rig.gateways
        await first.start(1)
        await second.until("InstanceAppeared")
        await rig.run_held(first)
        rig.cluster.up = []
        await first.until("BatchLost", "ray1 lost")
        await second.until("ray1 lost")
        lost = first.events[-1]
        assert isinstance(lost, BatchLost) and not lost.node_died
        rig.cluster.may_return.set()
        rig.cluster.up = [node("a")]
        await rig.until_all("ray1 joined")  # and nothing of the late reply
        while rig.cluster.stopped != [1]:
            await asyncio.sleep(0.005)

    scenario(story)


def test_batches_that_wait_on_a_lost_node_have_not_run() -> None:
    """A batch may wait for the start of its instance: it is refused, not lost."""

    async def story(rig: Rig) -> None:
        (gateway,) = rig.gateways
        rig.cluster.may_start.clear()
        gateway.order(StartInstance(1, 0, 0, 0))
        gateway.run(5, 1)
        gateway.run(6, 2)
        await gateway.until("BatchRefused")  # there is no such instance, and all has arrived
        rig.cluster.up = []
        await gateway.until("BatchRefused", "ray1 lost")
        rig.cluster.may_start.set()
        rig.cluster.up = [node("a")]
        await gateway.until("ray1 joined")
        assert not any(isinstance(event, InstanceStarted) for event in gateway.events)

    scenario(story, gateways=1)


def test_a_request_that_has_begun_before_does_not_run_again() -> None:
    """Its key is the same through whichever gateway it comes."""

    async def story(rig: Rig) -> None:
        await rig.gateways[0].start(1)
        await rig.gateways[1].until("InstanceAppeared")
        for gateway, batch_id in zip(rig.gateways, (5, 6), strict=True):
            gateway.run(batch_id, 1, key=b"the same")
            await gateway.until("ran")
        assert rig.cluster.ran == [5]
        assert [gateway.results[0].status for gateway in rig.gateways] == [200, 503]

    scenario(story)


def test_the_end_of_the_host_is_the_fault_of_no_task() -> None:
    async def story(rig: Rig) -> None:
        (gateway,) = rig.gateways
        assert not gateway.links[0].hello.runs_functions

    scenario(story, gateways=1)


@pytest.mark.parametrize(
    ("pool", "problem"),
    [
        ({"address": "nowhere"}, r"pools\.ray\.address: .*is not the address of a Ray cluster"),
        ({"address": "ray://h:1"}, r"pools\.ray\.address: .*is not the address of a Ray cluster"),
        ({"address": None}, r"pools\.ray\.nodes: .*an embedded Ray has one node"),
        ({"compute": "per_batch"}, r"pools\.ray\.compute: .*allowed: resident"),
        ({"target": "f"}, r"pools\.ray\.target: .*is not used by this provider"),
        ({"provider": "local"}, r"pools\.ray\.address: .*only with provider: ray"),
        ({"tier": "serverless"}, r"pools\.ray\.provider: .*does not run serverless pools"),
    ],
)
def test_an_invalid_pool_is_one_line(pool: dict[str, Any], problem: str) -> None:
    changed = {**APP["pools"]["ray"], **pool}
    if pool.get("tier") == "serverless":
        changed = {"tier": "serverless", "provider": "ray", "memory": "2GB"}
        changed["price"] = "$0.0000166667/GB-s"
    with pytest.raises(ConfigError, match=problem) as error:
        load({"ray": changed})
    assert "\n" not in str(error.value)


def test_pools_on_two_clusters_are_one_line() -> None:
    other = {**APP["pools"]["ray"], "address": "10.0.0.2:6379"}
    with pytest.raises(ConfigError, match=r"pools\.more\.address: .*one Ray cluster"):
        load({**APP["pools"], "more": other})


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pools\.ray\.provider: .*headgate\[ray\]"):
        check_ray(None, "app.yaml", "pools.ray")


def load(pools: dict[str, Any]) -> AppConfig:
    return from_spec({**APP, "pools": pools}, "app.yaml")
