"""The metrics of several gateways on one page.

A scraper that reaches one port reaches any of the gateways behind it, and would see the counters of
another one each time. So every gateway answers with the figures of all of them, told apart by the
label `gateway`: it asks the others for their pages, each on a Unix socket in the run directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, final

ANSWER_S: Final = 1.0  # for another gateway to answer; a scraper waits ten times as long
UP: Final = "headgate_gateway_up"
_END: Final = b"# EOF"
Render = Callable[[str], tuple[bytes, str]]  # a page and its media type, by `Accept` header


@final
class MergedPages:
    """Serves the page of one gateway to the others, and makes one page of all of them."""

    def __init__(self, run_dir: Path, slot: int, gateways: int, render: Render) -> None:
        self._run_dir = run_dir
        self._slot = slot
        self._gateways = gateways
        self._render = render
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to answer the other gateways."""
        path = self._path(self._slot)
        path.unlink(missing_ok=True)  # that of a gateway that was killed
        self._server = await asyncio.start_unix_server(self._answer, path)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def collect(self, accept: str) -> tuple[bytes, str]:
        """Return the page of all gateways. One that does not answer is shown as down."""
        own, media_type = self._render(accept)
        others = [slot for slot in range(self._gateways) if slot != self._slot]
        answers = await asyncio.gather(*(self._ask(slot, accept) for slot in others))
        pages = {self._slot: own, **dict(zip(others, answers, strict=True))}
        return merge_pages(dict(sorted(pages.items()))), media_type

    def _path(self, slot: int) -> Path:
        return self._run_dir / f"metrics-{slot}.sock"

    async def _ask(self, slot: int, accept: str) -> bytes:
        """Return the page of another gateway; empty if there is no answer."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path(slot))
                try:
                    writer.write(accept.encode("latin-1") + b"\n")
                    return await reader.read(-1)
                finally:
                    writer.close()
        return b""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(ANSWER_S):
                accept = await reader.readline()
                writer.write(self._render(accept.decode("latin-1").strip())[0])
                await writer.drain()
        writer.close()


def merge_pages(pages: Mapping[int, bytes]) -> bytes:
    r"""Return one page of the pages of gateways, by slot; an empty one: the gateway is down.

    A format of Prometheus wants all samples of a metric together, after its help and type.

    >>> page = b"# HELP a Some.\n# TYPE a gauge\na{b=\"c\"} 1\n"
    >>> print(merge_pages({0: page, 1: page, 2: b""}).decode(), end="")
    # HELP headgate_gateway_up Whether a gateway answers.
    # TYPE headgate_gateway_up gauge
    headgate_gateway_up{gateway="0"} 1.0
    headgate_gateway_up{gateway="1"} 1.0
    headgate_gateway_up{gateway="2"} 0.0
    # HELP a Some.
    # TYPE a gauge
    a{gateway="0",b="c"} 1
    a{gateway="1",b="c"} 1
    """
    comments: dict[bytes, list[bytes]] = {}  # by name of the metric
    samples: dict[bytes, list[bytes]] = {}
    ends = False
    for slot, page in pages.items():
        label = b'gateway="%d"' % slot
        metric = b""
        for line in page.splitlines():
            if line == _END:
                ends = True
            elif line.startswith(b"# "):
                metric = line.split(b" ", 3)[2]
                known = comments.setdefault(metric, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(metric, []).append(_labelled(line, label))
    lines = [b"# HELP %b Whether a gateway answers." % UP.encode()]
    lines.append(b"# TYPE %b gauge" % UP.encode())
    lines += [b'%b{gateway="%d"} %.1f' % (UP.encode(), slot, bool(p)) for slot, p in pages.items()]
    for metric, texts in comments.items():
        lines += texts
        lines += samples.get(metric, [])
    if ends:
        lines.append(_END)
    return b"\n".join(lines) + b"\n"


def _labelled(sample: bytes, label: bytes) -> bytes:
    name, brace, rest = sample.partition(b"{")
    if brace and b" " not in name:
        return b"%b{%b,%b" % (name, label, rest)
    name, _, value = sample.partition(b" ")
    return b"%b{%b} %b" % (name, label, value)
