"""The workload of a run: from a trace, from the command line, or from the application file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from headgate.cli.options import WorkloadOptions
from headgate.config import AppConfig
from headgate.core.errors import ConfigError
from headgate.core.model import App
from headgate.core.rng import stream
from headgate.sim.clients import LoopClients
from headgate.workload import (
    Arrivals,
    ClosedLoop,
    find_trace,
    mix,
    named,
    parse_arrivals,
    read_trace,
    window,
)
from headgate.workload.arrivals import DEFAULT_NAME

TRACE: Final = "trace:"


@dataclass(frozen=True, slots=True)
class Workload:
    """Open-loop arrivals, and closed-loop clients that wait for each response."""

    arrivals: Arrivals | None
    loops: tuple[ClosedLoop, ...]
    window_ns: int

    @property
    def requests_max(self) -> int | None:
        """The number of requests after which nothing more is sent; None: the time ends it."""
        counts = [loop.requests_max for loop in self.loops]
        if self.arrivals is not None or any(count is None for count in counts):
            return None
        return sum(count for count in counts if count is not None)

    def clients(self, app: App) -> list[LoopClients]:
        """Return clients for one run. They hold state, so each run needs its own."""
        return [LoopClients(loop, app) for loop in self.loops]


def choose_workload(config: AppConfig, where: str, options: WorkloadOptions, seed: int) -> Workload:
    """Return the workload. Each arrival stream draws from a random stream of its own."""
    if options.trace is not None and options.arrivals:
        problem = "cannot be given together with --arrivals"
        raise ConfigError(
            problem, where="--trace", value=options.trace, allowed="either --trace or --arrivals"
        )
    if options.trace is not None or options.arrivals:
        parts = list(_from_command_line(config, options, seed))
    else:
        parts = list(_from_file(config, where, options, seed))
    for place, part in parts:
        if isinstance(part, Arrivals):
            _check_sizes(config.app, part, place)
    open_parts = [part for _, part in parts if isinstance(part, Arrivals)]
    return Workload(
        arrivals=mix(open_parts) if len(open_parts) > 1 else next(iter(open_parts), None),
        loops=tuple(part for _, part in parts if isinstance(part, ClosedLoop)),
        window_ns=max(part.duration_ns for _, part in parts),
    )


def trace_files(config: AppConfig, options: WorkloadOptions) -> list[Path]:
    if options.trace is not None:
        names = [options.trace]
    else:
        processes = options.arrivals or [s.process for s in config.workload.streams]
        names = [text.removeprefix(TRACE) for text in processes if text.startswith(TRACE)]
    return [find_trace(name, options.traces) for name in names]


def _from_command_line(
    config: AppConfig, options: WorkloadOptions, seed: int
) -> Iterator[tuple[str, Arrivals | ClosedLoop]]:
    processes = options.arrivals if options.trace is None else (f"{TRACE}{options.trace}",)
    where = "--arrivals" if options.trace is None else "--trace"
    for index, process in enumerate(processes):
        part = read_process(process, options, config.workload.duration_ns, seed, index, where=where)
        is_trace = process.startswith(TRACE)
        place = process.removeprefix(TRACE) if is_trace else f"{where} {process}"
        yield place, _with_known_names(config.app, part, place, is_trace=is_trace)


def _from_file(
    config: AppConfig, where: str, options: WorkloadOptions, seed: int
) -> Iterator[tuple[str, Arrivals | ClosedLoop]]:
    default = config.workload
    if not default.streams:
        problem = "there are no requests to send"
        allowed = "arrival streams, or --trace FILE, or --arrivals PROCESS"
        raise ConfigError(problem, where=where, key="workload.arrivals", allowed=allowed)
    for index, arrivals in enumerate(default.streams):
        key = f"workload.arrivals[{index}].process"
        part = read_process(
            arrivals.process, options, default.duration_ns, seed, index, where=where, key=key
        )
        names = arrivals.pipeline.name, arrivals.client.name
        if not arrivals.process.startswith(TRACE):
            _check_agreement(part, names, where, key)
        if isinstance(part, ClosedLoop):
            yield f"{where}: {key}", replace(part, pipeline=names[0], client=names[1])
        else:
            yield f"{where}: {key}", named(part, *names)


def read_process(
    process: str,
    options: WorkloadOptions,
    duration_ns: int,
    seed: int,
    index: int,
    *,
    where: str,
    key: str | None = None,
) -> Arrivals | ClosedLoop:
    """Return the arrivals of a specification, or of a trace: `trace:FILE`.

    `duration_ns` is the default for a specification; `index` selects the random stream.
    """
    own_seed = stream(seed, f"arrivals/{index}").getrandbits(63)
    try:
        if not process.startswith(TRACE):
            duration_ns = options.duration_ns or duration_ns
            return parse_arrivals(process, duration_ns=duration_ns, seed=own_seed)
        path = find_trace(process.removeprefix(TRACE), options.traces)
        arrivals = read_trace(path, seed=own_seed, sort=options.sort)
    except ConfigError as error:
        raise error.located(where, key) from None
    if options.duration_ns is None or options.duration_ns >= arrivals.duration_ns:
        return arrivals
    return window(arrivals, 0, options.duration_ns)


def _check_agreement(
    part: Arrivals | ClosedLoop, names: tuple[str, str], where: str, key: str
) -> None:
    """Refuse an arrival process that names another pipeline or client than its stream does."""
    for noun, own, (name,) in zip(("pipeline", "client"), names, _names(part), strict=True):
        if name not in (DEFAULT_NAME, own):
            problem = f"differs from the {noun} of the stream"
            raise ConfigError(problem, where=where, key=f"{key}: {noun}", value=name, allowed=own)


def _with_known_names(
    app: App, part: Arrivals | ClosedLoop, where: str, *, is_trace: bool
) -> Arrivals | ClosedLoop:
    """Check pipelines and clients; without a client, the first one of the application counts.

    If the application has only one pipeline or client, any name in a trace stands for it.
    """
    clients = [client.name for client in app.clients]
    is_anonymous = DEFAULT_NAME not in clients
    if isinstance(part, ClosedLoop):
        if is_anonymous and part.client == DEFAULT_NAME:
            part = replace(part, client=clients[0])
    elif is_anonymous and part.clients == (DEFAULT_NAME,):
        part = replace(part, clients=(clients[0],))
    pipelines = [pipeline.name for pipeline in app.pipelines]
    for noun, names, known in zip(
        ("pipeline", "client"), _names(part), (pipelines, clients), strict=True
    ):
        if len(known) == 1:
            names = () if is_trace else tuple(name for name in names if name != DEFAULT_NAME)
        _check_names(names, known, noun, where)
    return part


def _names(part: Arrivals | ClosedLoop) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of pipelines and of clients in the requests."""
    if isinstance(part, ClosedLoop):
        return (part.pipeline,), (part.client,)
    return part.pipelines, part.clients


def _check_names(names: Iterable[str], known: list[str], noun: str, where: str) -> None:
    for name in names:
        if name not in known:
            problem = f"names no {noun}" if name == DEFAULT_NAME else f"unknown {noun}"
            value = None if name == DEFAULT_NAME else name
            allowed = ", ".join(known)
            raise ConfigError(problem, where=where, key=noun, value=value, allowed=allowed)


def _check_sizes(app: App, arrivals: Arrivals, where: str) -> None:
    """Refuse a request that exceeds the largest batch: no policy could ever dispatch it."""
    if arrivals.items is None or not len(arrivals):
        return
    known = {pipeline.name: pipeline for pipeline in app.pipelines}
    for index, name in enumerate(arrivals.pipelines):
        pipeline = known.get(name, app.pipelines[0])
        sizes = arrivals.items[arrivals.pipeline == index]
        for stage in pipeline.stages:
            items_max = min(variant.profile.items_max for variant in stage.function.variants)
            if len(sizes) and sizes.max() > items_max:
                problem = f"exceeds the largest batch of function {stage.function.name}"
                raise ConfigError(
                    problem,
                    where=where,
                    key="items",
                    value=int(sizes.max()),
                    allowed=f"1 to {items_max}",
                )
