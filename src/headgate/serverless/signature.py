"""AWS Signature Version 4 in the `Authorization` header, as the side that checks it.

A signature in the query string is never looked at: clients of Lambda do not send one, and a URL
that is good by itself is what a web page could be made to open.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from headgate.serverless.errors import ServiceError
from headgate.serverless.http import Request

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SKEW_S_MAX: Final = 300.0  # between the clocks of client and platform, either way
_SERVICE: Final = "lambda"
_TERMINATOR: Final = "aws4_request"
_UNRESERVED: Final = "-_.~"
_MUST_BE_SIGNED: Final = frozenset(("host", "x-amz-date"))


@dataclass(frozen=True, slots=True)
class Signature:
    """What an `Authorization` header says, beside the time of the request."""

    access_key_id: str
    date: str  # YYYYMMDD
    region: str
    headers: tuple[str, ...]  # in small letters, sorted
    time: str  # YYYYMMDDTHHMMSSZ
    digest: str  # in hexadecimal


def read_signature(request: Request, now_s: float) -> Signature:
    """Read who has signed a request, without checking the signature. Raises `ServiceError`."""
    if "authorization" not in request.headers:
        raise ServiceError(
            403, "MissingAuthenticationTokenException", "Missing Authentication Token"
        )
    algorithm, _, rest = request.headers["authorization"].partition(" ")
    pairs = [part.strip().partition("=") for part in rest.split(",")]
    fields = {name: value for name, _, value in pairs}
    scope = fields.get("Credential", "").split("/")
    names = tuple(sorted(fields.get("SignedHeaders", "").split(";")))
    digest, time = fields.get("Signature", ""), request.headers.get("x-amz-date", "")
    is_whole = (
        algorithm == ALGORITHM
        and len(pairs) == len(fields) == 3
        and len(scope) == 5
        and scope[3:] == [_SERVICE, _TERMINATOR]
        and re.fullmatch("[0-9a-f]{64}", digest) is not None
    )
    if not is_whole:
        raise _incomplete(f"an {ALGORITHM} header for the service {_SERVICE} is needed")
    unsigned = {name for name in request.headers if name.startswith("x-amz-")} | _MUST_BE_SIGNED
    unsigned -= set(names)
    if unsigned:
        raise _incomplete(f"these headers must be signed: {', '.join(sorted(unsigned))}")
    signature = Signature(scope[0], scope[1], scope[2], names, time, digest)
    _check_time(signature, now_s)
    return signature


def check_signature(signature: Signature, request: Request, secret: str) -> None:
    """See that a request was signed with the secret, all of it. Raises `ServiceError`."""
    body_digest = hashlib.sha256(request.body).hexdigest()
    declared = request.headers.get("x-amz-content-sha256", body_digest)
    wanted = sign(signature, canonical_request(signature.headers, request, body_digest), secret)
    # Compared as bytes: text that is not ASCII cannot be compared in constant time.
    is_right = hmac.compare_digest(wanted.encode(), signature.digest.encode())
    if not is_right or declared != body_digest:
        raise _invalid(
            "The request signature we calculated does not match the signature you provided."
        )


def canonical_request(names: tuple[str, ...], request: Request, body_digest: str) -> str:
    """Return what is signed of a request, in the one form that both sides agree on."""
    pairs = (pair.partition("=") for pair in request.query_string.split("&") if pair)
    query = sorted((_encoded(name), _encoded(value)) for name, _, value in pairs)
    headers = ((name, " ".join(request.headers.get(name, "").split())) for name in names)
    return "\n".join(
        (
            request.method,
            # Encoded once more than it comes, as everywhere but with S3.
            quote(request.path.encode("latin-1"), safe="/~"),
            "&".join(f"{name}={value}" for name, value in query),
            *(f"{name}:{value}" for name, value in headers),
            "",
            ";".join(names),
            body_digest,
        )
    )


def sign(signature: Signature, canonical: str, secret: str) -> str:
    """Return the digest that whoever has the secret would have sent."""
    scope = (signature.date, signature.region, _SERVICE, _TERMINATOR)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join((ALGORITHM, signature.time, "/".join(scope), digest))
    key = f"AWS4{secret}".encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def _check_time(signature: Signature, now_s: float) -> None:
    try:
        signed = datetime.strptime(signature.time, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise _incomplete("X-Amz-Date must be YYYYMMDDTHHMMSSZ") from None
    if signature.date != signature.time[:8]:
        raise _invalid("the dates of Credential and X-Amz-Date differ")
    if abs(signed.timestamp() - now_s) > SKEW_S_MAX:
        now = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ")
        raise _invalid(f"Signature expired: {signature.time} is too far from {now}")


def _encoded(text: str) -> str:
    return quote(unquote_to_bytes(text.encode("latin-1")), safe=_UNRESERVED)


def _incomplete(problem: str) -> ServiceError:
    return ServiceError(403, "IncompleteSignatureException", problem)


def _invalid(problem: str) -> ServiceError:
    return ServiceError(403, "InvalidSignatureException", problem)
