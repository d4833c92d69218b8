"""All remote pools of an application, and the dispatch of actions to them."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Final, final

from headgate.config import AppConfig
from headgate.config.providers import Provider
from headgate.core.actions import CancelBatch, KeepWarm, PlacedAction
from headgate.core.errors import ConfigError
from headgate.core.model import Pool
from headgate.functions.tensor import Signature
from headgate.live.deployment import NodeSpec
from headgate.live.pools.remote_pool import (
    CallResult,
    CostSink,
    EndpointNode,
    NodeListener,
    OnColdStart,
    RemoteCall,
    RemotePool,
    WarmKeeper,
)
from headgate.system.threads import BlockingCalls

THREADS_MAX: Final = 256  # concurrent calls per pool; more count as throttled
SWITCH_S: Final = 0.0005  # how long a calling thread may hold the GIL while the event loop waits
CHECK_S: Final = 2.0  # until a server at an address must respond
# HTTP/2, which the head of Ray speaks: the greeting of a client, with empty settings. A server
# begins with its own settings: a frame of type 4.
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS: Final = 4
_FRAME_HEAD_BYTES: Final = 9


def check_providers(config: AppConfig, where: str) -> None:
    """Check that every pool has a usable provider. Raises `ConfigError`."""
    for pool, provider in zip(config.app.pools, config.providers, strict=True):
        if provider is None:
            problem = "has no provider: it can be simulated, but not served"
            allowed = "lambda" if pool.faas is not None else "sagemaker"
            key = f"pools.{pool.name}.provider"
            raise ConfigError(problem, where=where, key=key, allowed=allowed)
        if provider.kind == "ray":
            check_ray(provider.address, where, f"pools.{pool.name}")
        elif provider.kind != "local":
            _client(pool, provider, hang_s=1.0, where=where)


def check_ray(address: str | None, where: str, key: str) -> None:
    """Check that Ray is installed, and that there is a head at the address. Raises `ConfigError`.

    Ray itself would retry for minutes, and it takes seconds to import.
    """
    if find_spec("ray") is None:
        problem = "needs the extra `ray`: pip install 'headgate[ray]'"
        raise ConfigError(problem, where=where, key=f"{key}.provider")
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    problem = ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CHECK_S) as connection:
            connection.settimeout(CHECK_S)
            connection.sendall(_GREETING)
            head = connection.recv(_FRAME_HEAD_BYTES)
        if len(head) < 4 or head[3] != _SETTINGS:
            problem = "another server responds there"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise no_ray_error(problem, where, f"{key}.address", address)


def no_ray_error(problem: str, where: str, key: str, address: str) -> ConfigError:
    """Return the error for an address without Ray."""
    allowed = "host:port of the head of a cluster that this machine is part of (ray start), auto"
    return ConfigError(
        f"there is no Ray: {problem}", where=where, key=key, value=address, allowed=allowed
    )


@final
class RemotePools:
    """Creates each remote pool and passes actions on to it."""

    def __init__(
        self,
        config: AppConfig,
        listener: NodeListener,
        costs: CostSink,
        on_cold_start: OnColdStart,
        signatures: Sequence[Signature],
        *,
        first_node_id: int,
    ) -> None:
        self.by_pool: dict[int, RemotePool] = {}
        self.warm_keepers: dict[int, WarmKeeper] = {}  # by pool
        self._app = config.app
        self._listener = listener
        self._costs = costs
        self._on_cold_start = on_cold_start
        self._signatures = signatures  # by function id
        self._hang_ns = config.serve.execution_timeout_ns
        self._nodes: dict[int, EndpointNode] = {}
        for pool, provider in zip(config.app.pools, config.providers, strict=True):
            if provider is not None and provider.kind not in ("local", "ray"):
                self._add(pool, provider, first_node_id + len(self._nodes))
        if self.by_pool:
            # The default switch interval of Python is ten times what the scheduling of a request
            # takes, and calls use much CPU time.
            sys.setswitchinterval(SWITCH_S)

    def join(self) -> None:
        """Report the nodes that are up."""
        for node in self._nodes.values():
            node.join()

    async def stop(self) -> None:
        await asyncio.gather(*(keeper.stop() for keeper in self.warm_keepers.values()))
        for remote_pool in self.by_pool.values():
            remote_pool.stop()

    def pools_up(self) -> set[int]:
        """Return the pools that can run batches."""
        return set(self.by_pool)

    def runner_of(
        self, pool_id: int, node_id: int | None
    ) -> Callable[[int, RemoteCall], None] | None:
        """Return what runs batches on a node, or without a node; None if not remote."""
        if node_id is None:
            remote_pool = self.by_pool.get(pool_id)
            return None if remote_pool is None else remote_pool.send
        node = self._nodes.get(node_id)
        return None if node is None else node.dispatch

    def execute(self, action: PlacedAction) -> bool:
        """Execute any action other than a dispatch; return whether it was for a remote pool."""
        if action.node_id is None:
            return isinstance(action, CancelBatch)  # a call in flight returns anyway
        node = self._nodes.get(action.node_id)
        if node is not None:
            node.execute(action)
        return node is not None

    def keep_warm(self, action: KeepWarm) -> None:
        function_id = self._app.variants[action.variant_id].function_id
        name = self._app.functions[function_id].name
        self.warm_keepers[action.pool_id].set_target(
            name, action.count, is_provisioned=action.is_provisioned
        )

    def _add(self, pool: Pool, provider: Provider, first_node_id: int) -> None:
        hang_s = self._hang_ns / 1e9
        client = _client(pool, provider, hang_s=hang_s, where="the application")
        if pool.faas is not None:
            from headgate.live.pools.lambda_pool import LambdaFunctions  # noqa: PLC0415

            functions = LambdaFunctions(client, provider, pool.faas.payload_bytes_max)
            remote_pool = self._make_pool(pool, functions.call)
            self.warm_keepers[pool.id] = WarmKeeper(
                remote_pool,
                pool.faas,
                functions.ping,
                functions.provision,
                self._costs,
                self._on_cold_start,
            )
            return
        from headgate.live.pools.sagemaker_pool import SageMakerEndpoints  # noqa: PLC0415

        endpoints = SageMakerEndpoints(client, provider, first_node_id)
        remote_pool = self._make_pool(pool, endpoints.call)
        remote_pool.on_unreachable = self._on_unreachable
        for number in range(pool.nodes):
            node = NodeSpec(first_node_id + number, pool.id, f"{pool.name}{number + 1}", [])
            self._nodes[node.id] = EndpointNode(
                node, self._app, self._signatures, remote_pool, endpoints.ping, self._listener
            )

    def _make_pool(self, pool: Pool, call: Callable[[RemoteCall], CallResult]) -> RemotePool:
        threads = BlockingCalls(_threads(pool), asyncio.get_running_loop())
        remote_pool = RemotePool(
            pool,
            call,
            self._listener,
            self._costs,
            self._on_cold_start,
            threads,
            hang_ns=self._hang_ns,
        )
        self.by_pool[pool.id] = remote_pool
        return remote_pool

    def _on_unreachable(self, call: RemoteCall) -> None:
        node = None if call.node_id is None else self._nodes[call.node_id]
        if node is not None:
            node.mark_unreachable(call)


def _threads(pool: Pool) -> int:
    if pool.faas is not None:
        return min(pool.faas.concurrency_max, THREADS_MAX)
    return min(pool.nodes * (pool.slots + pool.queue_max) + 2, THREADS_MAX)  # two for pings


# `Any`: boto3 has no types.
def _client(pool: Pool, provider: Provider, *, hang_s: float, where: str) -> Any:
    """Make the client of a pool. Raises `ConfigError` if it could never work."""
    key = f"pools.{pool.name}"
    try:
        from headgate.live.pools.aws_client import make_client  # noqa: PLC0415  an extra
    except ImportError as error:
        problem = f"needs the extra `aws`: pip install 'headgate[aws]' ({error})"
        raise ConfigError(problem, where=where, key=f"{key}.provider") from None
    return make_client(
        "lambda" if provider.kind == "lambda" else "sagemaker-runtime",
        provider,
        connections=_threads(pool),
        hang_s=hang_s,
        where=where,
        key=key,
    )
