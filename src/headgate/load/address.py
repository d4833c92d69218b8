"""Where requests go, and the bytes that they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from headgate.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """A server, and the path that its URL ends in: without a slash at the end, if it is more."""

    host: str
    port: int
    is_secure: bool
    path: str

    @property
    def authority(self) -> str:
        """Host and port, as the `Host` header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def model_path(self, model: str) -> str:
        """Where the Open Inference Protocol has a model."""
        return f"{self.path.rstrip('/')}/v2/models/{quote(model, safe='')}"


@dataclass(frozen=True, slots=True)
class Body:
    """What a request carries, and the headers that say how to read it."""

    content: bytes
    headers: Mapping[str, str]


def parse_address(url: str) -> Address:
    """Read a URL.

    >>> parse_address("http://127.0.0.1:8080/v2/").path
    '/v2'
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"is not a URL: {error}", where="URL", value=url) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        allowed = "http://HOST:PORT or https://HOST:PORT"
        raise ConfigError("is not a URL of a server", where="URL", value=url, allowed=allowed)
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError("holds a character that no URL may", where="URL", value=url)
    is_secure = parts.scheme == "https"
    path = parts.path if parts.path == "/" else parts.path.rstrip("/")
    path += f"?{parts.query}" if parts.query else ""
    return Address(parts.hostname, port or (443 if is_secure else 80), is_secure, path)


def request_bytes(
    address: Address, method: str, path: str, body: Body | None, headers: Mapping[str, str]
) -> bytes:
    """Return a whole request. What cannot stand in a header is refused."""
    content = b"" if body is None else body.content
    lines = {"Host": address.authority}
    if body is not None:
        lines |= {**body.headers, "Content-Length": str(len(content))}
    lines |= headers
    head = [f"{method} {path or '/'} HTTP/1.1"]
    for name, value in lines.items():
        line = f"{name}: {value}"
        if not name or not line.isascii() or not line.isprintable() or ":" in name or " " in name:
            raise ConfigError("is not a header", where="--header", value=line)
        head.append(line)
    return "\r\n".join((*head, "", "")).encode() + content
