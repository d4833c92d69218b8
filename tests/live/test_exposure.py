"""What a server exposes: addresses, files, and plain text on TLS ports."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from sys import byteorder
from urllib.parse import urlsplit

import pytest
from served import Served

LISTENS = "0A"  # the state of a socket in /proc/net/tcp
REQUEST = b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
APP = 'functions: {plain: {code: "misbehaving:Numbers", batch_max: 4}}\n'
ADDRESS_BYTES = {"tcp": 4, "tcp6": 16}


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that makes files accessible to everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def processes(served: Served) -> list[int]:
    return [served.process.pid, *served.gateways(), *served.workers()]


def sockets_of(pid: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            link = str(path.readlink())
            if link.startswith("socket:["):
                found.add(link[8:-1])
    return found


def listening(served: Served) -> list[IPv4Address | IPv6Address]:
    """The addresses at which any process of a server accepts connections."""
    found = []
    for pid in processes(served):
        inodes = sockets_of(pid)
        for family, size in ADDRESS_BYTES.items():
            for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and fields[9] in inodes:
                    found.append(_address(fields[1].partition(":")[0], size))
    return found


def _address(written: str, size: int) -> IPv4Address | IPv6Address:
    """Return an address from the kernel's format.

    Words of four bytes in the order of this machine.
    """
    words = (int(written[at : at + 8], 16) for at in range(0, 2 * size, 8))
    address = ip_address(b"".join(word.to_bytes(4, byteorder) for word in words))
    return getattr(address, "ipv4_mapped", None) or address


def test_listens_on_loopback_by_default(misbehaving: Path) -> None:
    (misbehaving / "app.yaml").write_text(APP)
    with Served(misbehaving, "--grpc-port", "0") as served:
        found = listening(served)
    assert len(found) >= 2, "HTTP and gRPC"
    assert all(each.is_loopback for each in found), found


@pytest.mark.usefixtures("open_umask")
def test_worker_sockets_are_private(misbehaving: Path) -> None:
    """Whatever the umask: the run directory of a server, and the sockets in it."""
    (misbehaving / "app.yaml").write_text(APP)
    with Served(misbehaving, "--log", "run.log") as served:
        assert served.ask("plain", [1.0])[0] == 200
        (worker,) = served.workers()
        arguments = Path(f"/proc/{worker}/cmdline").read_text().split("\0")
        directory = Path(arguments[arguments.index("headgate.live.worker") + 1])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (path,) = directory.glob("*.sock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((misbehaving / "run.log").stat().st_mode) == 0o600
    assert not directory.exists()


def plaintext_reply(address: tuple[str, int], text: bytes) -> bytes:
    """Return what a client without TLS receives until the connection is closed."""
    answer = b""
    with socket.create_connection(address, timeout=30) as client, suppress(ConnectionError):
        client.sendall(text)
        while piece := client.recv(65_536):
            answer += piece
    return answer


def test_tls_port_sends_nothing_in_plain_text(misbehaving: Path) -> None:
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 1 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1",
        shell=True,
        cwd=misbehaving,
        check=True,
        capture_output=True,
    )
    serve = "serve: {tls_certificate: cert.pem, tls_key: key.pem, lame_duck: 0s}\n"
    (misbehaving / "app.yaml").write_text(APP + serve)
    context = ssl.create_default_context(cafile=str(misbehaving / "cert.pem"))
    context.set_alpn_protocols(["h2", "http/1.1"])
    with Served(misbehaving, "--grpc-port", "0") as served:
        url = urlsplit(served.url)
        host, _, port = served.grpc_address.rpartition(":")
        for address, text in (
            ((url.hostname or "", url.port or 0), REQUEST),
            ((host, int(port)), PREFACE),
        ):
            with (
                socket.create_connection(address, timeout=30) as plain,
                context.wrap_socket(plain, server_hostname=host) as client,
            ):
                client.sendall(text)
                assert client.recv(1), "it does not answer over TLS either"
            answer = plaintext_reply(address, text)
            # At most a TLS alert.
            assert not answer or answer[0] == 0x15, answer
