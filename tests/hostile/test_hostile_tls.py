"""Silent TLS clients, and very many that connect at once."""

from __future__ import annotations

import http.client
import os
import resource
import select
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from harness import write_app, write_certificate
from served import Served, ask_on, until

APP = """
functions: {plain: {code: "misdeeds:Numbers", batch_max: 4}}
serve: {tls_certificate: cert.pem, tls_key: key.pem, connections_max: %d, lame_duck: 0s}
"""
PLAIN_APP = 'functions: {plain: {code: "misdeeds:Numbers", batch_max: 4}}\nserve: {lame_duck: 0s}\n'


class Silent:
    """A number of silent connections."""

    def __init__(self, url: str, count: int) -> None:
        address = urlsplit(url)
        self._open: dict[int, socket.socket] = {}
        self._poll = select.poll()
        for _ in range(count):
            client = socket.create_connection((address.hostname or "", address.port or 0))
            self._open[client.fileno()] = client
            self._poll.register(client, select.POLLIN)

    def kept(self) -> int:
        """How many the server has not closed."""
        for number, _ in self._poll.poll(0):  # any event is the end
            self._poll.unregister(number)
            self._open.pop(number).close()
        return len(self._open)

    def close(self, count: int | None = None) -> None:
        for number in list(self._open)[:count]:
            self._poll.unregister(number)
            self._open.pop(number).close()


@contextmanager
def silent(url: str, count: int) -> Iterator[Silent]:
    clients = Silent(url, count)
    try:
        yield clients
    finally:
        clients.close()


def is_served(served: Served, directory: Path) -> bool:
    """Whether another client gets a response."""
    address = urlsplit(served.url)
    context = ssl.create_default_context(cafile=str(directory / "cert.pem"))
    connection = http.client.HTTPSConnection(
        address.hostname or "", address.port, context=context, timeout=60
    )
    try:
        return ask_on(connection, "plain", [1.0])[0] == 200
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        connection.close()


def test_silent_clients_are_counted(tmp_path: Path) -> None:
    """Before their handshakes as well."""
    write_certificate(tmp_path)
    with Served(write_app(tmp_path, APP % 40)) as served, silent(served.url, 120) as clients:
        assert until(lambda: clients.kept() <= 40, limit_s=8.0), clients.kept()
        clients.close(20)
        assert until(lambda: is_served(served, tmp_path))
        assert clients.kept() <= 20


@pytest.mark.slow
def test_silent_clients_time_out(tmp_path: Path) -> None:
    write_certificate(tmp_path)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most), most))
    with Served(write_app(tmp_path, APP % 300)) as served, silent(served.url, 2000) as clients:
        began_s = time.monotonic()
        assert until(lambda: clients.kept() <= 300, limit_s=8.0), clients.kept()
        assert until(lambda: clients.kept() == 0, limit_s=60.0)
        print(f"\n300 of 2,000 were kept, for {time.monotonic() - began_s:.1f} s")
        assert is_served(served, tmp_path)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_five_hundred_clients_connect_at_once(tmp_path: Path, is_encrypted: bool) -> None:
    """The gateway is stopped (SIGSTOP) meanwhile, so the kernel's backlog alone holds them."""
    if int(Path("/proc/sys/net/core/somaxconn").read_text()) < 600:
        pytest.skip("the kernel keeps fewer in line")
    write_certificate(tmp_path)
    app = APP % 4096 if is_encrypted else PLAIN_APP
    with Served(write_app(tmp_path, app)) as served, ExitStack() as stack:
        address = urlsplit(served.url)
        (gateway,) = served.gateways()
        os.kill(gateway, signal.SIGSTOP)
        try:
            poll = select.poll()
            for _ in range(500):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex((address.hostname or "", address.port or 0))
                poll.register(client, select.POLLOUT)
            assert until(lambda: len(poll.poll(0)) == 500, limit_s=5.0), len(poll.poll(0))
        finally:
            os.kill(gateway, signal.SIGCONT)
