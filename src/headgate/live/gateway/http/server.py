"""The gateway's HTTP server: its routes, and how a request begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, final
from urllib.parse import unquote_to_bytes

from headgate.http.connection import HttpConnection
from headgate.http.server import HttpServer
from headgate.live.call import FrontEndApi
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.context import GatewayContext
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.health import health_rules
from headgate.live.gateway.http.openapi import openapi_rules
from headgate.live.gateway.http.request import HttpRequest, Route, Rule
from headgate.live.gateway.inference import traceparent
from headgate.live.gateway.oip.http import infer_rules
from headgate.live.gateway.sagemaker import sagemaker_rules
from headgate.live.telemetry.metrics import Responses

Methods = Mapping[bytes, Route]

# Bounds of the cache: clients choose the targets, and can make up any number of them.
CACHED_MAX: Final = 1024
CACHED_BYTES_MAX: Final = 256  # of one target


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
        self.context.refresh(self.state.clock_s)

    def start(self) -> None:
        self.context.loop = asyncio.get_running_loop()
        super().start()

    def close(self) -> None:
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
        log = context.access_log
        return HttpRequest(
            connection,
            context,
            route,
            tenant,
            headers,
            method == b"HEAD",
            context.request_id(headers.get(b"x-request-id")),
            traceparent(headers[b"traceparent"]) if b"traceparent" in headers else b"",
            error,
            None if log is None else log.http_entry(method or b"-", target or b"-"),
        )


@final
class Router:
    """All paths. In a path, `{name}` and `{version}` stand for one segment each.

    Resolved targets are cached: clients use few different targets, and parsing one costs more than
    a whole response. A target with a name is cached only if `is_model` knows the name.

    >>> router = Router({"/a/{name}/b": Rule(b"GET", print)}, is_model=lambda name: True)
    >>> router.find(b"GET", b"/a/x%20y/b?q=1").name
    'x y'
    """

    def __init__(self, rules: Mapping[str, Rule], is_model: Callable[[str], bool]) -> None:
        self._is_model = is_model
        self._cached: dict[bytes, Methods] = {}
        self._fixed = {path.encode(): rule for path, rule in rules.items() if "{" not in path}
        self._patterns = [(path.encode().split(b"/"), rule) for path, rule in rules.items()]

    def find(self, method: bytes, target: bytes) -> Route:
        """The route of a request. Raises `RequestError` (404, 405)."""
        methods = self._cached.get(target) or self._resolve(target)
        route = methods.get(method)
        if route is None:
            allow = ", ".join(sorted(name.decode() for name in methods))
            raise RequestError(405, f"{_quoted(target)} allows only {allow}", allow=allow)
        return route

    def _resolve(self, target: bytes) -> Methods:
        path = target.partition(b"?")[0].partition(b"#")[0]
        if not path.startswith(b"/"):  # the absolute form that proxies use, or nonsense
            path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
        rule = self._fixed.get(path)
        route = Route(rule) if rule is not None else None
        if rule is None or route is None:
            rule, route = self._match(path.split(b"/"))
        if rule is None or route is None:
            raise RequestError(404, f"no route matches {_quoted(path)}", reason="unknown_path")
        methods = {rule.method: route}
        if rule.method == b"GET":
            methods[b"HEAD"] = route
        if len(target) <= CACHED_BYTES_MAX and (not route.name or self._is_model(route.name)):
            if len(self._cached) >= CACHED_MAX:
                self._cached.clear()  # made-up targets: those in use are cached again at once
            self._cached[target] = methods
        return methods

    def _match(self, segments: list[bytes]) -> tuple[Rule, Route] | tuple[None, None]:
        for pattern, rule in self._patterns:
            if len(pattern) != len(segments):
                continue
            names = {}
            for expected, segment in zip(pattern, segments, strict=True):
                if expected in (b"{name}", b"{version}") and segment:
                    names[expected] = unquote_to_bytes(segment).decode("utf-8", "replace")
                elif expected != segment:
                    break
            else:
                name, version = names.get(b"{name}", ""), names.get(b"{version}", "")
                return rule, Route(rule, name, version)
        return None, None


def _quoted(target: bytes) -> str:
    return repr(target[:100].decode("latin-1"))
