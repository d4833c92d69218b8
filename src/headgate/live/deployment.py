"""Deployment descriptor: the file that the supervisor writes for its gateway and its workers.

All processes read the same file, so that an edit of the application file in the meantime cannot
make them disagree.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import msgspec
from msgspec import Struct

from headgate.config import AppConfig, ServeSpec, from_spec
from headgate.config.providers import Provider
from headgate.core.errors import ConfigError
from headgate.core.model import UNLIMITED, App, Tier

_FILE: Final = "deployment.json"


@final
class NodeSpec(Struct, frozen=True):
    """One node, and the cores its worker is pinned to; none if it is a place for one of Ray."""

    id: int
    pool_id: int
    name: str
    cores: list[int]


@final
class Deployment(Struct, frozen=True):
    """An application, the directory of its files, and the nodes that serve it."""

    spec: dict[str, Any]  # the application as plain data, with every default filled in
    base: str  # directory that `model` and `code` are relative to
    nodes: list[NodeSpec]

    def load(self) -> AppConfig:
        return from_spec(self.spec, _FILE)

    def may_spin(self, gateways: int) -> bool:
        """Whether every worker and every gateway has cores of its own, as `busy_poll` needs."""
        claimed = sum(len(node.cores) for node in self.nodes)
        has_own = all(node.cores for node in self.nodes)
        return has_own and claimed + gateways <= len(os.sched_getaffinity(0))


def write_deployment(run_dir: Path, deployment: Deployment) -> None:
    (run_dir / _FILE).write_bytes(msgspec.json.encode(deployment))


def read_deployment(run_dir: Path) -> Deployment:
    return msgspec.json.decode((run_dir / _FILE).read_bytes(), type=Deployment)


def tls_context(serve: ServeSpec, base: Path, where: str | None = None) -> ssl.SSLContext | None:
    """Return the TLS context of connections; None without a certificate. Raises `ConfigError`."""
    if serve.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate, key = base / serve.tls_certificate, None
    if serve.tls_key is not None:
        key = base / serve.tls_key
        _check_readable(key, where, "serve.tls_key", serve.tls_key)
    _check_readable(certificate, where, "serve.tls_certificate", serve.tls_certificate)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"is not a certificate with its key: {error.strerror or error}",
            where=where,
            key="serve.tls_certificate",
            value=serve.tls_certificate,
            allowed="a certificate chain (PEM), and its key there or in tls_key",
        ) from None
    return context


def _check_readable(path: Path, where: str | None, key: str, value: str) -> None:
    """OpenSSL names neither the file nor, where both are missing, the first of them."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"cannot be read from {path.parent}: {error.strerror}",
            where=where,
            key=key,
            value=value,
            allowed="a PEM file",
        ) from None


def socket_path(run_dir: Path, node_id: int) -> Path:
    """Return the path of the Unix socket that the worker of a node listens on."""
    return run_dir / f"node-{node_id}.sock"


def listen(path: Path) -> socket.socket:
    """Listen on a socket that only our own user can connect to."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen()
    return listener


def is_on_ray(providers: Sequence[Provider | None], node: NodeSpec) -> bool:
    """Whether a node is a place for a node of Ray. All others have a worker."""
    provider = providers[node.pool_id]
    return provider is not None and provider.kind == "ray"


def assign_cores(
    app: App,
    cores: Sequence[int],
    where: str,
    providers: Sequence[Provider | None] = (),
    gateways: int = 1,
) -> list[NodeSpec]:
    """Return the nodes of all local pools, each with cores of its own as far as they suffice, and
    after them the places of pools on Ray.

    A pool that declares its CPUs gets that many cores per node, rounded up. The other pools share
    the remaining cores equally, except for one core that is left to each gateway. Cores are
    assigned from the highest number down, because other processes of a machine tend to run on the
    lowest. Without `providers` all pools are local.
    """
    kinds = [provider.kind if provider is not None else "local" for provider in providers]
    pools = [pool for pool in app.pools if not kinds or kinds[pool.id] == "local"]
    for pool in pools:
        if pool.faas is not None or pool.tier != Tier.DEDICATED:
            problem, allowed = "cannot be served from here yet", "tier: dedicated"
            if pool.tier == Tier.GPU:
                problem = "live GPU pools are not available yet"
                allowed = "provider: ray, tier: dedicated"
            allowed += ", or headgate simulate"
            raise ConfigError(problem, where=where, key=f"pools.{pool.name}", allowed=allowed)
    undeclared = sum(pool.nodes for pool in pools if pool.cpu_milli >= UNLIMITED)
    declared = sum(p.nodes * _cpus(p.cpu_milli) for p in pools if p.cpu_milli < UNLIMITED)
    share = max(1, (len(cores) - gateways - declared) // max(1, undeclared))
    nodes: list[NodeSpec] = []
    ordered_cores = sorted(cores, reverse=True)
    taken = 0
    for pool in pools:
        count = _cpus(pool.cpu_milli) if pool.cpu_milli < UNLIMITED else share
        for number in range(pool.nodes):
            chosen = range(taken, taken + min(count, len(cores)))
            own = sorted(ordered_cores[i % len(cores)] for i in chosen)
            taken += count
            nodes.append(NodeSpec(len(nodes), pool.id, f"{pool.name}{number + 1}", own))
    for pool in app.pools:
        if kinds and kinds[pool.id] == "ray":
            for number in range(pool.nodes):
                nodes.append(NodeSpec(len(nodes), pool.id, f"{pool.name}{number + 1}", []))
    return nodes


def _cpus(milli: int) -> int:
    return max(1, -(-milli // 1000))
