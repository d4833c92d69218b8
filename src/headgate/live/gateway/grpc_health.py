"""The standard `grpc.health.v1`: what balancers and probes ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, final

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from headgate.live.gateway.grpc_messages import SERVICE
from headgate.live.serving import Phase, Serving

HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_S: Final = 0.2  # how often a change is looked for

Context = ServicerContext[HealthCheckRequest, HealthCheckResponse]


@final
class Health(HealthServicer):
    """Serving while the gateway says that it is ready, as a whole and for the one service."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        """How it is now."""
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return HealthCheckResponse(status=status)

    async def Watch(
        self, request: HealthCheckRequest, context: Context
    ) -> AsyncIterator[HealthCheckResponse]:
        """How it is, now and whenever that changes."""
        told: int | None = None
        while True:
            status = self._status(request.service)
            if status != told:
                told = status
                yield HealthCheckResponse(status=status)
            await asyncio.sleep(WATCH_S)

    def _status(self, service: str) -> int:
        if service not in ("", SERVICE):
            return HealthCheckResponse.SERVICE_UNKNOWN
        if self._serving.phase is Phase.READY:
            return HealthCheckResponse.SERVING
        return HealthCheckResponse.NOT_SERVING
