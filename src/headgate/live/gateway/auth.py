"""Who asks, and how much they may: API keys, and a rate and a concurrency per tenant.

Only hashes of keys are kept. They are looked up by hash, which tells an attacker's clock nothing
about the key, and compared in constant time all the same.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from math import ceil
from typing import final

from headgate.core.clock import SECOND_NS
from headgate.live.gateway.config import GatewayConfig, TenantLimit
from headgate.live.gateway.errors import RequestError


@final
class Tenant:
    """One client and what it uses of what it may: a token bucket, and calls in service."""

    __slots__ = (
        "_burst",
        "_concurrency_max",
        "_filled_ns",
        "_rate",
        "_tokens",
        "client_id",
        "open",
    )

    def __init__(self, limit: TenantLimit) -> None:
        self.client_id = limit.client_id
        self.open = 0
        self._concurrency_max = limit.concurrency_max
        self._rate = limit.rate_per_s / SECOND_NS
        self._burst = float(max(1, limit.burst))
        self._tokens = self._burst
        self._filled_ns = 0

    def enter(self, now_ns: int) -> None:
        """Begin a call; `leave` ends it. Raises `RequestError` (429) where the tenant is at a
        limit.
        """
        if self._concurrency_max and self.open >= self._concurrency_max:
            raise RequestError(
                429,
                f"{self.open} requests of this client are in service; it may have no more",
                reason="concurrency_limited",
                retry_ns=SECOND_NS,  # who knows when one of its own ends
            )
        if self._rate:
            self._take(now_ns)
        self.open += 1

    def leave(self) -> None:
        """End a call."""
        self.open -= 1

    def turn_away(self) -> None:
        """End a call that was not even looked at: what it took of the rate is given back."""
        self.open -= 1
        self._tokens = min(self._tokens + 1.0, self._burst)

    def _take(self, now_ns: int) -> None:
        # The first call finds the bucket full, however long it has been.
        if self._filled_ns:
            self._tokens += (now_ns - self._filled_ns) * self._rate
            self._tokens = min(self._tokens, self._burst)
        self._filled_ns = now_ns
        if self._tokens < 1.0:
            raise RequestError(
                429,
                "this client asks more often than it may",
                reason="rate_limited",
                retry_ns=ceil((1.0 - self._tokens) / self._rate),
            )
        self._tokens -= 1.0


@final
class ApiKeys:
    """All keys and tenants. Where there are no keys, everybody is client 0."""

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
        self.anyone = self._tenants[0]
        self.client_ids = frozenset(self._tenants)

    def tenant(self, headers: Mapping[bytes, bytes]) -> Tenant:
        """Whose request this is. Raises `RequestError` (401)."""
        if not self._keys:
            return self.anyone
        given = _given(headers)
        if given:
            digest = sha256(given).hexdigest()
            known, tenant = self._keys.get(digest, ("", self.anyone))
            if hmac.compare_digest(known, digest):
                return tenant
        raise RequestError(
            401,
            "an API key is needed, as a bearer token or in X-API-Key"
            if not given
            else "the API key is not known",
            reason="unauthenticated",
        )


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"")
