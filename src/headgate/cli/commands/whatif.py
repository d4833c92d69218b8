"""`headgate whatif`: predicts what would have become of the requests of an event log, changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any, Final, final

import click
import numpy as np
from rich.text import Text

from headgate.cli.app_loading import (
    SelectedPolicy,
    check_gateways,
    select_policy,
    shared_by_gateways,
)
from headgate.cli.calibration import (
    CalibratedLog,
    client_overhead_option,
    read_calibrated,
    size_lines,
    spans,
)
from headgate.cli.options import json_option, set_option
from headgate.cli.output import show, show_json
from headgate.cli.simulation import run
from headgate.cli.workload import Workload
from headgate.config import AppConfig, from_spec
from headgate.config.build import variant_spec
from headgate.core.actions import Action
from headgate.core.clock import HOUR_NS, NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError, unknown_name_error
from headgate.core.events import Event
from headgate.core.model import App, Pool, Variant
from headgate.core.units import format_duration
from headgate.metrics.columns import with_client_overhead
from headgate.metrics.confidence import RunFigures, resample_windows, run_figures
from headgate.metrics.from_log import BatchColumns, LogColumnsReader, Trouble, calibrate
from headgate.metrics.table import rows_table
from headgate.sim.interfaces import Observer
from headgate.workload import superpose
from headgate.workload.arrivals import ARRIVALS_MAX

_REPLICATES: Final = 40  # draws of windows from each simulation
_LEVEL: Final = 0.95
_BATCH_MAX: Final = "batch_max"
_COUNTS: Final = ("requests", "refused")


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from what was."""

    workers: int | None = None
    policy: str | None = None
    rate_scale: float = 1.0
    settings: tuple[tuple[str, object], ...] = ()  # of the application file, and of the policy

    def __str__(self) -> str:
        parts = [] if self.workers is None else [f"workers {self.workers}"]
        parts += [] if self.policy is None else [f"policy {self.policy}"]
        parts += [] if self.rate_scale == 1.0 else [f"rate x {self.rate_scale:g}"]
        return ", ".join([*parts, *(f"{key} {value}" for key, value in self.settings)])


@dataclass(frozen=True, slots=True)
class Estimate:
    """A predicted figure, with the interval of what chance may make of it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of the log and predicted figures, by name; None: the log does not say."""

    was: dict[str, float | None]
    predicted: dict[str, Estimate]
    unseen: list[str]  # one line for everything that the log does not have


@click.command("whatif")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Nodes of the pool of nodes. With several such pools: --set pools.NAME.nodes=N.",
)
@click.option("--policy", metavar="NAME", help="Scheduling policy. Default: that of LOG.")
@click.option(
    "--rate-scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    metavar="X",
    help="Send X times as many requests: 0.5 thins them, 2 superposes two copies. Default: 1.",
)
@set_option(
    "A key of the application file, such as functions.NAME.batch_max=4, or, without a dot, a"
    " setting of the policy. May be repeated."
)
@click.option(
    "--runs",
    type=click.IntRange(1, 1_000),
    default=5,
    show_default=True,
    help="Simulations, with seeds 0, 1, ...: the more, the surer the interval.",
)
@client_overhead_option
@json_option
def command(
    logs: tuple[Path, ...],
    workers: int | None,
    policy: str | None,
    rate_scale: float,
    settings: tuple[tuple[str, object], ...],
    runs: int,
    overheads_ns: tuple[int, ...],
    as_json: bool,
) -> None:
    """Predict what would have become of the requests of LOG if something had been different.

    Calibrates from LOG as headgate calibrate does, simulates its requests with the changes, and
    prints the prediction beside what was, with 95 % intervals. Without changes, the difference
    says how well LOG itself is predicted. What LOG has never seen is named. Of several gateways,
    give the logs of all: as many are simulated, and share the requests evenly.

    \b
    headgate whatif run.log
    headgate whatif run.log --workers 2 --rate-scale 1.5
    headgate whatif run-0.log run-1.log --workers 4
    headgate whatif run.log --policy clipper --set functions.resnet.batch_max=4
    """
    changes = Changes(workers, policy, rate_scale, settings)
    read = read_calibrated(*logs)
    found = predict(read, changes, runs=runs, client_overheads_ns=overheads_ns)
    if as_json:
        show_json(
            {
                "log": read.name,
                "changes": {**asdict(changes), "settings": dict(settings)},
                "runs": runs,
                "was": found.was,
                "predicted": {name: asdict(each) for name, each in found.predicted.items()},
                # Without a change: whether what was lies in the interval of each figure.
                "self_check": None if str(changes) else _self_check(found),
                "unseen": found.unseen,
                "missing": read.missing or None,
            }
        )
    else:
        _show(read, changes, runs, found)


def predict(
    log: CalibratedLog,
    changes: Changes,
    *,
    runs: int,
    client_overheads_ns: Sequence[int] = (0,),
) -> Prediction:
    """Simulate the requests of a log with changes, once for each seed. Raises `ConfigError`.

    A figure is the mean over the simulations. Its interval is over all draws of windows from all
    simulations: see `resample_windows`. The interval of the cost is over the simulations alone.
    """
    if log.header.peers > log.gateways:
        problem = f"is the log of one of {log.header.peers} gateways, and has only its requests"
        raise ConfigError(problem, where=log.name, allowed="the logs of all gateways")
    if len(log.columns.requests) * changes.rate_scale > ARRIVALS_MAX or isnan(changes.rate_scale):
        allowed = f"above 0, and up to {ARRIVALS_MAX:,} requests"
        value = changes.rate_scale
        raise ConfigError("is out of range", where="--rate-scale", value=value, allowed=allowed)
    config, selected, assumed = _changed(log, changes, client_overheads_ns)
    check_gateways(selected, log.gateways, "gateways")
    platforms, of_gateway = config.app, config
    if log.gateways > 1:
        shared = shared_by_gateways(config, selected.kind.capabilities, log.gateways)
        of_gateway = from_spec(shared, log.name)
    figures: list[dict[str, float]] = []
    draws: list[RunFigures] = []
    seen = _Batches(config.app)
    for seed in range(runs):
        arrivals = log.arrivals()
        if changes.rate_scale != 1.0:
            arrivals = superpose(arrivals, changes.rate_scale, seed=seed)
        workload = Workload(arrivals, (), arrivals.duration_ns)
        title = f"simulation {seed + 1} of {runs},"
        observer = seen if seed == 0 else None  # others differ by chance alone
        ended, columns = run(
            of_gateway,
            selected,
            workload,
            seed=seed,
            gateways=log.gateways,
            platforms=platforms,
            observer=observer,
            title=title,
        )
        own = asdict(run_figures(columns.requests))
        cost_usd = ended.summary.cost_usd
        figures.append({"requests": len(columns.requests), **own, "cost_usd": cost_usd})
        draws += resample_windows(columns.requests, _REPLICATES, seed=seed)
    return Prediction(
        _what_was(log, client_overheads_ns),
        {name: _estimate(name, figures, draws) for name in figures[0]},
        [*assumed, *_unseen(log, config.app, seen.reader.columns().batches)],
    )


def _estimate(
    name: str, figures: Sequence[Mapping[str, float]], draws: Sequence[RunFigures]
) -> Estimate:
    own = [each[name] for each in figures]
    is_drawn = any(field.name == name for field in fields(RunFigures))
    values = np.array([getattr(each, name) for each in draws] if is_drawn else own)
    values = values[~np.isnan(values)]
    if not len(values):
        return Estimate(nan, nan, nan)
    low, high = np.quantile(values, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2)).tolist()
    return Estimate(fmean(value for value in own if not isnan(value)), low, high)


@final
class _Batches(Observer):
    """Reads the batches of a simulation as those of a log are read."""

    def __init__(self, app: App) -> None:
        self.reader = LogColumnsReader(app)

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.reader.read(now_ns, event, actions, scheduler)


def _what_was(log: CalibratedLog, client_overheads_ns: Sequence[int]) -> dict[str, float | None]:
    overheads_ns = np.array(client_overheads_ns, np.int64)
    requests = log.columns.requests
    in_turn = overheads_ns[np.arange(len(requests)) % len(overheads_ns)]
    requests = with_client_overhead(requests, in_turn)
    figures = asdict(run_figures(requests))
    return {"requests": len(requests), **figures, "cost_usd": _cost_usd(log)}


def _cost_usd(log: CalibratedLog) -> float | None:
    """Return what nodes and calls cost until the last request ended, as far as a log says.

    It does not say when nodes were rented, nor how long instances held compute with a price.
    """
    batches, finished_ns = log.columns.batches, log.columns.requests.finished_ns
    end_ns = int(finished_ns[finished_ns != NEVER_NS].max(initial=0))
    total_usd = 0.0
    for pool in log.config.app.pools:
        if pool.is_elastic or pool.cpu_usd_per_hour or pool.gpu_usd_per_hour:
            return None
        if pool.faas is None:
            total_usd += pool.nodes * pool.usd_per_hour * end_ns / HOUR_NS
        else:
            is_call = (batches.pool == pool.id) & (batches.finished == 1)
            total_usd += sum(pool.faas.usd(ns) for ns in batches.alone_ns[is_call].tolist())
    return total_usd


def _changed(
    log: CalibratedLog, changes: Changes, client_overheads_ns: Sequence[int]
) -> tuple[AppConfig, SelectedPolicy, list[str]]:
    """Return the calibrated application with the changes, its policy, and what is assumed."""
    keys = [(key, value) for key, value in changes.settings if "." in key]
    for key, _ in keys:
        _section(log.header.app, key)  # before anything is computed
    log, assumed = _with_larger_batches(log, keys)
    spec = log.spec(client_overheads_ns)
    for key, value in keys:
        section, name = _section(spec, key)
        section[name] = value
        if name == _BATCH_MAX and isinstance(value, int) and section.get("exec_time"):
            variant = _variant(log.config.app, key)
            section["exec_time"] = [f"{ns}ns" for ns in variant.profile.exec_ns[: max(1, value)]]
    if changes.workers is not None:
        _set_workers(spec, log, changes.workers, keys)
    config = from_spec(spec, "--set" if keys else log.name)
    given = {key: value for key, value in changes.settings if "." not in key}
    return config, select_policy(config, log.name, changes.policy, given), assumed


def _section(spec: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the section of a dotted key, and its last part. Raises if the file has no such key."""
    section: Any = spec
    rest = key
    while True:
        if not isinstance(section, dict):
            problem = f"has no keys of its own below {key.removesuffix(rest).rstrip('.')}"
            raise ConfigError(problem, where="--set", key=key)
        # Names may have dots in them: the longest one that is there.
        names = [name for name in section if rest == name or rest.startswith(f"{name}.")]
        if not names:
            name = rest.partition(".")[0]
            raise unknown_name_error("key", name, section, where="--set", key=key)
        name = max(names, key=len)
        if rest == name:
            return section, name
        section, rest = section[name], rest[len(name) + 1 :]


def _variant(app: App, key: str) -> Variant:
    """Return the variant whose section has a key: `functions.f.k`, `functions.f.variants.v.k`."""
    path = key.removeprefix("functions.").rpartition(".")[0].replace(".variants.", "/")
    return next(variant for variant in app.variants if variant.name == path)


def _with_larger_batches(
    log: CalibratedLog, keys: Sequence[tuple[str, object]]
) -> tuple[CalibratedLog, list[str]]:
    """Return the log calibrated for larger batches than its profiles have, if keys ask for them.

    A batch of more items than the profile has is assumed to take as much longer with each further
    item as it did with the last, or with one item alone. The lines say so: of a profile without
    batches, they never pay, and the prediction is that without the change.
    """
    longer: dict[str, list[str]] = {}
    assumed: list[str] = []
    for key, value in keys:
        if key.rpartition(".")[2] != _BATCH_MAX or not isinstance(value, int):
            continue
        variant = _variant(log.config.app, key)
        exec_ns = list(variant.profile.exec_ns)
        step_ns = exec_ns[-1] - (exec_ns[-2] if len(exec_ns) > 1 else 0)
        if len(exec_ns) < value <= 1_024:
            sizes, item = spans(range(len(exec_ns) + 1, value + 1)), format_duration(step_ns)
            exec_ns += [exec_ns[-1] + step_ns * (i + 1) for i in range(value - len(exec_ns))]
            longer[variant.name] = [f"{ns}ns" for ns in exec_ns]
            like = "one alone, so nothing is gained" if step_ns == exec_ns[0] else "the last one"
            batches = f"batches of {sizes} of {variant.name}"
            assumed.append(f"assumed: each further item of {batches} takes {item}, like {like}")
    if not longer:
        return log, assumed
    spec = deepcopy(dict(log.header.app))
    for name, times in longer.items():
        variant_spec(spec, name)["exec_time"] = times
    config = from_spec(spec, log.name)
    header = replace(log.header, app=spec)
    results = calibrate(config.app, log.columns.batches)
    return replace(log, header=header, config=config, results=results), assumed


def _set_workers(
    spec: dict[str, Any],
    log: CalibratedLog,
    workers: int,
    settings: Sequence[tuple[str, object]],
) -> None:
    pools = [pool.name for pool in log.config.app.pools if pool.faas is None]
    if len(pools) != 1:
        problem = f"{len(pools)} pools have nodes: which one?" if pools else "no pool has nodes"
        allowed = ", ".join(f"--set pools.{name}.nodes={workers}" for name in pools)
        raise ConfigError(problem, where="--workers", value=workers, allowed=allowed or None)
    if any(key == f"pools.{pools[0]}.nodes" for key, _ in settings):
        problem = f"cannot be given together with --set pools.{pools[0]}.nodes"
        raise ConfigError(problem, where="--workers", value=workers, allowed="either of them")
    sections = dict(spec.get("pools") or {})
    sections[pools[0]] = {**sections.get(pools[0], {"tier": "dedicated"}), "nodes": workers}
    spec["pools"] = sections


def _unseen(log: CalibratedLog, app: App, used: BatchColumns) -> Iterator[str]:
    """Yield a line for everything that the simulation did and that the log does not have."""
    yield from _unseen_nodes(log, app, used)
    results = {result.function: result for result in log.results}
    logged = log.columns.batches
    for function in app.functions:
        ids = [variant.id for variant in function.variants]
        own = np.isin(used.variant, ids)
        before = np.isin(logged.variant, ids) & (logged.finished == 1)
        if not own.any():
            continue
        if function.name not in results:
            yield f"assumed: the times of {function.name}, of which no warm batch is in the log"
            continue
        sizes = np.unique(used.items[own]).tolist()
        yield from size_lines(function.name, results[function.name].sizes, sizes)
        most, had = int(used.concurrency[own].max()), int(logged.concurrency[before].max(initial=0))
        if most > had:
            together = f"up to {most} batches at once beside {function.name} on a node"
            yield f"assumed: {together} (the log has up to {had}), by its slowdown"
        for shape in sorted(set(used.shape[own].tolist()) - set(logged.shape[before].tolist())):
            yield f"assumed: {function.name} in shape {shape}, by its profile"


def _unseen_nodes(log: CalibratedLog, app: App, used: BatchColumns) -> Iterator[str]:
    for pool in app.pools:
        before = next((each for each in log.config.app.pools if each.name == pool.name), None)
        if pool.faas is not None:
            if not (used.pool == pool.id).any():
                continue
            yield f"assumed: the times of calls to {pool.name}, which a log does not calibrate"
            if troubled := _troubled_calls(log, pool, used):
                yield (
                    f"assumed: {pool.name} takes every call within its limits, so its circuit "
                    "breaker stays closed (calls of the log that were refused, failed or lost: "
                    f"{troubled:,})"
                )
        elif before is None or pool.nodes > before.nodes:
            had = 0 if before is None else before.nodes
            nodes = f"{pool.nodes} nodes of {pool.name} (the log has {had})"
            yield f"assumed: {nodes}, none of which slows another down"


def _troubled_calls(log: CalibratedLog, pool: Pool, used: BatchColumns) -> int:
    """Return how many calls of the log failed as no simulation does: it has throttles alone."""
    troubles = log.columns.batches.trouble[log.columns.batches.pool == pool.id]
    troubled = int(np.count_nonzero(troubles == Trouble.DOWN))
    if not (used.trouble[used.pool == pool.id] == Trouble.THROTTLED).any():
        troubled += int(np.count_nonzero(troubles == Trouble.THROTTLED))
    return troubled


def _show(log: CalibratedLog, changes: Changes, runs: int, found: Prediction) -> None:
    requests = log.columns.requests
    length_s = int(requests.arrival_ns.max(initial=0)) / SECOND_NS
    title = f"{log.name}: {len(requests):,} requests in {length_s:,.1f} s under {log.header.policy}"
    change = f"predicted with {changes}" if str(changes) else "predicted without a change"
    show(Text(f"{title}, {change}\n", "bold"))
    show(rows_table([_row(name, found) for name in found.was]))
    show(Text(f"intervals: 95 % of {runs * _REPLICATES} draws of windows of {runs} simulations"))
    if not str(changes):
        checked = _self_check(found)
        outside = [_title(name) for name, is_inside in checked.items() if not is_inside]
        verdict = f"all but {'; '.join(outside)}" if outside else "all figures"
        show(Text(f"self-check: what was lies in the intervals of {verdict}"))
    for line in found.unseen:
        show(Text(line, "yellow"))
    is_open = requests.finished_ns == NEVER_NS
    if is_open.any():
        count = int(np.count_nonzero(is_open))
        show(Text(f"{count:,} requests were open at the end of the log: not counted", "yellow"))
    if log.missing:
        show(Text(log.missing, "yellow"))


def _self_check(found: Prediction) -> dict[str, bool]:
    """Return, by figure that has an interval, whether what was lies in it."""
    checked: dict[str, bool] = {}
    for field in fields(RunFigures):
        was, predicted = found.was[field.name], found.predicted[field.name]
        if was is not None and not isnan(was):
            checked[field.name] = predicted.low <= was <= predicted.high
    return checked


def _title(name: str) -> str:
    units = {"in_time": "in time, %", "cost_usd": "cost, $"}
    return units.get(name, f"{name.removesuffix('_ms')}, ms" if name.endswith("_ms") else name)


def _row(name: str, found: Prediction) -> dict[str, object]:
    was, predicted = found.was[name], found.predicted[name]
    scale = 100 if name == "in_time" else 1

    def shown(value: float | None) -> float | None:
        return None if value is None or isnan(value) else round(scale * value, 6)

    return {
        "": _title(name),
        "was": shown(was),
        "predicted": shown(predicted.value),
        "from": shown(predicted.low),
        "to": shown(predicted.high),
        "difference": _difference(name, was, predicted.value),
    }


def _difference(name: str, was: float | None, predicted: float) -> str | None:
    if was is None or isnan(was) or isnan(predicted):
        return None
    if name == "in_time":
        return f"{100 * (predicted - was):+.1f} points"
    if name in _COUNTS or not was:
        return f"{predicted - was:+,.4g}"
    return f"{100 * (predicted / was - 1):+.1f} %"
