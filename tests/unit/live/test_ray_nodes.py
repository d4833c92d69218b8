"""The nodes of a Ray pool on a scripted cluster, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import pytest

from headgate.config import AppConfig, from_spec
from headgate.core.actions import StartInstance, StopInstance
from headgate.core.errors import ConfigError
from headgate.core.events import (
    BatchLost,
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
    Refusal,
)
from headgate.core.model import Pool, Variant
from headgate.functions.tensor import TaskInputs, TaskResult
from headgate.live.deployment import NodeSpec
from headgate.live.ipc.messages import BatchRan
from headgate.live.pools import ray_pool
from headgate.live.pools.ray_pool import (
    ClusterNode,
    OnActorGone,
    RayMembership,
    RayNode,
    StartFailure,
    check_ray,
)
from headgate.live.pools.registry import check_providers
from headgate.live.pools.remote_pool import CallResult, Done, Lost, RemoteCall, RemotePool
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


def node(id: str, cpus: int = 2) -> ClusterNode:
    return ClusterNode(id, "10.0.0.1", 1, 1000 * cpus, 0)


class ScriptedCluster:
    """A cluster whose nodes, starts and results the test says."""

    def __init__(self) -> None:
        self.up = [node("a")]
        self.unreachable: set[str] = set()
        self.failure = StartFailure()
        self.result: CallResult = Done([TaskResult(7, [])], 1_000_000)
        self.on_gone: dict[int, OnActorGone] = {}
        self.stopped: list[int] = []
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
    ) -> StartFailure:
        if not self.failure.reason:
            self.on_gone[instance_id] = on_gone
        return self.failure

    def stop(self, instance_id: int, *, unloads: bool) -> None:
        self.stopped.append(instance_id)

    def call(self, call: RemoteCall) -> CallResult:
        return self.result

    def close(self) -> None:
        self.is_closed = True


class Rig:
    """A pool of two places on a scripted cluster; it records what the gateway would see."""

    def __init__(self) -> None:
        self.cluster = ScriptedCluster()
        self.seen: list[str] = []
        self.events: list[Event] = []
        config = from_spec(APP, "app.yaml")
        self.pool = config.app.pools[0]
        loop = asyncio.get_running_loop()
        remote_pool = RemotePool(
            self.pool,
            self.cluster.call,
            self,
            self,
            lambda function, took_ns: None,
            BlockingCalls(8, loop),
            hang_ns=10_000_000_000,
        )
        self.membership = RayMembership(self.cluster)
        threads = BlockingCalls(8, loop)
        for number in range(2):
            spec = NodeSpec(number, 0, f"ray{number + 1}", [])
            place = RayNode(
                spec, config.app, remote_pool, self.cluster, threads, self, self.membership.doubt
            )
            self.membership.places.append(place)
        self.place = self.membership.places[0]
        remote_pool.on_returned = lambda call, outcome: self.membership.places[
            call.node_id or 0
        ].on_returned(call, outcome)
        self.membership.ask()

    def on_node_joined(self, node: NodeSpec) -> None:
        self.seen.append(f"{node.name} joined")

    def on_node_lost(self, node: NodeSpec) -> None:
        self.seen.append(f"{node.name} lost")

    def on_event(self, event: Event) -> None:
        self.seen.append(type(event).__name__)
        self.events.append(event)

    def on_batch_ran(self, pool_id: int, message: BatchRan) -> None:
        self.seen.append("ran")

    def on_call_billed(self, pool_id: int, shares: object, took_ns: int) -> None:
        """Nothing is billed per call."""

    def on_keep_warm_billed(self, pool_id: int, function: str, usd: float) -> None:
        """Nothing is kept warm."""

    async def until(self, *seen: str) -> None:
        """Wait until exactly this has been seen since the last time."""
        async with asyncio.timeout(10):
            while len(self.seen) < len(seen):
                await asyncio.sleep(0.005)
        assert self.seen == list(seen)
        self.seen.clear()

    async def start(self, instance_id: int) -> None:
        self.place.execute(StartInstance(instance_id, 0, 0, 0))
        await self.until("InstanceStarted")

    def dispatch(self, batch_id: int, instance_id: int) -> None:
        tasks = [TaskInputs(7, 1, [])]
        call = RemoteCall(
            batch_id, 0, "f", 0, 0, tasks, 1 << 62, False, None, None, (), instance_id
        )
        self.place.dispatch(0, call)


def scenario(story: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    async def play() -> None:
        rig = Rig()
        await rig.until("ray1 joined")
        await story(rig)
        await rig.membership.stop()
        assert rig.cluster.is_closed

    asyncio.run(play())


def test_nodes_take_places_and_leave_them() -> None:
    """A third node waits for a place, and one that is too small never gets one."""

    async def story(rig: Rig) -> None:
        rig.cluster.up = [node("a"), node("small", cpus=1), node("b"), node("c")]
        await rig.until("ray2 joined")
        rig.cluster.up = [node("b"), node("c")]
        await rig.until("ray1 lost", "ray1 joined")

    scenario(story)


def test_an_instance_starts_runs_and_stops() -> None:
    async def story(rig: Rig) -> None:
        await rig.start(1)
        rig.dispatch(5, 1)
        await rig.until("ran")
        rig.place.execute(StopInstance(1, 0))
        await rig.until("InstanceStopped")
        while rig.cluster.stopped != [1]:
            await asyncio.sleep(0.005)

    scenario(story)


def test_a_second_batch_waits_for_no_slot() -> None:
    """One slot and no queue: the Backend refuses what cannot begin."""

    async def story(rig: Rig) -> None:
        await rig.start(1)
        rig.dispatch(5, 1)
        rig.dispatch(6, 1)
        await rig.until("BatchRefused", "ran")
        refused = rig.events[-1]
        assert isinstance(refused, BatchRefused) and refused.reason == Refusal.BUSY

    scenario(story)


def test_a_failed_start_says_why() -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.failure = StartFailure("OSError: no weights")
        rig.place.execute(StartInstance(1, 0, 0, 0))
        await rig.until("InstanceStopped")
        stopped = rig.events[-1]
        assert isinstance(stopped, InstanceStopped) and stopped.reason == "OSError: no weights"

    scenario(story)


def test_the_batch_of_a_dead_actor_is_reported_before_its_instance() -> None:
    """The Scheduler must know which tasks may have killed it; then the instance is gone."""

    async def story(rig: Rig) -> None:
        await rig.start(1)
        rig.cluster.result = Lost("the process of its actor died", node_died=True)
        rig.dispatch(5, 1)
        await rig.until("BatchLost", "InstanceStopped")
        lost, stopped = rig.events[-2:]
        assert isinstance(lost, BatchLost) and lost.node_died
        assert isinstance(stopped, InstanceStopped)
        assert stopped.reason == "the process of its actor died"
        rig.dispatch(6, 1)
        await rig.until("BatchRefused")

    scenario(story)


def test_an_idle_actor_that_dies_has_stopped() -> None:
    async def story(rig: Rig) -> None:
        await rig.start(1)
        rig.cluster.on_gone[1]("the process of its actor died", False)
        await rig.until("InstanceStopped")

    scenario(story)


def test_an_unreachable_node_is_lost_before_ray_says_so() -> None:
    """Ray still lists it: it does not join again until it can be reached."""

    async def story(rig: Rig) -> None:
        await rig.start(1)
        rig.cluster.unreachable = {"a"}
        rig.cluster.on_gone[1]("its actor cannot be reached", True)
        await rig.until("InstanceStopped", "ray1 lost")
        await asyncio.sleep(2 * ray_pool.POLL_S)
        assert rig.seen == []
        rig.cluster.unreachable = set()
        await rig.until("ray1 joined")

    scenario(story)


def test_a_start_on_a_node_that_is_gone_is_no_load_failure() -> None:
    """The node is lost, and with it the start: the function itself is not to blame."""

    async def story(rig: Rig) -> None:
        rig.cluster.failure = StartFailure("its actor cannot be reached", is_unavailable=True)
        rig.cluster.unreachable = {"a"}
        rig.place.execute(StartInstance(1, 0, 0, 0))
        await rig.until("ray1 lost")

    scenario(story)


def test_a_start_that_fails_on_a_node_that_is_up_is_a_failure() -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.failure = StartFailure("its actor cannot be reached", is_unavailable=True)
        rig.place.execute(StartInstance(1, 0, 0, 0))
        await rig.until("InstanceStopped")

    scenario(story)


def test_batches_that_wait_on_a_lost_node_have_not_run() -> None:
    """A batch may wait for the start of its instance: it is refused, not lost."""

    async def story(rig: Rig) -> None:
        rig.place.execute(StartInstance(1, 0, 0, 0))
        rig.dispatch(5, 1)
        rig.membership.places[0].lose()
        await rig.until("BatchRefused", "ray1 lost")
        assert not any(isinstance(event, InstanceStarted) for event in rig.events)

    scenario(story)


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
    monkeypatch.setattr(ray_pool, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pools\.ray\.provider: .*headgate\[ray\]"):
        check_ray(None, "app.yaml", "pools.ray")


def load(pools: dict[str, Any]) -> AppConfig:
    return from_spec({**APP, "pools": pools}, "app.yaml")


def test_several_gateways_are_one_line() -> None:
    config = from_spec({**APP, "serve": {"gateways": 2}}, "app.yaml")
    with pytest.raises(ConfigError, match=r"serve\.gateways: 2: .*a pool on Ray.*allowed: 1"):
        check_providers(config, "app.yaml")
