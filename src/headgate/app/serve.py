"""What `headgate serve` needs, from the application file: `serve` and `clients`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headgate.app.entry import Entry
from headgate.app.loaded import ClientChoice, ServeChoice
from headgate.app.spec import ClientSpec, ServeSpec
from headgate.core import units

HANG_NS_MIN: Final = 100_000_000  # less, and a worker would end itself before it is up
BODY_BYTES_MAX: Final = 1 << 30  # no message between processes is longer
SHARED_BYTES_MIN: Final = 64 << 10
SHARED_BYTES_MAX: Final = 64 << 30
LOG_BYTES_MIN: Final = 64 << 10  # each segment has the whole header
LOG_BYTES_MAX: Final = 1 << 40
MEMORY_BYTES_MAX: Final = 1 << 40


def choose_serve(spec: ServeSpec, where: str) -> ServeChoice:
    """Return how the application is served."""
    entry = Entry(spec, where, "serve")
    for name in ("host", "tls_certificate", "tls_key", "log"):
        if getattr(spec, name) == "":
            raise entry.error(name, "is empty")
    if spec.tls_key is not None and spec.tls_certificate is None:
        raise entry.error("tls_key", "has no certificate", allowed="only with tls_certificate")
    hang_ns = entry.duration_ns("hang")
    if hang_ns < HANG_NS_MIN:
        allowed = f"{units.format_duration(HANG_NS_MIN)} or longer"
        raise entry.error("hang", "is too short", allowed=allowed)
    return ServeChoice(
        host=spec.host,
        port=spec.port,
        grpc_port=spec.grpc_port,
        tls_certificate=spec.tls_certificate,
        tls_key=spec.tls_key,
        log=spec.log,
        lame_duck_ns=entry.duration_ns("lame_duck"),
        drain_ns=entry.duration_ns("drain"),
        timeout_ns=entry.positive_ns("timeout"),
        hang_ns=hang_ns,
        body_bytes=_bounded_bytes(entry, "body", 1, BODY_BYTES_MAX),
        connections=spec.connections,
        shared_memory_bytes=_bounded_bytes(
            entry, "shared_memory", SHARED_BYTES_MIN, SHARED_BYTES_MAX
        ),
        overload_status=spec.overload_status,
        log_size_bytes=_bounded_bytes(entry, "log_size", LOG_BYTES_MIN, LOG_BYTES_MAX),
        log_age_ns=entry.duration_or_never_ns("log_age"),
        log_keep=spec.log_keep,
        log_level=spec.log_level,
        log_format=spec.log_format,
        access_log=spec.access_log,
        expose_errors=spec.expose_errors,
        answer_bytes=_bounded_bytes(entry, "answer", 1, BODY_BYTES_MAX),
        memory_bytes=_bounded_bytes(entry, "memory", 1, MEMORY_BYTES_MAX),
    )


def without_keys(spec: Mapping[str, object]) -> dict[str, object]:
    """Return an application as plain data without the hashes of its clients' keys.

    For an event log, which is kept, copied and sent around: no decision depends on a key.
    """
    clients = spec.get("clients")
    if not isinstance(clients, Mapping):
        return dict(spec)
    kept = {name: {**client, "key": None} for name, client in clients.items()}
    return {**spec, "clients": kept}


def choose_clients(specs: Mapping[str, ClientSpec], where: str) -> tuple[ClientChoice, ...]:
    """Return what each client may do, by its id; none if none are named."""
    owners: dict[str, str] = {}
    choices: list[ClientChoice] = []
    for id, (name, spec) in enumerate(specs.items()):
        entry = Entry(spec, where, f"clients.{name}")
        if spec.key is not None and owners.setdefault(spec.key, name) != name:
            problem = f"is the key of {owners[spec.key]}, too"
            raise entry.error("key", problem, allowed="a key of its own")
        choices.append(
            ClientChoice(
                client_id=id,
                key_sha256=None if spec.key is None else spec.key.removeprefix("sha256:"),
                rate_per_s=None if spec.rate is None else entry.positive_rate_per_s("rate"),
                burst=spec.burst,
                concurrency=spec.concurrency,
            )
        )
    return tuple(choices)


def _bounded_bytes(entry: Entry[ServeSpec], name: str, least: int, most: int) -> int:
    size_bytes = entry.size_bytes(name)
    if not least <= size_bytes <= most:
        problem = "is too small" if size_bytes < least else "is too large"
        allowed = f"{units.format_size(least)} to {units.format_size(most)}"
        raise entry.error(name, problem, allowed=allowed)
    return size_bytes
