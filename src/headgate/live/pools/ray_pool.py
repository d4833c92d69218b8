"""The nodes of Ray pools, as the event loop of the gateway sees them.

A node of Ray is a node of the core, and an actor is an instance. Each node has a `Backend` of its
own, the same as in a local worker: it decides what begins, waits or is refused, and this module
does it. Start and Stop actions start and kill actors, in threads; batches are calls of a
`RemotePool`, whose results are events.

A pool has `nodes` places. Ray says which of its nodes are up (`RayMembership` asks twice a second),
and each node that has the resources of the pool takes a free place: the core sees it join. The
place of a node that is gone is lost, until another node takes it.

What has died, and what follows:

- The process of an actor: its batches are lost, and the instance has stopped. The batches are
  reported first, so that the Scheduler knows which tasks may have killed the process.
- A node: its running batches are lost, those that had not begun are refused, and the node is lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from time import monotonic_ns
from typing import Final, Protocol, TypeVar, final

from headgate.core.actions import (
    Action,
    Dispatch,
    LoadWeights,
    PlacedAction,
    StartInstance,
    StopInstance,
)
from headgate.core.backend import NODE_LOST, Backend, Effect, Ended, IdleTimer, Message
from headgate.core.errors import ConfigError
from headgate.core.events import (
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
    Refusal,
    WeightsLoaded,
)
from headgate.core.model import UNLIMITED, App, Pool, Variant
from headgate.functions.error_text import error_text
from headgate.live.deployment import NodeSpec
from headgate.live.pools.remote_pool import CallResult, Lost, NodeListener, RemoteCall, RemotePool
from headgate.system.threads import BlockingCalls, run_in_daemon_thread

POLL_S: Final = 0.5  # between two questions for the nodes of the cluster
RETRY_S: Final = 0.1  # until a start or a stop finds a free thread
CHECK_S: Final = 2.0  # until a server at an address must respond
# HTTP/2, which the head of Ray speaks: the greeting of a client, with empty settings. A server
# begins with its own settings: a frame of type 4.
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS: Final = 4
_FRAME_HEAD_BYTES: Final = 9
_LOG: Final = logging.getLogger(__name__)
Result = TypeVar("Result")


def check_ray(address: str | None, where: str, key: str) -> None:
    """Check that Ray is installed, and that there is a head at the address. Raises `ConfigError`.

    Ray itself would retry for minutes, and it takes seconds to import.
    """
    if find_spec("ray") is None:
        problem = "needs the extra `ray`: pip install 'headgate[ray]'"
        raise ConfigError(problem, where=where, key=f"{key}.provider")
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    problem = ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CHECK_S) as connection:
            connection.settimeout(CHECK_S)
            connection.sendall(_GREETING)
            head = connection.recv(_FRAME_HEAD_BYTES)
        if len(head) < 4 or head[3] != _SETTINGS:
            problem = "another server responds there"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise no_ray_error(problem, where, f"{key}.address", address)


def no_ray_error(problem: str, where: str, key: str, address: str) -> ConfigError:
    """Return the error for an address without Ray."""
    allowed = "host:port of the head of a cluster that this machine is part of (ray start), auto"
    return ConfigError(
        f"there is no Ray: {problem}", where=where, key=key, value=address, allowed=allowed
    )


@final
@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster, with the resources that it offers to Ray."""

    id: str
    host: str
    port: int  # of its raylet
    cpu_milli: int
    gpu_sevenths: int

    def fits(self, pool: Pool) -> bool:
        """Whether the node has what each node of a pool has. A node without CPUs runs nothing."""
        cpu_milli = pool.cpu_milli if pool.cpu_milli < UNLIMITED else 1
        gpu_sevenths = pool.gpu_sevenths if pool.gpu_sevenths < UNLIMITED else 1
        return self.cpu_milli >= max(1, cpu_milli) and self.gpu_sevenths >= gpu_sevenths


@final
@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why an actor could not be started; empty if it was."""

    reason: str = ""
    is_unavailable: bool = False  # its node may be gone


OnActorGone = Callable[[str, bool], None]  # why, and whether its node may be gone as well


class Cluster(Protocol):
    """What the event loop needs of a `RayCluster`. All methods block: threads call them."""

    def nodes(self, doubtful: Collection[str]) -> list[ClusterNode]:
        """Return the nodes that are up; of the doubtful ones, those that accept connections."""

    def start(
        self,
        instance_id: int,
        variant: Variant,
        pool: Pool,
        shape_id: int,
        node_id: str,
        on_gone: OnActorGone,
    ) -> StartFailure:
        """Start an actor and load its function; call `on_gone`, in some thread, when it ends."""

    def stop(self, instance_id: int, *, unloads: bool) -> None:
        """Kill an actor; with `unloads`, let its model unload first."""

    def close(self) -> None:
        """Disconnect: Ray kills all actors."""


@final
@dataclass(eq=False)
class RayNode:
    """One place in a Ray pool: executes the actions for the node that has taken it."""

    spec: NodeSpec
    app: App
    pool: RemotePool
    cluster: Cluster
    threads: BlockingCalls  # for starts and stops
    listener: NodeListener
    on_doubt: Callable[[str], None]  # this node of Ray may be gone: find out now
    taken_by: ClusterNode | None = None
    _held: dict[int, RemoteCall] = field(default_factory=dict)  # by batch that has not begun
    # By running batch: its order, and the Backend of the node at that time.
    _running: dict[int, tuple[Dispatch, Backend]] = field(default_factory=dict)
    _gone: dict[int, str] = field(default_factory=dict)  # by instance whose actor is gone: why
    _doubtful_starts: list[tuple[StartInstance, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._backend: Backend | None = None

    def join(self, node: ClusterNode) -> None:
        """Let a node of Ray take this place."""
        self.taken_by = node
        self._backend = Backend(self.pool.pool, self.app.variants)
        _LOG.info("%s is the node %s of Ray, at %s", self.spec.name, node.id[:8], node.host)
        self.listener.on_node_joined(self.spec)

    def lose(self) -> None:
        """Report the node as lost. Its running batches end when their calls do."""
        assert self._backend is not None and self.taken_by is not None
        _LOG.warning("%s, the node %s of Ray, is lost", self.spec.name, self.taken_by.id[:8])
        instance_ids = list(self._backend.instances)
        self.close()
        held, self._held = self._held, {}
        for batch_id in held:
            self.listener.on_event(BatchRefused(batch_id, Refusal.GONE))
        self._gone.clear()
        self._doubtful_starts.clear()
        self.listener.on_node_lost(self.spec)
        for instance_id in instance_ids:
            self._stop_actor(instance_id, unloads=False)

    def close(self) -> None:
        """Leave the place, and report nothing more about what was there."""
        self._backend, self.taken_by = None, None

    def confirm(self) -> None:
        """The node is up after all: what failed on it has failed for other reasons."""
        starts, self._doubtful_starts = self._doubtful_starts, []
        for order, reason in starts:
            self._start_failed(order, reason)

    def dispatch(self, now_ns: int, call: RemoteCall) -> None:
        """Begin, hold or refuse a batch."""
        if self._backend is None:
            self.listener.on_event(BatchRefused(call.batch_id, Refusal.GONE))
            return
        assert call.instance_id is not None
        items = sum(task.items for task in call.tasks)
        self._held[call.batch_id] = call
        self._handle(
            Dispatch(
                call.batch_id,
                call.variant_id,
                [],
                items,
                call.pool_id,
                call.node_id,
                call.instance_id,
                shape_id=call.shape_id,
            )
        )

    def execute(self, action: PlacedAction) -> None:
        """Execute any other action."""
        if self._backend is not None:
            self._handle(action)
        elif isinstance(action, StartInstance | StopInstance):
            self.listener.on_event(InstanceStopped(action.instance_id, NODE_LOST))

    def on_returned(self, call: RemoteCall, outcome: CallResult) -> None:
        """Handle the end of a batch, whose result has been reported."""
        order, backend = self._running.pop(call.batch_id)
        if backend is not self._backend:
            return
        if isinstance(outcome, Lost):  # or the next batch would be sent to a dead actor
            assert call.instance_id is not None
            self._stop_gone(backend, call.instance_id, outcome.message, not outcome.node_died)
        self._handle(Ended(order))

    def _handle(self, message: Message) -> None:
        assert self._backend is not None
        self._apply(self._backend.handle(monotonic_ns(), message))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, IdleTimer):
                delay_s = max(0, effect.at_ns - monotonic_ns()) / 1e9
                self._loop.call_later(delay_s, self._on_idle_timer, self._backend, effect)
            elif isinstance(effect, Event):
                self._report(effect)
            else:
                self._begin(effect)

    def _on_idle_timer(self, backend: Backend | None, timer: IdleTimer) -> None:
        if backend is not None and backend is self._backend:
            self._handle(timer)

    def _report(self, event: Event) -> None:
        if isinstance(event, BatchRefused):
            self._held.pop(event.batch_id, None)
        elif isinstance(event, InstanceStopped):
            reason = self._gone.pop(event.instance_id, "")
            self._stop_actor(event.instance_id, unloads=not reason)
            event = InstanceStopped(event.instance_id, reason or event.reason)
        self.listener.on_event(event)

    def _begin(self, order: Action) -> None:
        backend = self._backend
        assert backend is not None
        if isinstance(order, Dispatch):
            self._begin_batch(order, backend)
        elif isinstance(order, StartInstance):
            self._begin_start(order, backend)
        else:
            assert isinstance(order, LoadWeights)  # as in a local worker, there is nothing to do
            self.listener.on_event(WeightsLoaded(order.instance_id))
            self._handle(Ended(order))

    def _begin_batch(self, order: Dispatch, backend: Backend) -> None:
        call = self._held.pop(order.batch_id)
        if order.instance_id in self._gone:
            self.listener.on_event(BatchRefused(order.batch_id, Refusal.GONE))
            self._handle(Ended(order))
            return
        self._running[order.batch_id] = (order, backend)
        self.pool.send(monotonic_ns(), call)

    def _begin_start(self, order: StartInstance, backend: Backend) -> None:
        assert self.taken_by is not None
        instance_id = order.instance_id
        gone = partial(self._actor_gone, backend, instance_id)

        def on_gone(reason: str, is_doubtful: bool) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(gone, reason, is_doubtful)

        start = partial(
            self.cluster.start,
            instance_id,
            self.app.variants[order.variant_id],
            self.pool.pool,
            order.shape_id,
            self.taken_by.id,
            on_gone,
        )
        done = partial(self._on_start_ended, order, backend, monotonic_ns())
        self._submit(start, done, _unexpected)

    def _on_start_ended(
        self, order: StartInstance, backend: Backend, began_ns: int, failure: StartFailure
    ) -> None:
        if backend is not self._backend:  # the node was lost meanwhile
            self._stop_actor(order.instance_id, unloads=False)
        elif failure.is_unavailable:
            self._doubtful_starts.append((order, failure.reason))
            self._doubt()
        elif failure.reason:
            self._start_failed(order, failure.reason)
        else:
            function_id = self.app.variants[order.variant_id].function_id
            name = self.app.functions[function_id].name
            self.pool.on_cold_start(name, monotonic_ns() - began_ns)
            effects = backend.handle(monotonic_ns(), Ended(order))
            self.listener.on_event(InstanceStarted(order.instance_id, self.spec.id))
            self._apply(effects)

    def _start_failed(self, order: StartInstance, reason: str) -> None:
        assert self._backend is not None
        effects = self._backend.handle(monotonic_ns(), Ended(order, True))
        self._gone.pop(order.instance_id, None)
        self.listener.on_event(InstanceStopped(order.instance_id, reason))
        self._apply(effects)

    def _actor_gone(
        self, backend: Backend, instance_id: int, reason: str, is_doubtful: bool
    ) -> None:
        """Handle the end of an actor, whether it ran a batch or not."""
        instance = backend.instances.get(instance_id)
        if self._stop_gone(backend, instance_id, reason, is_doubtful) and instance is not None:
            _LOG.warning("%s on %s: %s", instance.variant.name, self.spec.name, reason)

    def _stop_gone(
        self, backend: Backend, instance_id: int, reason: str, is_doubtful: bool
    ) -> bool:
        """Stop an instance whose actor is gone, as soon as its running batches have ended.

        Return whether that was news: it may have been stopped as ordered, or reported already.
        """
        is_known = backend is self._backend and instance_id in backend.instances
        if not is_known or instance_id in self._gone:
            return False
        self._gone[instance_id] = reason
        self._handle(StopInstance(instance_id, self.spec.id))
        if is_doubtful:
            self._doubt()
        return True

    def _doubt(self) -> None:
        if self.taken_by is not None:
            self.on_doubt(self.taken_by.id)

    def _stop_actor(self, instance_id: int, *, unloads: bool) -> None:
        stop = partial(self.cluster.stop, instance_id, unloads=unloads)
        self._submit(stop, lambda _: None, lambda _: None)

    def _submit(
        self,
        function: Callable[[], Result],
        done: Callable[[Result], None],
        on_error: Callable[[BaseException], Result],
    ) -> None:
        if self.threads.free:
            self.threads.submit(function, done, on_error)
        else:
            self._loop.call_later(RETRY_S, self._submit, function, done, on_error)


def _unexpected(error: BaseException) -> StartFailure:
    """Return the failure of a start that raised, which is a defect."""
    return StartFailure(error_text(error))


@final
class RayMembership:
    """Gives the nodes of the cluster their places in the pools, as they come and go.

    A node that may be gone is doubtful until its raylet accepts a connection. Ray takes a while to
    declare it dead, and nothing could be started on it meanwhile.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.places: list[RayNode] = []
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._thread = BlockingCalls(1, self._loop)
        self._timer: asyncio.TimerHandle | None = None
        self._doubtful: set[str] = set()  # nodes of Ray
        self._asks_again = False  # a node became doubtful after the last question
        self._is_silent = False  # Ray does not respond
        self._is_stopped = False

    def doubt(self, node_id: str) -> None:
        """Find out now whether a node is gone."""
        self._doubtful.add(node_id)
        self.ask()

    def ask(self) -> None:
        """Ask Ray for its nodes now."""
        if not self._thread.free:
            self._asks_again = True
            return
        if self._timer is not None:
            self._timer.cancel()
        ask = partial(self._nodes, frozenset(self._doubtful))
        self._thread.submit(ask, self._on_nodes, lambda _: None)

    async def stop(self) -> None:
        """Stop asking, and disconnect."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._thread.stop()
        for place in self.places:
            place.close()
        await run_in_daemon_thread(self._cluster.close)

    def _nodes(self, doubtful: frozenset[str]) -> tuple[frozenset[str], list[ClusterNode]] | None:
        try:
            return doubtful, self._cluster.nodes(doubtful)
        except Exception as error:  # Ray may raise anything
            if not self._is_silent:
                _LOG.warning("Ray does not respond: %s", error_text(error))
            return None

    def _on_nodes(self, answer: tuple[frozenset[str], list[ClusterNode]] | None) -> None:
        if self._is_stopped:
            return
        self._is_silent = answer is None
        if answer is not None:
            self._update(*answer)
        if self._asks_again:
            self._asks_again = False
            self.ask()
        else:
            self._timer = self._loop.call_later(POLL_S, self.ask)

    def _update(self, checked: frozenset[str], nodes: Sequence[ClusterNode]) -> None:
        ids = {node.id for node in nodes}
        confirmed = checked & ids
        self._doubtful -= confirmed
        for place in self.places:
            if place.taken_by is not None and place.taken_by.id not in ids:
                place.lose()
            elif place.taken_by is not None and place.taken_by.id in confirmed:
                place.confirm()
        for pool_id in {place.spec.pool_id for place in self.places}:
            places = [place for place in self.places if place.spec.pool_id == pool_id]
            taken = {place.taken_by.id for place in places if place.taken_by is not None}
            free = [place for place in places if place.taken_by is None]
            pool = places[0].pool.pool
            new = [node for node in nodes if node.id not in taken and node.fits(pool)]
            for place, node in zip(free, new, strict=False):
                place.join(node)
