"""The Ray cluster of a gateway: the only module that imports Ray.

All methods block, so the event loop never calls them: it uses threads (`BlockingCalls`). A process
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

import logging
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic_ns
from typing import Any, Final, final

import ray
import ray._private.worker as ray_worker  # its output is redirected
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
from headgate.core.errors import ConfigError
from headgate.core.events import Refusal
from headgate.core.model import UNLIMITED, Pool, Shape, Variant
from headgate.functions.error_text import error_text, sendable
from headgate.functions.tensor import Signature
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.pools.ray_actor import (
    LogRecord,
    RayActor,
    decode_load,
    decode_measured,
    pack_tasks,
    unpack_reply,
)
from headgate.live.pools.ray_pool import ClusterNode, OnActorGone, StartFailure, no_ray_error
from headgate.live.pools.remote_pool import CallResult, Done, Failed, Lost, Refused, RemoteCall
from headgate.live.worker.model_cache import LOAD_TIMEOUT_FACTOR

CONNECT_S: Final = 120.0  # an embedded Ray starts in seconds; on a busy machine it takes longer
CLOSE_S: Final = 10.0
UNLOAD_S: Final = 10.0
REACH_S: Final = 1.0  # until a raylet must accept a connection
OBJECT_STORE_BYTES_MIN: Final = 128 << 20  # of an embedded Ray, which demands at least 75 MB
# What Ray appends to its temporary directory: a session, and in it the longest name of a socket.
SOCKET_CHARS: Final = len("/session_2000-01-01_00-00-00_000000_1234567/sockets/plasma_store")
SOCKET_PATH_MAX: Final = 107
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
    ) -> StartFailure:
        """Start an actor and load its function; call `on_gone`, in some thread, when it ends."""
        actor = self._make_actor(variant, pool, shape_id, node_id)
        with self._lock:
            self._actors[instance_id] = actor
        failure = self._load(actor, variant)
        if failure.reason:
            self.stop(instance_id)
        else:
            actor.wait.remote().future().add_done_callback(
                lambda ended: _report_end(ended, on_gone)
            )
        return failure

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

    def call(self, call: RemoteCall) -> CallResult:
        """Run a batch on the actor of its instance and wait for its result. Never raises."""
        assert call.instance_id is not None
        with self._lock:
            actor = self._actors.get(call.instance_id)
        if actor is None:
            return Refused(Refusal.GONE, f"instance {call.instance_id} has ended")
        try:
            message, arrays = pack_tasks(call.tasks)
            large = [ray.put(array) for array in arrays]
        except (ObjectStoreFullError, OutOfDiskError) as error:
            return Refused(Refusal.BUSY, f"the object store is full: {_first_line(error)}")
        try:
            reply = unpack_reply(ray.get(actor.run.remote(message, *large), timeout=self._hang_s))
        except GetTimeoutError:
            self.stop(call.instance_id)
            return Lost(f"a batch of {call.function!r} hung: its actor is killed", node_died=True)
        except RayActorError as error:
            # If only the actor died, a task of the batch may be the reason. Else the node died.
            is_alone = not isinstance(error, ActorUnavailableError) and not _names_node(error)
            return Lost(f"{call.function}: {_actor_problem(error)}", node_died=is_alone)
        except Exception as error:  # Ray may raise anything
            return Failed(sendable(_first_line(error)))
        _log_records(reply.records)
        return Done(reply.results, reply.took_ns)

    def inspect(self, variant: Variant) -> MeasuredFunction:
        """Load a function once, wherever there is room, and measure it if nothing is declared."""
        pool = next(pool for pool in self._ray_pools if pool.id in variant.pool_ids)
        source = self._config.sources[variant.id]
        if not any(node.fits(pool) for node in self.nodes()):
            _LOG.warning("pool %s: no node of Ray has the resources of the pool yet", pool.name)
        began_ns = monotonic_ns()
        actor = self._make_actor(variant, pool, 0, None)
        try:
            failure = self._load(actor, variant)
            if failure.reason:
                return MeasuredFunction(variant.name, Signature(), (), 0, 0, failure.reason)
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

    def _load(self, actor: Any, variant: Variant) -> StartFailure:
        try:
            loaded = decode_load(ray.get(actor.load.remote(), timeout=self._load_s))
        except GetTimeoutError:
            return StartFailure("TimeoutError: no room on the node, or loading timed out")
        except (RayActorError, ActorUnschedulableError) as error:
            is_unavailable = isinstance(error, ActorUnavailableError) or _names_node(error)
            return StartFailure(_actor_problem(error), is_unavailable)
        except Exception as error:  # such as a node without Headgate
            return StartFailure(_first_line(error))
        _log_records(loaded.records)
        if loaded.version != headgate.__version__:
            problem = f"the node has Headgate {loaded.version}, not {headgate.__version__}"
            return StartFailure(problem)
        if loaded.problem:
            self._log_once(variant, loaded.problem, loaded.trace)
        return StartFailure(loaded.problem)

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
