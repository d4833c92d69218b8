"""Pools whose nodes a Broker grants to gateways, as the supervisor carries it out.

It is the counterpart of the simulator's `shared_pools`. A gateway sends the supervisor every start
that names no node. The Broker of the pool decides when it gets one, and which. The supervisor then
orders the start at the worker of that node itself, over a connection of its own: so a start that
has been granted goes on if its gateway dies, and the supervisor sees by itself when a node is free
again. Every gateway learns of the instance from the worker.

The Brokers live and die with the supervisor. Nobody takes their place, because nobody outlives it:
when it dies, gateways and workers end as well.

A pool that no start without a node was ever ordered for has no Broker, and the supervisor no
connections to its workers.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from headgate.core.actions import Action, StartInstance, StopInstance
from headgate.core.backend import Broker
from headgate.core.errors import ConfigError
from headgate.core.event_log import from_wire, to_wire
from headgate.core.events import Event, InstanceAppeared, InstanceStarted, InstanceStopped
from headgate.core.ids import IDS_PER_SCHEDULER, first_id, owner
from headgate.core.model import App
from headgate.live.deployment import NodeSpec, socket_path
from headgate.live.ipc.messages import ActionMessage, EventMessage, Frames, Hello, frame

READ_BYTES: Final = 64 * 1024
MEMORY_BYTES: Final = 64 * 1024  # of the arena that the supervisor has to offer and never uses
_LOG: Final = logging.getLogger(__name__)


@final
class NodeGrants:
    """The Brokers of one process group. Nothing blocks; `poll` is to be called again and again.

    `tell` sends an event to the gateway with an index, if that still runs.
    """

    def __init__(
        self, app: App, nodes: list[NodeSpec], run_dir: Path, tell: Callable[[int, Event], None]
    ) -> None:
        self._app = app
        self._nodes = nodes
        self._run_dir = run_dir
        self._tell = tell
        self._brokers: dict[int, Broker] = {}  # by pool id
        self._workers: dict[int, WorkerControl] = {}  # by node id, of pools with a Broker
        self._starts: dict[int, StartInstance] = {}  # by instance id, waiting for a grant
        self._granted: dict[int, int] = {}  # instance id -> node id, until it has started
        self._held: dict[int, set[int]] = {}  # by node id: its instances, as far as known

    def fds(self) -> list[int]:
        """Descriptors that become readable when a worker has sent something."""
        return [worker.fileno() for worker in self._workers.values() if worker.is_open]

    def order(self, action: Action) -> None:
        """Take a start or a stop that names no node from a gateway."""
        if isinstance(action, StartInstance):
            self._request_start(action)
        elif isinstance(action, StopInstance):
            self._cancel_start(action.instance_id)
        else:
            _LOG.error("a gateway sent %s to its supervisor", type(action).__name__)

    def poll(self) -> None:
        """Connect to workers, and handle what they have sent."""
        for node_id, worker in self._workers.items():
            was_open = worker.is_open
            for message in worker.poll():
                if isinstance(message, Hello):
                    self._on_node_joined(node_id, {each.id for each in message.instances})
                else:
                    self._on_event(node_id, message)
            if was_open and not worker.is_open:
                self._on_node_lost(node_id)
        for broker in self._brokers.values():
            self._grant(broker)

    def gateway_left(self, index: int) -> None:
        """Withdraw what a gateway has ordered and not been granted. Granted starts go on."""
        ids = range(first_id(index), first_id(index) + IDS_PER_SCHEDULER)
        for broker in self._brokers.values():
            for instance_id in broker.withdraw_all(ids):
                del self._starts[instance_id]

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def _request_start(self, action: StartInstance) -> None:
        broker = self._brokers.get(action.pool_id)
        if broker is None:
            broker = self._brokers[action.pool_id] = Broker()
            for node in self._nodes:
                if node.pool_id == action.pool_id:
                    self._workers[node.id] = WorkerControl(socket_path(self._run_dir, node.id))
        function_id = self._app.variants[action.variant_id].function_id
        denied = broker.request(action.instance_id, function_id, action.nth)
        if denied:
            self._report(action.instance_id, denied)
        else:
            self._starts[action.instance_id] = action
            self._grant(broker)

    def _cancel_start(self, instance_id: int) -> None:
        start = self._starts.pop(instance_id, None)
        node_id = self._granted.get(instance_id)
        if start is not None:
            self._brokers[start.pool_id].withdraw(instance_id)
            self._report(instance_id, "the start was cancelled")
        elif node_id is not None:
            self._workers[node_id].send(StopInstance(instance_id, node_id))
        else:
            self._report(instance_id, "the instance had already stopped")

    def _grant(self, broker: Broker) -> None:
        for grant in broker.grants():
            start = self._starts.pop(grant.instance_id)
            instance_id, node_id = grant.instance_id, grant.node_id
            variant_id, pool_id, shape_id = start.variant_id, start.pool_id, start.shape_id
            self._granted[instance_id] = node_id
            self._held.setdefault(node_id, set()).add(instance_id)
            order = StartInstance(instance_id, variant_id, pool_id, node_id, shape_id)
            self._workers[node_id].send(order)

    def _on_node_joined(self, node_id: int, instance_ids: set[int]) -> None:
        self._held[node_id] = instance_ids
        if not instance_ids:
            self._broker_of(node_id).node_joined(node_id)

    def _on_node_lost(self, node_id: int) -> None:
        """Withdraw a node. Gateways that do not know that their instance was there are told."""
        self._broker_of(node_id).node_lost(node_id)
        for instance_id in self._held.pop(node_id, set()):
            if self._granted.pop(instance_id, None) is not None:
                self._report(instance_id, "the node was lost")

    def _on_event(self, node_id: int, event: Event) -> None:
        held = self._held.setdefault(node_id, set())
        if isinstance(event, InstanceStarted | InstanceAppeared):
            held.add(event.instance_id)
            self._granted.pop(event.instance_id, None)
        elif isinstance(event, InstanceStopped):
            self._granted.pop(event.instance_id, None)
            held.discard(event.instance_id)
            if not held:
                self._broker_of(node_id).node_freed(node_id)

    def _broker_of(self, node_id: int) -> Broker:
        (pool_id,) = (node.pool_id for node in self._nodes if node.id == node_id)
        return self._brokers[pool_id]

    def _report(self, instance_id: int, reason: str) -> None:
        self._tell(owner(instance_id), InstanceStopped(instance_id, reason))


@final
class WorkerControl:
    """A connection of the supervisor to a worker, which takes it for a gateway without requests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sock: socket.socket | None = None
        self._frames = Frames()
        self._unsent = bytearray()
        self.is_open = False  # the worker has sent its `Hello`, and can take orders

    def fileno(self) -> int:
        assert self._sock is not None
        return self._sock.fileno()

    def send(self, action: Action) -> None:
        """Send an action. It is dropped if the worker is gone, which `poll` will notice."""
        self._unsent += frame(ActionMessage(to_wire(action)))
        self._flush()

    def poll(self) -> list[Hello | Event]:
        """Connect if need be; return what the worker has sent: its `Hello` first, then events."""
        received: list[Hello | Event] = []
        try:
            if self._sock is None:
                self._connect()
            self._receive(received)
            self._flush()
        except (OSError, ValueError, ConfigError):  # no worker there yet, or no more
            self.close()
        return received

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock, self._frames, self.is_open = None, Frames(), False
        self._unsent.clear()

    def _connect(self) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._sock.connect(str(self._path))

    def _receive(self, received: list[Hello | Event]) -> None:
        """Add what has arrived, also if the worker has closed the connection after it."""
        assert self._sock is not None
        while True:
            try:
                # The descriptor of the worker's memory comes with its `Hello`, and is not used.
                data, descriptors, _, _ = socket.recv_fds(self._sock, READ_BYTES, 1)
            except BlockingIOError:
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                raise ConnectionError("the worker has closed the connection")
            for message in self._frames.feed(data):
                if isinstance(message, Hello):
                    _send_memory(self._sock)
                    self.is_open = True
                    received.append(message)
                elif isinstance(message, EventMessage):
                    event = from_wire(message.wire)
                    assert isinstance(event, Event)
                    received.append(event)

    def _flush(self) -> None:
        while self._unsent and self._sock is not None and self.is_open:
            try:
                del self._unsent[: self._sock.send(self._unsent)]
            except OSError:  # full for now, or gone: `poll` finds out
                return


def _send_memory(sock: socket.socket) -> None:
    """Complete the handshake, which wants memory for tensors that will never come."""
    # They import NumPy, which most supervisors do not need.
    from headgate.live.ipc.node_memory import channel_pair  # noqa: PLC0415
    from headgate.live.ipc.shared_memory import Arena  # noqa: PLC0415

    arena = Arena.create(MEMORY_BYTES)
    ends = channel_pair()
    try:
        socket.send_fds(sock, [b"\0"], [arena.fd, ends[1].fileno()])
    finally:
        arena.close()
        for end in ends:
            end.close()
