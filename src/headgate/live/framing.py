"""Messages on a stream: each behind its length, in four bytes."""

from __future__ import annotations

from typing import final

from msgspec import MsgspecError

from headgate.live.messages import (
    DECODER,
    ENCODER,
    LENGTH_BYTES,
    MESSAGE_BYTES_MAX,
    AnyMessage,
    Message,
)


def frame(message: Message) -> bytes:
    """Return a message as it is sent. Raises `ValueError` if it is too long for that.

    >>> from headgate.live.messages import Release
    >>> Frames().feed(frame(Release([64])))
    [Release(offsets=[64])]
    """
    body = ENCODER.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes; at most {MESSAGE_BYTES_MAX}")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


@final
class Frames:
    """Puts messages together again, however the stream was cut.

    Tensors in them share the memory that was read, so nothing is copied but what arrives in pieces,
    and that once.
    """

    __slots__ = ("_partial", "_wanted")

    def __init__(self) -> None:
        self._partial = bytearray()
        self._wanted = 0  # bytes of `_partial` that are worth another look

    def feed(self, data: bytes) -> list[AnyMessage]:
        """Return the messages that are complete with this.

        Raises `ValueError` if it is no message or too long for one; then the stream is lost.
        """
        if not self._partial:
            return self._read(data)
        self._partial += data
        if len(self._partial) < self._wanted:
            return []
        whole, self._partial = self._partial, bytearray()
        return self._read(whole)

    def _read(self, data: bytes | bytearray) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        view = memoryview(data)
        start, end = 0, len(data)
        self._wanted = LENGTH_BYTES
        while end - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            size = int.from_bytes(view[start:body], "little")
            if size > MESSAGE_BYTES_MAX:
                raise ValueError(f"a message of {size} bytes; at most {MESSAGE_BYTES_MAX}")
            if end - body < size:
                self._wanted = LENGTH_BYTES + size
                break
            start = body + size
            try:
                messages.append(DECODER.decode(view[body:start]))
            except MsgspecError as error:
                raise ValueError(f"no message: {error}") from None
        if start < end:
            self._partial = bytearray(view[start:])
        return messages
