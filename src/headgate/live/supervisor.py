"""The supervisor: the process that a user starts, and that ends last.

It serves nothing itself. It binds the sockets, keeps a generation of workers and a gateway alive,
and passes signals on:

- SIGTERM: the gateway says it is not ready, goes on for its lame-duck time, takes no more, finishes
  what it has within its bound, and all end. SIGINT (Ctrl-C) leaves the lame-duck time out.
- A second signal ends everything at once.
- SIGHUP, or a changed file where that is watched: a new generation is started; when it is ready,
  the old one finishes. If the new configuration is wrong, or one of its functions cannot be loaded,
  the old one stays.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.live import deployment as deployments
from headgate.live.deployment import Deployment, NodeSpec
from headgate.live.ipc.crash_markers import LOAD, CrashMarkers
from headgate.live.model_registry import LoadsNeeded
from headgate.live.telemetry.logs import HUNG_EXIT
from headgate.system.child_process import ChildProcess, describe_exit

# A generation: the workers and the gateway of one configuration.
#
# A change of configuration is a new generation beside the old one. Both have the same listening
# sockets, so that no connection is turned away in between.


_LOG: Final = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S_MIN: Final = 2.0  # heartbeats come twice a second; one may be late
FIRST_HEARTBEAT_TIMEOUT_S: Final = 60.0  # before the first one: Python and libraries are being read
# Before a process is started again, by how often it was in the time before: once at once.
BACKOFF_S: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
BACKOFF_WINDOW_S: Final = 30.0
BAD_CONFIGURATION: Final = 78  # how a child ends that will never be able to begin
BAD_INPUT: Final = 2  # how the command ends then
PROBLEMS_PREFIX: Final = b"problems: "  # begins the line of a gateway that cannot begin
PATH_MAX: Final = 70  # of the directory that run directories are made in


@final
class ProcessGroup:
    """Starts its processes, watches them, and starts again what ends."""

    def __init__(
        self,
        number: int,
        deployment: Deployment,
        *,
        http_fd: int,
        log_path: Path | None,
    ) -> None:
        self.number = number
        self.deployment = deployment
        self.config = deployment.load()
        self._http_fd = http_fd
        self._log_path = log_path
        self.problems: list[str] = []  # why it cannot be served, if it cannot
        self._run_dir = _make_run_dir()
        self._markers = CrashMarkers(self._run_dir)
        deployments.write_deployment(self._run_dir, deployment)
        self._hang_s = self.config.serve.hang_ns / 1e9
        self._heartbeat_timeout_s = max(
            HEARTBEAT_TIMEOUT_S_MIN, self._hang_s
        )  # it may hold the interpreter meanwhile
        self._workers: dict[int, ChildProcess] = {}  # by node id
        self._nodes = {node.id: node for node in deployment.nodes}
        self._has_been_ready = False
        self._kill_reasons: dict[str, str] = {}  # by child that we have ended: why
        self._restarts_s: dict[str, list[float]] = {}  # by child: when, lately
        self._restart_at_s: dict[str, float] = {}  # by child that is gone: when it is started again
        self._gateway_starts = 0
        for node in deployment.nodes:
            self._start_worker(node)
        self.gateway = self._start_gateway()
        self.is_draining = False

    # --- starting ------------------------------------------------------------------------------

    def _start_worker(self, node: NodeSpec) -> None:
        self._workers[node.id] = ChildProcess(
            node.name,
            "headgate.live.worker",
            [str(self._run_dir), str(node.id), "--hang-s", str(self._hang_s)],
        )

    def _start_gateway(self) -> ChildProcess:
        arguments = [str(self._run_dir), "--http-fd", str(self._http_fd)]
        if self.number or self._gateway_starts:
            # Who comes meanwhile is served by the one before, or had better wait than be refused.
            arguments.append("--listens-when-ready")
        arguments += ["--loads-needed", self._loads_needed]
        if self._log_path is not None:
            # Each gateway has a log of its own: what lies there already is given a number.
            arguments += ["--log", str(self._log_path)]
        self._gateway_starts += 1
        return ChildProcess(
            "gateway", "headgate.live.gateway", arguments, inherited_fds=[self._http_fd]
        )

    @property
    def _loads_needed(self) -> LoadsNeeded:
        if self._has_been_ready:
            return "none"
        return "all" if self.number else "one"

    @property
    def ready_line(self) -> bytes | None:
        """What the gateway says when it is ready, and it is."""
        crashed, end, _ = self.gateway.output.partition(b"\n")
        return crashed if end and not crashed.startswith(PROBLEMS_PREFIX) else None

    # --- watching ------------------------------------------------------------------------------

    def poll(self) -> int | None:
        """Deal with what has happened since. Return an exit status if this cannot go on."""
        for node_id, worker in self._workers.items():
            worker.poll_output()
            self._kill_if_silent(worker)
            self._kill_if_over_memory(worker, self._nodes[node_id])
        self.gateway.poll_output()
        if self.ready_line is not None:  # from then on it says that it lives
            self._has_been_ready = True
            self._kill_if_silent(self.gateway)
        for child in (self.gateway, *self._workers.values()):
            status = child.exit_status()
            if status is not None and child.name not in self._restart_at_s:
                if self.is_draining:
                    continue
                if child is self.gateway and status == BAD_CONFIGURATION:
                    child.poll_output()  # its last words
                    self.problems = _parse_problems(child.output)
                    if not self._has_been_ready:
                        return BAD_INPUT
                    _LOG.error("%s", "; ".join(self.problems))
                self._plan_restart(child, status)
        self._restart_children()
        return None

    def _kill_if_silent(self, child: ChildProcess) -> None:
        if child.last_output_s is None:
            is_silent = monotonic() - child.started_s > max(
                FIRST_HEARTBEAT_TIMEOUT_S, self._heartbeat_timeout_s
            )
        else:
            is_silent = monotonic() - child.last_output_s > self._heartbeat_timeout_s
        if is_silent:
            self._kill(child, "has hung", "TimeoutError: loading takes too long")

    def _kill_if_over_memory(self, worker: ChildProcess, node: NodeSpec) -> None:
        limit_bytes = self.config.app.pools[node.pool_id].memory_bytes
        if limit_bytes < NEVER_NS and worker.private_bytes() > limit_bytes:
            problem = "MemoryError: loading takes more memory than the pool has"
            self._kill(worker, "holds more memory than its pool has", problem)

    def _kill(self, child: ChildProcess, why: str, problem: str) -> None:
        """End a process; `problem` is that of the function that it is loading, if it is."""
        if child.exit_status() is None and child.name not in self._kill_reasons:
            self._kill_reasons[child.name] = problem
            _LOG.error("%s %s, and is ended", _display_name(child), why)
            child.send_signal(signal.SIGKILL)

    def _plan_restart(self, child: ChildProcess, status: int) -> None:
        now_s = monotonic()
        before_s = self._restarts_s.get(child.name, [])
        recent_s = [at_s for at_s in before_s if now_s - at_s < BACKOFF_WINDOW_S]
        delay_s = BACKOFF_S[min(len(recent_s), len(BACKOFF_S) - 1)]
        self._restarts_s[child.name] = [*recent_s, now_s]
        self._restart_at_s[child.name] = now_s + delay_s
        _LOG.error(
            "%s died (%s)%s; it is started again in %g s",
            _display_name(child),
            describe_exit(status),
            self._describe_crash(child, status),
            delay_s,
        )

    def _describe_crash(self, child: ChildProcess, status: int) -> str:
        """Say what a worker was loading when it died, and have that not loaded again by others."""
        problem = f"ProcessDied: {describe_exit(status)} while it was loaded"
        if status == HUNG_EXIT:
            problem = "TimeoutError: loading takes too long"
        problem = self._kill_reasons.pop(child.name, problem)
        found = [
            under_way
            for node_id, worker in self._workers.items()
            if worker is child
            for under_way in self._markers.take_interrupted(node_id)
        ]
        crashed = []
        for step, variant_id in found:
            self._markers.mark_suspect(step, variant_id, problem)
            verb = "loading" if step == LOAD else "measuring"
            crashed.append(f"{verb} {self.config.app.variants[variant_id].name!r}")
        return f" while {' and '.join(crashed)}" if crashed else ""

    def _restart_children(self) -> None:
        for name in [name for name, due_s in self._restart_at_s.items() if due_s <= monotonic()]:
            del self._restart_at_s[name]
            if name == self.gateway.name and not self.is_draining:
                self.gateway.close()
                self.gateway = self._start_gateway()
            for node_id, worker in list(self._workers.items()):
                if worker.name == name:
                    worker.close()
                    self._start_worker(self._nodes[node_id])

    # --- leaving -------------------------------------------------------------------------------

    def drain(self, number: signal.Signals) -> None:
        """Have the gateway finish: SIGTERM after its lame-duck time, SIGINT at once, SIGUSR1 after
        having left new connections to somebody else for its lame-duck time.
        """
        self.is_draining = True
        # One that has not begun minds no signals yet, but this one ends it.
        self.gateway.send_signal(signal.SIGTERM if self.ready_line is None else number)

    @property
    def is_drained(self) -> bool:
        """Whether the gateway has finished."""
        return self.is_draining and self.gateway.exit_status() is not None

    def kill(self) -> None:
        """End everything, now; `close` has still to be called."""
        for child in (self.gateway, *self._workers.values()):
            child.kill()

    def close(self) -> None:
        """End whatever is left: workers have nothing to do without their gateway."""
        self.gateway.close()
        for worker in self._workers.values():
            worker.send_signal(signal.SIGUSR1)  # SIGTERM may come from anybody, and is ignored
        for worker in self._workers.values():
            worker.wait(2.0)
            worker.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def _display_name(child: ChildProcess) -> str:
    return child.name if child.name == "gateway" else f"worker {child.name}"


def problems_line(problems: list[str]) -> bytes:
    """What a gateway says on its pipe that cannot begin: why not."""
    return PROBLEMS_PREFIX + json.dumps(problems).encode() + b"\n"


def _parse_problems(crashed: bytes) -> list[str]:
    line = crashed.partition(b"\n")[0]
    return (
        list(json.loads(line.removeprefix(PROBLEMS_PREFIX)))
        if line.startswith(PROBLEMS_PREFIX)
        else []
    )


def _make_run_dir() -> Path:
    """A directory for sockets, whose paths must not be long."""
    parent = tempfile.gettempdir()
    if len(parent) > PATH_MAX:
        allowed = f"at most {PATH_MAX} characters"
        raise ConfigError("is too long for sockets", key="TMPDIR", value=parent, allowed=allowed)
    return Path(tempfile.mkdtemp(prefix="headgate-", dir=parent))


POLL_S: Final = 0.1
STARTING_POLL_S: Final = 0.01  # while it is starting


@final
class Supervisor:
    """Runs until it is told to end."""

    def __init__(
        self,
        prepare: Callable[[], Deployment],
        listener: socket.socket,
        *,
        log_path: Path | None,
        watched_state: Callable[[], object] | None,
        on_ready: Callable[[bytes], None],
    ) -> None:
        self._prepare = prepare
        self._listener = listener
        self._log_path = log_path
        self._watched_state = watched_state  # what it returns changes when a watched file has
        self._on_ready = on_ready
        self._signals: list[int] = []
        self._groups: list[ProcessGroup] = []  # oldest first; the last one is wanted
        self._groups_started = 0
        self._is_ready = False
        self._is_reload_pending = False
        self._is_stopping = False

    def run(self) -> int:
        """Serve; return the exit status."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.set_wakeup_fd(wake_write)
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        handlers = {number: signal.signal(number, self._queue_signal) for number in handled}
        try:
            self._groups.append(self._new_group())
            return self._loop(wake_read)
        finally:
            for group in self._groups:
                group.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            os.close(wake_read)
            os.close(wake_write)

    def _queue_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _new_group(self) -> ProcessGroup:
        number = self._groups_started
        self._groups_started += 1
        return ProcessGroup(
            number,
            self._prepare(),
            http_fd=self._listener.fileno(),
            log_path=self._log_path,
        )

    def _loop(self, wake_fd: int) -> int:
        seen = None if self._watched_state is None else self._watched_state()
        while True:
            ready, _, _ = select.select(
                [wake_fd], [], [], POLL_S if self._is_ready else STARTING_POLL_S
            )
            if ready:
                os.read(wake_fd, 4096)
            while self._signals:
                if self._on_signal(signal.Signals(self._signals.pop(0))):
                    return 0
            if self._watched_state is not None and seen != (seen := self._watched_state()):
                self._reload()
            status = self._poll()
            if status is not None:
                return status

    def _on_signal(self, number: signal.Signals) -> bool:
        """Act on a signal; whether that was the second to say that it must end."""
        if number is signal.SIGHUP:
            self._reload()
            return False
        if self._is_stopping:
            for group in self._groups:
                group.kill()
            return True
        self._is_stopping = True
        # Gateways have the socket too, and close it when they have finished. Whoever connects after
        # that is refused rather than left waiting for somebody to accept.
        self._listener.close()
        for group in self._groups:
            group.drain(number)
        return False

    def _reload(self) -> None:
        """Start a new generation, unless the new configuration is wrong.

        While one is on its way, it is only noted.
        """
        self._is_reload_pending = len(self._groups) > 1
        if self._is_reload_pending or self._is_stopping:
            return
        try:
            self._groups.append(self._new_group())
        except ConfigError as error:
            _LOG.error("%s; what is served stays as it was", error)

    def _poll(self) -> int | None:
        for group in list(self._groups):
            status = group.poll()
            if status is not None and len(self._groups) == 1:
                for problem in group.problems:
                    _LOG.error("%s", problem)
                return status
            if status is not None:
                _LOG.error("%s; what is served stays as it was", "; ".join(group.problems))
            if status is not None or group.is_drained:
                group.close()
                self._groups.remove(group)
        if not self._groups:
            return 0
        if self._is_reload_pending and len(self._groups) == 1:
            self._reload()
        newest = self._groups[-1]
        if newest.ready_line is not None:
            if not self._is_ready:
                self._is_ready = True
                self._on_ready(newest.ready_line)
            for older in self._groups[:-1]:
                if not older.is_draining:
                    _LOG.info("the new configuration is served")
                    older.drain(signal.SIGUSR1)
        return None
