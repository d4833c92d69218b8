"""What gRPC clients can make a server hold: large messages, many connections, slow senders."""

from __future__ import annotations

import gzip
import hashlib
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness import PeakMemory, write_app
from http2_client import Http2Client
from served import Served, until

from headgate.live.gateway.grpc.server import SERVICE, Messages

INFER = f"/{SERVICE}/ModelInfer"
MEGABYTE = 1_000_000
MESSAGES = Messages()
KEYS = "clients: {{{}}}\n".format(
    ", ".join(
        f'{name}: {{key: "sha256:{hashlib.sha256(name.encode()).hexdigest()}"}}'
        for name in ("ali", "bob")
    )
)
APP = """
functions: {{rows: {{code: "misdeeds:Rows", batch_max: 1, exec_time: 20ms}}}}
pools: {{local: {{tier: dedicated, nodes: 1, cpus: 1}}}}
serve: {{{serve}}}
"""
BUDGET_MB = 96
# Beside the budget: shared memory with the worker, what is queued in its socket, one message that
# is being read, and freed memory that the C library keeps.
BESIDE_MB = 150
LARGE = 15 * MEGABYTE
CONNECTIONS_MAX = 40  # of the narrow server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With room for the connections of two tests: closed ones are counted for a moment."""
    yield from _serve(tmp_path_factory.mktemp("keyed"), connections_max=200)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _serve(tmp_path_factory.mktemp("narrow"), connections_max=CONNECTIONS_MAX)


def _serve(directory: Path, connections_max: int) -> Iterator[Served]:
    serve = (
        f"body_max: 16MB, memory_max: {BUDGET_MB}MB, "
        f"connections_max: {connections_max}, shared_memory: 16MiB"
    )
    app = write_app(directory, KEYS + APP.format(serve=serve))
    with Served(app, "--grpc-port", "0") as served:
        yield served


def message(size: int) -> bytes:
    """A request with one row of `size` bytes."""
    request = MESSAGES["ModelInferRequest"](model_name="rows")
    request.inputs.add(name="x", datatype="FP32", shape=(1, size // 4))
    request.raw_input_contents.append(bytes(size // 4 * 4))
    encoded = request.SerializeToString()
    assert isinstance(encoded, bytes)
    return encoded


def channel_to(served: Served) -> grpc.Channel:
    """A connection of its own."""
    options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    return grpc.insecure_channel(served.grpc_address, options)


def ask(channel: grpc.Channel, key: str, size: int, timeout_s: float = 60.0) -> str:
    """The name of the status of one request."""
    return str(asking(channel, key, message(size), timeout_s).code().name)


def asking(channel: grpc.Channel, key: str, request: bytes, timeout_s: float = 60.0) -> Any:
    """A call in progress; its future has a status, which its type does not declare."""
    stub: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)
    return stub.future(request, timeout=timeout_s, metadata=(("x-api-key", key),))


def flood(served: Served, key: str, size: int, count: int) -> Counter[str]:
    """Send messages at once, each on a connection of its own. Returns the statuses."""
    channels = [channel_to(served) for _ in range(count)]
    try:
        large = message(size)
        calls = [asking(channel, key, large) for channel in channels]
        codes = Counter(call.code().name for call in calls)
        print(codes, {call.details() for call in calls})  # shown if an assertion fails
        return codes
    finally:
        for channel in channels:
            channel.close()


def test_large_messages_are_held_within_the_budget(keyed: Served) -> None:
    """Messages that do not fit wait at their clients, which try again after waiting too long."""
    with PeakMemory(keyed.gateways) as peak:
        left = 60
        while left:
            codes = flood(keyed, "ali", LARGE, left)
            assert codes["OK"] > 0, codes
            assert set(codes) <= {"OK", "UNAVAILABLE"}, codes
            left = codes["UNAVAILABLE"]
    grown_mb = (peak.bytes_max - peak.bytes_first) / MEGABYTE
    assert grown_mb < BUDGET_MB + BESIDE_MB, f"{grown_mb:.0f} MB, {codes}"


def test_messages_without_a_key_are_not_held(keyed: Served) -> None:
    with PeakMemory(keyed.gateways) as peak:
        assert set(flood(keyed, "nobody", LARGE, 30)) == {"UNAUTHENTICATED"}
    grown_mb = (peak.bytes_max - peak.bytes_first) / MEGABYTE
    assert grown_mb < 60, f"{grown_mb:.0f} MB"


def test_a_message_that_is_too_large_is_refused_when_it_is_announced(keyed: Served) -> None:
    """Before the whole message has arrived."""
    with Http2Client(keyed.grpc_address) as client:
        stream = client.open_stream(INFER, {"x-api-key": "ali"})
        client.announce(stream, 1 << 30)
        assert b"larger than max" in client.wait_for_response(stream)


def test_compressed_messages_are_refused(keyed: Served) -> None:
    """A hundred megabytes of zeros in a hundred kilobytes."""
    bomb = gzip.compress(bytes(100 * MEGABYTE))
    with PeakMemory(keyed.gateways) as peak, Http2Client(keyed.grpc_address) as client:
        stream = client.open_stream(INFER, {"x-api-key": "ali", "grpc-encoding": "gzip"})
        client.announce(stream, len(bomb), is_compressed=True)
        client.send(stream, bomb, limit_s=5)
        assert b"gzip" in client.wait_for_response(stream)
    assert peak.bytes_max - peak.bytes_first < 60 * MEGABYTE


def test_unfinished_messages_delay_nobody_else(keyed: Served) -> None:
    """Each stream of one key has announced the largest message, and sends nothing more."""
    with Http2Client(keyed.grpc_address) as client, channel_to(keyed) as channel:
        for _ in range(30):
            stream = client.open_stream(INFER, {"x-api-key": "ali"})
            client.announce(stream, LARGE)
        assert [ask(channel, "bob", 4000) for _ in range(20)] == ["OK"] * 20


def test_an_unread_stream_is_granted_no_more_than_a_small_window(keyed: Served) -> None:
    """A message that waits for memory stays at the client."""
    with Http2Client(keyed.grpc_address) as client:
        first = [client.open_stream(INFER, {"x-api-key": "ali"}) for _ in range(8)]
        for stream in first:
            client.announce(stream, LARGE)
        granted = [client.send(stream, bytes(MEGABYTE), limit_s=0.3) for stream in first]
        assert sum(size > 100_000 for size in granted) <= 2, granted


def test_connections_are_limited(narrow: Served) -> None:
    """Silent or not; and new ones are accepted when they are closed."""
    clients = []
    try:
        for _ in range(100):
            clients.append(Http2Client(narrow.grpc_address))
        greeted = [client for client in clients if _is_served(client)]
        assert 0 < len(greeted) <= CONNECTIONS_MAX
    finally:
        for client in clients:
            client.socket.close()
    with channel_to(narrow) as channel:
        assert until(lambda: ask(channel, "bob", 4000, 5.0) == "OK", 60)


def _is_served(client: Http2Client) -> bool:
    end_s = time.monotonic() + 2.0
    try:
        while not client.has_settings and time.monotonic() < end_s:
            client.receive(0.05)
    except OSError:
        return False
    return client.has_settings


@pytest.mark.slow
def test_silent_connections_are_closed(narrow: Served) -> None:
    """They count against the limit until then."""
    host, _, port = narrow.grpc_address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS_MAX)]
    try:
        with channel_to(narrow) as channel:
            assert until(lambda: ask(channel, "bob", 4000, 5.0) == "OK", 60)
    finally:
        for each in silent:
            each.close()


def test_every_error_is_counted(keyed: Served) -> None:
    with channel_to(keyed) as channel:
        assert [ask(channel, key, 4000) for key in ("bob", "nobody")] == ["OK", "UNAUTHENTICATED"]
    text = keyed.get("/metrics")[1]
    for code, reason in (
        ("UNAUTHENTICATED", "unauthenticated"),
        ("OK", ""),
    ):
        labels = f'{{code="{code}",protocol="grpc",reason="{reason}"}}'
        assert f"headgate_responses_total{labels}" in text
