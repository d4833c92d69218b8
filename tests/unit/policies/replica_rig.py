"""A rig for the policies that keep replicas: a Scheduler, its timers, and a chain of functions."""

from __future__ import annotations

from stage_rig import MS, chain_app

from headgate.config import make_config
from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    SetTimer,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.events import (
    BatchFinished,
    Event,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    RequestArrived,
    TimerFired,
    TimerKey,
)
from headgate.core.model import (
    Compute,
    Function,
    Profile,
    Shape,
    ShapeTimes,
    Variant,
)
from headgate.core.scheduler.scheduler import Scheduler
from headgate.policies import find_policy
from headgate.policies._replicas import ReplicaPolicy, StageReplicas

# Batches of 1 to 4 items. A seventh of a GPU is what costs: an item in the small shape costs 20, or
# in a batch of four 12.5; in the large shape 36, or 22.5.
SMALL, LARGE = Shape(1_000, 1), Shape(1_000, 3)
SMALL_NS = (20 * MS, 30 * MS, 40 * MS, 50 * MS)
LARGE_NS = (12 * MS, 18 * MS, 24 * MS, 30 * MS)


def make_function(
    id: int,
    *,
    cold_start_ms: int = 0,
    memory_bytes: int = 0,
    concurrency: int = 8,
    has_large: bool = True,
    prewarm_nodes: int = 0,
) -> Function:
    profile = Profile(SMALL_NS, cold_start_ns=cold_start_ms * MS, memory_bytes=memory_bytes)
    more = (ShapeTimes(LARGE, LARGE_NS),) if has_large else ()
    variant = Variant(id, f"v{id}", id, (0,), profile, SMALL, concurrency, more)
    return Function(id, f"f{id}", (variant,), prewarm_nodes=prewarm_nodes)


class ReplicaRig:
    """A chain of functions under a policy. Starts end `cold_start_ms` later, batches on demand."""

    def __init__(
        self,
        policy: str,
        functions: list[Function],
        slo_ms: int,
        *,
        nodes: int = 1,
        slots: int = 8,
        gpu_sevenths: int = 7,
        memory_bytes: int = 100,
        compute: int = Compute.PER_BATCH,
        **settings: object,
    ) -> None:
        app = chain_app(
            functions, slo_ms, nodes=nodes, slots=slots, gpu_sevenths=gpu_sevenths,
            memory_bytes=memory_bytes, compute=compute,
        )  # fmt: skip
        kind = find_policy(policy)
        config = make_config(kind.config, settings, "test")
        self.scheduler = Scheduler(app, kind, config, validate=True)
        self.sent: list[Dispatch] = []
        self.started: list[StartInstance] = []
        self.stopped: list[StopInstance] = []
        self.settled: dict[int, int] = {}
        self.now_ms = 0.0
        self._timers: dict[TimerKey, int] = {}
        self._later: list[tuple[int, Event]] = []
        self._arrived = 0
        for node_id in range(nodes):
            self.handle(NodeJoined(node_id, 0, f"n{node_id}"))

    @property
    def policy(self) -> ReplicaPolicy:
        policy = self.scheduler.policy
        assert isinstance(policy, ReplicaPolicy)
        return policy

    def stage(self, index: int = 0) -> StageReplicas:
        return self.policy.stages[0][index]

    def configs(self, index: int = 0) -> list[tuple[int, int, int]]:
        """Node, shape and batch of each replica of a stage."""
        replicas = self.stage(index).replicas
        return sorted((r.node.id, r.config.shape_id, r.config.batch) for r in replicas)

    def handle(self, event: Event) -> list[Dispatch]:
        """Handle an event now; the dispatches that it led to."""
        before = len(self.sent)
        events = [event]
        while events:
            for action in self.scheduler.handle(round(self.now_ms * MS), events.pop(0)):
                events += self._carry_out(action)
        return self.sent[before:]

    def add(self, missing: float, index: int = 0) -> None:
        """Add the replica that the policy chooses, and start its instance."""
        actions = self.scheduler.actions_so_far
        before = len(actions)
        assert self.policy.add_replica(self.stage(index), missing)
        for action in actions[before:]:
            for event in self._carry_out(action):
                self.handle(event)

    def arrive(self, count: int = 1, items: int = 1) -> list[Dispatch]:
        """Have requests arrive now; the dispatches that they led to."""
        before = len(self.sent)
        for _ in range(count):
            self.handle(RequestArrived(self._arrived, 0, items=items))
            self._arrived += 1
        return self.sent[before:]

    def finish(self, batch: Dispatch) -> list[Dispatch]:
        return self.handle(BatchFinished(batch.batch_id))

    def advance(self, to_ms: float) -> list[Dispatch]:
        """Let time pass: starts end and timers fire; the dispatches that they led to."""
        before = len(self.sent)
        while True:
            due = [(at_ns, event) for at_ns, event in self._later]
            due += [(at_ns, TimerFired(key)) for key, at_ns in self._timers.items()]
            due = [each for each in due if each[0] <= to_ms * MS]
            if not due:
                break
            at_ns, event = min(due, key=lambda each: each[0])
            if isinstance(event, TimerFired):
                del self._timers[event.key]
            else:
                self._later.remove((at_ns, event))
            self.now_ms = max(self.now_ms, at_ns / MS)
            self.handle(event)
        self.now_ms = max(self.now_ms, to_ms)
        return self.sent[before:]

    def _carry_out(self, action: Action) -> list[Event]:
        if isinstance(action, Dispatch):
            self.sent.append(action)
        elif isinstance(action, Settle):
            self.settled[action.request_id] = action.settlement.outcome
        elif isinstance(action, SetTimer):
            self._timers[action.key] = action.at_ns
        elif isinstance(action, CancelTimer):
            self._timers.pop(action.key, None)
        elif isinstance(action, StopInstance):
            self.stopped.append(action)
            return [InstanceStopped(action.instance_id, "stopped")]
        elif isinstance(action, StartInstance):
            self.started.append(action)
            assert action.node_id is not None
            event = InstanceStarted(action.instance_id, action.node_id)
            profile = self.scheduler.app.variants[action.variant_id].profile
            if not profile.cold_start_ns:
                return [event]
            self._later.append((round(self.now_ms * MS) + profile.cold_start_ns, event))
        return []
