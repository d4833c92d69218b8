"""All pools of an application that somebody else runs, and who is asked for what."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from headgate.config import AppConfig
from headgate.config.providers import Provider, providers_of
from headgate.core.actions import CancelBatch, KeepWarm, PlacedAction
from headgate.core.errors import ConfigError
from headgate.core.model import Pool
from headgate.functions.tensor import Signature
from headgate.live.deployment import NodeSpec
from headgate.live.pools.remote_pool import (
    CallResult,
    CostSink,
    RemoteCall,
    RemotePool,
    Started,
    WarmKeeper,
)
from headgate.live.pools.sagemaker_pool import EndpointNode, NodeListener
from headgate.system.threads import DaemonThreads

THREADS_MAX: Final = 256  # calls of one pool at once; what exceeds them counts as throttled
SWITCH_S: Final = 0.0005  # how long a thread that calls may keep the loop from running


def check_providers(loaded: AppConfig, where: str) -> None:
    """See that every pool can be served. Raises `ConfigError`: one that could never be asked."""
    for pool, provider in zip(loaded.app.pools, providers_of(loaded), strict=True):
        if provider is None:
            problem = "has no provider: it can be simulated and not served"
            allowed = "lambda" if pool.faas is not None else "sagemaker"
            key = f"pools.{pool.name}.provider"
            raise ConfigError(problem, where=where, key=key, allowed=allowed)
        if provider.kind != "local":
            _client(pool, provider, hang_s=1.0, where=where)


@final
class RemotePools:
    """Makes an outpost of each such pool, and passes on what is meant for it."""

    def __init__(
        self,
        loaded: AppConfig,
        listener: NodeListener,
        books: CostSink,
        started: Started,
        signatures: Sequence[Signature],
        *,
        first_node_id: int,
    ) -> None:
        self.by_pool: dict[int, RemotePool] = {}
        self.warmths: dict[int, WarmKeeper] = {}  # by pool
        self._app = loaded.app
        self._listener = listener
        self._books = books
        self._started = started
        self._signatures = signatures  # by function id
        self._hang_ns = loaded.serve.execution_timeout_ns
        self._nodes: dict[int, EndpointNode] = {}
        for pool, provider in zip(loaded.app.pools, providers_of(loaded), strict=True):
            if provider is not None and provider.kind != "local":
                self._add(pool, provider, first_node_id + len(self._nodes))
        if self.by_pool:
            # Python lets a thread go on for so long while others wait; its default is ten times
            # what we take to schedule a request, and calls burn much of that.
            sys.setswitchinterval(SWITCH_S)

    def join(self) -> None:
        """Have the nodes join."""
        for node in self._nodes.values():
            node.join()

    async def stop(self) -> None:
        """Leave them all."""
        await asyncio.gather(*(warmth.stop() for warmth in self.warmths.values()))
        for outpost in self.by_pool.values():
            outpost.stop()

    def outpost(self, pool_id: int, node_id: int | None) -> RemotePool | None:
        """Return who runs a batch on this node, or in this pool; None: nobody of these."""
        if node_id is None:
            return self.by_pool.get(pool_id)
        node = self._nodes.get(node_id)
        return None if node is None else node.outpost

    def order(self, action: PlacedAction) -> bool:
        """Carry out any order but to run a batch; whether it was for anybody here."""
        if action.node_id is None:
            return isinstance(action, CancelBatch)  # what is out to functions comes back anyway
        node = self._nodes.get(action.node_id)
        if node is not None:
            node.order(action)
        return node is not None

    def keep_warm(self, action: KeepWarm) -> None:
        """Keep functions of a pool ready from now on."""
        function_id = self._app.variants[action.variant_id].function_id
        name = self._app.functions[function_id].name
        self.warmths[action.pool_id].wish(name, action.count, is_provisioned=action.is_provisioned)

    def _add(self, pool: Pool, provider: Provider, first_node_id: int) -> None:
        hang_s = self._hang_ns / 1e9
        client = _client(pool, provider, hang_s=hang_s, where="the application")
        if pool.faas is not None:
            from headgate.live.pools.lambda_pool import LambdaFunctions  # noqa: PLC0415

            functions = LambdaFunctions(client, provider, pool.faas.payload_bytes_max)
            outpost = self._outpost(pool, functions.call)
            self.warmths[pool.id] = WarmKeeper(
                outpost,
                pool.faas,
                functions.ping,
                functions.provision,
                self._books,
                self._started,
            )
            return
        from headgate.live.pools.sagemaker_pool import SageMakerEndpoints  # noqa: PLC0415

        endpoints = SageMakerEndpoints(client, provider, first_node_id)
        outpost = self._outpost(pool, endpoints.call)
        outpost.on_gone = self._gone
        for number in range(pool.nodes):
            place = NodeSpec(first_node_id + number, pool.id, f"{pool.name}{number + 1}", [])
            self._nodes[place.id] = EndpointNode(
                place, self._app, self._signatures, outpost, endpoints.ping, self._listener
            )

    def _outpost(self, pool: Pool, call: Callable[[RemoteCall], CallResult]) -> RemotePool:
        threads = DaemonThreads(_threads(pool), asyncio.get_running_loop())
        outpost = RemotePool(
            pool,
            call,
            self._listener,
            self._books,
            self._started,
            threads,
            hang_ns=self._hang_ns,
        )
        self.by_pool[pool.id] = outpost
        return outpost

    def _gone(self, errand: RemoteCall) -> None:
        if errand.node_id is not None:
            self._nodes[errand.node_id].gone(errand)


def _threads(pool: Pool) -> int:
    if pool.faas is not None:
        return min(pool.faas.concurrency_max, THREADS_MAX)
    return min(pool.nodes * (pool.slots + pool.queue_max) + 2, THREADS_MAX)  # two ask who is there


# `Any`: boto3 has no types, and makes its classes when it runs.
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
