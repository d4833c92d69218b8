"""Provisioned instances of a function: there for as long as they are paid for."""

from __future__ import annotations

from typing import final

from headgate.core.model import Serverless


@final
class Provision:
    """How many there are, how many are in use, and what they cost while they wait."""

    def __init__(self, spec: Serverless) -> None:
        self._spec = spec
        self._count = 0  # paid for
        self._there = 0  # of those, so many are ready,
        self._coming: list[tuple[int, int]] = []  # and from when on how many, the soonest first
        self._running = 0
        self._since_ns = 0
        self._held_ns = 0  # instances x time

    def set(self, now_ns: int, count: int) -> None:
        """Have so many from now on; more take a while to come, fewer go at once."""
        self._account(now_ns)
        self._arrive(now_ns)
        self._there = min(self._there, count)
        self._coming = [(at_ns, min(there, count)) for at_ns, there in self._coming]
        if count > (self._coming[-1][1] if self._coming else self._there):
            self._coming.append((now_ns + self._spec.provision_ns, count))
        self._count = count

    def take(self, now_ns: int) -> bool:
        """Use one, if one is free."""
        self._arrive(now_ns)
        if self._running >= self._there:
            return False
        self._running += 1
        return True

    def give(self, now_ns: int) -> None:
        """It is free again."""
        self._running -= 1

    def usd(self, end_ns: int) -> float:
        """What they cost besides what their calls cost."""
        self._account(end_ns)
        return self._held_ns / 1e9 * self._spec.gigabytes * self._spec.provisioned_usd_per_gb_s

    def _arrive(self, now_ns: int) -> None:
        while self._coming and self._coming[0][0] <= now_ns:
            self._there = self._coming.pop(0)[1]

    def _account(self, now_ns: int) -> None:
        self._held_ns += self._count * (now_ns - self._since_ns)
        self._since_ns = now_ns
