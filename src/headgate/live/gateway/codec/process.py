"""`python -m headgate.live.gateway.codec.process`: reads and writes the long texts of a gateway.

Reading some megabytes of JSON takes a second, during which an interpreter does nothing else,
whichever thread reads. In a process of its own it delays only the request that the text belongs to.

Jobs come through a socket, one at a time, and each gets a reply. Both are a header in MessagePack
behind its length, then the raw parts whose sizes the header gives. The process ends when the
gateway closes its end of the socket.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, final

import msgspec
from msgspec import Struct
from msgspec.msgpack import Decoder

from headgate.live.gateway.codec.text import ReadText, WriteText, read_text, write_text
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip.messages import InferRequest
from headgate.live.ipc.messages import ENCODER, LENGTH_BYTES, frame
from headgate.system.process import memory_bytes, set_parent_death_signal

NICENESS: Final = 5  # workers have precedence
# Memory of a text as Python objects, as a multiple of the largest text.
MEMORY_FACTOR: Final = 6
HEADER_BYTES_MAX: Final = 128 << 10  # of a request without its elements
NO_MEMORY: Final = "text_too_large"
TRACE_CHARACTERS_MAX: Final = 10_000


@final
class CodecJob(Struct, array_like=True, tag="job"):
    """A job. `sizes` are the sizes of the raw parts that follow."""

    message: ReadText | WriteText
    sizes: list[int]


@final
class ReadResult(Struct, array_like=True, tag="read"):
    """A request that was read; elements of its inputs follow. Size -1: not in the text."""

    format: str
    request: InferRequest
    sizes: list[int]


@final
class WriteResult(Struct, array_like=True, tag="written"):
    """The text of a response, which follows."""

    sizes: list[int]


@final
class ErrorResult(Struct, array_like=True, tag="error"):
    """The fields of the `RequestError` that the job raised."""

    status: int
    message: str
    reason: str
    sizes: list[int] = []


@final
class FailedResult(Struct, array_like=True, tag="broken"):
    """A defect of ours: where it is."""

    trace: str
    sizes: list[int] = []


AnyReply = ReadResult | WriteResult | ErrorResult | FailedResult

REPLIES: Final[Decoder[AnyReply]] = Decoder(AnyReply)
_JOBS: Final[Decoder[CodecJob]] = Decoder(CodecJob)


def run_job(
    message: ReadText | WriteText, parts: Sequence[memoryview], limits: GatewayConfig
) -> tuple[AnyReply, list[bytes | memoryview]]:
    """Do a job. Returns the reply and the raw parts that follow it. Never raises."""
    try:
        if isinstance(message, WriteText):
            text = write_text(message, parts, limits)
            return WriteResult([len(text)]), [text]
        parsed = read_text(message, parts[0], limits)
        if len(ENCODER.encode(parsed.request)) > HEADER_BYTES_MAX:
            raise RequestError(
                413, "the names and parameters of the request are too long", reason="too_large"
            )
        sizes = [-1 if data is None else len(data) for data in parsed.data]
        raw: list[bytes | memoryview] = [data for data in parsed.data if data is not None]
        return ReadResult(parsed.format, parsed.request, sizes), raw
    except RequestError as error:
        return ErrorResult(error.status, error.message, error.reason), []
    except MemoryError:
        problem = "the text takes too much memory to process; use binary tensors"
        status = 413 if isinstance(message, ReadText) else 500
        return ErrorResult(status, problem, NO_MEMORY), []
    except Exception:
        return FailedResult(traceback.format_exc()[-TRACE_CHARACTERS_MAX:]), []


def serve(connection: socket.socket, limits: GatewayConfig) -> None:
    """Do jobs until the gateway closes the socket."""
    while (head := _receive(connection, LENGTH_BYTES)) is not None:
        header = _receive(connection, int.from_bytes(head, "little"))
        if header is None:
            return
        job = _JOBS.decode(header)
        parts: list[memoryview] = []
        for size in job.sizes:
            part = _receive(connection, size)
            if part is None:
                return
            parts.append(memoryview(part).toreadonly())
        reply, raw = run_job(job.message, parts, limits)
        del parts
        connection.sendall(frame(reply))
        for each in raw:
            connection.sendall(each)
        if isinstance(reply, ErrorResult) and reply.reason == NO_MEMORY:
            return  # memory that it fragmented would be missing for the next job


def _receive(connection: socket.socket, size: int) -> bytearray | None:
    """Read exactly `size` bytes; None if the socket is closed before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return data


def _bound_memory(limits: GatewayConfig) -> None:
    """Limit the memory of this process, so that a large text gets an error and kills nothing."""
    text_bytes = limits.json_bytes_max + limits.response_bytes_max
    bound = memory_bytes(None, "VmData") + MEMORY_FACTOR * text_bytes + (64 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def main() -> int:
    """Serve one gateway. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="headgate.live.gateway.codec.process", description=__doc__
    )
    parser.add_argument("--fd", type=int, required=True, help="a connected socket")
    parser.add_argument("--limits", required=True, help="a GatewayConfig as JSON")
    options = parser.parse_args()
    # A signal to all processes at once is for the gateway, which still has requests to complete.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    # Without this, the death of the gateway would be noticed only after the current job.
    set_parent_death_signal(signal.SIGKILL)
    limits = msgspec.json.decode(options.limits, type=GatewayConfig)
    _bound_memory(limits)
    with socket.socket(fileno=options.fd) as connection, suppress(ConnectionError):
        serve(connection, limits)  # until the gateway is gone
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
