"""The crew: connections to all workers, made again whenever they end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Protocol, final

from headgate.live.arena import Arena
from headgate.live.assignment import Place, socket_path
from headgate.live.driver import Fault, no_fault
from headgate.live.framing import Frames
from headgate.live.link import Link, Listener
from headgate.live.messages import Hello

RETRY_S: Final = 0.02
FAULT_S: Final = 1.0  # after a mistake of ours, which may well happen again
HELLO_BYTES: Final = 64 * 1024

_LOG: Final = logging.getLogger(__name__)


class CrewListener(Listener, Protocol):
    """Who hears of workers that come."""

    def joined(self, link: Link) -> None:
        """A worker is there, or there again, empty."""

    def failed(self, error: BaseException) -> None:
        """The crew has given up, which it never should."""


@final
class Crew:
    """Keeps one link to each worker."""

    def __init__(
        self,
        run_dir: Path,
        places: list[Place],
        listener: CrewListener,
        *,
        arena_bytes: int,
        fault: Fault = no_fault,
    ) -> None:
        self._run_dir = run_dir
        self._places = places
        self._listener = listener
        self._arena_bytes = arena_bytes
        self._fault = fault
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to connect, and never give up."""
        self._tasks = [asyncio.create_task(self._keep(place)) for place in self._places]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Leave the workers to themselves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._listener.failed(error)

    async def _keep(self, place: Place) -> None:
        while True:
            try:
                is_lost = await self._serve(place)
            except Exception:
                _LOG.exception("worker %s cannot be used, and is left", place.name)
                self._fault("worker_connection")
                await asyncio.sleep(FAULT_S)
            else:
                if not is_lost:
                    await asyncio.sleep(RETRY_S)

    async def _serve(self, place: Place) -> bool:
        """Have a link to a worker until it ends; False if there was none."""
        link = await self._connect(place)
        if link is None:
            return False
        try:
            self._listener.joined(link)
            _LOG.info("worker %s (process %d) has joined", place.name, link.hello.pid)
            await link.closed
            _LOG.info("worker %s (process %d) has left", place.name, link.hello.pid)
        finally:
            link.close()
        return True

    async def _connect(self, place: Place) -> Link | None:
        """Return a link once the worker has said hello; None if it is not there yet."""
        loop = asyncio.get_running_loop()
        path = str(socket_path(self._run_dir, place.id))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A worker says hello only when it has looked at its functions: that may take a while.
            hello, theirs = await loop.run_in_executor(None, _shake_hands, sock, path)
            own = Arena.create(self._arena_bytes)
            with ExitStack() as unless_linked:
                unless_linked.callback(own.close)
                unless_linked.callback(theirs.close)
                socket.send_fds(sock, [b"\0"], [own.fd])
                sock.setblocking(False)
                link = Link(place, hello, self._listener, own, theirs, self._fault)
                await loop.create_unix_connection(lambda: link, sock=sock)
                unless_linked.pop_all()
        except (OSError, ValueError):
            sock.close()
            return None
        except BaseException:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # or the thread would wait for a hello for ever
            sock.close()
            raise
        return link


def _shake_hands(sock: socket.socket, path: str) -> tuple[Hello, Arena]:
    """Connect, and wait for the worker's first message and its shared memory."""
    sock.connect(path)
    frames = Frames()
    descriptors: list[int] = []
    while True:
        data, received, _, _ = socket.recv_fds(sock, HELLO_BYTES, 1)
        descriptors.extend(received)
        if not data:
            raise ConnectionError("the worker left without a word")
        for message in frames.feed(data):
            if not isinstance(message, Hello) or len(descriptors) != 1:
                raise ValueError("that is no worker")
            size = os.fstat(descriptors[0]).st_size
            return message, Arena.attach(descriptors[0], size)
