"""The Ray host, `python -m headgate.live.ray_host RUN_DIR`: the only module that imports Ray.

It has the nodes of all Ray pools (`ray_host.node`), for all gateways, and the connection to Ray.
Functions are loaded and measured once, before the first gateway gets its `Hello`. What was measured
is kept for the next host of the same server, which would lose time with it.

All methods of `RayCluster` block, so the event loop never calls them: it uses threads. A process
can be connected to one cluster only, and all Ray pools of an application are on it. Without an
address, an embedded Ray of one node is started; its processes are children of this one.

- Ray ties its processes to the *thread* that started them (the kernel kills them when that thread
  ends). So a thread of its own connects, waits, and disconnects; it ends last.
- Actors belong to this process: Ray kills them when it disconnects, or dies in any way.
- An actor is pinned to its node and is neither restarted nor are its calls repeated by Ray: both
  are decisions of the Scheduler.
- Ray prints to stdout what happens in a cluster. Those lines become debug messages of our log.
- Ray calls an actor *unavailable* when the connection to it has broken, and declares a node dead
  only after its health checks have failed for 15 s. Until then a node with such an actor is taken
  for what a connection to its raylet says (`nodes`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic_ns
from typing import Any, Final, final

import ray
import ray._private.worker as ray_worker  # its output is redirected
from msgspec.msgpack import Decoder, Encoder
from ray._private import auto_init_hook
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import headgate
from headgate.config import AppConfig, without_keys
from headgate.core.errors import ConfigError, error_text, sendable
from headgate.core.events import Refusal
from headgate.core.model import UNLIMITED, Pool, Shape, Variant
from headgate.functions.tensor import Signature, TaskInputs
from headgate.live.deployment import NodeSpec, is_on_ray, listen, read_deployment, socket_path
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.model_registry import measured_on_ray
from headgate.live.pools.registry import no_ray_error
from headgate.live.pools.remote_pool import CallResult, Done, Failed, Lost, Refused
from headgate.live.ray_host.actor import (
    LogRecord,
    RayActor,
    decode_load,
    decode_measured,
    pack_tasks,
    unpack_reply,
)
from headgate.live.ray_host.node import (
    ClusterNode,
    Enter,
    OnActorGone,
    Place,
    RayMembership,
    RayNode,
    StartResult,
)
from headgate.live.supervisor import BAD_CONFIGURATION, HEARTBEAT, problems_line
from headgate.live.telemetry import logs
from headgate.live.telemetry.logs import exit_process
from headgate.live.worker.begun_requests import BegunRequests, create_memory
from headgate.live.worker.model_cache import LOAD_TIMEOUT_FACTOR
from headgate.system.process import restore_signal_handler, set_parent_death_signal
from headgate.system.threads import BlockingCalls, run_in_daemon_thread

CONNECT_S: Final = 120.0  # an embedded Ray starts in seconds; on a busy machine it takes longer
CLOSE_S: Final = 10.0
UNLOAD_S: Final = 10.0
NODE_POLL_S: Final = 0.5  # while the cluster has no node for a pool
REACH_S: Final = 1.0  # until a raylet must accept a connection
OBJECT_STORE_BYTES_MIN: Final = 128 << 20  # of an embedded Ray, which demands at least 75 MB
# What Ray appends to its temporary directory: a session, and in it the longest name of a socket.
SOCKET_CHARS: Final = len("/session_2000-01-01_00-00-00_000000_1234567/sockets/plasma_store")
SOCKET_PATH_MAX: Final = 107
HEARTBEAT_S: Final = 0.5
STARTS_MAX: Final = 64  # actors that start or stop at once; more wait
# The default switch interval of Python is ten times what the scheduling of a request takes, and
# calls use much CPU time.
SWITCH_S: Final = 0.0005
MEASURED: Final = "ray-measured"  # a file in the run directory
_MESSAGE_CHARS_MAX: Final = 500
_LOG: Final = logging.getLogger(__name__)
_RAY_LOG: Final = logging.getLogger(f"{__name__}.messages")
_FUNCTIONS_LOG: Final = logging.getLogger("headgate.functions")


@final
class RayCluster:
    """A connection to Ray, and the actors on it, by instance. Thread-safe."""

    def __init__(self, config: AppConfig, base: str, run_dir: Path) -> None:
        self._config = config
        self._spec = without_keys(config.spec)
        self._base = base
        self._temp_dir = run_dir / "ray"
        self._hang_s = config.serve.execution_timeout_ns / 1e9
        self._ray_pools = [
            pool
            for pool, provider in zip(config.app.pools, config.providers, strict=True)
            if provider is not None and provider.kind == "ray"
        ]
        first = config.providers[self._ray_pools[0].id]
        assert first is not None
        self._address = first.address
        self._actors: dict[int, Any] = {}  # by instance; Ray has no types for handles
        self._known_traces: set[str] = set()
        self._lock = Lock()
        self._is_connected = Event()
        self._is_closing = Event()
        self._problem: BaseException | None = None
        self._thread = Thread(target=self._own_connection, name="ray", daemon=True)

    def connect(self) -> None:
        """Connect, or start an embedded Ray. Raises `ConfigError`."""
        self._thread.start()
        if not self._is_connected.wait(CONNECT_S):
            raise self._error(f"Ray does not respond within {CONNECT_S:g} s")
        if self._problem is not None:
            raise self._error(_first_line(self._problem))

    def close(self) -> None:
        """Disconnect: Ray kills all actors; an embedded Ray ends."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def nodes(self, doubtful: Collection[str] = ()) -> list[ClusterNode]:
        """Return the nodes that are up; of the doubtful ones, those that accept connections.

        Raises if Ray does not respond.
        """
        nodes = [_cluster_node(node) for node in ray.nodes() if node["Alive"]]
        return [node for node in nodes if node.id not in doubtful or _is_reachable(node)]

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
        actor = self._make_actor(variant, pool, shape_id, node_id)
        with self._lock:
            self._actors[instance_id] = actor
        result = self._load(actor, variant)
        if result.problem:
            self.stop(instance_id)
        else:
            actor.wait.remote().future().add_done_callback(
                lambda ended: _report_end(ended, on_gone)
            )
        return result

    def stop(self, instance_id: int, *, unloads: bool = False) -> None:
        """Kill an actor; with `unloads`, let its model unload first."""
        with self._lock:
            actor = self._actors.pop(instance_id, None)
        if actor is None or self._is_closing.is_set():  # in the end Ray kills all of them
            return
        if unloads:
            with suppress(RayError):
                ray.get(actor.unload.remote(), timeout=UNLOAD_S)
        with suppress(RayError, ValueError):  # the actor or the connection is gone
            ray.kill(actor, no_restart=True)

    def call(
        self, instance_id: int, function: str, tasks: list[TaskInputs], enter: Enter
    ) -> CallResult:
        """Run a batch on the actor of an instance and wait for its result. Never raises."""
        with self._lock:
            actor = self._actors.get(instance_id)
        if actor is None:
            return Refused(Refusal.GONE, f"instance {instance_id} has ended")
        try:
            packed = _put(tasks)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            return Refused(Refusal.BUSY, f"the object store is full: {_first_line(error)}")
        try:
            new, begun_before = enter(tasks)
            if not new:
                return Done(begun_before, 0)
            message, large = _put(new) if begun_before else packed
            reply = unpack_reply(ray.get(actor.run.remote(message, *large), timeout=self._hang_s))
        except GetTimeoutError:
            self.stop(instance_id)
            return Lost(f"a batch of {function!r} hung: its actor is killed", node_died=True)
        except RayActorError as error:
            # If only the actor died, a task of the batch may be the reason. Else the node died.
            is_alone = not isinstance(error, ActorUnavailableError) and not _names_node(error)
            return Lost(f"{function}: {_actor_problem(error)}", node_died=is_alone)
        except Exception as error:  # Ray may raise anything
            return Failed(sendable(_first_line(error)))
        _log_records(reply.records)
        return Done(reply.results + begun_before, reply.took_ns)

    def inspect(self, variant: Variant) -> MeasuredFunction:
        """Load a function once, wherever there is room, and measure it if nothing is declared."""
        pool = next(pool for pool in self._ray_pools if pool.id in variant.pool_ids)
        source = self._config.sources[variant.id]
        self._wait_for_node(pool)
        began_ns = monotonic_ns()
        actor = self._make_actor(variant, pool, 0, None)
        try:
            result = self._load(actor, variant)
            if result.problem:
                return MeasuredFunction(variant.name, Signature(), (), 0, 0, result.problem)
            start_ns = monotonic_ns() - began_ns
            batch_max = source.batch_max if source is not None and source.is_measured else 0
            try:
                reply = ray.get(actor.measure.remote(batch_max), timeout=self._load_s)
            except RayError as error:  # measuring has killed it
                problem = f"cannot be measured: {_actor_problem(error)}"
                return MeasuredFunction(variant.name, Signature(), (), 0, 0, problem)
            measured = decode_measured(reply)
            measured.start_ns = start_ns
            return measured
        finally:
            with suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)

    def _wait_for_node(self, pool: Pool) -> None:
        """Wait until the cluster has a node for a pool: it may take its time to grow."""
        has_warned = False
        while not any(node.fits(pool) for node in self.nodes()):
            if not has_warned:
                _LOG.warning("pool %s: no node of Ray has the resources of the pool yet", pool.name)
                has_warned = True
            if self._is_closing.wait(NODE_POLL_S):
                return

    @property
    def _load_s(self) -> float:
        return LOAD_TIMEOUT_FACTOR * self._hang_s

    def _own_connection(self) -> None:
        """Connect, wait for the end, and disconnect, in the thread that the processes belong to."""
        try:
            self._connect()
        except BaseException as error:  # Ray may raise anything, and exits for some mistakes
            self._problem = error
        self._is_connected.set()
        self._is_closing.wait()
        with suppress(Exception):
            ray.shutdown()

    def _connect(self) -> None:
        ray_log = logging.getLogger("ray")
        ray_log.setLevel(logging.ERROR)
        ray_log.handlers.clear()  # its errors go where ours go
        ray_log.propagate = True
        ray_worker.print_to_stdstream = _log_message
        # Else any call after the end of the connection would start another Ray.
        auto_init_hook.enable_auto_connect = False
        common = {"log_to_driver": False, "configure_logging": False}
        if self._address is not None:
            ray.init(address=self._address, **common)
            return
        if len(str(self._temp_dir)) + SOCKET_CHARS > SOCKET_PATH_MAX:
            raise ConfigError(f"{self._temp_dir} is too long for the sockets of Ray: set TMPDIR")
        cpus = [pool.cpu_milli for pool in self._ray_pools]
        store_bytes = 2 * self._config.serve.shared_memory_bytes
        ray.init(
            address="local",  # whatever RAY_ADDRESS says
            num_cpus=-(-sum(cpus) // 1000) if max(cpus) < UNLIMITED else None,
            object_store_memory=max(store_bytes, OBJECT_STORE_BYTES_MIN),
            include_dashboard=False,
            _temp_dir=str(self._temp_dir),
            **common,
        )

    def _make_actor(self, variant: Variant, pool: Pool, shape_id: int, node_id: str | None) -> Any:
        options: dict[str, Any] = {
            **_resources(pool, variant.shapes[shape_id].shape),
            "max_concurrency": variant.concurrency + 1,  # one more for `wait`
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if node_id is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor_class = ray.remote(RayActor).options(**options)
        return actor_class.remote(self._spec, self._base, variant.id, shape_id)

    def _load(self, actor: Any, variant: Variant) -> StartResult:
        try:
            loaded = decode_load(ray.get(actor.load.remote(), timeout=self._load_s))
        except GetTimeoutError:
            return StartResult("TimeoutError: no room on the node, or loading timed out")
        except (RayActorError, ActorUnschedulableError) as error:
            is_unavailable = isinstance(error, ActorUnavailableError) or _names_node(error)
            return StartResult(_actor_problem(error), is_unavailable)
        except Exception as error:  # such as a node without Headgate
            return StartResult(_first_line(error))
        _log_records(loaded.records)
        if loaded.version != headgate.__version__:
            problem = f"the node has Headgate {loaded.version}, not {headgate.__version__}"
            return StartResult(problem)
        if loaded.problem:
            self._log_once(variant, loaded.problem, loaded.trace)
        return StartResult(loaded.problem, signature=loaded.signature)

    def _log_once(self, variant: Variant, problem: str, trace: str) -> None:
        """Log a load failure, with its traceback the first time."""
        with self._lock:
            is_new = trace not in self._known_traces
            self._known_traces.add(trace)
        if is_new and trace:
            _LOG.error("%s: cannot be loaded: %s\n%s", variant.name, problem, trace)
        else:
            _LOG.warning("%s: still cannot be loaded: %s", variant.name, problem)

    def _error(self, problem: str) -> ConfigError:
        key = f"pools.{self._ray_pools[0].name}"
        if self._address is None:
            return ConfigError(f"the embedded Ray cannot be started: {problem}", key=key)
        if isinstance(self._problem, ConnectionError) and self._address != "auto":
            problem += "; a cluster with token authentication needs RAY_AUTH_MODE=token"
        return no_ray_error(problem, "the application", f"{key}.address", self._address)


def _put(tasks: list[TaskInputs]) -> tuple[bytes, list[Any]]:
    """Put large tensors into the object store; return the message, and references to them."""
    message, arrays = pack_tasks(tasks)
    return message, [ray.put(array) for array in arrays]


def _resources(pool: Pool, shape: Shape) -> dict[str, float]:
    """Return what an actor reserves: CPUs where the pool limits them, and its share of a GPU.

    Ray counts in units of 1/10000, rounded down, so that 7/7 of a GPU are never more than one.
    """
    cpus = shape.cpu_milli / 1000 if pool.cpu_milli < UNLIMITED else 0.0
    return {"num_cpus": cpus, "num_gpus": shape.gpu_sevenths * 10_000 // 7 / 10_000}


def _cluster_node(node: dict[str, Any]) -> ClusterNode:
    resources = node["Resources"]
    return ClusterNode(
        node["NodeID"],
        node["NodeManagerAddress"],
        node["NodeManagerPort"],
        round(1000 * resources.get("CPU", 0)),
        round(7 * resources.get("GPU", 0)),
    )


def _is_reachable(node: ClusterNode) -> bool:
    try:
        socket.create_connection((node.host, node.port), REACH_S).close()
    except OSError:
        return False
    return True


def _report_end(ended: Any, on_gone: OnActorGone) -> None:
    error = ended.exception()
    reason = "its actor has ended" if error is None else _actor_problem(error)
    on_gone(reason, isinstance(error, ActorUnavailableError) or _names_node(error))


def _names_node(error: BaseException | None) -> bool:
    """Whether the death of an actor followed that of its node. Ray says so in its text only."""
    return "node has died" in str(error) or "node was terminated" in str(error)


def _actor_problem(error: BaseException) -> str:
    """Return why an actor is gone, in one line."""
    text = str(error)
    if isinstance(error, ActorUnavailableError):
        return "its actor cannot be reached"
    if _names_node(error):
        return "its actor died with its node"
    if "unexpectedly" in text and "exit" in text:
        return "the process of its actor died"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    """Return the message of an error in one line. Ray's messages have many."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ConfigError):
        return str(error)
    return (lines[0] if lines else error_text(error))[:_MESSAGE_CHARS_MAX]


def _log_records(records: list[LogRecord]) -> None:
    for record in records:
        _FUNCTIONS_LOG.log(record.level, "%s", record.text)


def _log_message(message: dict[str, Any], ignore_prefix: bool) -> None:
    """Log what Ray would print, for those who look for it."""
    for line in message.get("lines", ()):
        _RAY_LOG.debug("%s", str(line).rstrip())


@final
class _NodeMaker:
    """Makes the `RayNode` of a node of Ray that has taken a place."""

    def __init__(
        self,
        config: AppConfig,
        cluster: RayCluster,
        measured: dict[int, MeasuredFunction],
        membership: RayMembership,
        begun: BegunRequests,
        specs: Sequence[NodeSpec],
    ) -> None:
        self._app = config.app
        self._cluster = cluster
        self._measured = measured
        self._membership = membership
        self._begun = begun
        slots = sum(config.app.pools[spec.pool_id].slots for spec in specs)
        self._threads = BlockingCalls(slots + STARTS_MAX, asyncio.get_running_loop())

    def __call__(self, place: Place, node: ClusterNode) -> RayNode:
        return RayNode(
            place.spec.id,
            place.pool,
            self._app,
            self._measured,
            name=place.spec.name,
            ray_id=node.id,
            cluster=self._cluster,
            threads=self._threads,
            begun=self._begun,
            on_doubt=self._membership.doubt,
            on_news=place.flush,
        )


def _measured(config: AppConfig, cluster: RayCluster, path: Path) -> dict[int, MeasuredFunction]:
    """Return what this host or one before it has measured, by variant id."""
    with suppress(FileNotFoundError):
        return _DECODER.decode(path.read_bytes())
    measured = {variant.id: cluster.inspect(variant) for variant in measured_on_ray(config)}
    new = path.with_suffix(".new")
    new.write_bytes(_ENCODER.encode(measured))
    new.rename(path)  # all of it, whenever this process is killed
    return measured


async def _send_heartbeats(fd: int | None, is_stopped: asyncio.Event) -> None:
    """Tell the supervisor that this process is alive; end with the supervisor."""
    if fd is None:
        return
    os.set_blocking(fd, False)
    while True:
        with suppress(BlockingIOError):  # the pipe is full: the supervisor is busy
            try:
                os.write(fd, HEARTBEAT)
            except BrokenPipeError:  # the supervisor has died
                is_stopped.set()
                return
        await asyncio.sleep(HEARTBEAT_S)


def main() -> int:
    """Serve until the supervisor says otherwise; return the exit status."""
    set_parent_death_signal(signal.SIGKILL)
    # As a worker: service managers send SIGTERM to all processes, and a terminal SIGINT.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="headgate.live.ray_host", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--heartbeat-fd", type=int, help="gets a heartbeat byte twice a second")
    parser.add_argument("--begun-fd", type=int, help="memory of requests that have begun")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    return asyncio.run(_run(options.run_dir, options.heartbeat_fd, options.begun_fd))


async def _run(run_dir: Path, heartbeat_fd: int | None, begun_fd: int | None) -> int:
    loop = asyncio.get_running_loop()
    is_stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, is_stopped.set)
    deployment = read_deployment(run_dir)
    config = deployment.load()
    logs.configure(config.serve, "ray host")
    specs = [node for node in deployment.nodes if is_on_ray(config.providers, node)]
    listeners = [listen(socket_path(run_dir, spec.id)) for spec in specs]
    heartbeats = asyncio.create_task(_send_heartbeats(heartbeat_fd, is_stopped))
    cluster = RayCluster(config, deployment.base, run_dir)
    preparing = asyncio.create_task(_prepare(config, cluster, run_dir / MEASURED))
    stopping = asyncio.create_task(is_stopped.wait())
    await asyncio.wait({preparing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not preparing.done():
        return 0  # Ray ends with this process
    try:
        measured = preparing.result()
    except ConfigError as error:
        if heartbeat_fd is not None:
            os.write(heartbeat_fd, problems_line([str(error)]))
        return BAD_CONFIGURATION
    membership = RayMembership(cluster)
    begun = BegunRequests(create_memory() if begun_fd is None else begun_fd)
    make = _NodeMaker(config, cluster, measured, membership, begun, specs)
    arena_bytes = config.serve.shared_memory_bytes
    for spec, listener in zip(specs, listeners, strict=True):
        pool = config.app.pools[spec.pool_id]
        membership.places.append(Place(spec, pool, listener, make, arena_bytes))
    membership.ask()
    await stopping
    heartbeats.cancel()
    await membership.stop()
    return 0


async def _prepare(
    config: AppConfig, cluster: RayCluster, path: Path
) -> dict[int, MeasuredFunction]:
    """Connect to Ray; return what is known of the functions that no worker loads."""
    await run_in_daemon_thread(cluster.connect)
    restore_signal_handler(signal.SIGTERM)  # Ray has installed one that ends the process
    return await run_in_daemon_thread(lambda: _measured(config, cluster, path))


_ENCODER: Final = Encoder()
_DECODER: Final = Decoder(dict[int, MeasuredFunction])


if __name__ == "__main__":
    exit_process(main())
