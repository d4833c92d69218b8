"""`headgate serve`: serves an application until a signal ends it."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from headgate.cli.app_loading import (
    base_directory,
    check_gateways,
    known_policy,
    load_app,
    select_policy,
    shared_by_gateways,
    warn_of_unreachable_objectives,
    warn_of_what_is_overlooked,
)
from headgate.cli.options import admission_option
from headgate.config import AppConfig, ServeSpec, from_spec
from headgate.config.reference import SchemaKey, keys_of
from headgate.core.errors import ConfigError
from headgate.http.interface import BACKLOG
from headgate.live.deployment import Deployment, NodeSpec, assign_cores, tls_context
from headgate.live.event_log import check_log_path
from headgate.live.model_registry import remote_only
from headgate.live.pools.registry import check_providers
from headgate.live.supervisor import Supervisor, log_path_of
from headgate.live.telemetry import logs
from headgate.live.telemetry.logs import reopen_standard_fds

_LOG: Final = logging.getLogger(__name__)
# Keys of `serve:` that hold for as long as the server runs. gRPC may be added later.
_FIXED_SETTINGS: Final = ("host", "port", "grpc_port", "gateways", "log")


def _parser(setting: SchemaKey, option: str) -> Callable[[str], object]:
    """Return the parser of the option of a key of `serve:`. It raises `ConfigError`."""

    def value(text: str) -> object:
        try:
            setting.check(text, option)
        except ConfigError:
            if not re.fullmatch("-?[0-9]{1,18}", text):
                raise
            setting.check(int(text), option)
            return int(text)
        return text

    return value


def _setting_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add an option for each key of `serve:`, as the schema declares it."""
    for setting in reversed(keys_of(ServeSpec)):
        if setting.key == "log":
            continue  # a file in the working directory, not beside APP: an option of its own
        name = f"--{setting.key.replace('_', '-')}"
        text = setting.description
        if setting.default is not None:
            text += f" Default: {setting.default_text}."
        if isinstance(setting.default, bool):
            option = click.option(f"{name}/--no-{name[2:]}", default=None, help=text)
        else:
            option = click.option(
                name, type=_parser(setting, name), metavar=setting.placeholder, help=text
            )
        command = option(command)
    return command


@click.command("serve")
@click.argument("app", metavar="APP")
@click.option(
    "--policy", metavar="NAME", help="Scheduling policy. Default: that of APP, or headgate."
)
@click.option("--slo", metavar="LATENCY", help="Objective of pipelines without one, such as 50ms.")
@click.option(
    "--workers",
    type=click.IntRange(1, 1_000),
    metavar="N",
    help="Number of nodes of APP's first pool.",
)
@admission_option
@click.option("--log", type=click.Path(path_type=Path), help="File for the event log.")
@click.option("--reload", "reloads", is_flag=True, help="Reload when a file beside APP changes.")
@_setting_options
def command(
    app: str,
    policy: str | None,
    slo: str | None,
    workers: int | None,
    admission: str | None,
    log: Path | None,
    reloads: bool,
    **settings: object,
) -> int:
    """Serve APP: a YAML file, module:app, or a single model.onnx.

    The other options are the keys of `serve:` in APP, and take precedence over them.

    \b
    headgate serve model.onnx
    headgate serve app.yaml --port 9000 --log run.log
    """
    reopen_standard_fds()
    given = {name: value for name, value in settings.items() if value is not None}
    for name in ("tls_certificate", "tls_key"):  # beside APP only where APP names them
        if name in given:
            given[name] = str(Path(str(given[name])).absolute())

    def prepare() -> Deployment:
        return _deployment(app, given, policy=policy, slo=slo, workers=workers, admission=admission)

    def prepare_again() -> Deployment:
        _warn_of_fixed_settings(app, serve, from_command)
        return prepare()

    from_command = {*given, *([] if log is None else ["log"])}
    first = prepare()
    warn_of_unreachable_objectives(first.load(), app)
    warn_of_what_is_overlooked(first.load(), app)
    _warn_of_shared_cores(first.nodes, app)
    _warn_of_clients_without_keys(first.load(), app)
    serve = first.load().serve
    if log is None and serve.log is not None:
        log = Path(first.base) / serve.log
    if log is not None:
        for slot in range(serve.gateways):
            check_log_path(log_path_of(log, slot, serve.gateways))
    with _open_ports(serve) as (listener, ports):
        # These settings stay for as long as the server runs.
        given.update(host=serve.host, gateways=serve.gateways, **ports)
        supervisor = Supervisor(
            prepare_again,
            listener,
            log_path=log,
            watched_state=(lambda: _stamp(app)) if reloads else None,
            on_ready=_print_banner,
        )
        # Logging can neither block nor end the supervisor, even if stderr is no longer read.
        with logs.configured(serve, "supervisor"):
            return supervisor.run()


@contextmanager
def _open_ports(serve: ServeSpec) -> Iterator[tuple[socket.socket, dict[str, int]]]:
    """Yield the socket of the HTTP port, and the ports by their settings; gRPC's is reserved."""
    with ExitStack() as sockets:
        if serve.gateways == 1:
            listener = sockets.enter_context(_bind(serve.host, serve.port))
            listener.listen(BACKLOG)
        else:  # each gateway has a socket of its own
            listener = sockets.enter_context(_reserve(serve.host, serve.port))
        ports = {"port": listener.getsockname()[1]}
        if serve.grpc_port is not None:  # gRPC opens a socket of its own
            reserved = sockets.enter_context(_reserve(serve.host, serve.grpc_port))
            ports["grpc_port"] = reserved.getsockname()[1]
        yield listener, ports


def _warn_of_shared_cores(nodes: Sequence[NodeSpec], app: str) -> None:
    """Warn on stderr if workers slow each other down, which no profile and no policy knows."""
    wanted, cores = sum(len(node.cores) for node in nodes), len(os.sched_getaffinity(0))
    if wanted > cores:
        problem = f"{len(nodes)} workers want {wanted} cores and share {cores}"
        click.echo(f"headgate: warning: {app}: pools: {problem}", err=True)


def _warn_of_clients_without_keys(config: AppConfig, app: str) -> None:
    """Warn on stderr of clients that no request can be from: keys tell who sends one."""
    without = [
        client.name
        for client, spec in zip(config.app.clients, config.tenants, strict=False)
        if spec.key is None
    ]
    who = "requests need the key of another client"
    if len(without) == len(config.tenants):
        who = f"all requests count as those of {without.pop(0)}" if without else ""
    if without:
        problem = f"without a key no request is theirs; {who}"
        click.echo(f"headgate: warning: {app}: clients: {', '.join(without)}: {problem}", err=True)


def _warn_of_fixed_settings(app: str, running: ServeSpec, from_command: Collection[str]) -> None:
    """Log which settings of a file that has changed wait for the next start."""
    serve = load_app(app).serve
    for name in _FIXED_SETTINGS:
        value, is_value = getattr(serve, name), getattr(running, name)
        is_added = name == "grpc_port" and is_value is None
        if value != is_value and name not in from_command and not is_added:
            problem = f"needs a new start of the server; it stays {is_value!r}"
            _LOG.warning("%s: serve.%s: %r: %s", app, name, value, problem)


def _deployment(
    app: str,
    given: Mapping[str, object],
    *,
    policy: str | None,
    slo: str | None,
    workers: int | None,
    admission: str | None,
) -> Deployment:
    """Load APP with the changes of the command line."""
    config = load_app(app)
    spec: dict[str, Any] = dict(config.spec)
    spec["serve"] = {**spec["serve"], **given}
    if admission is not None:
        spec["limits"] = {**spec["limits"], "admission": admission}
    if policy is not None and policy != config.policy.name:  # else with the settings of the file
        known_policy(policy, "--policy")
        spec["policy"] = policy
    if slo is not None:
        spec["slo"] = {**(spec["slo"] or {}), "latency": slo}
    if workers is not None:
        pools = spec["pools"] or {"local": {"tier": "dedicated"}}
        first = next(iter(pools))
        spec["pools"] = {**pools, first: {**pools[first], "nodes": workers}}
    changed = from_spec(spec, app)
    _check_served(changed, app)
    selected = select_policy(changed, app, None, {})
    check_gateways(selected, changed.serve.gateways, app, "serve.gateways")
    check_providers(changed, app)
    tls_context(changed.serve, base_directory(app), app)
    if changed.serve.grpc_port is not None and find_spec("grpc") is None:
        problem = "needs the extra `grpc`"
        raise ConfigError(
            problem, where=app, key="serve.grpc_port", allowed="pip install 'headgate[grpc]'"
        )
    if changed.serve.gateways > 1:
        capabilities, gateways = selected.kind.capabilities, changed.serve.gateways
        changed = from_spec(shared_by_gateways(changed, capabilities, gateways), app)
    cores, gateways = sorted(os.sched_getaffinity(0)), changed.serve.gateways
    nodes = assign_cores(changed.app, cores, app, changed.providers, gateways)
    return Deployment(changed.spec, str(base_directory(app)), nodes)


def _check_served(config: AppConfig, where: str) -> None:
    remote = remote_only(config)  # these run elsewhere and need no local files
    for variant, source in zip(config.app.variants, config.sources, strict=True):
        if source is None and variant not in remote:
            raise ConfigError(
                "has neither `model` nor `code`, so it can be simulated but not served",
                where=where,
                key=f"functions.{variant.name}",
                allowed="model: FILE.onnx, or code: module:name",
            )


def _stamp(app: str) -> object:
    """Return a value that changes whenever a source beside APP does."""
    stamps = []
    for path in base_directory(app).rglob("*"):
        if path.suffix.lower() in (".py", ".yaml", ".yml", ".onnx"):
            try:
                status = path.stat()
                stamps.append((str(path), status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                continue  # deleted in the meantime
    return sorted(stamps)


def _bind(host: str, port: int, options: tuple[int, ...] = (socket.SO_REUSEADDR,)) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen: {reason}", where=f"{host}:{port}") from None
    return listener


def _reserve(host: str, port: int) -> socket.socket:
    """Return a socket that reserves a port for the sockets of gateways; it does not listen.

    The first bind is exclusive, because a shared one would not notice that the port is in use. Only
    connections that a server has closed may be left there then. If that server had one gateway, the
    port can be shared only with the second option; without it another server that is about to start
    notices that the port is reserved.
    """
    exclusive = _bind(host, port)
    port = exclusive.getsockname()[1]
    exclusive.close()
    try:
        return _bind(host, port, (socket.SO_REUSEPORT,))
    except ConfigError:
        return _bind(host, port, (socket.SO_REUSEPORT, socket.SO_REUSEADDR))


def _print_banner(message: bytes) -> None:
    """Print what is served, and an example request."""
    banner = json.loads(message)
    click.echo(f"serving {banner['url']}  (policy {banner['policy']}; Ctrl-C ends it)")
    if banner["grpc"]:
        click.echo(f"gRPC on {banner['grpc']}")
    for model in banner["models"]:
        click.echo(f"  {model['name']}: {model['signature']}")
    click.echo(f"try it:\n  {banner['curl']}")
