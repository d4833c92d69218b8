"""One request and its whole answer: for what is asked before and after a run."""

from __future__ import annotations

import ssl
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final

from headgate.load.address import Address, Body

_ANSWER_BYTES_MAX: Final = 256 << 20


def exchange(
    address: Address, method: str, path: str, body: Body | None = None, *, timeout_s: float = 10.0
) -> tuple[int, bytes]:
    """Return status and content. Raises OSError, also for what is not HTTP."""
    if address.is_secure:
        context = ssl.create_default_context()
        connection: HTTPConnection = HTTPSConnection(
            address.host, address.port, timeout=timeout_s, context=context
        )
    else:
        connection = HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        content = None if body is None else body.content
        connection.request(method, path or "/", content, {} if body is None else dict(body.headers))
        answer = connection.getresponse()
        return answer.status, answer.read(_ANSWER_BYTES_MAX)
    except HTTPException as error:
        raise OSError(f"does not speak HTTP: {type(error).__name__}") from None
    finally:
        connection.close()
