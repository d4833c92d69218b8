"""The standard `grpc.health.v1`: what balancers and probes ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from headgate.live.gateway.grpc_guard import Guard, Rpc
from headgate.live.gateway.grpc_messages import SERVICE
from headgate.live.gateway.grpc_status import printable
from headgate.live.gateway.readiness import server_problem
from headgate.live.gateway.refusal import Refused
from headgate.live.serving import Serving

HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_S: Final = 0.2  # how often a change is looked for


@final
class Health:
    """Serving while the gateway says that it is ready, as a whole and for the one service."""

    def __init__(self, serving: Serving, guard: Guard) -> None:
        self.is_over = False  # no more changes will come
        self._serving = serving
        self._guard = guard
        guard.add(f"/{HEALTH}/Check", self._check, is_public=True)
        guard.add_stream(f"/{HEALTH}/Watch", self._watch)

    async def _check(self, rpc: Rpc) -> bytes:
        status = self._status(await self._service(rpc))
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise Refused(404, "there is no such service", reason="unknown_path")
        tell_reason(rpc, server_problem(self._serving))
        return HealthCheckResponse(status=status).SerializeToString()

    async def _watch(self, rpc: Rpc) -> AsyncIterator[bytes]:
        """How it is, now and whenever that changes."""
        service = await self._service(rpc)
        told: int | None = None
        while not self.is_over:
            status = self._status(service)
            if status != told:
                told = status
                yield HealthCheckResponse(status=status).SerializeToString()
            await asyncio.sleep(WATCH_S)

    async def _service(self, rpc: Rpc) -> str:
        try:
            message = await self._guard.read_public(rpc) or b""
            return HealthCheckRequest.FromString(message).service
        except DecodeError:
            raise Refused(400, "the message is not a HealthCheckRequest") from None

    def _status(self, service: str) -> int:
        if service not in ("", SERVICE):
            return HealthCheckResponse.SERVICE_UNKNOWN
        if server_problem(self._serving):
            return HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.SERVING


def tell_reason(rpc: Rpc, problem: str) -> None:
    """Say why something is not ready, in metadata: the messages have no field for it."""
    if problem:
        rpc.context.set_trailing_metadata((("headgate-reason", printable(problem)),))
