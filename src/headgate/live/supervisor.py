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
from headgate.live import deployment as assignments
from headgate.live.deployment import Deployment, NodeSpec
from headgate.live.ipc.crash_markers import LOAD, CrashMarkers
from headgate.live.model_registry import LoadsNeeded
from headgate.live.telemetry.logs import HUNG_EXIT
from headgate.system.child_process import ChildProcess, how_ended

# A generation: the workers and the gateway of one configuration.
#
# A change of configuration is a new generation beside the old one. Both have the same listening
# sockets, so that no connection is turned away in between.


_LOG: Final = logging.getLogger(__name__)

SILENT_S_MIN: Final = 2.0  # heartbeats come twice a second; one may be late
SILENT_FIRST_S: Final = 60.0  # before the first one: Python and libraries are being read
# Before a process is started again, by how often it was in the time before: once at once.
BACKOFF_S: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
BACKOFF_WINDOW_S: Final = 30.0
BAD_CONFIGURATION: Final = 78  # how a child ends that will never be able to begin
BAD_INPUT: Final = 2  # how the command ends then
PROBLEMS: Final = b"problems: "  # begins the line of a gateway that cannot begin
PATH_MAX: Final = 70  # of the directory that run directories are made in


@final
class ProcessGroup:
    """Starts its processes, watches them, and starts again what ends."""

    def __init__(
        self,
        number: int,
        assignment: Deployment,
        *,
        http_fd: int,
        log_path: Path | None,
    ) -> None:
        self.number = number
        self.assignment = assignment
        self.loaded = assignment.load()
        self._http_fd = http_fd
        self._log_path = log_path
        self.problems: list[str] = []  # why it cannot be served, if it cannot
        self._run_dir = _make_run_dir()
        self._markers = CrashMarkers(self._run_dir)
        assignments.write(self._run_dir, assignment)
        self._hang_s = self.loaded.serve.execution_timeout_ns / 1e9
        self._silent_s = max(SILENT_S_MIN, self._hang_s)  # it may hold the interpreter meanwhile
        self._workers: dict[int, ChildProcess] = {}  # by node id
        self._places = {place.id: place for place in assignment.nodes}
        self._has_greeted = False
        self._ended_for: dict[str, str] = {}  # by child that we have ended: why
        self._restarts_s: dict[str, list[float]] = {}  # by child: when, lately
        self._due_s: dict[str, float] = {}  # by child that is gone: when it is started again
        self._gateway_starts = 0
        for place in assignment.nodes:
            self._start_worker(place)
        self.gateway = self._start_gateway()
        self.is_leaving = False

    # --- starting ------------------------------------------------------------------------------

    def _start_worker(self, place: NodeSpec) -> None:
        self._workers[place.id] = ChildProcess(
            place.name,
            "headgate.live.worker",
            [str(self._run_dir), str(place.id), "--hang-s", str(self._hang_s)],
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
        return ChildProcess("gateway", "headgate.live.gateway", arguments, keeps=[self._http_fd])

    @property
    def _loads_needed(self) -> LoadsNeeded:
        if self._has_greeted:
            return "none"
        return "all" if self.number else "one"

    @property
    def greeting(self) -> bytes | None:
        """What the gateway says when it is ready, and it is."""
        said, end, _ = self.gateway.said.partition(b"\n")
        return said if end and not said.startswith(PROBLEMS) else None

    # --- watching ------------------------------------------------------------------------------

    def look(self) -> int | None:
        """Deal with what has happened since. Return an exit status if this cannot go on."""
        for node_id, worker in self._workers.items():
            worker.hear()
            self._end_if_hung(worker)
            self._end_if_too_large(worker, self._places[node_id])
        self.gateway.hear()
        if self.greeting is not None:  # from then on it says that it lives
            self._has_greeted = True
            self._end_if_hung(self.gateway)
        for child in (self.gateway, *self._workers.values()):
            status = child.ended()
            if status is not None and child.name not in self._due_s:
                if self.is_leaving:
                    continue
                if child is self.gateway and status == BAD_CONFIGURATION:
                    child.hear()  # its last words
                    self.problems = _problems(child.said)
                    if not self._has_greeted:
                        return BAD_INPUT
                    _LOG.error("%s", "; ".join(self.problems))
                self._plan_restart(child, status)
        self._restart_due()
        return None

    def _end_if_hung(self, child: ChildProcess) -> None:
        if child.heard_s is None:
            is_silent = monotonic() - child.started_s > max(SILENT_FIRST_S, self._silent_s)
        else:
            is_silent = monotonic() - child.heard_s > self._silent_s
        if is_silent:
            self._end(child, "has hung", "TimeoutError: loading takes too long")

    def _end_if_too_large(self, worker: ChildProcess, place: NodeSpec) -> None:
        limit_bytes = self.loaded.app.pools[place.pool_id].memory_bytes
        if limit_bytes < NEVER_NS and worker.private_bytes() > limit_bytes:
            problem = "MemoryError: loading takes more memory than the pool has"
            self._end(worker, "holds more memory than its pool has", problem)

    def _end(self, child: ChildProcess, why: str, problem: str) -> None:
        """End a process; `problem` is that of the function that it is loading, if it is."""
        if child.ended() is None and child.name not in self._ended_for:
            self._ended_for[child.name] = problem
            _LOG.error("%s %s, and is ended", _called(child), why)
            child.tell(signal.SIGKILL)

    def _plan_restart(self, child: ChildProcess, status: int) -> None:
        now_s = monotonic()
        before_s = self._restarts_s.get(child.name, [])
        recent_s = [at_s for at_s in before_s if now_s - at_s < BACKOFF_WINDOW_S]
        delay_s = BACKOFF_S[min(len(recent_s), len(BACKOFF_S) - 1)]
        self._restarts_s[child.name] = [*recent_s, now_s]
        self._due_s[child.name] = now_s + delay_s
        _LOG.error(
            "%s died (%s)%s; it is started again in %g s",
            _called(child),
            how_ended(status),
            self._blame(child, status),
            delay_s,
        )

    def _blame(self, child: ChildProcess, status: int) -> str:
        """Say what a worker was loading when it died, and have that not loaded again by others."""
        problem = f"ProcessDied: {how_ended(status)} while it was loaded"
        if status == HUNG_EXIT:
            problem = "TimeoutError: loading takes too long"
        problem = self._ended_for.pop(child.name, problem)
        found = [
            under_way
            for node_id, worker in self._workers.items()
            if worker is child
            for under_way in self._markers.under_way(node_id)
        ]
        said = []
        for step, variant_id in found:
            self._markers.suspect(step, variant_id, problem)
            verb = "loading" if step == LOAD else "measuring"
            said.append(f"{verb} {self.loaded.app.variants[variant_id].name!r}")
        return f" while {' and '.join(said)}" if said else ""

    def _restart_due(self) -> None:
        for name in [name for name, due_s in self._due_s.items() if due_s <= monotonic()]:
            del self._due_s[name]
            if name == self.gateway.name and not self.is_leaving:
                self.gateway.close()
                self.gateway = self._start_gateway()
            for node_id, worker in list(self._workers.items()):
                if worker.name == name:
                    worker.close()
                    self._start_worker(self._places[node_id])

    # --- leaving -------------------------------------------------------------------------------

    def leave(self, number: signal.Signals) -> None:
        """Have the gateway finish: SIGTERM after its lame-duck time, SIGINT at once, SIGUSR1 after
        having left new connections to somebody else for its lame-duck time.
        """
        self.is_leaving = True
        # One that has not begun minds no signals yet, but this one ends it.
        self.gateway.tell(signal.SIGTERM if self.greeting is None else number)

    @property
    def has_left(self) -> bool:
        """Whether the gateway has finished."""
        return self.is_leaving and self.gateway.ended() is not None

    def kill(self) -> None:
        """End everything, now; `close` has still to be called."""
        for child in (self.gateway, *self._workers.values()):
            child.kill()

    def close(self) -> None:
        """End whatever is left: workers have nothing to do without their gateway."""
        self.gateway.close()
        for worker in self._workers.values():
            worker.tell(signal.SIGUSR1)  # SIGTERM may come from anybody, and is ignored
        for worker in self._workers.values():
            worker.wait(2.0)
            worker.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def _called(child: ChildProcess) -> str:
    return child.name if child.name == "gateway" else f"worker {child.name}"


def problems_line(problems: list[str]) -> bytes:
    """What a gateway says on its pipe that cannot begin: why not."""
    return PROBLEMS + json.dumps(problems).encode() + b"\n"


def _problems(said: bytes) -> list[str]:
    line = said.partition(b"\n")[0]
    return list(json.loads(line.removeprefix(PROBLEMS))) if line.startswith(PROBLEMS) else []


def _make_run_dir() -> Path:
    """A directory for sockets, whose paths must not be long."""
    parent = tempfile.gettempdir()
    if len(parent) > PATH_MAX:
        allowed = f"at most {PATH_MAX} characters"
        raise ConfigError("is too long for sockets", key="TMPDIR", value=parent, allowed=allowed)
    return Path(tempfile.mkdtemp(prefix="headgate-", dir=parent))


LOOK_EVERY_S: Final = 0.1
LOOK_FIRST_S: Final = 0.01  # while it is starting


@final
class Supervisor:
    """Runs until it is told to end."""

    def __init__(
        self,
        prepare: Callable[[], Deployment],
        listener: socket.socket,
        *,
        log_path: Path | None,
        watches: Callable[[], object] | None,
        greet: Callable[[bytes], None],
    ) -> None:
        self._prepare = prepare
        self._listener = listener
        self._log_path = log_path
        self._watches = watches  # what it returns changes when a watched file has
        self._greet = greet
        self._signals: list[int] = []
        self._generations: list[ProcessGroup] = []  # oldest first; the last one is wanted
        self._started = 0
        self._is_greeted = False
        self._wants_change = False
        self._is_told_to_end = False

    def run(self) -> int:
        """Serve; return the exit status."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.set_wakeup_fd(wake_write)
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        handlers = {number: signal.signal(number, self._note) for number in handled}
        try:
            self._generations.append(self._new_generation())
            return self._loop(wake_read)
        finally:
            for generation in self._generations:
                generation.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            os.close(wake_read)
            os.close(wake_write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _new_generation(self) -> ProcessGroup:
        number = self._started
        self._started += 1
        return ProcessGroup(
            number,
            self._prepare(),
            http_fd=self._listener.fileno(),
            log_path=self._log_path,
        )

    def _loop(self, wake_fd: int) -> int:
        seen = None if self._watches is None else self._watches()
        while True:
            ready, _, _ = select.select(
                [wake_fd], [], [], LOOK_EVERY_S if self._is_greeted else LOOK_FIRST_S
            )
            if ready:
                os.read(wake_fd, 4096)
            while self._signals:
                if self._is_over(signal.Signals(self._signals.pop(0))):
                    return 0
            if self._watches is not None and seen != (seen := self._watches()):
                self._change()
            status = self._look()
            if status is not None:
                return status

    def _is_over(self, number: signal.Signals) -> bool:
        """Act on a signal; whether that was the second to say that it must end."""
        if number is signal.SIGHUP:
            self._change()
            return False
        if self._is_told_to_end:
            for generation in self._generations:
                generation.kill()
            return True
        self._is_told_to_end = True
        # Gateways have the socket too, and close it when they have finished. Whoever connects after
        # that is refused rather than left waiting for somebody to accept.
        self._listener.close()
        for generation in self._generations:
            generation.leave(number)
        return False

    def _change(self) -> None:
        """Start a new generation, unless the new configuration is wrong.

        While one is on its way, it is only noted.
        """
        self._wants_change = len(self._generations) > 1
        if self._wants_change or self._is_told_to_end:
            return
        try:
            self._generations.append(self._new_generation())
        except ConfigError as error:
            _LOG.error("%s; what is served stays as it was", error)

    def _look(self) -> int | None:
        for generation in list(self._generations):
            status = generation.look()
            if status is not None and len(self._generations) == 1:
                for problem in generation.problems:
                    _LOG.error("%s", problem)
                return status
            if status is not None:
                _LOG.error("%s; what is served stays as it was", "; ".join(generation.problems))
            if status is not None or generation.has_left:
                generation.close()
                self._generations.remove(generation)
        if not self._generations:
            return 0
        if self._wants_change and len(self._generations) == 1:
            self._change()
        newest = self._generations[-1]
        if newest.greeting is not None:
            if not self._is_greeted:
                self._is_greeted = True
                self._greet(newest.greeting)
            for older in self._generations[:-1]:
                if not older.is_leaving:
                    _LOG.info("the new configuration is served")
                    older.leave(signal.SIGUSR1)
        return None
