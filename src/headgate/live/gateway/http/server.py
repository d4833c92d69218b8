"""The gateway's HTTP server: its routes, and how a request begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import final

from headgate.http.connection import HttpConnection
from headgate.http.server import HttpServer
from headgate.live.call import FrontEndApi
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.context import GatewayContext
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.health import health_rules
from headgate.live.gateway.http.openapi import openapi_rules
from headgate.live.gateway.http.request import HttpRequest, Route
from headgate.live.gateway.http.router import Router
from headgate.live.gateway.oip.http import infer_rules
from headgate.live.gateway.sagemaker import sagemaker_rules
from headgate.live.telemetry.metrics import Responses


@final
class GatewayServer(HttpServer):
    """The HTTP front end. It makes the context that all front ends share."""

    def __init__(
        self,
        api: FrontEndApi,
        config: GatewayConfig,
        render_metrics: Callable[[str], tuple[bytes, str]],
        responses: Responses | None = None,
    ) -> None:
        """`render_metrics` maps a scraper's `Accept` header to a page and its media type."""
        super().__init__(config.http_limits, self._begin)
        self.context = GatewayContext(api, config, render_metrics, responses)
        self.router = Router(
            infer_rules() | health_rules() | sagemaker_rules() | openapi_rules(),
            lambda name: name in api.models,
        )

    def refresh(self) -> None:
        """Refresh the context, a few times a second."""
        self.context.refresh(self.state.clock_s)

    def start(self) -> None:
        """Start the sweep on the running loop."""
        self.context.loop = asyncio.get_running_loop()
        super().start()

    def close(self) -> None:
        """Close everything at once."""
        self.context.close()
        super().close()

    def _begin(
        self, connection: HttpConnection, method: bytes, target: bytes, headers: dict[bytes, bytes]
    ) -> HttpRequest:
        """Find the route and the tenant of a request."""
        context = self.context
        route: Route | None = None
        tenant = error = None
        try:
            route = self.router.find(method, target)
            keys = context.keys
            tenant = keys.anonymous if route.rule.is_public else keys.tenant(headers)
        except RequestError as problem:
            error = problem.with_traceback(None)  # a traceback and its frame would be a cycle
        request = HttpRequest(connection, context, route, tenant, headers, method == b"HEAD")
        request.error = error
        if context.access_log is not None:
            request.access_entry = context.access_log.http_entry(method or b"-", target or b"-")
        return request
