"""The nodes of Ray as nodes of the core: an actor is an instance.

A pool has `nodes` places, which gateways know by the sockets of workers. Ray says which of its
nodes are up (`RayMembership` asks twice a second), and each node that has the resources of the pool
takes a free `Place`. Only then the place accepts gateways, which have connected and wait for the
`Hello`: they see the node join. When the node is gone their connections are closed, which is how
they see a worker go, until another node takes the place.

The `Backend` of a node decides what begins, waits or is refused, as in a worker, and `RayNode` does
it: it starts, calls and kills actors, in threads. Everything else happens in one event loop.
Gateways cannot tell the node from a worker.

What has died, and what follows:

- The process of an actor: its batches are lost, and the instance has stopped. The batches are
  reported first, so that the Scheduler knows which tasks may have killed the process.
- A node: its running batches are lost, those that had not begun are refused, and the node is lost.
- This process: gateways see their connections close. They suspect no task, because functions run in
  actors (`Hello.runs_functions`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from time import monotonic_ns
from typing import Final, Protocol, TypeVar, final

from headgate.core.actions import Action, Dispatch, LoadWeights, StartInstance, StopInstance
from headgate.core.backend import IdleTimer
from headgate.core.errors import ConfigError, error_text
from headgate.core.event_log import to_wire
from headgate.core.events import (
    BatchFailed,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStopped,
    Refusal,
)
from headgate.core.model import UNLIMITED, Pool, Variant
from headgate.functions.tensor import Signature, TaskInputs, TaskResult
from headgate.live.deployment import NodeSpec
from headgate.live.ipc.messages import EventMessage, Hello, MeasuredFunction, frame
from headgate.live.pools.remote_pool import CallResult, Done, Failed, Lost, Refused
from headgate.live.worker.begun_requests import BegunRequests
from headgate.live.worker.connection import UNSENT_BYTES_MAX, GatewayConnection
from headgate.live.worker.executor import enter_begun, ran_message, share_outputs
from headgate.live.worker.node import SharedNode
from headgate.system.threads import BlockingCalls, run_in_daemon_thread

POLL_S: Final = 0.5  # between two questions for the nodes of the cluster
RETRY_S: Final = 0.1  # until a call finds a free thread
_LOG: Final = logging.getLogger(__name__)
Result = TypeVar("Result")


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
class StartResult:
    """The end of a start: the signature of the function, or why there is no actor."""

    problem: str = ""
    is_unavailable: bool = False  # its node may be gone
    signature: Signature = field(default_factory=Signature)


OnActorGone = Callable[[str, bool], None]  # why, and whether its node may be gone as well
# Returns which of the tasks may run, and the results of the others.
Enter = Callable[[list[TaskInputs]], tuple[list[TaskInputs], list[TaskResult]]]


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
    ) -> StartResult:
        """Start an actor and load its function; call `on_gone`, in some thread, when it ends."""

    def stop(self, instance_id: int, *, unloads: bool) -> None:
        """Kill an actor; with `unloads`, let its model unload first."""

    def call(
        self, instance_id: int, function: str, tasks: list[TaskInputs], enter: Enter
    ) -> CallResult:
        """Run a batch on an actor. `enter` is called right before tasks run. Never raises."""

    def inspect(self, variant: Variant) -> MeasuredFunction:
        """Load a function once, wherever there is room, and measure it if nothing is declared."""

    def close(self) -> None:
        """Disconnect: Ray kills all actors."""


@final
@dataclass(eq=False)
class RayNode(SharedNode):
    """Carries out the orders of a `SharedNode` on one node of Ray, from joining to loss."""

    _: KW_ONLY
    name: str
    ray_id: str
    cluster: Cluster
    threads: BlockingCalls
    begun: BegunRequests
    on_doubt: Callable[[str], None]  # this node of Ray may be gone: find out now
    on_news: Callable[[], None]  # gateways have been told something: send it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loop = asyncio.get_running_loop()
        self._is_lost = False
        self._started: set[int] = set()  # instances
        self._running: dict[int, GatewayConnection] = {}  # by batch
        self._gone: dict[int, str] = {}  # by instance whose actor is gone: why
        self._doubtful_starts: list[tuple[StartInstance, StartResult]] = []

    def lose(self) -> None:
        """Tell the gateways what is lost with the node. They see their connections close next."""
        instance_ids = list(self.backend.instances)
        self._is_lost = True
        for batch_id, connection in self._running.items():
            self._tell(connection, BatchLost(batch_id, node_died=False))
        for batch_id, (connection, _) in self._held.items():
            self._tell(connection, BatchRefused(batch_id, Refusal.GONE))
        for instance_id in instance_ids:
            self._stop_actor(instance_id, unloads=False)

    def confirm(self) -> None:
        """The node is up after all: what failed on it has failed for other reasons."""
        starts, self._doubtful_starts = self._doubtful_starts, []
        for order, result in starts:
            self._end(order, result)

    def _tell(self, connection: GatewayConnection, event: Event) -> None:
        if connection in self._connections:
            connection.report(event)

    def _is_loaded(self, instance_id: int) -> bool:
        return instance_id in self._started

    def _size_bytes(self, variant: Variant) -> int:
        measured = self.measured.get(variant.id)
        return variant.profile.memory_bytes or (0 if measured is None else measured.memory_bytes)

    def _add_timer(self, timer: IdleTimer) -> None:
        delay_s = max(0, timer.at_ns - monotonic_ns()) / 1e9
        self._loop.call_later(delay_s, self._on_idle_timer, timer)

    def _on_idle_timer(self, timer: IdleTimer) -> None:
        if not self._is_lost:
            self._handle(timer)
            self.on_news()

    def _report(self, event: Event) -> None:
        """Report an event of the Backend; the actor of an instance that has stopped is killed."""
        if isinstance(event, InstanceStopped):
            reason = self._gone.pop(event.instance_id, "")
            self._started.discard(event.instance_id)
            self._stop_actor(event.instance_id, unloads=not reason)
            event = InstanceStopped(event.instance_id, reason or event.reason)
        super()._report(event)

    def _begin(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            self._begin_batch(action)
        elif isinstance(action, StartInstance):
            self._begin_start(action)
        else:
            assert isinstance(action, LoadWeights)  # as in a worker, there is nothing to do
            self._end_load(action)

    def _begin_batch(self, order: Dispatch) -> None:
        connection, tasks = self._held.pop(order.batch_id)
        assert order.instance_id is not None
        if order.instance_id in self._gone:
            refused = EventMessage(to_wire(BatchRefused(order.batch_id, Refusal.GONE)))
            self._end_batch(order, connection, frame(refused))
            return
        self._running[order.batch_id] = connection
        function = self.app.functions[self.app.variants[order.variant_id].function_id].name
        self._submit(
            partial(self._call, order, connection, function, tasks),
            partial(self._on_returned, order, connection),
            partial(_failed_call, order.batch_id),
        )

    def _call(
        self,
        order: Dispatch,
        connection: GatewayConnection,
        function: str,
        tasks: list[TaskInputs],
    ) -> tuple[CallResult, bytes]:
        """Run a batch, in a thread; return its outcome and the message about it."""
        assert order.instance_id is not None
        enter = partial(enter_begun, self.begun)
        outcome = self.cluster.call(order.instance_id, function, tasks, enter)
        for task in tasks:
            task.inputs.clear()  # their blocks are released with the reply
        if not isinstance(outcome, Done):
            return outcome, frame(EventMessage(to_wire(_event_of(order.batch_id, outcome))))
        share_outputs(outcome.results, connection.arena)
        ended_ns = monotonic_ns()
        began_ns = ended_ns - outcome.took_ns
        return outcome, ran_message(connection, order.batch_id, began_ns, ended_ns, outcome.results)

    def _on_returned(
        self, order: Dispatch, connection: GatewayConnection, ended: tuple[CallResult, bytes]
    ) -> None:
        outcome, message = ended
        del self._running[order.batch_id]
        if self._is_lost:
            return
        assert order.instance_id is not None
        problem = "" if isinstance(outcome, Done) else _problem_of(outcome)
        if problem:
            _LOG.warning("%s: %s", self.name, problem)
        if isinstance(outcome, Lost):
            # The batch first, and its instance before another batch is sent to a dead actor.
            self._tell(connection, _event_of(order.batch_id, outcome))
            message = b""
            self._stop_gone(order.instance_id, outcome.message, not outcome.node_died)
        self._end_batch(order, connection, message)
        self.on_news()

    def _begin_start(self, order: StartInstance) -> None:
        gone = partial(self._actor_gone, order.instance_id)

        def on_gone(reason: str, is_doubtful: bool) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(gone, reason, is_doubtful)

        start = partial(
            self.cluster.start,
            order.instance_id,
            self.app.variants[order.variant_id],
            self.pool,
            order.shape_id,
            self.ray_id,
            on_gone,
        )
        self._submit(start, partial(self._on_start_ended, order), _failed_start)

    def _on_start_ended(self, order: StartInstance, result: StartResult) -> None:
        if self._is_lost:
            self._stop_actor(order.instance_id, unloads=False)
        elif result.is_unavailable:
            self._doubtful_starts.append((order, result))
            self.on_doubt(self.ray_id)
        else:
            self._end(order, result)

    def _end(self, order: StartInstance, result: StartResult) -> None:
        if result.problem:
            self._gone.pop(order.instance_id, None)
        else:
            self._started.add(order.instance_id)
        self._end_start(order, result.problem, result.signature)
        self.on_news()

    def _actor_gone(self, instance_id: int, reason: str, is_doubtful: bool) -> None:
        """Handle the end of an actor, whether it ran a batch or not."""
        instance = self.backend.instances.get(instance_id)
        if self._stop_gone(instance_id, reason, is_doubtful) and instance is not None:
            _LOG.warning("%s on %s: %s", instance.variant.name, self.name, reason)
        self.on_news()

    def _stop_gone(self, instance_id: int, reason: str, is_doubtful: bool) -> bool:
        """Stop an instance whose actor is gone, as soon as its running batches have ended.

        Return whether that was news: it may have been stopped as ordered, or reported already.
        """
        is_known = not self._is_lost and instance_id in self.backend.instances
        if not is_known or instance_id in self._gone:
            return False
        self._gone[instance_id] = reason
        self._handle(StopInstance(instance_id, self.id))
        if is_doubtful:
            self.on_doubt(self.ray_id)
        return True

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


@final
class Place:
    """One place: its socket, the node of Ray that has taken it, and the gateways that use it.

    `make_node` makes the `RayNode` of a node that joins, for a place that sends its news.
    """

    def __init__(
        self,
        spec: NodeSpec,
        pool: Pool,
        listener: socket.socket,
        make_node: Callable[[Place, ClusterNode], RayNode],
        arena_bytes: int,
    ) -> None:
        listener.setblocking(False)
        self.spec = spec
        self.pool = pool
        self.taken_by: ClusterNode | None = None
        self._listener = listener
        self._make_node = make_node
        self._arena_bytes = arena_bytes
        self._loop = asyncio.get_running_loop()
        self._node: RayNode | None = None
        self._connections: dict[int, GatewayConnection] = {}  # by descriptor

    def join(self, node: ClusterNode) -> None:
        """Let a node of Ray take this place, and accept gateways."""
        self.taken_by, self._node = node, self._make_node(self, node)
        _LOG.info("%s is the node %s of Ray, at %s", self.spec.name, node.id[:8], node.host)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def confirm(self) -> None:
        """The node, which was doubtful, is up."""
        if self._node is not None:
            self._node.confirm()

    def lose(self) -> None:
        """Tell the gateways that the node is gone."""
        assert self.taken_by is not None and self._node is not None
        _LOG.warning("%s, the node %s of Ray, is lost", self.spec.name, self.taken_by.id[:8])
        self._node.lose()
        self.flush()
        self._leave()

    def close(self) -> None:
        """Close the socket and all connections."""
        self._leave()
        self._listener.close()

    def _leave(self) -> None:
        """Close all connections. Gateways that connect from now on wait for the next node."""
        self._loop.remove_reader(self._listener.fileno())
        for connection in list(self._connections.values()):
            self._close(connection)
        self.taken_by = self._node = None

    def flush(self) -> None:
        """Send the gateways what they have not been sent."""
        for connection in list(self._connections.values()):
            try:
                self._flush(connection)
            except OSError:
                self._close(connection)

    def _accept(self) -> None:
        assert self._node is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the peer has disconnected, or no descriptor is free
            return
        sock.setblocking(False)
        connection = GatewayConnection(sock, self._arena_bytes)
        self._connections[sock.fileno()] = connection
        node = self._node
        node.add_gateway(connection)
        functions = [
            measured
            for variant_id, measured in node.measured.items()
            if self.pool.id in node.app.variants[variant_id].pool_ids
        ]
        present = node.present_instances()
        try:
            connection.send_hello(
                Hello(self.spec.id, os.getpid(), functions, present, runs_functions=False)
            )
        except OSError:
            self._close(connection)
            return
        self._loop.add_reader(sock.fileno(), self._read_from, connection)
        self.flush()

    def _read_from(self, connection: GatewayConnection) -> None:
        try:
            messages = connection.read()
            if messages is None:
                self._close(connection)
                return
            for message in messages:
                assert self._node is not None
                self._node.on_message(connection, message)
        except OSError:
            self._close(connection)
        except (ValueError, ConfigError) as error:  # never from our own gateway
            _LOG.error(
                "%s: a gateway sent an invalid message; disconnecting: %s", self.spec.name, error
            )
            self._close(connection)
        self.flush()

    def _flush(self, connection: GatewayConnection) -> None:
        """Write what is pending, and stop reading from a gateway with too much unread output."""
        connection.send_released()
        if not connection.unsent_bytes:
            return
        was_blocked, fd = connection.is_blocked, connection.sock.fileno()
        connection.flush()
        if not connection.is_blocked and not was_blocked:
            return
        if connection.is_blocked:
            self._loop.add_writer(fd, self.flush)
        else:
            self._loop.remove_writer(fd)
        if connection.unsent_bytes > UNSENT_BYTES_MAX:
            self._loop.remove_reader(fd)
        else:
            self._loop.add_reader(fd, self._read_from, connection)

    def _close(self, connection: GatewayConnection) -> None:
        fd = connection.sock.fileno()
        if self._connections.pop(fd, None) is None:
            return
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        connection.close()
        if self._node is not None:
            self._node.remove_gateway(connection)


@final
class RayMembership:
    """Gives the nodes of the cluster their places in the pools, as they come and go.

    A node that may be gone is doubtful until its raylet accepts a connection. Ray takes a while to
    declare it dead, and nothing could be started on it meanwhile.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.places: list[Place] = []
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
            pool = places[0].pool
            new = [node for node in nodes if node.id not in taken and node.fits(pool)]
            for place, node in zip(free, new, strict=False):
                place.join(node)


def _event_of(batch_id: int, outcome: Failed | Refused | Lost) -> Event:
    if isinstance(outcome, Failed):
        return BatchFailed(batch_id, outcome.reason)
    if isinstance(outcome, Refused):
        return BatchRefused(batch_id, outcome.reason)
    return BatchLost(batch_id, outcome.node_died)


def _problem_of(outcome: Failed | Refused | Lost) -> str:
    return outcome.reason if isinstance(outcome, Failed) else outcome.message


def _failed_call(batch_id: int, error: BaseException) -> tuple[CallResult, bytes]:
    """Return the result of a call that raised, which is a defect: whether it ran is unknown."""
    outcome = Failed(error_text(error))
    return outcome, frame(EventMessage(to_wire(_event_of(batch_id, outcome))))


def _failed_start(error: BaseException) -> StartResult:
    """Return the result of a start that raised, which is a defect."""
    return StartResult(error_text(error))
