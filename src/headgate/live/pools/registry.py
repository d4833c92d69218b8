"""All remote pools of an application, and the dispatch of actions to them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from headgate.config import AppConfig
from headgate.config.providers import Provider
from headgate.core.actions import CancelBatch, KeepWarm, PlacedAction
from headgate.core.errors import ConfigError
from headgate.core.model import Pool
from headgate.functions.tensor import Signature
from headgate.live.deployment import NodeSpec
from headgate.live.pools.ray_pool import RayMembership, RayNode, check_ray
from headgate.live.pools.remote_pool import (
    GRACE_NS,
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

if TYPE_CHECKING:
    from headgate.live.pools.ray_cluster import RayCluster

THREADS_MAX: Final = 256  # concurrent calls per pool; more count as throttled
STARTS_MAX: Final = 64  # actors of a Ray pool that start or stop at once; more wait
SWITCH_S: Final = 0.0005  # how long a calling thread may hold the GIL while the event loop waits


def check_providers(config: AppConfig, where: str) -> None:
    """Check that every pool has a usable provider. Raises `ConfigError`."""
    for pool, provider in zip(config.app.pools, config.providers, strict=True):
        if provider is None:
            problem = "has no provider: it can be simulated, but not served"
            allowed = "lambda" if pool.faas is not None else "sagemaker"
            key = f"pools.{pool.name}.provider"
            raise ConfigError(problem, where=where, key=key, allowed=allowed)
        if provider.kind == "ray":
            if config.serve.gateways > 1:  # their Backends would not know of each other
                problem = f"cannot be shared with {pool.name}, a pool on Ray"
                gateways = config.serve.gateways
                raise ConfigError(
                    problem, where=where, key="serve.gateways", value=gateways, allowed="1"
                )
            check_ray(provider.address, where, f"pools.{pool.name}")
        elif provider.kind != "local":
            _client(pool, provider, hang_s=1.0, where=where)


def uses_ray(config: AppConfig) -> bool:
    """Whether a pool of the application is on Ray."""
    return any(provider is not None and provider.kind == "ray" for provider in config.providers)


def connect_ray(config: AppConfig, base: str, run_dir: Path) -> RayCluster | None:
    """Connect to the cluster of the Ray pools; None if there are none. Raises `ConfigError`.

    Blocks for seconds.
    """
    if not uses_ray(config):
        return None
    from headgate.live.pools.ray_cluster import RayCluster  # noqa: PLC0415  an extra

    cluster = RayCluster(config, base, run_dir)
    cluster.connect()
    return cluster


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
        ray: RayCluster | None = None,
    ) -> None:
        self.by_pool: dict[int, RemotePool] = {}
        self.warm_keepers: dict[int, WarmKeeper] = {}  # by pool
        self._app = config.app
        self._listener = listener
        self._costs = costs
        self._on_cold_start = on_cold_start
        self._signatures = signatures  # by function id
        self._hang_ns = config.serve.execution_timeout_ns
        self._nodes: dict[int, EndpointNode | RayNode] = {}
        self._ray = ray
        self._membership = None if ray is None else RayMembership(ray)
        for pool, provider in zip(config.app.pools, config.providers, strict=True):
            if provider is not None and provider.kind != "local":
                self._add(pool, provider, first_node_id + len(self._nodes))
        if self.by_pool:
            # The default switch interval of Python is ten times what the scheduling of a request
            # takes, and calls use much CPU time.
            sys.setswitchinterval(SWITCH_S)

    def join(self) -> None:
        """Report the nodes that are up; those of Ray as soon as Ray has named them."""
        for node in self._nodes.values():
            if isinstance(node, EndpointNode):
                node.join()
        if self._membership is not None:
            self._membership.ask()

    async def stop(self) -> None:
        await asyncio.gather(*(keeper.stop() for keeper in self.warm_keepers.values()))
        for remote_pool in self.by_pool.values():
            remote_pool.stop()
        if self._membership is not None:
            await self._membership.stop()

    def pools_up(self) -> set[int]:
        """Return the pools that can run batches: a Ray pool needs a node."""
        places = () if self._membership is None else self._membership.places
        on_ray = {place.spec.pool_id for place in places}
        with_node = {place.spec.pool_id for place in places if place.taken_by is not None}
        return self.by_pool.keys() - on_ray | with_node

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
        if provider.kind == "ray":
            self._add_ray(pool, first_node_id)
            return
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

    def _add_ray(self, pool: Pool, first_node_id: int) -> None:
        cluster, membership = self._ray, self._membership
        assert cluster is not None and membership is not None, "the gateway connects first"
        # A call has the timeout itself, and then knows that its actor was killed.
        remote_pool = self._make_pool(pool, cluster.call, grace_ns=GRACE_NS)
        threads = BlockingCalls(STARTS_MAX, asyncio.get_running_loop())
        for number in range(pool.nodes):
            spec = NodeSpec(first_node_id + number, pool.id, f"{pool.name}{number + 1}", [])
            node = RayNode(
                spec, self._app, remote_pool, cluster, threads, self._listener, membership.doubt
            )
            self._nodes[spec.id] = node
            membership.places.append(node)
        remote_pool.on_returned = self._on_ray_returned

    def _on_ray_returned(self, call: RemoteCall, outcome: CallResult) -> None:
        assert call.node_id is not None
        node = self._nodes[call.node_id]
        assert isinstance(node, RayNode)
        node.on_returned(call, outcome)

    def _make_pool(
        self, pool: Pool, call: Callable[[RemoteCall], CallResult], *, grace_ns: int = 0
    ) -> RemotePool:
        threads = BlockingCalls(_threads(pool), asyncio.get_running_loop())
        remote_pool = RemotePool(
            pool,
            call,
            self._listener,
            self._costs,
            self._on_cold_start,
            threads,
            hang_ns=self._hang_ns + grace_ns,
        )
        self.by_pool[pool.id] = remote_pool
        return remote_pool

    def _on_unreachable(self, call: RemoteCall) -> None:
        node = None if call.node_id is None else self._nodes[call.node_id]
        if isinstance(node, EndpointNode):
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
