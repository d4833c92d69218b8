"""Routes: from a method and a target to the rule that handles the request.

Resolved targets are cached in a dictionary: clients use few different targets, and parsing one
costs more than a whole response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, final
from urllib.parse import unquote_to_bytes

from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.request import Route, Rule

Methods = Mapping[bytes, Route]

# Bounds of the cache: clients choose the targets, and can make up any number of them.
CACHED_MAX: Final = 1024
CACHED_BYTES_MAX: Final = 256  # of one target


@final
class Router:
    """All paths. In a path, `{name}` and `{version}` stand for one segment each.

    A target with a name is cached only if `is_model` knows the name.

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
