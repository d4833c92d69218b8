"""The ports of `headgate serve`: who may take one, and when."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from headgate.cli.commands.serve import _bind, _reserve
from headgate.core.errors import ConfigError
from headgate.live.gateway.process import _shared_listener

HOST = "127.0.0.1"


def listening(is_shared: bool) -> socket.socket:
    """The listener of a server: of one gateway, or of one of several."""
    if is_shared:
        reserved = _reserve(HOST, 0)
        listener = _shared_listener(HOST, reserved.getsockname()[1])
        reserved.close()
        listener.setblocking(True)
    else:
        listener = _bind(HOST, 0)
        listener.listen()
    return listener


@pytest.mark.parametrize("again", [_bind, _reserve], ids=["one", "several"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["from one", "from several"])
def test_a_server_starts_again_at_once(
    is_shared: bool, again: Callable[[str, int], socket.socket]
) -> None:
    """A server that closes a connection first leaves it to the kernel for a minute (TIME_WAIT)."""
    listener = listening(is_shared)
    port: int = listener.getsockname()[1]
    with socket.create_connection((HOST, port)) as client:
        listener.accept()[0].close()
        listener.close()
        assert client.recv(1) == b""
    again(HOST, port).close()


@pytest.mark.parametrize("is_shared", [False, True], ids=["one", "several"])
def test_a_port_in_use_is_refused(is_shared: bool) -> None:
    with listening(is_shared) as listener:
        port: int = listener.getsockname()[1]
        for take in (_bind, _reserve):
            with pytest.raises(ConfigError, match=f"{HOST}:{port}: cannot listen: Address already"):
                take(HOST, port)


def test_a_port_of_a_server_that_is_starting_is_refused() -> None:
    with _reserve(HOST, 0) as reserved:
        port: int = reserved.getsockname()[1]
        for take in (_bind, _reserve):
            with pytest.raises(ConfigError, match="cannot listen"):
                take(HOST, port)
