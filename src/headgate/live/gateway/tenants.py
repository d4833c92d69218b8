"""Tenants: API keys, and what each tenant may use: a rate, a concurrency and a share of the memory.

Only SHA-256 hashes of keys are kept. A key is looked up by its hash, so the time of a lookup tells
an attacker nothing about the key; the hashes are compared in constant time all the same.

The memory budget bounds the memory that clients can make the server hold. Request bodies until
their response, tensors decoded from text, and responses that clients have not read yet are reserved
in it before they are held. Each tenant has a guaranteed share. The rest is first come, first
served, up to a maximum per tenant that leaves room for the others.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import final

from headgate.core.clock import SECOND_NS
from headgate.core.token_bucket import TokenBucket
from headgate.live.gateway.config import GatewayConfig, TenantLimit
from headgate.live.gateway.errors import RequestError


@final
class Tenant:
    """One client's limits and what it uses of them: a token bucket, and requests in flight."""

    __slots__ = ("_bucket", "_concurrency_max", "_limit", "client_id", "in_flight")

    def __init__(self, limit: TenantLimit) -> None:
        self.client_id = limit.client_id
        self.in_flight = 0
        self._limit = limit
        self._concurrency_max = limit.concurrency_max
        self._bucket: TokenBucket | None = None
        if limit.rate_per_s:
            self._bucket = TokenBucket(max(1.0, limit.burst), limit.rate_per_s)

    def divide(self, gateways: int, now_ns: int) -> None:
        """Allow the part of the limits that one of this many gateways may give away.

        What the client has used of its burst stays used: gateways that come and go give it none.
        """
        limit = self._limit
        self._concurrency_max = -(-limit.concurrency_max // gateways)
        if self._bucket is not None:
            burst = max(1.0, limit.burst / gateways)
            self._bucket.resize(now_ns, burst, limit.rate_per_s / gateways)

    def admit(self, now_ns: int) -> None:
        """Count a request; `finish` ends it. Raises `RequestError` (429) at a limit."""
        if self._concurrency_max and self.in_flight >= self._concurrency_max:
            raise RequestError(
                429,
                f"the client is at its concurrency limit: {self.in_flight} requests in flight",
                reason="concurrency_limited",
                retry_ns=SECOND_NS,  # when a request in flight will end is not known
            )
        if self._bucket is not None and (wait_ns := self._bucket.take(now_ns)):
            message = "the client is over its rate limit"
            raise RequestError(429, message, reason="rate_limited", retry_ns=wait_ns)
        self.in_flight += 1

    def finish(self) -> None:
        self.in_flight -= 1

    def refund(self) -> None:
        """End a request that was refused before its body was read; its token is given back."""
        self.in_flight -= 1
        if self._bucket is not None:
            self._bucket.give_back()


@final
class ApiKeys:
    """All keys and tenants. Where no keys are configured, everybody is client 0."""

    def __init__(self, config: GatewayConfig) -> None:
        self._tenants: dict[int, Tenant] = {
            limit.client_id: Tenant(limit) for limit in config.tenants
        }
        for client_id in (0, *(key.client_id for key in config.keys)):
            self._tenants.setdefault(client_id, Tenant(TenantLimit(client_id)))
        self._keys = {
            key.sha256.lower(): (key.sha256.lower(), self._tenants[key.client_id])
            for key in config.keys
        }
        self.anonymous = self._tenants[0]
        self.client_ids = frozenset(self._tenants)

    def divide(self, gateways: int, now_ns: int) -> None:
        """Share the limits of all tenants among gateways, which each count for themselves."""
        for tenant in self._tenants.values():
            tenant.divide(gateways, now_ns)

    def tenant(self, headers: Mapping[bytes, bytes]) -> Tenant:
        """The tenant that a request's key belongs to. Raises `RequestError` (401)."""
        if not self._keys:
            return self.anonymous
        key = _key_in(headers)
        if key:
            digest = sha256(key).hexdigest()
            known, tenant = self._keys.get(digest, ("", self.anonymous))
            if hmac.compare_digest(known, digest):
                return tenant
        raise RequestError(
            401,
            "the API key is unknown"
            if key
            else "an API key is required, as a bearer token or in X-API-Key",
            reason="unauthenticated",
        )


def _key_in(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"")


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
