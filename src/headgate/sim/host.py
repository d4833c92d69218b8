"""The CPUs of a host, shared by everything that runs on its pools.

What runs is slowed down while it wants more CPUs than the host has: all of it alike, as by the
fair scheduler of an operating system. Nodes and platforms on a host are its members. Each says how
many CPUs it wants whenever that changes, and computes anew when its work ends whenever the slowdown
of the host changes.
"""

from __future__ import annotations

from typing import Protocol, final

from headgate.core.model import Host


class HostMember(Protocol):
    """A node or a platform on a host."""

    def on_host_changed(self, now_ns: int) -> None:
        """The slowdown of the host has changed: until now it was another."""


@final
class SimHost:
    """One host: how much its members want, and by how much that slows them down."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._members: list[HostMember] = []
        self._wanted_milli: list[int] = []  # by member
        self._total_milli = 0
        self.slowdown = 1.0

    def join(self, member: HostMember) -> int:
        """Add a member; return its number."""
        self._members.append(member)
        self._wanted_milli.append(0)
        return len(self._members) - 1

    def want(self, now_ns: int, number: int, cpu_milli: int) -> None:
        """Say how many CPUs a member wants from now on. The other members are told."""
        self._total_milli += cpu_milli - self._wanted_milli[number]
        self._wanted_milli[number] = cpu_milli
        slowdown = self._host.slowdown(self._total_milli)
        if slowdown != self.slowdown:
            self.slowdown = slowdown
            for other, member in enumerate(self._members):
                if other != number:
                    member.on_host_changed(now_ns)
