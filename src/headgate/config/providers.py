"""The provider of each pool, and the credentials for endpoints on this machine.

A pool is run by workers on this machine, by AWS Lambda, SageMaker or Ray (`Provider`). Its
`endpoint_url` may lead to this machine, where the Lambda emulator, a test or a stranger listens:
that endpoint never gets credentials of AWS. The emulator makes keys of its own when it starts and
leaves them in a file that only its user can read, found by the port of the endpoint.
"""

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

from headgate.config.decoding import Located
from headgate.config.schema import PoolSpec
from headgate.core.errors import ConfigError

KEY_PREFIX: Final = "HEADGATE"  # of key ids that the emulator makes; those of AWS differ
ID_VARIABLE: Final = "HEADGATE_PLATFORM_ACCESS_KEY_ID"
SECRET_VARIABLE: Final = "HEADGATE_PLATFORM_SECRET_ACCESS_KEY"
FILE_VARIABLE: Final = "HEADGATE_PLATFORM_KEYS_FILE"
_FILE_BYTES_MAX: Final = 65_536
_PORTS: Final = {"http": 80, "https": 443}
_AWS_ONLY: Final = ("target", "endpoint_url", "region")
_RAY_ADDRESS: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_TARGETS: Final = {
    "lambda": "the name of a Lambda function, or name:alias",
    "sagemaker": "the name of a SageMaker endpoint",
}


@dataclass(frozen=True, slots=True)
class Provider:
    """What runs the nodes or the functions of a pool, and where it is called."""

    kind: Literal["local", "lambda", "sagemaker", "ray"]
    target: str = ""  # template of the function or endpoint name, see `target_of`
    endpoint_url: str | None = None  # None: AWS itself
    region: str | None = None  # None: as configured for the AWS SDK
    address: str | None = None  # of a Ray cluster; None: an embedded one

    def target_of(self, function: str, node: int = 1) -> str:
        """Return the name to call for a function on a node (counted from 1).

        >>> Provider("lambda", "shop-{function}").target_of("rank")
        'shop-rank'
        """
        return self.target.replace("{function}", function).replace("{node}", str(node))


def choose_providers(pools: Mapping[str, PoolSpec], where: str) -> tuple[Provider | None, ...]:
    """Return the provider of each pool, by pool id; None: the pool can only be simulated."""
    if not pools:
        return (Provider("local"),)  # the default pool
    providers = tuple(
        _choose_provider(Located(spec, where, f"pools.{name}")) for name, spec in pools.items()
    )
    on_ray = [
        each for each in zip(pools, providers, strict=True) if each[1] and each[1].kind == "ray"
    ]
    for name, provider in on_ray:
        if provider != on_ray[0][1]:
            at = Located(pools[name], where, f"pools.{name}")
            problem = f"differs from that of {on_ray[0][0]}: a server can be on one Ray cluster"
            raise at.error("address", problem, allowed="the same address for all pools on Ray")
    return providers


def _choose_provider(at: Located[PoolSpec]) -> Provider | None:
    spec = at.spec
    is_serverless = spec.tier == "serverless"
    kind = spec.provider or (None if is_serverless else "local")
    if spec.provider is not None and is_serverless != (spec.provider == "lambda"):
        allowed = "lambda" if is_serverless else "local, sagemaker, ray"
        raise at.error("provider", f"does not run {spec.tier} pools", allowed=allowed)
    if kind in (None, "local", "ray"):
        _refuse(at, _AWS_ONLY, "only with provider: lambda or sagemaker")
    if kind != "ray":
        _refuse(at, ("address",), "only with provider: ray")
    if kind is None or kind == "local":
        return None if kind is None else Provider("local")
    if kind == "ray":
        return _ray_provider(at)
    if not spec.target:
        raise at.error("target", "is missing", allowed=_TARGETS[kind])
    if kind == "sagemaker" and spec.nodes > 1 and "{node}" not in spec.target:
        problem = f"names the same endpoint for {spec.nodes} nodes"
        raise at.error("target", problem, allowed="a name that contains {node}")
    if spec.endpoint_url is not None and not is_valid_url(spec.endpoint_url):
        allowed = "http://127.0.0.1:9001, https://...; without a user name"
        raise at.error("endpoint_url", "is not a valid URL", allowed=allowed)
    return Provider(kind, spec.target, spec.endpoint_url, spec.region)


def _refuse(at: Located[PoolSpec], names: tuple[str, ...], allowed: str) -> None:
    for name in names:
        if getattr(at.spec, name) is not None:
            raise at.error(name, "is not used by this provider", allowed=allowed)


def _ray_provider(at: Located[PoolSpec]) -> Provider:
    spec = at.spec
    address = spec.address
    if address is not None and address != "auto" and not _RAY_ADDRESS.fullmatch(address):
        allowed = "host:port, such as 10.0.0.1:6379, or auto"
        raise at.error("address", "is not the address of a Ray cluster", allowed=allowed)
    if address is None and spec.nodes > 1:
        problem = f"is {spec.nodes}, but an embedded Ray has one node"
        raise at.error("nodes", problem, allowed="1, or the `address` of a cluster")
    limits_compute = spec.cpu_milli is not None or spec.gpu_sevenths is not None
    if limits_compute and spec.compute != "resident":
        problem = "is not how Ray limits `cpus` and `gpu_share`: an actor holds them while it lives"
        raise at.error("compute", problem, allowed="resident")
    return Provider("ray", address=address)


@dataclass(frozen=True, slots=True)
class PlatformKeys:
    """An access key of the Lambda emulator. The secret is not part of the representation."""

    access_key_id: str
    secret_access_key: str = field(repr=False)


# For endpoints on this machine whose keys are not known: the emulator refuses these with a message
# that says where its keys are, and any other server ignores them.
NO_KEYS: Final = PlatformKeys("headgate", "headgate")


class KeysFile(msgspec.Struct, frozen=True):
    """The file that the Lambda emulator writes when it starts."""

    platform: str  # id of the emulator, so that no other one removes its file
    endpoint_url: str
    region: str
    access_key_id: str
    secret_access_key: str


def is_valid_url(url: str) -> bool:
    """Whether a URL is an HTTP address that all libraries parse alike.

    >>> is_valid_url("http://127.0.0.1:9001"), is_valid_url("http://127.0.0.1:9001@elsewhere.org")
    (True, False)
    """
    if not re.fullmatch(r"[!-~]+", url) or "\\" in url:
        return False
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return False
    return parts.scheme in _PORTS and bool(parts.hostname) and "@" not in parts.netloc


def is_aws_url(url: str) -> bool:
    """Whether a URL is an endpoint of AWS itself, authenticated by TLS.

    >>> is_aws_url("https://lambda.eu-central-1.amazonaws.com"), is_aws_url("https://amazonaws.com.io")
    (True, False)
    """
    parts = urlsplit(url)
    suffixes = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
    return parts.scheme == "https" and (parts.hostname or "").endswith(suffixes)


def is_local_url(url: str, *, where: str, key: str) -> bool:
    """Whether a URL leads to this machine, by what its host name resolves to now.

    Raises `ConfigError` if that is ambiguous: then no credentials are the right ones.
    """
    host = urlsplit(url).hostname or ""
    is_localhost = host == "localhost" or host.endswith(".localhost")
    are_local = [_is_local(address) for address in _addresses(host)]
    if are_local and any(are_local) != all(are_local):
        problem = "resolves to this machine and to others"
        raise ConfigError(problem, where=where, key=key, value=url, allowed="one address")
    if is_localhost and are_local and not all(are_local):
        problem = "is named localhost but resolves to another machine"
        raise ConfigError(problem, where=where, key=key, value=url, allowed="http://127.0.0.1:9001")
    return is_localhost or any(are_local)


def keys_for(url: str, environment: Mapping[str, str] = os.environ) -> PlatformKeys:
    """Return the keys for an endpoint on this machine. Raises `ConfigError`.

    In this order: the variables HEADGATE_PLATFORM_*, the key file of the emulator on that port,
    and the variables of AWS if they hold a key of the emulator, as its `export` lines set them.
    """
    fixed = fixed_keys(environment)
    if fixed is not None:
        return fixed
    parts = urlsplit(url)
    port = parts.port or _PORTS[parts.scheme]
    named = environment.get(FILE_VARIABLE)
    keys = read_keys(Path(named) if named else keys_path(port, environment))
    if keys is not None:
        return PlatformKeys(keys.access_key_id, keys.secret_access_key)
    exported = environment.get("AWS_ACCESS_KEY_ID", "")
    if exported.startswith(KEY_PREFIX):
        return PlatformKeys(exported, environment.get("AWS_SECRET_ACCESS_KEY", ""))
    return NO_KEYS


def keys_path(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the key file of the emulator on a port of this machine. Raises `ConfigError`."""
    state = environment.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError:  # the home directory is not known
        problem, allowed = "there is no home directory", f"{FILE_VARIABLE}, or XDG_STATE_HOME"
        raise ConfigError(problem, where="platform keys", allowed=allowed) from None
    return base / "headgate" / f"platform-{port}.json"


def read_keys(path: Path) -> KeysFile | None:
    """Return the content of a key file; None if there is none, or if other users can access it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or status.st_mode & 0o077:
                return None
            return msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=KeysFile)
    except (OSError, ValueError):  # ValueError: not JSON, or not a valid file name
        return None


def fixed_keys(environment: Mapping[str, str] = os.environ) -> PlatformKeys | None:
    """Return the keys set by environment variables, if any. Raises `ConfigError`."""
    id, secret = environment.get(ID_VARIABLE), environment.get(SECRET_VARIABLE)
    if not id and not secret:
        return None
    if not id or not secret:
        missing = SECRET_VARIABLE if id else ID_VARIABLE
        raise ConfigError(f"{missing} is not set", where="platform keys", allowed="both or none")
    if not re.fullmatch("[A-Za-z0-9_]{8,128}", id) or id.startswith(("AKIA", "ASIA")):
        allowed = "8 to 128 letters and digits, not a key of AWS"
        raise ConfigError(
            "is not a key id", where="platform keys", key=ID_VARIABLE, allowed=allowed
        )
    if not re.fullmatch("[!-~]{16,256}", secret):
        allowed = "16 to 256 printable characters without spaces"
        raise ConfigError(
            "is not a secret key", where="platform keys", key=SECRET_VARIABLE, allowed=allowed
        )
    return PlatformKeys(id, secret)


def _addresses(host: str) -> list[IPv4Address | IPv6Address]:
    """The addresses of a host. Like HTTP libraries, the resolver accepts 127.1 and 0x7f000001."""
    try:
        return [ip_address(host)]
    except ValueError:
        pass
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ip_address(str(address[0]).partition("%")[0]) for *_, address in resolved]


def _is_local(address: IPv4Address | IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    address = mapped or address
    # A connection to the unspecified address goes to this machine.
    return address.is_loopback or address.is_unspecified
