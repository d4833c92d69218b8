"""Authentication: request signatures, protection against web pages, and the platform's keys.

Everything but the signature is checked as soon as the head of a request has arrived, so that the
body of a rejected request is never stored. `Origin` and `Host` distinguish a web page, which the
user who runs the platform may have opened, from a program.

Signatures are AWS Signature Version 4 in the `Authorization` header. A signature in the query
string is ignored: clients of Lambda do not send one, and a URL that is valid by itself could be
opened by a web page.

The keys are generated when a platform starts, written to a file for its user, and removed when the
platform ends.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Final, final
from urllib.parse import quote, unquote_to_bytes, urlsplit

import msgspec

from headgate.config.providers import (
    FILE_VARIABLE,
    KEY_PREFIX,
    KeysFile,
    PlatformKeys,
    fixed_keys,
    keys_for,
    keys_path,
)
from headgate.core.errors import ConfigError
from headgate.lambda_emulator.cleanup_process import unfinished_keys
from headgate.lambda_emulator.http import EmulatorRequest, ServiceError

ALGORITHM: Final = "AWS4-HMAC-SHA256"
REGION: Final = "us-east-1"
SKEW_S_MAX: Final = 300.0  # between the clocks of client and platform, in either direction
_SERVICE: Final = "lambda"
_TERMINATOR: Final = "aws4_request"
_UNRESERVED: Final = "-_.~"
_MUST_BE_SIGNED: Final = frozenset(("host", "x-amz-date"))
_LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))
_HOST: Final = re.compile(r"(?:\[(?P<ip>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d{1,5})?")
_JSON: Final = re.compile(r"application/(?:json|x-amz-json-1\.\d)(?:\s*;.*)?", re.IGNORECASE)
_QUOTED_MAX: Final = 100  # of client input, in an error message
_KEYS_FILE_MODE: Final = 0o600


@dataclass(frozen=True, slots=True)
class RequestSignature:
    """The fields of an `Authorization` header, and the time of the request."""

    access_key_id: str
    date: str  # YYYYMMDD
    region: str
    headers: tuple[str, ...]  # lower case, sorted
    time: str  # YYYYMMDDTHHMMSSZ
    digest: str  # hexadecimal


def read_signature(request: EmulatorRequest, now_s: float) -> RequestSignature:
    """Parse the signature of a request without verifying it. Raises `ServiceError`."""
    if "authorization" not in request.headers:
        raise _forbidden("MissingAuthenticationToken", "Missing Authentication Token")
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
        problem = f"an {ALGORITHM} header for the service {_SERVICE} is needed"
        raise _forbidden("IncompleteSignature", problem)
    unsigned = {name for name in request.headers if name.startswith("x-amz-")} | _MUST_BE_SIGNED
    unsigned -= set(names)
    if unsigned:
        problem = f"these headers must be signed: {', '.join(sorted(unsigned))}"
        raise _forbidden("IncompleteSignature", problem)
    signature = RequestSignature(scope[0], scope[1], scope[2], names, time, digest)
    _check_time(signature, now_s)
    return signature


def check_signature(signature: RequestSignature, request: EmulatorRequest, secret: str) -> None:
    """Verify that the whole request was signed with the secret. Raises `ServiceError`."""
    body_digest = hashlib.sha256(request.body).hexdigest()
    body_digest_header = request.headers.get("x-amz-content-sha256", body_digest)
    expected = sign(signature, canonical_request(signature.headers, request, body_digest), secret)
    # Compare bytes: `compare_digest` rejects text that is not ASCII.
    is_valid = hmac.compare_digest(expected.encode(), signature.digest.encode())
    if not is_valid or body_digest_header != body_digest:
        problem = "The request signature we calculated does not match the signature you provided."
        raise _forbidden("InvalidSignature", problem)


def canonical_request(names: tuple[str, ...], request: EmulatorRequest, body_digest: str) -> str:
    """Return the canonical form of a request, of which the signature is computed."""
    pairs = (pair.partition("=") for pair in request.query_string.split("&") if pair)
    query = sorted((_encoded(name), _encoded(value)) for name, _, value in pairs)
    headers = ((name, " ".join(request.headers.get(name, "").split())) for name in names)
    return "\n".join(
        (
            request.method,
            # The path is URL-encoded a second time, as by all AWS services but S3.
            quote(request.path.encode("latin-1"), safe="/~"),
            "&".join(f"{name}={value}" for name, value in query),
            *(f"{name}:{value}" for name, value in headers),
            "",
            ";".join(names),
            body_digest,
        )
    )


def sign(signature: RequestSignature, canonical: str, secret: str) -> str:
    """Return the digest of a canonical request under a secret."""
    scope = (signature.date, signature.region, _SERVICE, _TERMINATOR)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join((ALGORITHM, signature.time, "/".join(scope), digest))
    key = f"AWS4{secret}".encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def _check_time(signature: RequestSignature, now_s: float) -> None:
    try:
        signed = datetime.strptime(signature.time, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise _forbidden("IncompleteSignature", "X-Amz-Date must be YYYYMMDDTHHMMSSZ") from None
    if signature.date != signature.time[:8]:
        raise _forbidden("InvalidSignature", "the dates of Credential and X-Amz-Date differ")
    if abs(signed.timestamp() - now_s) > SKEW_S_MAX:
        now = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ")
        problem = f"Signature expired: {signature.time} is too far from {now}"
        raise _forbidden("InvalidSignature", problem)


def _encoded(text: str) -> str:
    return quote(unquote_to_bytes(text.encode("latin-1")), safe=_UNRESERVED)


def _forbidden(kind: str, problem: str) -> ServiceError:
    return ServiceError(403, f"{kind}Exception", problem)


@final
class RequestAuth:
    """Authenticates requests. Without keys, any client that is not a web page is accepted."""

    def __init__(self, keys: PlatformKeys | None, host: str, allowed: Iterable[str] = ()) -> None:
        """Accept `Host` headers of the bound host, of this machine, and of `allowed` hosts."""
        self.keys_location = "with whoever started it"  # for error messages
        self._keys = keys
        self._allowed = frozenset(each.lower().strip("[]") for each in allowed)
        self._hosts = _LOOPBACK | self._allowed | {host.lower()}

    def check_head(self, request: EmulatorRequest) -> None:
        """Check what the head of a request tells. Raises `ServiceError`."""
        _check_host(request, self._hosts)
        self._check_origin(request)
        _check_content_type(request)
        if self._keys is not None:
            self._read(request, self._keys)

    def check(self, request: EmulatorRequest) -> None:
        """Verify the signature of a complete request. Raises `ServiceError`."""
        if self._keys is not None:
            signature = self._read(request, self._keys)
            check_signature(signature, request, self._keys.secret_access_key)

    def _read(self, request: EmulatorRequest, keys: PlatformKeys) -> RequestSignature:
        signature = read_signature(request, time.time())
        if signature.access_key_id != keys.access_key_id:
            problem = "The security token included in the request is invalid"
            location = f"the keys of this platform are {self.keys_location}"
            raise _forbidden("UnrecognizedClient", f"{problem}: {location}")
        return signature

    def _check_origin(self, request: EmulatorRequest) -> None:
        """Reject web pages, unless they come from an allowed host."""
        site = request.headers.get("sec-fetch-site", "none")
        origin = request.headers.get("origin")
        if request.method == "OPTIONS":
            raise _forbidden("AccessDenied", "no web page may call this platform")
        if origin is None and site not in ("cross-site", "same-site"):
            return
        try:
            host = urlsplit(origin or "").hostname
        except ValueError:
            host = None
        if host not in self._allowed:
            problem = "no web page may call this platform, unless --allow-host names its host"
            raise _forbidden("AccessDenied", problem)


def _check_host(request: EmulatorRequest, names: frozenset[str]) -> None:
    """Reject a request whose `Host` is another host. Raises `ServiceError`.

    This stops DNS rebinding: a web page whose host name is made to resolve to this machine sends
    its own host name. The local IP address of the connection is always accepted, because an
    address cannot be rebound.
    """
    host_header = request.headers.get("host", "")
    match = _HOST.fullmatch(host_header)
    host = (match["ip"] or match["name"]).lower() if match else ""
    if host in names:
        return
    try:
        if host and ip_address(host) == ip_address(request.local[0]):
            return
    except ValueError:
        pass  # a host name, not an address
    problem = f"Host {host_header[:_QUOTED_MAX]!r} is none of this platform's"
    raise _forbidden("AccessDenied", f"{problem}: --allow-host NAME makes it one")


def _check_content_type(request: EmulatorRequest) -> None:
    """Reject forms and plain text, which a web page can send without a CORS preflight.

    An invocation accepts any content type.
    """
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if not has_body or request.parts[-1:] == ("invocations",):
        return
    if not _JSON.fullmatch(headers.get("content-type", "")):
        problem = "Content-Type must be application/json"
        raise ServiceError(415, "UnsupportedMediaTypeException", problem)


def make_keys() -> PlatformKeys:
    """Return the keys set by environment variables, or else new ones. Raises `ConfigError`."""
    fixed = fixed_keys()
    if fixed is not None:
        return fixed
    id = KEY_PREFIX + base64.b32encode(secrets.token_bytes(10)).decode()
    return PlatformKeys(id, secrets.token_urlsafe(30))


def client_options(
    endpoint_url: str, region: str = REGION, keys: PlatformKeys | None = None
) -> dict[str, str]:
    """Return the arguments of `boto3.client` for a platform on this machine.

    Without `keys`, those that the platform has written to a file are used.
    """
    keys = keys or keys_for(endpoint_url)
    return {
        "endpoint_url": endpoint_url,
        "region_name": region,
        "aws_access_key_id": keys.access_key_id,
        "aws_secret_access_key": keys.secret_access_key,
    }


@dataclass(frozen=True, slots=True)
class KeysLocation:
    """The file to which a platform writes its keys."""

    path: Path
    platform: str  # unique ID of the platform, to recognise its own file

    @classmethod
    def select(cls, path: Path | None, port: int) -> KeysLocation:
        """Return the given path, the one set by the environment, or the default of a port."""
        variable = os.environ.get(FILE_VARIABLE)
        selected = path or (Path(variable) if variable else keys_path(port))
        return cls(selected.absolute(), str(uuid.uuid4()))

    @property
    def description(self) -> str:
        """Description for clients without keys. It does not reveal the home directory."""
        path = str(self.path)
        home = os.path.expanduser("~") + os.sep  # noqa: PTH111  # must not raise without a home
        if path.startswith(home):
            path = f"~/{path.removeprefix(home)}"
        return f"in {path}, for the user who started it"

    def write(self, keys: PlatformKeys, endpoint_url: str, region: str) -> None:
        """Write the keys to a file that only this user can read. Raises `ConfigError`."""
        contents = KeysFile(
            self.platform, endpoint_url, region, keys.access_key_id, keys.secret_access_key
        )
        # Write to a temporary name first: readers never see a partial file, and a symbolic link
        # at the final path is not followed.
        unfinished = unfinished_keys(self.path, self.platform)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _KEYS_FILE_MODE)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, _KEYS_FILE_MODE)  # whatever the umask
                file.write(msgspec.json.format(msgspec.json.encode(contents)) + b"\n")
            unfinished.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            problem = f"the keys cannot be written: {error.strerror}"
            allowed = "--keys-file PATH"
            raise ConfigError(problem, where=str(self.path), allowed=allowed) from None
