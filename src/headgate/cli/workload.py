"""The requests of a run: from a trace, from the command line, or from the application file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

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

_TRACE: Final = "trace:"


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What the command line says about requests."""

    trace: str | None = None
    arrivals: tuple[str, ...] = ()
    duration_ns: int | None = None
    sort: bool = False  # accept a trace that is not in order of time
    traces: Path | None = None  # a directory


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that come by themselves, and clients that wait for answers."""

    arrivals: Arrivals | None
    loops: tuple[ClosedLoop, ...]
    window_ns: int

    def clients(self, app: App) -> list[LoopClients]:
        """Return clients for one run: they remember what they sent, so each run needs its own."""
        return [LoopClients(loop, app) for loop in self.loops]


def choose_workload(loaded: AppConfig, where: str, options: WorkloadOptions, seed: int) -> Workload:
    """Return the requests to send. Each stream draws from a random stream of its own."""
    if options.trace is not None and options.arrivals:
        problem = "cannot be given together with --arrivals"
        raise ConfigError(problem, where="--trace", value=options.trace, allowed="one of the two")
    if options.trace is not None or options.arrivals:
        parts = list(_from_command_line(loaded, options, seed))
    else:
        parts = list(_from_file(loaded, where, options, seed))
    for place, part in parts:
        if isinstance(part, Arrivals):
            _check_sizes(loaded.app, part, place)
    open_parts = [part for _, part in parts if isinstance(part, Arrivals)]
    return Workload(
        arrivals=mix(open_parts) if len(open_parts) > 1 else next(iter(open_parts), None),
        loops=tuple(part for _, part in parts if isinstance(part, ClosedLoop)),
        window_ns=max(part.duration_ns for _, part in parts),
    )


def trace_files(loaded: AppConfig, options: WorkloadOptions) -> list[Path]:
    """Return the files that the requests come from."""
    if options.trace is not None:
        names = [options.trace]
    else:
        specs = options.arrivals or [asked.process for asked in loaded.workload.streams]
        names = [spec.removeprefix(_TRACE) for spec in specs if spec.startswith(_TRACE)]
    return [find_trace(name, options.traces) for name in names]


def _from_command_line(
    loaded: AppConfig, options: WorkloadOptions, seed: int
) -> Iterator[tuple[str, Arrivals | ClosedLoop]]:
    specs = options.arrivals if options.trace is None else (f"{_TRACE}{options.trace}",)
    where = "--arrivals" if options.trace is None else "--trace"
    for index, spec in enumerate(specs):
        with _located(where, None):
            part = _read(spec, options, loaded.workload.duration_ns, seed, index)
        is_trace = spec.startswith(_TRACE)
        place = spec.removeprefix(_TRACE) if is_trace else f"{where} {spec}"
        yield place, _with_known_names(loaded.app, part, place, is_trace=is_trace)


def _from_file(
    loaded: AppConfig, where: str, options: WorkloadOptions, seed: int
) -> Iterator[tuple[str, Arrivals | ClosedLoop]]:
    choice = loaded.workload
    if not choice.streams:
        problem = "there are no requests to send"
        allowed = "streams here, or --trace FILE, or --arrivals SPEC"
        raise ConfigError(problem, where=where, key="workload.arrivals", allowed=allowed)
    for index, asked in enumerate(choice.streams):
        key = f"workload.arrivals[{index}].process"
        with _located(where, key):
            part = _read(asked.process, options, choice.duration_ns, seed, index)
        names = asked.pipeline.name, asked.client.name
        if not asked.process.startswith(_TRACE):
            _check_agreement(part, names, where, key)
        if isinstance(part, ClosedLoop):
            yield f"{where}: {key}", replace(part, pipeline=names[0], client=names[1])
        else:
            yield f"{where}: {key}", named(part, *names)


def _read(
    spec: str, options: WorkloadOptions, duration_ns: int, seed: int, index: int
) -> Arrivals | ClosedLoop:
    own_seed = stream(seed, f"arrivals/{index}").getrandbits(63)
    if not spec.startswith(_TRACE):
        duration_ns = options.duration_ns or duration_ns
        return parse_arrivals(spec, duration_ns=duration_ns, seed=own_seed)
    path = find_trace(spec.removeprefix(_TRACE), options.traces)
    arrivals = read_trace(path, seed=own_seed, sort=options.sort)
    if options.duration_ns is None or options.duration_ns >= arrivals.duration_ns:
        return arrivals
    return window(arrivals, 0, options.duration_ns)


def _check_agreement(
    part: Arrivals | ClosedLoop, names: tuple[str, str], where: str, key: str
) -> None:
    """Refuse a specification that names another pipeline or client than its stream does."""
    for noun, own, (said,) in zip(("pipeline", "client"), names, _names(part), strict=True):
        if said not in (DEFAULT_NAME, own):
            problem = f"the {noun} of the stream is another"
            raise ConfigError(problem, where=where, key=f"{key}: {noun}", value=said, allowed=own)


def _with_known_names(
    app: App, part: Arrivals | ClosedLoop, where: str, *, is_trace: bool
) -> Arrivals | ClosedLoop:
    """Check pipelines and clients; where no client is named, the first one is meant.

    Where the application has only one, that is who is meant, whatever a trace calls it.
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
    """The pipelines and the clients that its requests carry."""
    if isinstance(part, ClosedLoop):
        return (part.pipeline,), (part.client,)
    return part.pipelines, part.clients


def _check_names(names: Iterable[str], known: list[str], noun: str, where: str) -> None:
    for name in names:
        if name not in known:
            problem = f"does not say which {noun}" if name == DEFAULT_NAME else f"unknown {noun}"
            value = None if name == DEFAULT_NAME else name
            allowed = ", ".join(known)
            raise ConfigError(problem, where=where, key=noun, value=value, allowed=allowed)


def _check_sizes(app: App, arrivals: Arrivals, where: str) -> None:
    """Refuse a request larger than the largest batch: no policy could ever dispatch it."""
    if arrivals.items is None or not len(arrivals):
        return
    known = {pipeline.name: pipeline for pipeline in app.pipelines}
    for index, name in enumerate(arrivals.pipelines):
        pipeline = known.get(name, app.pipelines[0])
        sizes = arrivals.items[arrivals.pipeline == index]
        for stage in pipeline.stages:
            most = min(variant.profile.items_max for variant in stage.function.variants)
            if len(sizes) and sizes.max() > most:
                problem = f"is more than a batch of function {stage.function.name} can hold"
                raise ConfigError(
                    problem,
                    where=where,
                    key="items",
                    value=int(sizes.max()),
                    allowed=f"1 to {most}",
                )


@contextmanager
def _located(where: str, key: str | None) -> Iterator[None]:
    """Say where a specification stands, in errors that know only what it says."""
    try:
        yield
    except ConfigError as error:
        if error.where is not None:
            raise
        keys = ": ".join(part for part in (key, error.key) if part)
        raise ConfigError(
            error.problem, where=where, key=keys, value=error.value, allowed=error.allowed
        ) from None
