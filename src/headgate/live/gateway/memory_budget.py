"""The memory budget: a bound on the memory that clients can make the server hold.

Request bodies until their response, tensors decoded from text, and responses that clients have not
read yet are reserved in one budget before they are held. Each tenant has a guaranteed share. The
rest is first come, first served, up to a maximum per tenant that leaves room for the others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final


@final
class Budget:
    """A number of bytes, divided among tenants.

    Half of the total is split evenly among the tenants, or more where each share would be smaller
    than `largest` bytes; the rest is common. No tenant has more than half of the total, unless its
    share is larger than that.

    >>> budget = Budget(1000, [1, 2], largest=100)
    >>> budget.reserve(1, 500), budget.reserve(1, 1), budget.reserve(2, 500), budget.used
    (True, False, True, 1000)
    """

    def __init__(self, total: int, tenants: Collection[int], largest: int) -> None:
        count = len(tenants)
        self.total = total
        self.used = 0
        self.share = min(total // count, max(total // 2 // count, largest))  # of each tenant
        self._tenant_max = max(total // 2, self.share)
        if count == 1:
            self.share = self._tenant_max = total
        self._common_left = total - self.share * count
        self._used = dict.fromkeys(tenants, 0)

    def reserve(self, tenant: int, size: int) -> bool:
        """Reserve bytes for a tenant, by its client id. Returns whether there was room."""
        used = self._used[tenant]
        wanted = used + size
        if wanted > self.share:
            common = wanted - max(used, self.share)
            if common > self._common_left or wanted > self._tenant_max:
                return False
            self._common_left -= common
        self._used[tenant] = wanted
        self.used += size
        return True

    def release(self, tenant: int, size: int) -> None:
        """Give bytes back that were reserved."""
        used = self._used[tenant]
        assert size <= used, "more bytes are released than were reserved"
        if used > self.share:
            self._common_left += used - max(used - size, self.share)
        self._used[tenant] = used - size
        self.used -= size

    def used_by(self, tenant: int) -> int:
        """How many bytes a tenant has reserved."""
        return self._used[tenant]


@final
class Hold:
    """The bytes of the budget that one request has reserved."""

    __slots__ = ("_budget", "_tenant", "size")

    def __init__(self, budget: Budget, tenant: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self.size = 0

    def grow(self, size: int) -> bool:
        """Reserve `size` more bytes. Returns False, and changes nothing, if there is no room."""
        if not self._budget.reserve(self._tenant, size):
            return False
        self.size += size
        return True

    def resize(self, size: int) -> bool:
        """Hold exactly `size` bytes. Returns False, and changes nothing, if there is no room."""
        if size > self.size:
            return self.grow(size - self.size)
        self._budget.release(self._tenant, self.size - size)
        self.size = size
        return True

    def release(self) -> None:
        """Give everything back. A second call does nothing."""
        if self.size:
            self._budget.release(self._tenant, self.size)
            self.size = 0
