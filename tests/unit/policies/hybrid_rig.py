"""A Scheduler under a hybrid policy: an elastic pool, a FaaS pool, and a clock set by the test.

The instance is the one of the hybrid paper, made ten times as heavy so that fewer requests keep it
busy: 360 ms in isolation and c times that at concurrency c, with an objective of 2 s. So five
concurrent requests are in time, and the instance serves 2.78 per second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headgate.core.actions import Action, Dispatch, StartInstance, StopInstance
from headgate.core.clock import SECOND_NS
from headgate.core.events import (
    BatchFinished,
    Event,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    RequestArrived,
    TimerFired,
)
from headgate.core.model import (
    App,
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
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import InstanceState
from headgate.policies import find_policy

MS: Final = 1_000_000
BOOT_S: Final = 60
SHARED: Final = tuple(float(c) for c in range(1, 9))
NODES: Final = Pool(0, "node", Tier.DEDICATED, nodes=4, slots=8, usd_per_hour=3.6)
RENTED: Final = replace(NODES, is_elastic=True, boot_ns=BOOT_S * SECOND_NS)
# A call of 300 ms costs 6e-4 USD and a node 1e-3 USD a second: it pays if it is given more than
# 1.67 requests in it.
CLOUD: Final = Pool(
    1, "cloud", Tier.SERVERLESS, nodes=0, faas=FaasPlatform(1 << 30, usd_per_gb_s=0.002)
)
LONE_MS: Final = 360


class HybridRig:
    """A policy under test; finished batches and boots are delivered as events in due time."""

    def __init__(
        self,
        policy: str,
        *,
        pools: tuple[Pool, ...] = (RENTED, CLOUD),
        functions: int = 1,
        warm: int = 1,
        latency_ms: int = 2_000,
        start_ms: int = 0,
        items_max: int = 1,
        **settings: object,
    ) -> None:
        kind = find_policy(policy)
        app = _app(pools, functions, warm, latency_ms, start_ms, items_max)
        self.scheduler = Scheduler(app, kind, kind.config(**settings), validate=True)
        self.view = self.scheduler.view
        self.now_ns = 0
        self.requests = 0
        self.out: dict[int, int | None] = {}  # batch id -> its node; None: a function
        self._due: list[tuple[int, Event]] = []  # boots
        places = [pool for pool in pools if pool.faas is None for _ in range(pool.nodes)]
        for id, pool in enumerate(places):
            self.tell(NodeJoined(id, pool.id, f"node{id}"))

    def tell(self, event: Event) -> list[Action]:
        """What is done about an event, now."""
        actions = self.scheduler.handle(self.now_ns, event)
        for action in actions:
            if isinstance(action, Dispatch):
                self.out[action.batch_id] = action.node_id
            elif isinstance(action, StartInstance) and action.node_id is not None:
                boot_ns = self.view.app.pools[action.pool_id].boot_ns if self.now_ns else 0
                started = InstanceStarted(action.instance_id, action.node_id)
                self._due.append((self.now_ns + boot_ns, started))
            elif isinstance(action, StopInstance):
                self._due = [d for d in self._due if not _is_start_of(action, d[1])]
                self._due.append((self.now_ns, InstanceStopped(action.instance_id, "stopped")))
        self._happen(self.now_ns)
        return actions

    def ask(
        self, count: int = 1, *, function: int = 0, items: int = 1, size: int = 0
    ) -> list[int | None]:
        """Where so many requests go at once: nodes by id, None for functions."""
        places: list[int | None] = []
        for _ in range(count):
            actions = self.tell(
                RequestArrived(self.requests, function, 0, items, payload_bytes=size)
            )
            self.requests += 1
            places += [a.node_id for a in actions if isinstance(a, Dispatch)]
        return places

    def finish(self, batch_id: int | None = None) -> list[int | None]:
        """End a batch, the oldest by default; where what goes out in its stead goes."""
        batch_id = min(self.out) if batch_id is None else batch_id
        del self.out[batch_id]
        actions = self.tell(BatchFinished(batch_id))
        return [a.node_id for a in actions if isinstance(a, Dispatch)]

    def load(self, seconds: float, rate_per_s: float) -> None:
        """Evenly spaced requests, each answered at once."""
        until_ns = self.now_ns + int(seconds * SECOND_NS)
        for _ in range(int(seconds * rate_per_s)):
            self.wait(int(SECOND_NS / rate_per_s))
            self.ask()
            while self.out:
                self.finish()
        self.wait(until_ns - self.now_ns)

    def wait(self, length_ns: int) -> None:
        """Let time pass; timers fire and boots end in it."""
        until_ns = self.now_ns + length_ns
        while True:
            timers_ns = [at_ns for at_ns in self.view.timers.values() if at_ns <= until_ns]
            next_ns = min([*timers_ns, *(at for at, _ in self._due if at <= until_ns), until_ns])
            self.now_ns = next_ns
            self._happen(next_ns)
            for key in [k for k, at_ns in self.view.timers.items() if at_ns <= next_ns]:
                self.tell(TimerFired(key))
            if next_ns >= until_ns:
                return

    def _happen(self, now_ns: int) -> None:
        ripe = [event for at_ns, event in self._due if at_ns <= now_ns]
        self._due = [(at_ns, event) for at_ns, event in self._due if at_ns > now_ns]
        for event in ripe:
            self.tell(event)

    @property
    def instances(self) -> int:
        """Number of instances that are running or starting."""
        there = self.view.instances.values()
        return sum(1 for instance in there if instance.state != InstanceState.DRAINING)

    @property
    def ready(self) -> int:
        """How many can take requests."""
        ready = (InstanceState.IDLE, InstanceState.BUSY)
        return sum(1 for instance in self.view.instances.values() if instance.state in ready)


def _is_start_of(stop: StopInstance, event: Event) -> bool:
    return isinstance(event, InstanceStarted) and event.instance_id == stop.instance_id


def _app(
    pools: tuple[Pool, ...],
    functions: int,
    warm: int,
    latency_ms: int,
    start_ms: int,
    items_max: int,
) -> App:
    """Only on a platform a start takes time: on a node of the rig it is the boot that does."""
    made: list[Function] = []
    variants = 0
    for id in range(functions):
        own: list[Variant] = []
        for pool in pools:
            is_cloud = pool.faas is not None
            called = Profile((300 * MS,), cold_start_ns=start_ms * MS)
            profile = called if is_cloud else Profile((LONE_MS * MS,) * items_max, SHARED)
            name = f"f{id}-{pool.name}"
            own.append(Variant(variants, name, id, (pool.id,), profile, concurrency=pool.slots))
            variants += 1
        made.append(Function(id, f"f{id}", tuple(own), prewarm_nodes=warm))
    slo = Slo(latency_ms * MS)
    pipelines = tuple(Pipeline(f.id, f.name, (Stage(f),), slo) for f in made)
    return App(tuple(made), pipelines, pools)
