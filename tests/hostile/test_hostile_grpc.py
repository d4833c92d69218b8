"""What gRPC clients can make a server hold: large messages, many connections, slow senders."""

from __future__ import annotations

import gzip
import hashlib
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from harness import PeakMemory, write_app
from http2_client import Http2Client
from served import Served, until

from headgate.live.gateway.grpc.messages import SERVICE, Messages

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
# Beside the budget: shared memory with the worker, what waits in its socket, one message that is
# just being read, and what a C library keeps of what was freed.
BESIDE_MB = 150
LARGE = 15 * MEGABYTE


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    serve = f"body_max: 16MB, memory_max: {BUDGET_MB}MB, connections_max: 40, shared_memory: 16MiB"
    directory = write_app(tmp_path_factory.mktemp("keyed"), KEYS + APP.format(serve=serve))
    with Served(directory, "--grpc-port", "0") as served:
        yield served


def message(size: int) -> bytes:
    """A request with one row of so many bytes."""
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
    """A call that is under way; its future has a status too, of which its type says nothing."""
    stub: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)
    return stub.future(request, timeout=timeout_s, metadata=(("x-api-key", key),))


def flood(served: Served, key: str, size: int, count: int) -> Counter[str]:
    """So many messages at once, each on a connection of its own; how they were answered."""
    channels = [channel_to(served) for _ in range(count)]
    try:
        large = message(size)
        calls = [asking(channel, key, large) for channel in channels]
        return Counter(call.code().name for call in calls)
    finally:
        for channel in channels:
            channel.close()


def test_large_messages_are_held_within_the_budget(keyed: Served) -> None:
    """Those that do not fit wait at their clients; before, all were held, and that twice."""
    with PeakMemory(keyed.gateways) as peak:
        codes = flood(keyed, "ali", LARGE, 60)
    assert set(codes) <= {"OK", "UNAVAILABLE"} and codes["OK"] > 0, codes
    grown_mb = (peak.bytes_max - peak.bytes_first) / MEGABYTE
    assert grown_mb < BUDGET_MB + BESIDE_MB, f"{grown_mb:.0f} MB, {codes}"


def test_who_has_no_key_makes_nothing_be_held(keyed: Served) -> None:
    with PeakMemory(keyed.gateways) as peak:
        assert set(flood(keyed, "nobody", LARGE, 30)) == {"UNAUTHENTICATED"}
    grown_mb = (peak.bytes_max - peak.bytes_first) / MEGABYTE
    assert grown_mb < 60, f"{grown_mb:.0f} MB"


def test_a_message_that_is_too_large_is_refused_when_it_is_announced(keyed: Served) -> None:
    """Not when all of it has come."""
    with Http2Client(keyed.grpc_address) as client:
        stream = client.open_stream(INFER, {"x-api-key": "ali"})
        client.announce(stream, 1 << 30)
        assert b"larger than max" in client.wait_for_answer(stream)


def test_nothing_is_unpacked(keyed: Served) -> None:
    """A hundred megabytes of zeros in a hundred kilobytes."""
    bomb = gzip.compress(bytes(100 * MEGABYTE))
    with PeakMemory(keyed.gateways) as peak, Http2Client(keyed.grpc_address) as client:
        stream = client.open_stream(INFER, {"x-api-key": "ali", "grpc-encoding": "gzip"})
        client.announce(stream, len(bomb), is_compressed=True)
        client.send(stream, bomb, limit_s=5)
        assert b"gzip" in client.wait_for_answer(stream)
    assert peak.bytes_max - peak.bytes_first < 60 * MEGABYTE


def test_messages_that_never_come_hold_up_nobody_elses(keyed: Served) -> None:
    """Each of one key's streams has announced as much as there may be, and sends no more."""
    with Http2Client(keyed.grpc_address) as client, channel_to(keyed) as channel:
        for _ in range(30):
            stream = client.open_stream(INFER, {"x-api-key": "ali"})
            client.announce(stream, LARGE)
        assert [ask(channel, "bob", 4000) for _ in range(20)] == ["OK"] * 20


def test_an_unread_stream_is_granted_no_more_than_a_small_window(keyed: Served) -> None:
    """What waits for room lies in the client's memory, not in the server's."""
    with Http2Client(keyed.grpc_address) as client:
        first = [client.open_stream(INFER, {"x-api-key": "ali"}) for _ in range(8)]
        for stream in first:
            client.announce(stream, LARGE)
        granted = [client.send(stream, bytes(MEGABYTE), limit_s=0.3) for stream in first]
        assert sum(size > 100_000 for size in granted) <= 2, granted


def test_connections_are_bounded(keyed: Served) -> None:
    """Whether they say something or not; and there is room again when they are gone."""
    clients = []
    try:
        for _ in range(100):
            clients.append(Http2Client(keyed.grpc_address))
        greeted = [client for client in clients if _is_served(client)]
        assert 0 < len(greeted) <= 40
    finally:
        for client in clients:
            client.socket.close()
    with channel_to(keyed) as channel:
        assert until(lambda: ask(channel, "bob", 4000, 5.0) == "OK", 60)


def _is_served(client: Http2Client) -> bool:
    end_s = time.monotonic() + 2.0
    try:
        while not client.is_greeted and time.monotonic() < end_s:
            client.receive(0.05)
    except OSError:
        return False
    return client.is_greeted


@pytest.mark.slow
def test_connections_that_say_nothing_are_closed(keyed: Served) -> None:
    """They take the places of others until then."""
    host, _, port = keyed.grpc_address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(40)]
    try:
        with channel_to(keyed) as channel:
            assert until(lambda: ask(channel, "bob", 4000, 5.0) == "OK", 60)
    finally:
        for each in silent:
            each.close()


def test_every_refusal_is_counted(keyed: Served) -> None:
    text = keyed.get("/metrics")[1]
    for code, reason in (
        ("UNAUTHENTICATED", "unauthenticated"),
        ("OK", ""),
    ):
        labels = f'{{code="{code}",protocol="grpc",reason="{reason}"}}'
        assert f"headgate_responses_total{labels}" in text
