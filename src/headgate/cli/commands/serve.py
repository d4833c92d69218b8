"""`headgate serve`: serves an application until a signal ends it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from headgate.cli.app_loading import load_app, select_policy, warn_of_unreachable_objectives
from headgate.config import AppConfig, from_spec
from headgate.config.providers import providers_of
from headgate.core.errors import ConfigError
from headgate.http.interface import BACKLOG
from headgate.live.deployment import Deployment, assign_cores
from headgate.live.model_registry import remote_only
from headgate.live.pools.registry import check_providers
from headgate.live.supervisor import Supervisor
from headgate.live.telemetry import logs
from headgate.live.telemetry.logs import reopen_standard_fds


@click.command("serve")
@click.argument("app", metavar="APP")
@click.option("--host", help="Address to listen on. Default: that of APP, or 127.0.0.1.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), help="HTTP port. Default: that of APP, or 8080."
)
@click.option("--grpc-port", type=click.IntRange(0, 65_535), help="Serve gRPC on this port, too.")
@click.option(
    "--policy", metavar="NAME", help="Scheduling policy. Default: that of APP, or headgate."
)
@click.option("--slo", metavar="LATENCY", help="Objective of pipelines without one, such as 50ms.")
@click.option(
    "--workers", type=click.IntRange(1, 1_000), help="Number of nodes of APP's first pool."
)
@click.option("--log", type=click.Path(path_type=Path), help="File for the event log.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least severe level of messages on stderr. Default: that of APP, or info.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    help="Text, or one JSON object per line. Default: that of APP, or text.",
)
@click.option(
    "--access-log/--no-access-log",
    default=None,
    help="Log each request with its outcome. Default: that of APP, or off.",
)
@click.option("--reload", "reloads", is_flag=True, help="Reload when a file beside APP changes.")
def command(
    app: str,
    host: str | None,
    port: int | None,
    grpc_port: int | None,
    policy: str | None,
    slo: str | None,
    workers: int | None,
    log: Path | None,
    log_level: str | None,
    log_format: str | None,
    access_log: bool | None,
    reloads: bool,
) -> int:
    """Serve APP: a YAML file, module:app, or a single model.onnx.

    \b
    headgate serve model.onnx
    headgate serve app.yaml --port 9000 --log run.log
    """
    reopen_standard_fds()
    changes = {
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "log_level": log_level,
        "log_format": log_format,
        "access_log": access_log,
    }
    given = {name: value for name, value in changes.items() if value is not None}

    def prepare() -> Deployment:
        return _deployment(app, given, policy=policy, slo=slo, workers=workers)

    first = prepare()
    warn_of_unreachable_objectives(first.load(), app)
    serve = first.load().serve
    if log is None and serve.log is not None:
        log = Path(first.base) / serve.log
    if log is not None and (log.is_dir() or not log.parent.is_dir()):
        raise ConfigError("cannot be written", where=str(log), key="--log")
    with ExitStack() as sockets:
        listener = sockets.enter_context(_bind(serve.host, serve.port))
        listener.listen(BACKLOG)
        given["port"] = listener.getsockname()[1]
        if serve.grpc_port is not None:
            # gRPC opens a socket of its own; this one only reserves the port. The first bind is
            # exclusive, because a shared one would not notice that the port is in use.
            _bind(serve.host, serve.grpc_port).close()
            reserved = sockets.enter_context(_bind(serve.host, serve.grpc_port, is_shared=True))
            given["grpc_port"] = reserved.getsockname()[1]
        supervisor = Supervisor(
            prepare,
            listener,
            log_path=log,
            watched_state=(lambda: _stamp(app)) if reloads else None,
            on_ready=_print_banner,
        )
        # Logging can neither block nor end the supervisor, even if nobody reads stderr any more.
        with logs.configured(serve, "supervisor"):
            return supervisor.run()


def _deployment(
    app: str,
    given: Mapping[str, object],
    *,
    policy: str | None,
    slo: str | None,
    workers: int | None,
) -> Deployment:
    """Load APP with the changes of the command line."""
    config = _load(app)
    spec: dict[str, Any] = dict(config.spec)
    spec["serve"] = {**spec["serve"], **given}
    if policy is not None:
        spec["policy"] = policy
    if slo is not None:
        spec["slo"] = {**(spec["slo"] or {}), "latency": slo}
    if workers is not None:
        pools = spec["pools"] or {"local": {"tier": "dedicated"}}
        first = next(iter(pools))
        spec["pools"] = {**pools, first: {**pools[first], "nodes": workers}}
    changed = from_spec(spec, app)
    _check_served(changed, app)
    select_policy(changed, app, None, {})
    check_providers(changed, app)
    nodes = assign_cores(changed.app, sorted(os.sched_getaffinity(0)), app, providers_of(changed))
    return Deployment(changed.spec, str(_base(app)), nodes)


def _load(app: str) -> AppConfig:
    if not app.endswith(".onnx"):
        return load_app(app)
    path = Path(app)
    if not path.is_file():
        raise ConfigError("is not a file", where=app)
    name = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in path.stem)
    return from_spec({"functions": {name.lstrip(".-") or "model": {"model": path.name}}}, app)


def _check_served(config: AppConfig, where: str) -> None:
    remote = remote_only(config)  # these run elsewhere and need no local files
    for variant, source in zip(config.app.variants, config.sources, strict=True):
        if source is None and variant not in remote:
            raise ConfigError(
                "has neither `model` nor `code`, so it can be simulated but not served",
                where=where,
                key=f"functions.{variant.name}",
            )


def _base(app: str) -> Path:
    """Return the directory in which `model` and `code` are found."""
    if app.endswith((".yaml", ".yml", ".onnx")):
        return Path(app).resolve().parent
    return Path.cwd()


def _stamp(app: str) -> object:
    """Return a value that changes whenever a source beside APP does."""
    stamps = []
    for path in _base(app).rglob("*"):
        if path.suffix in (".py", ".yaml", ".yml", ".onnx"):
            try:
                stamps.append((str(path), path.stat().st_mtime_ns))
            except OSError:
                continue  # deleted in the meantime
    return sorted(stamps)


def _bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        option = socket.SO_REUSEPORT if is_shared else socket.SO_REUSEADDR
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen: {reason}", where=f"{host}:{port}") from None
    return listener


def _print_banner(message: bytes) -> None:
    """Print what is served, and an example request."""
    banner = json.loads(message)
    click.echo(f"serving {banner['url']}  (policy {banner['policy']}; Ctrl-C ends it)")
    if banner["grpc"]:
        click.echo(f"gRPC on {banner['grpc']}")
    for model in banner["models"]:
        click.echo(f"  {model['name']}: {model['signature']}")
    click.echo(f"try it:\n  {banner['curl']}")
