"""`python -m headgate.live.gateway.codec.process`: the process that reads and writes long texts.

Reading some megabytes of JSON takes a second in which an interpreter does nothing else, whichever
thread does it. So a gateway has it done here, where nobody waits but the request whose text it is.

One job at a time comes through a socket and is answered: a header in MessagePack behind its length,
then the raw bytes whose sizes the header has. The process ends when the gateway's end is closed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import socket
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import msgspec
from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from headgate.live.gateway.codec.text import ReadText, WriteText, read_text, write_text
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip.json import InferRequest

LENGTH_BYTES: Final = 4
NICENESS: Final = 5  # workers go first
# Of what a client can have it take, over what the interpreter has: text as Python objects.
MEMORY_FACTOR: Final = 6
HEADER_BYTES_MAX: Final = 128 << 10  # of what a text says beside elements
NO_MEMORY: Final = "text_too_large"
_SET_PARENT_DEATH_SIGNAL: Final = 1  # of prctl
TRACE_CHARACTERS_MAX: Final = 10_000


@final
class CodecJob(Struct, array_like=True, tag="asked"):
    """A job. `sizes` are those of the raw parts that follow."""

    message: ReadText | WriteText
    sizes: list[int]


@final
class ReadResult(Struct, array_like=True, tag="read"):
    """What a text says; the elements of its inputs follow. A size of -1: there are none."""

    form: str
    request: InferRequest
    sizes: list[int]


@final
class WriteResult(Struct, array_like=True, tag="written"):
    """A text that follows."""

    sizes: list[int]


@final
class RefusedResult(Struct, array_like=True, tag="refused"):
    """Why there is nothing: as `RequestError` has it."""

    status: int
    message: str
    reason: str
    sizes: list[int] = []


@final
class FailedResult(Struct, array_like=True, tag="broken"):
    """A defect of ours: where it is."""

    trace: str
    sizes: list[int] = []


AnyReply = ReadResult | WriteResult | RefusedResult | FailedResult

ENCODER: Final = Encoder()
REPLIES: Final[Decoder[AnyReply]] = Decoder(AnyReply)
_JOBS: Final[Decoder[CodecJob]] = Decoder(CodecJob)


def packed(header: CodecJob | AnyReply) -> bytes:
    """A header as it is sent."""
    data = ENCODER.encode(header)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def answer(
    message: ReadText | WriteText, parts: Sequence[memoryview], limits: GatewayConfig
) -> tuple[AnyReply, list[bytes | memoryview]]:
    """Do a job: the reply, and the raw parts that follow it. Never raises."""
    try:
        if isinstance(message, WriteText):
            text = write_text(message, parts, limits)
            return WriteResult([len(text)]), [text]
        read = read_text(message, parts[0], limits)
        if len(ENCODER.encode(read.request)) > HEADER_BYTES_MAX:  # the gateway has to read it
            raise RequestError(413, "names, ids and parameters are too long", reason="too_large")
        sizes = [-1 if data is None else len(data) for data in read.data]
        found: list[bytes | memoryview] = [data for data in read.data if data is not None]
        return ReadResult(read.form, read.request, sizes), found
    except RequestError as refused:
        return RefusedResult(refused.status, refused.message, refused.reason), []
    except MemoryError:
        problem = "its text takes more memory than there is for that; use binary tensors"
        status = 413 if isinstance(message, ReadText) else 500
        return RefusedResult(status, problem, NO_MEMORY), []
    except Exception:
        return FailedResult(traceback.format_exc()[-TRACE_CHARACTERS_MAX:]), []


def serve(connection: socket.socket, limits: GatewayConfig) -> None:
    """Do jobs until there are no more."""
    while (head := _received(connection, LENGTH_BYTES)) is not None:
        header = _received(connection, int.from_bytes(head, "little"))
        if header is None:
            return
        job = _JOBS.decode(header)
        parts: list[memoryview] = []
        for size in job.sizes:
            part = _received(connection, size)
            if part is None:
                return
            parts.append(memoryview(part).toreadonly())
        reply, raw = answer(job.message, parts, limits)
        del parts
        connection.sendall(packed(reply))
        for each in raw:
            connection.sendall(each)
        if isinstance(reply, RefusedResult) and reply.reason == NO_MEMORY:
            return  # what is left of it would be missing for the next one


def _received(connection: socket.socket, size: int) -> bytearray | None:
    """So many bytes; None if the other end is closed before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return data


def _bound_memory(limits: GatewayConfig) -> None:
    """Let no text take everything: then it is refused, and the process lives."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    now_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmData:"))
    most = limits.json_bytes_max + limits.answer_bytes_max
    bound = (int(now_kib) << 10) + MEMORY_FACTOR * most + (64 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def main() -> int:
    """Serve one gateway. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="headgate.live.gateway.codec.process", description=__doc__
    )
    parser.add_argument("--fd", type=int, required=True, help="a connected socket")
    parser.add_argument("--limits", required=True, help="a GatewayConfig as JSON")
    options = parser.parse_args()
    # A signal to every process at once is for the gateway to heed: it still has answers to give.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    # The end of the socket would be noticed only after the job at hand.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    limits = msgspec.json.decode(options.limits, type=GatewayConfig)
    _bound_memory(limits)
    with socket.socket(fileno=options.fd) as connection, suppress(ConnectionError):
        serve(connection, limits)  # until the gateway is gone
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
