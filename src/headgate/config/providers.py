"""Who runs each pool, from the application file."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import convert

from headgate.config.errors import FieldReader
from headgate.config.options import AppConfig
from headgate.config.schema import PoolSpec
from headgate.core.errors import ConfigError

# Where an `endpoint_url` leads, and the keys for one that leads to this machine.
#
# What listens on this machine is an embedded platform, a test, or a stranger: it never gets
# credentials of AWS. An embedded platform makes keys of its own when it starts and leaves them in
# a file that only its user can read, found by the port of the endpoint.


KEY_PREFIX: Final = "HEADGATE"  # of the ids of keys that platforms make; those of AWS have others
ID_VARIABLE: Final = "HEADGATE_PLATFORM_ACCESS_KEY_ID"
SECRET_VARIABLE: Final = "HEADGATE_PLATFORM_SECRET_ACCESS_KEY"
FILE_VARIABLE: Final = "HEADGATE_PLATFORM_KEYS_FILE"
_FILE_BYTES_MAX: Final = 65_536
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class PlatformKeys:
    """An access key of an embedded platform. Its secret is never shown by accident."""

    access_key_id: str
    secret_access_key: str = field(repr=False)


# For endpoints on this machine whose keys are not known: a platform refuses these with a message
# that says where its keys are, and anything else does not look at them.
NO_KEYS: Final = PlatformKeys("headgate", "headgate")


class KeysFile(msgspec.Struct, frozen=True):
    """What a platform writes down when it starts."""

    platform: str  # which one, so that nobody removes the file of another
    endpoint_url: str
    region: str
    access_key_id: str
    secret_access_key: str


def is_address(url: str) -> bool:
    """Whether a URL is an address that all libraries read alike.

    >>> is_address("http://127.0.0.1:9001"), is_address("http://127.0.0.1:9001@elsewhere.org")
    (True, False)
    """
    if not re.fullmatch(r"[!-~]+", url) or "\\" in url:
        return False
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is no number
    except ValueError:
        return False
    return parts.scheme in _PORTS and bool(parts.hostname) and "@" not in parts.netloc


def is_of_aws(url: str) -> bool:
    """Whether an address is one of AWS's own, as certain as TLS makes it.

    >>> is_of_aws("https://lambda.eu-central-1.amazonaws.com"), is_of_aws("https://amazonaws.com.io")
    (True, False)
    """
    parts = urlsplit(url)
    suffixes = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
    return parts.scheme == "https" and (parts.hostname or "").endswith(suffixes)


def is_here(url: str, *, where: str, key: str) -> bool:
    """Whether an address leads to this machine, by what its name resolves to now.

    Raises `ConfigError` where that cannot be told: then no credentials are the right ones.
    """
    host = urlsplit(url).hostname or ""
    is_named_so = host == "localhost" or host.endswith(".localhost")
    places = [_is_local(address) for address in _addresses(host)]
    if places and any(places) != all(places):
        problem = "leads to this machine and elsewhere"
        raise ConfigError(problem, where=where, key=key, value=url, allowed="one address")
    if is_named_so and places and not all(places):
        problem = "is called localhost and leads elsewhere"
        raise ConfigError(problem, where=where, key=key, value=url, allowed="http://127.0.0.1:9001")
    return is_named_so or any(places)


def keys_for(url: str, environment: Mapping[str, str] = os.environ) -> PlatformKeys:
    """Return the keys for an endpoint on this machine. Raises `ConfigError`.

    Variables of ours come first, then the file of the platform on that port, then the variables
    of AWS if what they hold is the key of a platform, as its `export` lines have it.
    """
    fixed = fixed_keys(environment)
    if fixed is not None:
        return fixed
    parts = urlsplit(url)
    port = parts.port or _PORTS[parts.scheme]
    named = environment.get(FILE_VARIABLE)
    read = read_keys(Path(named) if named else keys_path(port, environment))
    if read is not None:
        return PlatformKeys(read.access_key_id, read.secret_access_key)
    exported = environment.get("AWS_ACCESS_KEY_ID", "")
    if exported.startswith(KEY_PREFIX):
        return PlatformKeys(exported, environment.get("AWS_SECRET_ACCESS_KEY", ""))
    return NO_KEYS


def keys_path(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the platform on a port of this machine leaves its keys. Raises `ConfigError`."""
    state = environment.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError:  # nobody knows where that is
        problem, allowed = "there is no home directory", f"{FILE_VARIABLE}, or XDG_STATE_HOME"
        raise ConfigError(problem, where="platform keys", allowed=allowed) from None
    return base / "headgate" / f"platform-{port}.json"


def read_keys(path: Path) -> KeysFile | None:
    """Return what is in a file of keys; None if there is none, or anybody else can get at it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or status.st_mode & 0o077:
                return None
            return msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=KeysFile)
    except (OSError, ValueError):  # a ValueError is what is no JSON, or a name that cannot be
        return None


def fixed_keys(environment: Mapping[str, str] = os.environ) -> PlatformKeys | None:
    """Return the keys that variables fix, if they do. Raises `ConfigError`."""
    id, secret = environment.get(ID_VARIABLE), environment.get(SECRET_VARIABLE)
    if not id and not secret:
        return None
    if not id or not secret:
        missing = SECRET_VARIABLE if id else ID_VARIABLE
        raise ConfigError(f"{missing} is not set", where="platform keys", allowed="both or none")
    if not re.fullmatch("[A-Za-z0-9_]{8,128}", id) or id.startswith(("AKIA", "ASIA")):
        allowed = "8 to 128 letters and digits that are no key of AWS"
        raise ConfigError("is no key id", where="platform keys", key=ID_VARIABLE, allowed=allowed)
    if not re.fullmatch("[!-~]{16,256}", secret):
        allowed = "16 to 256 printable characters without spaces"
        raise ConfigError(
            "is no secret", where="platform keys", key=SECRET_VARIABLE, allowed=allowed
        )
    return PlatformKeys(id, secret)


def _addresses(host: str) -> list[IPv4Address | IPv6Address]:
    """What a name resolves to. The resolver also reads 127.1 and 0x7f000001, as libraries do."""
    try:
        return [ip_address(host)]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def _is_local(address: IPv4Address | IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    address = mapped or address
    # Who connects to the unspecified address connects to this machine.
    return address.is_loopback or address.is_unspecified


_REMOTE_ONLY: Final = ("target", "endpoint_url", "region")


@dataclass(frozen=True, slots=True)
class Provider:
    """Who runs the nodes or the functions of a pool."""

    kind: Literal["local", "lambda", "sagemaker"]
    target: str = ""  # the function or the endpoint; `target_of` fills it in
    endpoint_url: str | None = None  # None: AWS itself
    region: str | None = None  # None: as AWS's own settings have it

    def target_of(self, function: str, node: int = 1) -> str:
        """Return what is called to run a function, on the n-th node.

        >>> Provider("lambda", "shop-{function}").target_of("rank")
        'shop-rank'
        """
        return self.target.replace("{function}", function).replace("{node}", str(node))


def providers_of(loaded: AppConfig) -> tuple[Provider | None, ...]:
    """Return who runs each pool, by its id; None: nobody, it can only be simulated."""
    pools = convert(loaded.spec["pools"], dict[str, PoolSpec])
    if not pools:
        return (Provider("local"),)  # the one that there is where none is declared
    return tuple(
        choose_provider(FieldReader(spec, "the application", f"pools.{name}"))
        for name, spec in pools.items()
    )


def choose_provider(entry: FieldReader[PoolSpec]) -> Provider | None:
    """Return who runs a pool; None: nobody. Raises `ConfigError`."""
    spec = entry.spec
    is_serverless = spec.tier == "serverless"
    kind = spec.provider or (None if is_serverless else "local")
    if spec.provider is not None and is_serverless != (spec.provider == "lambda"):
        allowed = "lambda" if is_serverless else "local, sagemaker"
        raise entry.error("provider", f"runs no {spec.tier} pools", allowed=allowed)
    if kind is None or kind == "local":
        for name in _REMOTE_ONLY:
            if getattr(spec, name) is not None:
                allowed = "only with provider: lambda or sagemaker"
                raise entry.error(name, "says where something is that runs here", allowed=allowed)
        return None if kind is None else Provider("local")
    if not spec.target:
        raise entry.error("target", "is missing", allowed=_TARGETS[kind])
    if kind == "sagemaker" and spec.nodes > 1 and "{node}" not in spec.target:
        problem = f"is one endpoint for {spec.nodes} nodes"
        raise entry.error("target", problem, allowed="a name with {node} in it")
    if spec.endpoint_url is not None:
        _check_url(entry, spec.endpoint_url)
    return Provider(kind, spec.target, spec.endpoint_url, spec.region)


def _check_url(entry: FieldReader[PoolSpec], url: str) -> None:
    if not is_address(url):
        allowed = "http://127.0.0.1:9001, https://...; without a user name"
        raise entry.error("endpoint_url", "is no address", allowed=allowed)


_TARGETS: Final = {
    "lambda": "the name of a Lambda function, or name:alias",
    "sagemaker": "the name of a SageMaker endpoint",
}
