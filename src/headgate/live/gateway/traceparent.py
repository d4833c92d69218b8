"""The W3C's `traceparent`: kept and sent back where it is well formed, ignored where it is not."""

from __future__ import annotations

import re
from typing import Final

_FORM: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


def traceparent(text: bytes | None) -> bytes:
    """The trace that a request belongs to; empty where it names none.

    >>> traceparent(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")[:5]
    b'00-0a'
    >>> traceparent(b"00-00000000000000000000000000000000-b7ad6b7169203331-01")
    b''
    """
    return text if text and _FORM.fullmatch(text) else b""
