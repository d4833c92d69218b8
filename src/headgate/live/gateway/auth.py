"""Authentication and rate limits: API keys, and a rate and a concurrency limit per tenant.

Only SHA-256 hashes of keys are kept. A key is looked up by its hash, so the time of a lookup tells
an attacker nothing about the key; the hashes are compared in constant time all the same.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from typing import final

from headgate.core.clock import SECOND_NS
from headgate.core.token_bucket import TokenBucket
from headgate.live.gateway.config import GatewayConfig, TenantLimit
from headgate.live.gateway.errors import RequestError


@final
class Tenant:
    """One client's limits and what it uses of them: a token bucket, and requests in flight."""

    __slots__ = (
        "_bucket",
        "_concurrency_max",
        "client_id",
        "in_flight",
    )

    def __init__(self, limit: TenantLimit) -> None:
        self.client_id = limit.client_id
        self.in_flight = 0
        self._concurrency_max = limit.concurrency_max
        self._bucket: TokenBucket | None = None
        if limit.rate_per_s:
            self._bucket = TokenBucket(float(max(1, limit.burst)), limit.rate_per_s)

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
        """End a request."""
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
