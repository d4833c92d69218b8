"""Who may use the platform: what a request must look like before anything is done about it.

Everything but the signature is checked when the head of a request has come, so that the body of
a request that is refused is never kept. `Origin` and `Host` are what tells a web page, which may
be opened by the very user who runs the platform, from a program.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from typing import Final, final
from urllib.parse import urlsplit

from headgate.app.endpoints import PlatformKeys
from headgate.serverless.errors import ServiceError
from headgate.serverless.http import Request, Response
from headgate.serverless.signature import Signature, check_signature, read_signature

_LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))
_HOST: Final = re.compile(r"(?:\[(?P<ip>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d{1,5})?")
_JSON: Final = re.compile(r"application/(?:json|x-amz-json-1\.\d)(?:\s*;.*)?", re.IGNORECASE)
_SHOWN_MAX: Final = 100  # characters of what a client has sent


@final
class Access:
    """Checks requests. Without keys, whoever reaches the platform and is no web page may use it."""

    def __init__(
        self,
        keys: PlatformKeys | None,
        host: str,
        named: Iterable[str] = (),
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Requests may be for the host that is bound, for this machine, and for hosts `named`."""
        self.keys_are = "with whoever started it"  # where they are found, in words
        self._keys = keys
        self._named = frozenset(each.lower().strip("[]") for each in named)
        self._hosts = _LOOPBACK | self._named | {host.lower()}
        self._clock_s = clock_s

    def screen(self, request: Request) -> Response | None:
        """Refuse a request by its head; None if its body may come."""
        try:
            _check_host(request, self._hosts)
            self._check_origin(request)
            _check_content_type(request)
            if self._keys is not None:
                self._read(request, self._keys)
        except ServiceError as error:
            return error.response()
        return None

    def check(self, request: Request) -> None:
        """Check the signature of a request that has come whole. Raises `ServiceError`."""
        if self._keys is not None:
            signature = self._read(request, self._keys)
            check_signature(signature, request, self._keys.secret_access_key)

    def _read(self, request: Request, keys: PlatformKeys) -> Signature:
        signature = read_signature(request, self._clock_s())
        if signature.access_key_id != keys.access_key_id:
            raise ServiceError(
                403,
                "UnrecognizedClientException",
                "The security token included in the request is invalid: the keys of this "
                f"platform are {self.keys_are}",
            )
        return signature

    def _check_origin(self, request: Request) -> None:
        """Refuse web pages, unless they are on a host that was named."""
        site = request.headers.get("sec-fetch-site", "none")
        origin = request.headers.get("origin")
        if request.method == "OPTIONS":
            raise _denied("no web page may call this platform")
        if origin is None and site not in ("cross-site", "same-site"):
            return
        try:
            host = urlsplit(origin or "").hostname
        except ValueError:
            host = None
        if host not in self._named:
            raise _denied("no web page may call this platform, unless --allow-host names its host")


def _check_host(request: Request, names: frozenset[str]) -> None:
    """Refuse a request that is meant for another host. Raises `ServiceError`.

    A page whose name is made to resolve to this machine (DNS rebinding) sends its own name. The
    address that the connection came in on cannot be a name.
    """
    said = request.headers.get("host", "")
    match = _HOST.fullmatch(said)
    host = (match["ip"] or match["name"]).lower() if match else ""
    if host in names:
        return
    try:
        if host and ip_address(host) == ip_address(request.local[0]):
            return
    except ValueError:
        pass  # a name
    raise _denied(
        f"Host {said[:_SHOWN_MAX]!r} is none of this platform's: --allow-host NAME makes it one"
    )


def _check_content_type(request: Request) -> None:
    """Refuse forms and plain text, which a web page can send without asking first.

    An invocation takes any bytes.
    """
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if not has_body or request.parts[-1:] == ("invocations",):
        return
    if not _JSON.fullmatch(headers.get("content-type", "")):
        raise ServiceError(
            415, "UnsupportedMediaTypeException", "Content-Type must be application/json"
        )


def _denied(problem: str) -> ServiceError:
    return ServiceError(403, "AccessDeniedException", problem)
