"""Bodies and responses that take long to read or write, beside a bystander.

Run by itself with -s, this prints the bystander's results beside each of them.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from harness import (
    Bystander,
    BystanderResults,
    PeakMemory,
    descendants,
    is_running,
    rss_bytes,
    write_app,
)
from served import Served, until

MIB = 1 << 20
APP = """
functions:
  halves: {code: "misdeeds:Halves", batch_max: 1, exec_time: 5ms}
  plain: {code: "misdeeds:Numbers", batch_max: 8, exec_time: 1ms}
pools:
  local: {tier: dedicated, nodes: 2, cpus: 1, memory: 4GB}
serve: {execution_timeout: 5s, lame_duck: 0s}
"""
FIRST = "numbers of one digit"
KEYS = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("good", "evil")}


@dataclass(frozen=True)
class Bomb:
    """A request that takes long, and the statuses it may get."""

    body: bytes
    statuses: tuple[int, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = "/v2/models/halves/infer"


def text(shape: str, elements: bytes, more: bytes = b"") -> bytes:
    head = b'{"inputs":[{"name":"x","datatype":"FP16","shape":[%b],"data":' % shape.encode()
    return head + elements + b"}]" + more + b"}"


def ones(count: int, one: bytes = b"1") -> bytes:
    return b"[%b1]" % ((one + b",") * (count - 1))


def raw(count: int, **more: object) -> Bomb:
    """Halves as raw bytes, with many digits each."""
    parameters = {"binary_data_size": 2 * count}
    described = {"name": "x", "datatype": "FP16", "shape": [1, count], "parameters": parameters}
    said = json.dumps({"inputs": [described], **more}).encode()
    headers = {"Inference-Header-Content-Length": str(len(said))}
    return Bomb(said + b"\x55\x35" * count, (200, 500), headers)


def rows(body: bytes, kind: str) -> Bomb:
    headers = {"Content-Type": kind, "X-Amzn-SageMaker-Target-Model": "halves"}
    return Bomb(body, (200, 400, 413, 500), headers, "/invocations")


BOMBS: dict[str, Callable[[], Bomb]] = {
    "numbers of one digit": lambda: Bomb(text("1,8000000", ones(8_000_000)), (200, 500)),
    "the same, of a wrong shape": lambda: Bomb(text("1,7", ones(8_000_000)), (400,)),
    "lists of one number": lambda: Bomb(text("4000000,1", ones(4_000_000, b"[1]")), (400,)),
    "rows of a SageMaker client": lambda: rows(
        b"[%b[1]]" % (b"[1]," * 3_900_000), "application/json"
    ),
    "64 MB of halves, answered in JSON": lambda: raw(32 * MIB - 500),
    "6 MB of halves, answered in JSON": lambda: raw(3 * MIB),
}
MORE_BOMBS: dict[str, Callable[[], Bomb]] = {
    "numbers of 800 digits": lambda: Bomb(
        text("1,20000", ones(20_000, b"1." + b"9" * 780)), (200,)
    ),
    "lists of nothing": lambda: Bomb(
        text("1,1", b"[1]", b',"parameters":{"a":[%b[]]}' % (b"[]," * 5_000_000)), (400,)
    ),
    "a million outputs": lambda: Bomb(
        text("1,1", b"[1]", b',"outputs":[%b{"name":"y"}]' % (b'{"name":"y"},' * 1_000_000)), (400,)
    ),
    "a million dimensions": lambda: Bomb(text("9," * 4_000_000 + "9", b"[1]"), (400,)),
    "brackets in brackets": lambda: Bomb(text("1,1", b"[" * 7_000_000 + b"]" * 7_000_000), (400,)),
    "a line of CSV": lambda: rows(b"1," * 8_000_000 + b"1", "text/csv"),
    "lines of CSV": lambda: rows(b"1\n" * 8_000_000, "text/csv"),
    "too much text": lambda: Bomb(b" " * (17 * MIB), (413,)),
    "64 MB of halves, there and back": lambda: raw(
        32 * MIB - 500, parameters={"binary_data_output": True}
    ),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(write_app(tmp_path_factory.mktemp("bodies"), APP)) as served:
        yield served


def send(url: str, bomb: Bomb) -> tuple[int, float]:
    """Send the attack. Returns its status and duration."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    try:
        began_s = time.monotonic()
        connection.request("POST", bomb.path, bomb.body, dict(bomb.headers))
        answer = connection.getresponse()
        while answer.read(MIB):
            pass
        return answer.status, time.monotonic() - began_s
    finally:
        connection.close()


def beside(served: Served, bomb: Bomb, times: int) -> tuple[BystanderResults, float]:
    """The results of a bystander beside `times` bombs, and how long the longest took."""
    with Bystander(
        served.url, "plain", sends_deadline=False, rate_per_s=100, timeout_s=60
    ) as bystander:
        time.sleep(0.3)
        took_s = 0.0
        for _ in range(times):
            status, one_s = send(served.url, bomb)
            assert status in bomb.statuses
            took_s = max(took_s, one_s)
        return bystander.stop(), took_s


@pytest.mark.parametrize("name", BOMBS)
def test_a_bystander_does_not_wait_for_a_large_text(served: Served, name: str) -> None:
    """Without the codec, the event loop would be busy for as long as the bomb takes."""
    (gateway,) = served.gateways()
    with PeakMemory(lambda: descendants(gateway)) as peak:
        results, took_s = beside(served, BOMBS[name](), times=2)
    print(f"\n{name}: {took_s:.2f} s; {peak.bytes_max / MIB:.0f} MiB; bystander: {results}")
    assert results.share_ok == 1.0, str(results)
    # A request that has to wait for a bomb waits for half of it on average.
    assert results.percentile_ms(50) < 200 + 250 * took_s, str(results)
    assert peak.bytes_max < 1700 * MIB  # the budget, twice the interpreter, and one long text
    assert served.gateways() == [gateway], served.errors()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BOMBS, *MORE_BOMBS])
def test_a_bystander_meets_its_deadline_beside_a_large_text(served: Served, name: str) -> None:
    (gateway,) = served.gateways()
    results, took_s = beside(served, {**BOMBS, **MORE_BOMBS}[name](), times=10)
    print(f"\n{name}: {took_s:.2f} s; bystander: {results}")
    assert results.share_ok == 1.0, str(results)
    assert results.percentile_ms(50) < 100
    assert served.gateways() == [gateway], served.errors()


def test_a_killed_gateway_leaves_no_process(tmp_path: Path) -> None:
    """Its codec processes end with it, also in the middle of a text."""
    with Served(write_app(tmp_path, APP)) as served:
        (gateway,) = served.gateways()
        thread = threading.Thread(target=_try_to_send, args=(served.url, BOMBS[FIRST]()))
        thread.start()
        assert until(lambda: len(descendants(gateway)) > 1)
        (codec,) = set(descendants(gateway)) - {gateway}
        os.kill(gateway, signal.SIGKILL)
        assert until(lambda: not is_running(codec))
        thread.join()
        assert until(lambda: served.gateways() not in ([], [gateway]))


def _try_to_send(url: str, bomb: Bomb) -> None:
    with suppress(OSError, http.client.HTTPException):
        send(url, bomb)


def announced(url: str, size: int, key: str, sent: int = 0) -> socket.socket:
    """A connection with a body that was announced and not sent to its end."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname or "", address.port or 0))
    head = (
        f"POST /v2/models/halves/infer HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\n"
        f"Inference-Header-Content-Length: 50\r\nContent-Length: {size}\r\n\r\n"
    )
    connection.sendall(head.encode() + bytes(sent))
    return connection


def test_unfinished_bodies_of_one_key_leave_memory_for_others(tmp_path: Path) -> None:
    clients = ", ".join(f'{name}: {{key: "sha256:{key}"}}' for name, key in KEYS.items())
    app = APP.replace("serve: {", "serve: {memory_max: 256MiB, ") + f"clients: {{{clients}}}\n"
    good = raw(4 * MIB, parameters={"binary_data_output": True})
    good = Bomb(good.body, (200,), {**good.headers, "X-API-Key": "good"})
    with Served(write_app(tmp_path, app)) as served, ExitStack() as stack:
        (gateway,) = served.gateways()
        assert send(served.url, good)[0] == 200
        before = rss_bytes(gateway)
        for _ in range(8):  # half a gigabyte, discarded: the key is unknown
            stack.enter_context(announced(served.url, 63 * MIB, "nobody", sent=62 * MIB))
        assert until(lambda: rss_bytes(gateway) - before < 64 * MIB)
        for _ in range(8):
            stack.enter_context(announced(served.url, 63 * MIB, "evil"))
        evil = Bomb(good.body, (503,), {**good.headers, "X-API-Key": "evil"})
        assert until(lambda: send(served.url, evil)[0] == 503)
        for _ in range(3):
            assert send(served.url, good)[0] == 200
