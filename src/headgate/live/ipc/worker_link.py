"""Connections of a gateway to its workers, re-established whenever they end.

Any failure of a worker (it dies, hangs and is killed, runs out of memory, sends an invalid message)
ends its connection. For the rest of the gateway that is a single event: the batches of the worker
are lost and its node is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final, Protocol, cast, final

from headgate.core.errors import ConfigError
from headgate.core.event_log import Wire, from_wire
from headgate.core.events import BatchFailed, BatchLost, BatchRefused, Event
from headgate.functions.tensor import Block, TaskInputs, TaskResult, Tensor
from headgate.live.deployment import NodeSpec, socket_path
from headgate.live.driver import CountFault, ignore_fault
from headgate.live.ipc.messages import (
    LENGTH_BYTES,
    MESSAGE_BYTES_MAX,
    ActionMessage,
    AnyMessage,
    BatchListener,
    BatchRan,
    EventMessage,
    ForgetMemory,
    Frames,
    FunctionLoaded,
    Hello,
    MeasuredFunction,
    Message,
    Release,
    RunBatch,
    frame,
)
from headgate.live.ipc.node_memory import Loans, NodeMemories, channel_pair
from headgate.live.ipc.shared_memory import INLINE_BYTES_MAX, Arena, allocate_buffer

RETRY_S: Final = 0.02
FAULT_RETRY_S: Final = 1.0  # after a defect of the gateway, which may well recur
HELLO_BYTES_MAX: Final = 64 << 20
# Copied per iteration of the event loop, so that other requests are not delayed.
COPY_BYTES_MAX: Final = 2 << 20
Copies = deque[tuple[memoryview, memoryview]]  # (destination, source)
_NO_COPIES: Final[Copies] = deque()
_LOG: Final = logging.getLogger(__name__)


class WorkerListener(BatchListener, Protocol):
    """Receives the messages of workers."""

    def keeps_on_node(self, task_id: int, is_unsure: bool) -> bool:
        """Whether the outputs of a task are for another stage, and stay where they are until it has
        read them.
        """

    def on_worker_event(self, link: WorkerLink, event: Event) -> None:
        """Handle an event of a worker. It may be about an instance that another gateway started."""

    def on_function_loaded(self, function: MeasuredFunction) -> None:
        """Handle a function that has loaded after earlier failures."""

    def on_worker_lost(self, link: WorkerLink, batch_ids: list[int]) -> None:
        """Handle the end of a connection, with the batches that were in flight."""


class WorkerLinksListener(WorkerListener, Protocol):
    """Receives workers that connect, and their messages."""

    def on_worker_joined(self, link: WorkerLink) -> None:
        """Handle a connected worker. Its `Hello` lists the instances that it has."""

    def abort(self, error: BaseException) -> None:
        """Handle an unexpected exception that ended the reconnect loop."""


@final
@dataclass(eq=False)
class WorkerLinks:
    """Maintains one `WorkerLink` per node."""

    run_dir: Path
    nodes: list[NodeSpec]
    listener: WorkerLinksListener
    _: KW_ONLY
    arena_bytes: int
    count_fault: CountFault = ignore_fault

    def __post_init__(self) -> None:
        self.memories = NodeMemories()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to connect to every node, and reconnect forever."""
        self._tasks = [asyncio.create_task(self._reconnect_forever(node)) for node in self.nodes]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.listener.abort(error)

    async def _reconnect_forever(self, node: NodeSpec) -> None:
        while True:
            try:
                is_lost = await self._serve(node)
            except Exception:
                _LOG.exception("the connection to worker %s failed; reconnecting", node.name)
                self.count_fault("worker_connection")
                await asyncio.sleep(FAULT_RETRY_S)
            else:
                if not is_lost:
                    await asyncio.sleep(RETRY_S)

    async def _serve(self, node: NodeSpec) -> bool:
        """Serve one connection until it ends; return False if there was none."""
        link = await self._connect(node)
        if link is None:
            return False
        try:
            if link.closed.done():  # the worker has died since its `Hello`
                return True
            self.listener.on_worker_joined(link)
            _LOG.info("worker %s (process %d) connected", node.name, link.hello.pid)
            await link.closed
            _LOG.info("worker %s (process %d) disconnected", node.name, link.hello.pid)
        finally:
            link.close()
        return True

    async def _connect(self, node: NodeSpec) -> WorkerLink | None:
        """Return a link once the worker has sent its `Hello`; None if it is not listening yet."""
        loop = asyncio.get_running_loop()
        path = str(socket_path(self.run_dir, node.id))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(path)
            # A worker sends its `Hello` only after its warm-up, which may take a while, and a place
            # for a node of Ray when a node takes it. Then it is there at once.
            await _readable(sock)
            sock.setblocking(True)
            hello, peer_fd = await loop.run_in_executor(None, _handshake, sock)
            with ExitStack() as unless_linked:
                unless_linked.callback(os.close, peer_fd)
                peer_arena = Arena.attach(os.dup(peer_fd), os.fstat(peer_fd).st_size)
                unless_linked.callback(peer_arena.close)
                arena = Arena.create(self.arena_bytes)
                unless_linked.callback(arena.close)
                channel, worker_channel = channel_pair()
                unless_linked.callback(channel.close)
                with worker_channel:
                    socket.send_fds(sock, [b"\0"], [arena.fd, worker_channel.fileno()])
                sock.setblocking(False)
                link = WorkerLink(node, hello, self.listener, arena, peer_arena, self.count_fault)
                link.share_memory(self.memories, peer_fd, channel)
                unless_linked.pop_all()  # the link owns them now
                unless_linked.callback(link.close_memory)
                await loop.create_unix_connection(lambda: cast("asyncio.Protocol", link), sock=sock)
                unless_linked.pop_all()
        except (OSError, ValueError):
            sock.close()
            return None
        except BaseException:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # or the thread would wait for the `Hello` forever
            sock.close()
            raise
        return link


@final
class WorkerLink:
    """The gateway's end of the connection to one worker, from handshake to close.

    It has the methods of `asyncio.Protocol`, which a compiled class cannot extend.
    """

    def __init__(
        self,
        node: NodeSpec,
        hello: Hello,
        listener: WorkerListener,
        arena: Arena,
        peer_arena: Arena,
        count_fault: CountFault = ignore_fault,
    ) -> None:
        self.node = node
        self.hello = hello
        self.listener = listener
        self.arena = arena
        self.peer_arena = peer_arena
        self.count_fault = count_fault
        self._loop = asyncio.get_running_loop()
        self.closed = self._loop.create_future()
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._batch_ids: set[int] = set()  # in flight
        # Copies to make before each message, and the message.
        self._unsent: deque[tuple[Copies, bytes]] = deque()
        self._pending: deque[AnyMessage] = deque()  # received while outputs are being copied
        self._copies: Copies | None = None  # copies of outputs that are not finished
        self._memories: NodeMemories | None = None
        self._memory_id = 0
        self._loans: Loans | None = None
        # Offsets of the worker's outputs that nobody reads any more, in whatever thread that ended.
        self._released: deque[int] = deque()

    def share_memory(self, memories: NodeMemories, fd: int, channel: socket.socket) -> None:
        """Let outputs of stages stay in the worker's memory, and other workers read them there.

        Takes ownership of the descriptor of that memory and of the channel.
        """
        self._memories = memories
        self._memory_id = memories.add(self.peer_arena, fd, self._released.append)
        self._loans = Loans(memories, self._memory_id, channel, self._send_forget)

    def close_memory(self) -> None:
        """Close the memory of both sides. What other workers read of it stays readable."""
        if self._memories is not None and self._loans is not None:
            self._loans.close()
            self._memories.remove(self._memory_id)
            self._memories = self._loans = None
        self.arena.close()
        self.peer_arena.close()

    def run(self, message: RunBatch) -> None:
        """Send a batch. Large tensors are copied into shared memory first, unless the worker can
        read them where they are.

        Their blocks are freed when the worker releases them, because a function may keep an array.
        The message says which outputs of earlier batches the worker may free in turn. Raises only
        if nothing has been sent: `ValueError` if the batch is too large.
        """
        blocks: list[int | Block] = []
        copies: Copies = deque()
        try:
            inline_bytes = 0
            for task in message.tasks:
                inline_bytes += self._share(task, blocks, copies)
                if inline_bytes > MESSAGE_BYTES_MAX:  # fail before copying anything
                    raise ValueError(
                        f"the batch has {inline_bytes} bytes; at most {MESSAGE_BYTES_MAX}"
                    )
            message.released = self._take_released()
            data = frame(message)
        except BaseException:
            self._released.extend(message.released)
            self._free(blocks)
            raise
        self._batch_ids.add(message.batch_id)
        self._write(data, copies)

    def send_action(self, wire: Wire) -> None:
        """Send any other action."""
        self._send(ActionMessage(wire))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _share(self, task: TaskInputs, blocks: list[int | Block], copies: Copies) -> int:
        """Lend or copy large inputs, or add them to `copies` if that takes long; return how many
        large bytes did not fit.
        """
        inline_bytes = 0
        for node, tensor in enumerate(task.inputs):
            data = tensor.data
            if isinstance(data, Block) or data.nbytes < INLINE_BYTES_MAX:
                continue
            block = None if self._loans is None else self._loans.lend(data)
            if block is not None:
                blocks.append(block)
                task.inputs[node] = Tensor(tensor.name, tensor.datatype, tensor.shape, block)
                continue
            if data.nbytes <= COPY_BYTES_MAX:
                block = self.arena.allocate(data)
            else:
                reserved = self.arena.reserve(data.nbytes)
                block = None if reserved is None else reserved[0]
                if reserved is not None:
                    copies.append((reserved[1], data))
            if block is None:  # the arena is full: send the tensor inside the message
                inline_bytes += data.nbytes
                continue
            blocks.append(block.offset)
            # A new tensor: the call keeps the original for another attempt.
            task.inputs[node] = Tensor(tensor.name, tensor.datatype, tensor.shape, block)
        return inline_bytes

    def _send(self, message: Message) -> None:
        self._write(frame(message))

    def _take_released(self) -> list[int]:
        released: list[int] = []
        while self._released:  # others only append
            released.append(self._released.popleft())
        return released

    def _send_forget(self, memory_id: int) -> None:
        self._send(ForgetMemory(memory_id))

    def _write(self, data: bytes, copies: Copies = _NO_COPIES) -> None:
        """Send bytes once their copies are made, and after everything sent before.

        If the write fails, the number of bytes sent is unknown, so the connection is aborted.
        """
        if copies or self._unsent:
            self._unsent.append((copies, data))
            if len(self._unsent) == 1:
                self._loop.call_soon(self._copy_unsent)
            return
        if self._transport is None:
            return
        try:
            self._transport.write(data)
        except Exception:
            _LOG.exception("cannot write to worker %s; disconnecting", self.node.name)
            self.count_fault("worker_connection")
            self._transport.abort()

    def _copy_unsent(self) -> None:
        """Copy one chunk of the pending copies, and send the messages whose copies are complete."""
        if not self._unsent:
            return  # the connection has ended
        _copy_chunk(self._unsent[0][0])
        unsent, self._unsent = self._unsent, deque()
        while unsent and not unsent[0][0]:
            self._write(unsent.popleft()[1])
        self._unsent = unsent
        if unsent:
            self._loop.call_soon(self._copy_unsent)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transport of uvloop is no subclass of it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle the messages that are complete."""
        try:
            self._pending.extend(self._frames.feed(data))
        except ValueError as error:
            self._protocol_error(error)
        else:
            self._process_messages()

    def _process_messages(self) -> None:
        """Handle messages in order, up to one whose outputs must be copied in chunks."""
        try:
            while self._pending and self._copies is None:
                self._on_message(self._pending.popleft())
        except (ValueError, ConfigError) as error:
            self._protocol_error(error)

    def _protocol_error(self, error: Exception) -> None:
        """Close the connection after an invalid message."""
        _LOG.error("worker %s sent an invalid message; disconnecting: %s", self.node.name, error)
        self.count_fault("worker_message")
        self._pending.clear()
        self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Report the batches in flight as lost."""
        self._transport = None
        self._unsent.clear()
        self._pending.clear()
        self._copies = None
        if not self.closed.done():
            self.closed.set_result(None)
        lost, self._batch_ids = sorted(self._batch_ids), set()
        self._notify(self.listener.on_worker_lost, self, lost)
        self.close_memory()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, BatchRan):
            self._free(message.released)
            self._take_outputs(message)
        elif isinstance(message, EventMessage):
            event = from_wire(message.wire)
            if not isinstance(event, Event):
                raise ValueError(f"{message.wire} is not an event")
            if isinstance(event, BatchRefused | BatchFailed | BatchLost):
                self._batch_ids.discard(event.batch_id)
            self._notify(self.listener.on_worker_event, self, event)
        elif isinstance(message, Release):
            self._free(message.blocks)
        elif isinstance(message, FunctionLoaded):
            self._notify(self.listener.on_function_loaded, message.function)
        else:
            raise ValueError(f"{type(message).__name__} is not for a gateway")

    def _notify(self, tell: Callable[..., None], *news: object) -> None:
        try:
            tell(*news)
        except Exception:
            self._listener_failed()

    def _listener_failed(self) -> None:
        """Log and count what the listener raised, a defect of the gateway; reading goes on."""
        _LOG.exception("a message of worker %s could not be handled", self.node.name)
        self.count_fault("report")

    def _take_outputs(self, message: BatchRan) -> None:
        """Copy the outputs out of the worker's shared memory, release it, and report the batch.

        Outputs for another stage stay there.
        """
        offsets: list[int] = []
        copies: Copies = deque()
        for result in message.results:
            for tensor in result.outputs:
                if isinstance(tensor.data, Block):
                    if self._memories is not None and self._keeps_on_node(result):
                        tensor.data = self._memories.keep(self._memory_id, tensor.data)
                        continue
                    offsets.append(tensor.data.offset)
                    view = self.peer_arena.view(tensor.data)
                    if len(view) <= COPY_BYTES_MAX:
                        tensor.data = memoryview(bytes(view))
                        continue
                    room = allocate_buffer(len(view))
                    copies.append((room, view))
                    tensor.data = room.toreadonly()
        if copies:
            self._copies = copies
            self._loop.call_soon(self._copy_outputs, message, offsets)
        else:
            self._on_batch_ran(message, offsets)

    def _keeps_on_node(self, result: TaskResult) -> bool:
        try:
            return self.listener.keeps_on_node(result.task_id, result.is_unsure)
        except Exception:
            self._listener_failed()
            return False

    def _copy_outputs(self, message: BatchRan, offsets: list[int]) -> None:
        """Copy one chunk of the outputs of a batch. Later messages wait."""
        if self._copies is None:
            return  # the connection has ended and the batch is lost
        _copy_chunk(self._copies)
        if self._copies:
            self._loop.call_soon(self._copy_outputs, message, offsets)
            return
        self._copies = None
        self._on_batch_ran(message, offsets)
        self._process_messages()

    def _on_batch_ran(self, message: BatchRan, offsets: list[int]) -> None:
        self._batch_ids.discard(message.batch_id)
        self._released.extend(offsets)
        try:
            self.listener.on_batch_ran(self.node.pool_id, message)
        except Exception:
            self._listener_failed()
            self._notify(self.listener.on_event, BatchLost(message.batch_id))

    def _free(self, blocks: list[int | Block]) -> None:
        for block in blocks:
            if isinstance(block, int):
                self.arena.free(block)
            elif self._loans is not None:
                self._loans.take_back(block)


def _copy_chunk(copies: Copies) -> None:
    """Copy up to `COPY_BYTES_MAX` bytes; the rest stays in `copies`."""
    budget = COPY_BYTES_MAX
    while copies and budget > 0:
        to, source = copies.popleft()
        size = min(budget, len(source))
        to[:size] = source[:size]
        budget -= size
        if size < len(source):
            copies.appendleft((to[size:], source[size:]))


async def _readable(sock: socket.socket) -> None:
    """Wait until the peer has sent something, or has closed the connection."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def on_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock.fileno(), on_readable)
    try:
        await readable
    finally:
        loop.remove_reader(sock.fileno())


def _handshake(sock: socket.socket) -> tuple[Hello, int]:
    """Read the `Hello` of the worker and the descriptor of its shared memory.

    Reads nothing beyond the `Hello`: the worker may tell of its instances right after it.
    """
    head, descriptors, _, _ = socket.recv_fds(sock, LENGTH_BYTES, 1)
    head += _read_exactly(sock, LENGTH_BYTES - len(head))
    size = int.from_bytes(head, "little")
    if size > HELLO_BYTES_MAX:
        raise ValueError("the peer is not a worker")
    messages = Frames().feed(head + _read_exactly(sock, size))
    if len(messages) != 1 or not isinstance(messages[0], Hello) or len(descriptors) != 1:
        raise ValueError("the peer is not a worker")
    return messages[0], descriptors[0]


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("the worker closed the connection before its Hello")
        data += part
    return data
