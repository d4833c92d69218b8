"""The standard `grpc.health.v1`: what balancers and probes ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, final

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from headgate.live.gateway.grpc_messages import SERVICE
from headgate.live.gateway.readiness import server_problem
from headgate.live.serving import Serving

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
        tell_reason(context, server_problem(self._serving))
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
        if server_problem(self._serving):
            return HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.SERVING


def tell_reason(context: ServicerContext[Any, Any], problem: str) -> None:
    """Say why something is not ready, in metadata: the messages have no field for it."""
    if problem:
        text = problem.encode("ascii", "replace").decode()
        context.set_trailing_metadata((("headgate-reason", text),))
