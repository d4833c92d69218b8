"""The supervisor: the process that a user starts and that exits last.

It serves no requests. It binds the sockets, keeps one process group (the workers, the gateways and
the Ray host of one configuration) running, restarts processes that die, and forwards signals:

- SIGTERM: each gateway reports not-ready, serves on for its lame-duck time, then accepts no more
  requests and finishes the open ones within the drain time; then all processes exit. SIGINT
  (Ctrl-C) skips the lame-duck time.
- A second signal kills everything at once.
- SIGHUP, or a change of a watched file: a new process group is started beside the old one, and the
  old one drains once the new one is ready. Both have the same listening sockets, so that no
  connection is refused in between. If the new configuration is invalid or one of its functions
  cannot be loaded, the old group stays.

Several gateways (`serve: {gateways: N}`) share the ports and the workers. The supervisor counts
those that are ready and tells each of them whenever the number changes; they do not talk to each
other.
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
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from time import monotonic
from typing import Final, final

from headgate.core.actions import Action
from headgate.core.errors import ConfigError
from headgate.core.events import Event, GatewaysChanged
from headgate.core.ids import SCHEDULERS_MAX
from headgate.core.model import UNLIMITED
from headgate.live.deployment import Deployment, NodeSpec, is_on_ray, write_deployment
from headgate.live.ipc.control_channel import ControlChannel
from headgate.live.ipc.crash_markers import LOAD, CrashMarkers
from headgate.live.model_registry import LoadsNeeded
from headgate.live.node_grants import NodeGrants
from headgate.live.telemetry.logs import HUNG_EXIT
from headgate.live.worker.begun_requests import create_memory
from headgate.system.process import ChildProcess, describe_exit

_LOG: Final = logging.getLogger(__name__)
POLL_S: Final = 0.1
STARTING_POLL_S: Final = 0.01  # until the first group is ready
HEARTBEAT_TIMEOUT_S_MIN: Final = 2.0  # heartbeats come twice a second; one may be late
# Until the first heartbeat: Python and libraries are being imported
FIRST_HEARTBEAT_TIMEOUT_S: Final = 60.0
# Delay before a restart, by the number of restarts within `BACKOFF_WINDOW_S`; the first is
# immediate.
BACKOFF_S: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
BACKOFF_WINDOW_S: Final = 30.0
STOP_S: Final = 2.0  # for workers to exit; then they are killed
BAD_CONFIGURATION: Final = 78  # exit status of a child that can never start
BAD_INPUT: Final = 2  # exit status of the command in that case
PROBLEMS_PREFIX: Final = b"problems: "  # prefix of the line of a child that cannot start
HEARTBEAT: Final = b"."
RAY_HOST: Final = "ray host"  # name of the process with the nodes of Ray
RAY_STOP_S: Final = 10.0  # for an embedded Ray to end
GATEWAY: Final = "gateway"  # name of a process; of several, followed by its slot
PATH_MAX: Final = 70  # of the parent of run directories: paths of Unix sockets are short


@final
@dataclass(eq=False)
class Supervisor:
    """Runs until a signal stops it."""

    prepare: Callable[[], Deployment]
    listener: socket.socket
    _: KW_ONLY
    log_path: Path | None
    watched_state: Callable[[], object] | None  # its return value changes when a watched file does
    on_ready: Callable[[bytes], None]

    def __post_init__(self) -> None:
        self._signals: list[int] = []
        self._groups: list[ProcessGroup] = []  # oldest first; the last one is current
        self._groups_started = 0
        self._is_ready = False
        self._is_reload_pending = False
        self._is_stopping = False
        self._begun_fd = create_memory()  # requests that have begun, also across reloads

    def run(self) -> int:
        """Serve until stopped; return the exit status."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        previous_fd = signal.set_wakeup_fd(wake_write)
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        handlers = {
            number: signal.signal(number, lambda number, frame: self._signals.append(number))
            for number in handled
        }
        try:
            # Before anything is read: an edit while the first group starts is a reload as well.
            state = None if self.watched_state is None else self.watched_state()
            self._groups.append(self._new_group())
            return self._loop(wake_read, state)
        finally:
            for group in self._groups:
                group.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(wake_read)
            os.close(wake_write)
            os.close(self._begun_fd)

    def _new_group(self) -> ProcessGroup:
        number = self._groups_started
        self._groups_started += 1
        http_fd, begun_fd = self.listener.fileno(), self._begun_fd
        return ProcessGroup(
            number, self.prepare(), http_fd=http_fd, begun_fd=begun_fd, log_path=self.log_path
        )

    def _wait(self, wake_fd: int) -> None:
        """Wait for a signal or a message, but not for long."""
        poll = select.poll()  # `select` takes no descriptor beyond 1023
        for fd in (wake_fd, *(fd for group in self._groups for fd in group.control_fds())):
            poll.register(fd, select.POLLIN)
        timeout_s = POLL_S if self._is_ready else STARTING_POLL_S
        ready = dict(poll.poll(timeout_s * 1e3))
        if wake_fd in ready:
            os.read(wake_fd, 4096)

    def _loop(self, wake_fd: int, state: object) -> int:
        while True:
            self._wait(wake_fd)
            while self._signals:
                if self._on_signal(signal.Signals(self._signals.pop(0))):
                    return 0
            if self.watched_state is not None and state != (state := self.watched_state()):
                self._reload()
            status = self._poll()
            if status is not None:
                return status

    def _on_signal(self, number: signal.Signals) -> bool:
        """Handle a signal; return whether to exit at once, as after the second stop signal."""
        if number is signal.SIGHUP:
            self._reload()
            return False
        if self._is_stopping:
            for group in self._groups:
                group.kill()
            return True
        self._is_stopping = True
        # Gateways have the socket as well and close it when they have drained. Clients that connect
        # after that are refused instead of waiting for an accept that never comes.
        self.listener.close()
        for group in self._groups:
            group.drain(number)
        return False

    def _reload(self) -> None:
        """Start a new process group, unless the new configuration is invalid.

        If a new group is starting already, the reload is deferred until it is ready.
        """
        self._is_reload_pending = len(self._groups) > 1
        if self._is_reload_pending or self._is_stopping:
            return
        try:
            self._groups.append(self._new_group())
        except ConfigError as error:
            _LOG.error("%s; the running configuration stays", error)

    def _poll(self) -> int | None:
        for group in list(self._groups):
            status = group.poll()
            if status is not None and len(self._groups) == 1:
                for problem in group.problems:
                    _LOG.error("%s", problem)
                return status
            if status is not None:
                _LOG.error("%s; the running configuration stays", "; ".join(group.problems))
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
                self.on_ready(newest.ready_line)
            for older in self._groups[:-1]:
                if not older.is_draining:
                    _LOG.info("the new configuration is ready and serves")
                    older.drain(signal.SIGUSR1)
        return None


@final
@dataclass(eq=False)
class GatewayChild:
    """One gateway process, and the connection to it.

    A slot is a place among the gateways of a group. Whoever replaces a gateway that has died gets
    its slot, and with it its name; but never its index, because its ids may be in use on workers.
    """

    slot: int
    index: int
    process: ChildProcess
    channel: ControlChannel

    @property
    def ready_line(self) -> bytes | None:
        """The line that the gateway writes when it is ready; None until then."""
        line, end, _ = self.process.output.partition(b"\n")
        return line if end and not line.startswith(PROBLEMS_PREFIX) else None

    @property
    def is_serving(self) -> bool:
        return self.ready_line is not None and self.process.exit_status() is None

    def close(self) -> None:
        self.process.close()
        self.channel.close()


@final
class ProcessGroup:
    """The workers, the gateways and, for pools on Ray, the Ray host of one configuration. Starts,
    watches and restarts them.

    The first gateway starts alone, because it starts the instances that the others then find. They
    are started when it is ready.
    """

    def __init__(
        self,
        number: int,
        deployment: Deployment,
        *,
        http_fd: int,
        begun_fd: int,
        log_path: Path | None,
    ) -> None:
        self.number = number
        self.config = deployment.load()
        self._http_fd = http_fd
        self._begun_fd = begun_fd
        self._log_path = log_path
        self.problems: list[str] = []  # why this configuration cannot be served
        self._run_dir = _make_run_dir()
        self._markers = CrashMarkers(self._run_dir)
        write_deployment(self._run_dir, deployment)
        self._hang_s = self.config.serve.execution_timeout_ns / 1e9
        # A function may hold the GIL for as long as a batch may take.
        self._heartbeat_timeout_s = max(HEARTBEAT_TIMEOUT_S_MIN, self._hang_s)
        self._workers: dict[int, ChildProcess] = {}  # by node id
        self._nodes = {node.id: node for node in deployment.nodes}
        self._has_been_ready = False
        # By child that was killed here: the problem to report.
        self._kill_reasons: dict[str, str] = {}
        self._restarts_s: dict[str, list[float]] = {}  # by child: times of recent restarts
        self._restart_at_s: dict[str, float] = {}  # by dead child: when it is restarted
        self.is_draining = False
        self.ready_line: bytes | None = None  # of the first gateway, once all have been ready
        self._gateways: dict[int, GatewayChild] = {}  # by slot
        self._gateway_starts = 0
        self._gateways_counted = 0  # as the gateways have been told
        nodes, run_dir = deployment.nodes, self._run_dir
        self._grants = NodeGrants(self.config.app, nodes, run_dir, self._tell_gateway)
        self._ray_host: ChildProcess | None = None
        providers = self.config.providers
        for node in deployment.nodes:
            if not is_on_ray(providers, node):
                self._start_worker(node)
        if len(self._workers) < len(deployment.nodes):
            self._ray_host = self._start_ray_host()
        self._start_gateway(0)

    def _start_worker(self, node: NodeSpec) -> None:
        arguments = [str(self._run_dir), str(node.id), "--hang-s", str(self._hang_s)]
        arguments += ["--begun-fd", str(self._begun_fd)]
        self._workers[node.id] = ChildProcess(
            node.name, "headgate.live.worker", arguments, inherited_fds=[self._begun_fd]
        )

    def _start_ray_host(self) -> ChildProcess:
        arguments = [str(self._run_dir), "--begun-fd", str(self._begun_fd)]
        return ChildProcess(
            RAY_HOST, "headgate.live.ray_host", arguments, inherited_fds=[self._begun_fd]
        )

    def _node_children(self) -> list[ChildProcess]:
        """Return the processes that have nodes."""
        workers = list(self._workers.values())
        return workers if self._ray_host is None else [*workers, self._ray_host]

    def _start_gateway(self, slot: int) -> None:
        index, channel = self._gateway_starts % SCHEDULERS_MAX, ControlChannel()
        control_fd, count = channel.gateway_sock.fileno(), self.config.serve.gateways
        arguments = [str(self._run_dir), "--control-fd", str(control_fd)]
        inherited_fds = [control_fd]
        if count == 1:
            arguments += ["--http-fd", str(self._http_fd)]
            inherited_fds.append(self._http_fd)
        arguments += ["--slot", str(slot), "--index", str(index)]
        arguments += ["--gateways", str(self._count_serving() + 1)]
        if self.number or self._gateway_starts:
            # Until then new connections are accepted by the previous gateway or the others, or
            # wait in the backlog instead of being refused.
            arguments.append("--listens-when-ready")
        if self._log_path is not None:
            # Each gateway has an event log of its own; an existing file is archived under a number.
            arguments += ["--log", str(log_path_of(self._log_path, slot, count))]
        arguments += ["--loads-needed", self._loads_needed(slot)]
        self._gateway_starts += 1
        name = GATEWAY if count == 1 else f"{GATEWAY} {slot}"
        process = ChildProcess(
            name, "headgate.live.gateway", arguments, inherited_fds=inherited_fds
        )
        channel.gateway_sock.close()
        self._gateways[slot] = GatewayChild(slot, index, process, channel)

    def _loads_needed(self, slot: int) -> LoadsNeeded:
        if self._has_been_ready or slot:
            return "none"  # the first gateway has checked them
        return "all" if self.number else "one"

    def _count_serving(self) -> int:
        return sum(gateway.is_serving for gateway in self._gateways.values())

    def control_fds(self) -> list[int]:
        """Descriptors that become readable when a gateway, or a worker, has sent something."""
        channels = (gateway.channel for gateway in self._gateways.values())
        open_fds = [channel.fileno() for channel in channels if not channel.is_broken]
        return open_fds + self._grants.fds()

    def poll(self) -> int | None:
        """Handle output, deaths and restarts; return an exit status if the group cannot go on."""
        for child in self._node_children():
            child.poll_output()
            self._kill_if_silent(child)
        for node_id, worker in self._workers.items():
            self._kill_if_over_memory(worker, self._nodes[node_id])
        for gateway in self._gateways.values():
            gateway.process.poll_output()
            if gateway.ready_line is not None:  # a ready gateway sends heartbeats
                self._kill_if_silent(gateway.process)
            if gateway.channel.is_stuck:
                self._kill(gateway.process, "does not read from its supervisor", "")
        self._check_ready()
        gateways = [gateway.process for gateway in self._gateways.values()]
        for child in (*gateways, *self._node_children()):
            status = child.exit_status()
            if status is not None and child.name not in self._restart_at_s:
                if self.is_draining:
                    continue
                if status == BAD_CONFIGURATION:
                    child.poll_output()  # read its last output
                    self.problems = _parse_problems(child.output)
                    if not self._has_been_ready:
                        return BAD_INPUT
                    _LOG.error("%s", "; ".join(self.problems))
                self._plan_restart(child, status)
        self._grant_nodes()
        self._restart_children()
        self._tell_count()
        return None

    def _grant_nodes(self) -> None:
        """Take the starts that gateways have ordered without a node, and grant them nodes."""
        for gateway in self._gateways.values():
            for message in gateway.channel.receive():
                if isinstance(message, Action):
                    self._grants.order(message)
            if gateway.process.exit_status() is not None:
                self._grants.gateway_left(gateway.index)
        self._grants.poll()

    def _tell_gateway(self, index: int, event: Event) -> None:
        for gateway in self._gateways.values():
            if gateway.index == index:
                gateway.channel.send(event)

    def _check_ready(self) -> None:
        """Start the other gateways when the first is ready; note when all of them are."""
        first = self._gateways[0].ready_line
        if first is None or self._has_been_ready:
            return
        for slot in range(1, self.config.serve.gateways):
            if slot not in self._gateways and not self.is_draining:
                self._start_gateway(slot)
        if self._count_serving() == self.config.serve.gateways:
            self._has_been_ready = True
            self.ready_line = first

    def _tell_count(self) -> None:
        """Tell every gateway how many are ready, if that has changed. A single one knows."""
        count = self._count_serving() if self.config.serve.gateways > 1 else 0
        for gateway in self._gateways.values():
            channel = gateway.channel
            if count and count != self._gateways_counted and gateway.is_serving:
                channel.send(GatewaysChanged(count))
            channel.flush()
        self._gateways_counted = count

    def _kill_if_silent(self, child: ChildProcess) -> None:
        timeout_s, since_s = self._heartbeat_timeout_s, child.last_output_s
        if since_s is None:
            timeout_s, since_s = max(FIRST_HEARTBEAT_TIMEOUT_S, timeout_s), child.started_s
        if monotonic() - since_s > timeout_s:
            self._kill(child, "sends no heartbeat", "TimeoutError: loading timed out")

    def _kill_if_over_memory(self, worker: ChildProcess, node: NodeSpec) -> None:
        limit_bytes = self.config.app.pools[node.pool_id].memory_bytes
        if limit_bytes < UNLIMITED and worker.private_bytes() > limit_bytes:
            problem = "MemoryError: loading exceeds the memory of the pool"
            self._kill(worker, "exceeds the memory of its pool", problem)

    def _kill(self, child: ChildProcess, why: str, problem: str) -> None:
        """Kill a child. `problem` is reported for the function that it is loading, if any."""
        if child.exit_status() is None and child.name not in self._kill_reasons:
            self._kill_reasons[child.name] = problem
            _LOG.error("%s %s and is killed", _display_name(child), why)
            child.send_signal(signal.SIGKILL)

    def _plan_restart(self, child: ChildProcess, status: int) -> None:
        now_s = monotonic()
        before_s = self._restarts_s.get(child.name, [])
        recent_s = [at_s for at_s in before_s if now_s - at_s < BACKOFF_WINDOW_S]
        delay_s = BACKOFF_S[min(len(recent_s), len(BACKOFF_S) - 1)]
        self._restarts_s[child.name] = [*recent_s, now_s]
        self._restart_at_s[child.name] = now_s + delay_s
        _LOG.error(
            "%s died (%s)%s; restarting in %g s",
            _display_name(child),
            describe_exit(status),
            self._describe_crash(child, status),
            delay_s,
        )

    def _describe_crash(self, child: ChildProcess, status: int) -> str:
        """Return what a worker was doing when it died; those functions become suspects."""
        problem = f"ProcessDied: {describe_exit(status)} while loading"
        if status == HUNG_EXIT:
            problem = "TimeoutError: loading timed out"
        problem = self._kill_reasons.pop(child.name, problem)
        interrupted = [
            step_of_variant
            for node_id, worker in self._workers.items()
            if worker is child
            for step_of_variant in self._markers.take_interrupted(node_id)
        ]
        activities = []
        for step, variant_id in interrupted:
            self._markers.mark_suspect(step, variant_id, problem)
            verb = "loading" if step == LOAD else "measuring"
            activities.append(f"{verb} {self.config.app.variants[variant_id].name!r}")
        return f" while {' and '.join(activities)}" if activities else ""

    def _restart_children(self) -> None:
        for name in [name for name, due_s in self._restart_at_s.items() if due_s <= monotonic()]:
            del self._restart_at_s[name]
            for slot, gateway in list(self._gateways.items()):
                if gateway.process.name == name and not self.is_draining:
                    gateway.close()
                    self._start_gateway(slot)
            for node_id, worker in list(self._workers.items()):
                if worker.name == name:
                    worker.close()
                    self._start_worker(self._nodes[node_id])
            if self._ray_host is not None and name == RAY_HOST:
                self._ray_host.close()
                self._ray_host = self._start_ray_host()

    def drain(self, number: signal.Signals) -> None:
        """Make the gateways finish and exit: SIGTERM after their lame-duck time, SIGINT at once,
        SIGUSR1 after a lame-duck time in which they leave new connections to the next group.
        """
        self.is_draining = True
        for gateway in self._gateways.values():
            # A gateway that is still starting handles no other signal than SIGTERM.
            is_ready = gateway.ready_line is not None
            gateway.process.send_signal(number if is_ready else signal.SIGTERM)

    @property
    def is_drained(self) -> bool:
        """Whether the gateways have exited after `drain`."""
        processes = (gateway.process for gateway in self._gateways.values())
        return self.is_draining and all(each.exit_status() is not None for each in processes)

    def kill(self) -> None:
        """Kill all processes now; `close` must still be called."""
        for gateway in self._gateways.values():
            gateway.process.kill()
        for child in self._node_children():
            child.kill()

    def close(self) -> None:
        """Stop the remaining processes and remove the run directory."""
        self._grants.close()
        for gateway in self._gateways.values():
            gateway.close()
        for child in self._node_children():
            # They ignore SIGTERM, which a service manager sends to all.
            child.send_signal(signal.SIGUSR1)
        began_s = monotonic()  # for all together: one by one, many would take minutes
        for child in self._node_children():
            limit_s = RAY_STOP_S if child is self._ray_host else STOP_S
            child.wait(max(0.0, began_s + limit_s - monotonic()))
            child.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def problems_line(problems: list[str]) -> bytes:
    """Return the line that a gateway or a Ray host writes to its pipe if it cannot start."""
    return PROBLEMS_PREFIX + json.dumps(problems).encode() + b"\n"


def log_path_of(path: Path, slot: int, gateways: int) -> Path:
    """Return the path of the event log of one of several gateways.

    >>> log_path_of(Path("run.log"), 1, 2).name, log_path_of(Path("run.log"), 0, 1).name
    ('run-1.log', 'run.log')
    """
    return path if gateways == 1 else path.with_name(f"{path.stem}-{slot}{path.suffix}")


def _display_name(child: ChildProcess) -> str:
    is_worker = child.name.partition(" ")[0] != GATEWAY and child.name != RAY_HOST
    return f"worker {child.name}" if is_worker else child.name


def _parse_problems(crashed: bytes) -> list[str]:
    line = crashed.partition(b"\n")[0].lstrip(HEARTBEAT)
    is_list = line.startswith(PROBLEMS_PREFIX)
    return list(json.loads(line.removeprefix(PROBLEMS_PREFIX))) if is_list else []


def _make_run_dir() -> Path:
    """Make a directory for Unix sockets, whose paths must be short."""
    parent = tempfile.gettempdir()
    if len(parent) > PATH_MAX:
        allowed = f"at most {PATH_MAX} characters"
        raise ConfigError(
            "is too long for Unix sockets", key="TMPDIR", value=parent, allowed=allowed
        )
    return Path(tempfile.mkdtemp(prefix="headgate-", dir=parent))
