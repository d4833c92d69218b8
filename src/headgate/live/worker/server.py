"""The worker as a server: one thread reads from gateways, others run functions.

One iteration of the reading thread: wait, read, act, then write once to each gateway. A thread that
has run a batch handles the completion and replies by itself. One lock ensures that only one thread
acts at a time; no thread holds it while it waits or while a function runs. An idle worker blocks in
all threads except for the heartbeat.

A failure of a gateway ends its connection. A failure of the worker ends the process, and gateways
see the connection close.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from time import monotonic_ns
from typing import Final, final

from headgate.config.options import AppConfig
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.live.deployment import NodeSpec
from headgate.live.ipc.crash_markers import CrashMarkers
from headgate.live.ipc.messages import AnyMessage, Hello, RunBatch
from headgate.live.telemetry.logs import HUNG_EXIT, exit_process
from headgate.live.worker.begun_requests import BegunRequests, create_memory
from headgate.live.worker.connection import UNSENT_BYTES_MAX, GatewayConnection
from headgate.live.worker.executor import Executor, Job
from headgate.live.worker.model_cache import LOAD_TIMEOUT_FACTOR, Loader, ModelCache
from headgate.live.worker.node import WorkerNode
from headgate.live.worker.warmup import Warmup
from headgate.system.busy_poll import BusyEpoll
from headgate.system.process import private_bytes

_LOG: Final = logging.getLogger(__name__)

LINGER_NS: Final = 1_000_000_000  # for gateways to read the last replies
CONNECTIONS_MAX: Final = 64
HEARTBEAT_S: Final = 0.5


@final
class Server:
    """Serves gateways until it is stopped."""

    def __init__(
        self,
        listener: socket.socket,
        run_dir: Path,
        spec: NodeSpec,
        config: AppConfig,
        base: str,
        *,
        heartbeat_fd: int | None,
        begun_fd: int | None,
        hang_ns: int,
        may_spin: bool,
    ) -> None:
        self._listener = listener
        self._spec = spec
        self._arena_bytes = config.serve.shared_memory_bytes
        self._lock = Lock()
        self._executor = Executor(self._on_done)
        self._woken_fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._blocked_until_ns = 0
        self._watchdog = Watchdog(
            spec.name, heartbeat_fd, self._executor, self._lock, self._request_stop
        )
        app, pool = config.app, config.app.pools[spec.pool_id]
        markers = CrashMarkers(run_dir)
        loader = Loader(app, config.sources, base, spec.id, markers)
        self._model_cache = ModelCache(app, pool, loader, own_bytes=private_bytes())
        self._warmup = Warmup(
            spec.id,
            [variant for variant in app.variants if pool.id in variant.pool_ids],
            config.sources,
            self._model_cache,
            loader,
            markers,
            LOAD_TIMEOUT_FACTOR * hang_ns,
            self._on_warmed_up,
        )
        self._node = WorkerNode(
            spec.id,
            pool,
            app,
            self._warmup.measured,
            run_dir,
            self._model_cache,
            loader,
            self._executor,
            hang_ns,
            BegunRequests(create_memory() if begun_fd is None else begun_fd),
        )
        self._epoll = select.epoll()
        self._connections: dict[int, GatewayConnection] = {}  # by descriptor
        self._is_stop_requested = False
        self._may_spin = may_spin
        self._is_single_request = False  # the last batch had a single request
        self._busy_epoll = BusyEpoll(self._epoll)

    def serve(self) -> int:
        """Warm up the functions, then serve; return the exit status of the process."""
        signal.signal(signal.SIGUSR1, lambda number, frame: self._request_stop())
        # A terminal sends it to all processes; the supervisor handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Without this, a signal that arrives just before the wait would be handled only after it.
        signal.set_wakeup_fd(self._wake_fd, warn_on_full_buffer=False)
        self._epoll.register(self._woken_fd, select.EPOLLIN)
        self._watchdog.start()
        self._executor.submit(self._warmup)
        while not self._node.is_draining or self._executor.is_busy():
            ready = self._wait()
            with self._lock:
                self._turn(ready)
                inline_job, self._executor.inline_job = self._executor.inline_job, None
            if inline_job is not None:
                self._executor.run_here(inline_job)
        self._linger()
        self._model_cache.clear()
        return 0

    def _turn(self, ready: list[tuple[int, int]]) -> None:
        for fd, events in ready:
            if fd == self._woken_fd:
                os.read(fd, 4096)
            elif fd == self._listener.fileno():
                self._accept()
            elif fd in self._connections:
                self._read_from(self._connections[fd], events)
        if self._is_stop_requested and not self._node.is_draining:
            self._listener.close()
            self._node.drain()
        now_ns = monotonic_ns()
        if now_ns >= self._node.next_timer_ns():
            self._node.retire_idle(now_ns)
        for connection in list(self._connections.values()):
            try:
                self._flush(connection)
            except OSError:
                self._close(connection)

    def _on_done(self, job: Job) -> None:
        """Handle the completion of a job, in the thread that ran it."""
        with self._lock:
            self._executor.finish(job)
            for connection in self._connections.values():
                with suppress(OSError):  # the reading thread will see it as well
                    self._flush(connection)
            if self._node.is_draining or self._node.next_timer_ns() < self._blocked_until_ns:
                self._wake()

    def _wake(self) -> None:
        """Wake the reading thread. Safe from any thread and from signal handlers."""
        with suppress(BlockingIOError):  # the pipe is full: the thread will wake anyway
            os.write(self._wake_fd, b".")

    def _wait(self) -> list[tuple[int, int]]:
        if self._executor.inline_job is not None:
            return self._epoll.poll(0)
        wake_ns = self._blocked_until_ns = self._node.next_timer_ns()
        until_ns = None if wake_ns == NEVER_NS else wake_ns
        return self._busy_epoll.wait(until_ns, may_spin=self._may_spin and self._is_single_request)

    def _on_warmed_up(self) -> None:
        """Start to accept gateways: the `Hello` can be sent now."""
        if not self._node.is_draining:
            gc.freeze()  # models are long-lived: exclude them from garbage collection
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the peer has disconnected, or no descriptor is free
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            sock.close()
            return
        sock.setblocking(False)
        connection = GatewayConnection(sock, self._arena_bytes)
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._node.add_gateway(connection)
        try:
            functions = list(self._warmup.measured.values())
            connection.send_hello(
                Hello(self._spec.id, os.getpid(), functions, self._node.present_instances())
            )
        except OSError:
            self._close(connection)

    def _read_from(self, connection: GatewayConnection, events: int) -> None:
        try:
            if not events & ~select.EPOLLOUT:
                return  # writable again: flushed at the end of the iteration
            messages = connection.read()
            if messages is None:
                self._close(connection)
                return
            for message in messages:
                self._on_message(connection, message)
        except OSError:
            self._close(connection)
        # Invalid messages never come from our own gateway.
        except (ValueError, ConfigError) as error:
            _LOG.error(
                "worker %s: a gateway sent an invalid message; disconnecting: %s",
                self._spec.name,
                error,
            )
            self._close(connection)

    def _on_message(self, connection: GatewayConnection, message: AnyMessage) -> None:
        if type(message) is RunBatch:
            self._is_single_request = len(message.tasks) == 1
        self._node.on_message(connection, message)

    def _flush(self, connection: GatewayConnection) -> None:
        """Write what is pending, and stop reading from a gateway with too much unread output."""
        connection.send_released()
        if not connection.unsent_bytes:
            return
        was_blocked = connection.is_blocked
        connection.flush()
        if connection.is_blocked or was_blocked:
            events = select.EPOLLOUT if connection.is_blocked else 0
            if connection.unsent_bytes <= UNSENT_BYTES_MAX:
                events |= select.EPOLLIN
            self._epoll.modify(connection.sock.fileno(), events)

    def _close(self, connection: GatewayConnection) -> None:
        fd = connection.sock.fileno()
        if self._connections.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            connection.close()
            self._node.remove_gateway(connection)

    def _request_stop(self) -> None:
        self._is_stop_requested = True
        self._wake()

    def _linger(self) -> None:
        """Wait up to `LINGER_NS` for gateways to read the last replies."""
        until_ns = monotonic_ns() + LINGER_NS
        for connection in list(self._connections.values()):
            connection.sock.settimeout(max(0.01, (until_ns - monotonic_ns()) / 1e9))
            with suppress(OSError):
                connection.flush()


@final
@dataclass(eq=False)
class Watchdog:
    """Sends heartbeats from a thread of its own: no long batch or read may delay them."""

    name: str
    fd: int | None
    executor: Executor
    lock: Lock
    on_supervisor_gone: Callable[[], None]
    _told: set[str] = field(default_factory=set)  # slow jobs that the log has named

    def start(self) -> None:
        """Start the thread. `on_supervisor_gone` is called when the pipe is closed at its end."""
        if self.fd is not None:
            os.set_blocking(self.fd, False)
        self._send_heartbeat()  # now, because a function that holds the GIL may delay the thread
        Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._exit_if_hung()
            self.log_slow_jobs()
            with self.lock:  # take the lock: a deadlocked worker must stop sending heartbeats
                self._send_heartbeat()
            time.sleep(HEARTBEAT_S)

    def _exit_if_hung(self) -> None:
        now_ns = time.monotonic_ns()
        job = self.executor.overdue_job(now_ns)
        if job is not None:
            seconds = (now_ns - job.began_ns) / 1e9
            _LOG.error(
                "worker %s: %s hung for %.1f s; the worker exits",
                self.name,
                job.description,
                seconds,
            )
            exit_process(HUNG_EXIT)

    def log_slow_jobs(self) -> None:
        """Name what is being loaded or measured, once, while it may still hang for long."""
        now_ns = time.monotonic_ns()
        slow = {job.description: job for job in self.executor.slow_jobs(now_ns)}
        for description in slow.keys() - self._told:
            seconds = (now_ns - slow[description].began_ns) / 1e9
            _LOG.warning("worker %s: %s takes %.0f s so far", self.name, description, seconds)
        self._told = set(slow)

    def _send_heartbeat(self) -> None:
        if self.fd is None:
            return
        try:
            os.write(self.fd, b".")
        except BlockingIOError:
            pass  # the pipe is full: the supervisor is busy
        except OSError:  # the supervisor has died
            self.fd = None
            self.on_supervisor_gone()
