"""The memory budget: what clients can make the server hold, all of it together.

Bodies that are not answered, the tensors that text was read into, and answers that are not read yet
are taken from one budget before they are held. Each tenant is guaranteed a share of it. What is not
guaranteed to anybody goes to whoever comes first, up to a most that leaves the others room.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final


@final
class Budget:
    """So many bytes, shared out by tenant.

    Half of the total is split evenly among the tenants, or more where that would not hold `largest`
    bytes for each of them; the rest is for whoever asks first. No tenant has more than half of the
    total, unless its share is larger than that.

    >>> budget = Budget(1000, [1, 2], largest=100)
    >>> budget.take(1, 500), budget.take(1, 1), budget.take(2, 500), budget.used
    (True, False, True, 1000)
    """

    def __init__(self, total: int, tenants: Collection[int], largest: int) -> None:
        count = len(tenants)
        self.total = total
        self.used = 0
        self.share = min(total // count, max(total // 2 // count, largest))  # of each tenant
        self._most = max(total // 2, self.share)
        if count == 1:
            self.share = self._most = total
        self._common_left = total - self.share * count
        self._used = dict.fromkeys(tenants, 0)

    def take(self, tenant: int, size: int) -> bool:
        """Take so many bytes for a tenant, by its client id. False: there is no room for them."""
        used = self._used[tenant]
        wanted = used + size
        if wanted > self.share:
            common = wanted - max(used, self.share)
            if common > self._common_left or wanted > self._most:
                return False
            self._common_left -= common
        self._used[tenant] = wanted
        self.used += size
        return True

    def give(self, tenant: int, size: int) -> None:
        """Give back what was taken."""
        used = self._used[tenant]
        assert size <= used, "more is given back than was taken"
        if used > self.share:
            self._common_left += used - max(used - size, self.share)
        self._used[tenant] = used - size
        self.used -= size

    def used_by(self, tenant: int) -> int:
        """How much a tenant has taken."""
        return self._used[tenant]


@final
class Hold:
    """What one request has taken of the budget; it changes, and is given back once."""

    __slots__ = ("_budget", "_tenant", "size")

    def __init__(self, budget: Budget, tenant: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self.size = 0

    def grow(self, size: int) -> bool:
        """Take more. False: there is no room, and nothing has changed."""
        if not self._budget.take(self._tenant, size):
            return False
        self.size += size
        return True

    def resize(self, size: int) -> bool:
        """Hold so much from now on. False: there is no room, and nothing has changed."""
        if size > self.size:
            return self.grow(size - self.size)
        self._budget.give(self._tenant, self.size - size)
        self.size = size
        return True

    def release(self) -> None:
        """Give everything back; again, if need be, for nothing."""
        if self.size:
            self._budget.give(self._tenant, self.size)
            self.size = 0
