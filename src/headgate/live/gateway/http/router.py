"""Routes: from a method and a target to who handles it.

Whatever was found once is found again by one look into a dictionary: the targets that clients use
are few, and parsing them costs more than answering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final
from urllib.parse import unquote_to_bytes

from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.request import HttpRequest
from headgate.live.gateway.http.responses import PLAIN, ResponseFormat

Handler = Callable[[HttpRequest], None]
Headers = Mapping[bytes, bytes]
Methods = Mapping[bytes, "Route"]

# Targets come from clients, and there is no end of them.
KNOWN_MAX: Final = 1024
KNOWN_BYTES_MAX: Final = 256  # of one


@dataclass(frozen=True, slots=True)
class Rule:
    """What a path does for one method. `is_open`: without an API key.

    `is_text` is there where the path takes a body, which it has a model look at: it says, of a
    request's headers, whether all of its body is text. Bodies of other requests are thrown away.
    """

    method: bytes
    handler: Handler
    is_open: bool = False
    is_text: Callable[[Headers], bool] | None = None
    form: ResponseFormat = PLAIN  # of refusals before the body has come


@dataclass(frozen=True, slots=True)
class Route:
    """Who handles a request, and the names that its path held."""

    rule: Rule
    name: str = ""
    version: str = ""


@final
class Router:
    """All paths. In a path, `{name}` and `{version}` stand for one part each.

    `is_model` says which names are worth remembering.

    >>> router = Router({"/a/{name}/b": Rule(b"GET", print)}, is_model=lambda name: True)
    >>> router.find(b"GET", b"/a/x%20y/b?q=1").name
    'x y'
    """

    def __init__(self, rules: Mapping[str, Rule], is_model: Callable[[str], bool]) -> None:
        self._is_model = is_model
        self._known: dict[bytes, Methods] = {}
        self._fixed = {path.encode(): rule for path, rule in rules.items() if "{" not in path}
        self._patterns = [(path.encode().split(b"/"), rule) for path, rule in rules.items()]

    def find(self, method: bytes, target: bytes) -> Route:
        """Who handles it. Raises `RequestError` (404, 405)."""
        methods = self._known.get(target) or self._resolve(target)
        route = methods.get(method)
        if route is None:
            allow = ", ".join(sorted(name.decode() for name in methods))
            raise RequestError(405, f"{_shown(target)} is for {allow}", allow=allow)
        return route

    def _resolve(self, target: bytes) -> Methods:
        path = target.partition(b"?")[0].partition(b"#")[0]
        if not path.startswith(b"/"):  # a proxy's form, or nonsense
            path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
        rule = self._fixed.get(path)
        route = Route(rule) if rule is not None else None
        if rule is None or route is None:
            rule, route = self._match(path.split(b"/"))
        if rule is None or route is None:
            raise RequestError(404, f"there is nothing at {_shown(path)}", reason="unknown_path")
        methods = {rule.method: route}
        if rule.method == b"GET":
            methods[b"HEAD"] = route
        if len(target) <= KNOWN_BYTES_MAX and (not route.name or self._is_model(route.name)):
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()  # somebody makes them up: those in use are back at once
            self._known[target] = methods
        return methods

    def _match(self, parts: list[bytes]) -> tuple[Rule, Route] | tuple[None, None]:
        for pattern, rule in self._patterns:
            if len(pattern) != len(parts):
                continue
            names = {}
            for expected, part in zip(pattern, parts, strict=True):
                if expected in (b"{name}", b"{version}") and part:
                    names[expected] = unquote_to_bytes(part).decode("utf-8", "replace")
                elif expected != part:
                    break
            else:
                name, version = names.get(b"{name}", ""), names.get(b"{version}", "")
                return rule, Route(rule, name, version)
        return None, None


def _shown(target: bytes) -> str:
    return repr(target[:100].decode("latin-1"))
