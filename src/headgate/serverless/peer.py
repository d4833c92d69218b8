"""Which process is at the other end of a connection within this machine.

The Runtime API has no place for a secret: the runtime makes its URLs of a host and a port. What
can be known is whose socket it is. The kernel lists every TCP socket with the number of its inode
in `/proc/net/tcp`, and the open files of every process, sockets with their inodes among them, in
`/proc/PID/fd`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from socket import inet_aton
from sys import byteorder
from typing import Final, TypeAlias

Address: TypeAlias = tuple[str, int]

SOCKETS: Final = Path("/proc/net/tcp")


def is_from_session(peer: Address, local: Address, session: int) -> bool:
    """Whether a connection comes from a process of a session, which is named after its leader.

    `peer` and `local` are both ends of it, as the side that has accepted it sees them: IPv4.
    """
    inode = _inode(peer, local)
    if not inode or not session:
        return False
    link = f"socket:[{inode}]"
    return any(_has_open(pid, link) for pid in _members(session))


def _inode(peer: Address, local: Address) -> str:
    """The inode of the other side's socket; empty if it is another user's, or gone."""
    ends = f"{_written(peer)} {_written(local)}"
    uid = str(os.geteuid())
    with SOCKETS.open(encoding="ascii") as lines:
        for line in lines:
            if ends in line:
                fields = line.split()
                is_it = (fields[1], fields[2]) == tuple(ends.split()) and fields[7] == uid
                return fields[9] if is_it and fields[9] != "0" else ""
    return ""


def _written(address: Address) -> str:
    """An address as the kernel writes it: the bytes of the host as a number of this machine.

    >>> _written(("127.0.0.1", 8080)) in ("0100007F:1F90", "7F000001:1F90")
    True
    """
    host = int.from_bytes(inet_aton(address[0]), byteorder)
    return f"{host:08X}:{address[1]:04X}"


def _members(session: int) -> Iterator[int]:
    """The leader of a session first: nobody else is asked about as a rule."""
    yield session
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal() and int(entry.name) != session:
                with suppress(OSError):  # it has ended
                    if os.getsid(int(entry.name)) == session:
                        yield int(entry.name)


def _has_open(pid: int, link: str) -> bool:
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # unless it has ended
        for entry in entries:
            with suppress(OSError):  # it has been closed
                if os.readlink(entry.path) == link:  # noqa: PTH115  # many of them
                    return True
    return False
