"""From an event log, or those of several gateways, to an application that simulates it."""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from heapq import merge
from pathlib import Path
from typing import Any

import click
import numpy as np

from headgate.cli.app_loading import of_all_gateways
from headgate.cli.options import writing
from headgate.cli.output import Progress
from headgate.config import AppConfig, from_spec
from headgate.config.build import variant_spec
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogEntry, LogHeader, LogReader, read_log
from headgate.core.model import App
from headgate.core.units import format_duration, parse_duration
from headgate.metrics.from_log import (
    ArrivalDelays,
    CalibrationResult,
    LogColumnsReader,
    LoggedColumns,
    calibrate,
    calibrated,
    find_arrival_delays,
    without_arrivals,
)
from headgate.workload import Arrivals, RequestTerms


def client_overheads_ns(text: str) -> tuple[int, ...]:
    """Parse durations, such as `0.5ms,2ms`."""
    return tuple(parse_duration(each, where="--client-overhead") for each in text.split(","))


client_overhead_option = click.option(
    "overheads_ns",
    "--client-overhead",
    type=client_overheads_ns,
    default="0ms",
    metavar="TIME,...",
    help="Time of a request that no log can see, such as 0.5ms: the latency that a client"
    " measures, less the total in Server-Timing. Several are equally likely. Default: 0ms.",
)


@dataclass(frozen=True, slots=True)
class CalibratedLog:
    """What an event log says: the application, what happened, and its service times.

    Of several gateways that shared their nodes, it is what all their logs say together.
    """

    name: str  # of the files
    header: LogHeader  # of the first of them, but with the application of all gateways together
    config: AppConfig  # as it was served
    columns: LoggedColumns
    results: list[CalibrationResult]
    delays: ArrivalDelays
    missing: str  # which part of the log is gone; empty: none
    gateways: int = 1  # whose logs these are

    def spec(self, client_overheads_ns: Sequence[int]) -> dict[str, object]:
        """Return an application file that simulates the log."""
        spec = calibrated(
            self.header.app,
            self.results,
            client_overheads_ns,
            self.delays.arrival_ns,
            self.delays.refusal_ns,
        )
        for variant_id, start_ns in self.columns.start_ns.items():
            # A worker has loaded its functions before it is ready, which was before the log began:
            # a simulation must not wait for that again.
            name = self.config.app.variants[variant_id].name
            variant_spec(spec, name)["cold_start"] = format_duration(start_ns)
        # The policy of the log, which the command line may have selected.
        policy = {"name": self.header.policy, **self.header.settings}
        spec["policy"] = policy if self.header.settings else self.header.policy
        return spec

    def arrivals(self) -> Arrivals:
        """Return the requests of the log, with what they asked for."""
        columns, app = self.columns, self.config.app
        requests = columns.requests
        terms = RequestTerms(
            columns.timeout_ns, columns.cancel_ns, columns.cost_usd, columns.payload_bytes
        )
        has_terms = any(
            column.any()
            for column in (terms.timeout_ns, terms.cancel_ns, terms.cost_usd, terms.payload_bytes)
        )
        return Arrivals(
            requests.arrival_ns,
            int(requests.arrival_ns[-1]) + 1 if len(requests) else 0,
            requests.pipeline,
            requests.client,
            tuple(pipeline.name for pipeline in app.pipelines),
            tuple(client.name for client in app.clients),
            columns.items,
            columns.priority if columns.priority.any() else None,
            terms if has_terms else None,
        )


def read_calibrated(*logs: Path) -> CalibratedLog:
    """Read a whole log, or the logs of all gateways of a server, and calibrate from it.

    Raises `ConfigError`, also if nothing ran, or if the logs do not belong together.
    """
    with ExitStack() as stack:
        headers: list[LogHeader] = []
        readers: list[LogReader] = []
        for path in logs:
            header, reader = read_log(path)
            headers.append(header)
            readers.append(stack.enter_context(closing(reader)))
        _check_together(logs, headers)
        header, gateways = headers[0], headers[0].peers if len(logs) > 1 else 1
        if gateways > 1:
            header = replace(header, app=of_all_gateways(header.app, gateways))
        config = from_spec(header.app, f"{logs[0]}:1: app")
        with Progress(f"reading {', '.join(path.name for path in logs)}"):
            columns = _read_columns(list(zip(headers, readers, strict=True)), config.app)
        missing = "; ".join(reader.missing for reader in readers if reader.missing)
    name = ", ".join(str(path) for path in logs)
    delays = find_arrival_delays(columns)
    columns = without_arrivals(columns, delays)
    results = calibrate(config.app, columns.batches)
    if not results:
        problem = "no batch completed in the log: there is nothing to calibrate with"
        raise ConfigError(problem, where=name)
    return CalibratedLog(name, header, config, columns, results, delays, missing, gateways)


def _check_together(logs: Sequence[Path], headers: Sequence[LogHeader]) -> None:
    """Raise `ConfigError` unless logs are those of all gateways of one server."""
    first, seen = headers[0], {headers[0].index: logs[0]}
    for path, header in zip(logs[1:], headers[1:], strict=True):
        if header.index in seen:
            problem = f"is the log of the same gateway as {seen[header.index]}"
            raise ConfigError(problem, where=str(path), allowed="one log of each gateway")
        if _shared(header) != _shared(first):
            problem = f"is of another application, policy or number of gateways than {logs[0]}"
            raise ConfigError(problem, where=str(path), allowed="the logs of one server")
        seen[header.index] = path
    if 1 < len(logs) < first.peers:
        problem = f"these are the logs of {len(logs)} of {first.peers} gateways"
        raise ConfigError(problem, where=str(logs[0]), allowed="the logs of all gateways")


def _shared(header: LogHeader) -> tuple[object, ...]:
    """Return what the headers of all gateways of a server have in common.

    A gateway has the times and sizes that the first worker it heard of has measured, so where
    something was measured these may differ.
    """
    app: dict[str, Any] = copy.deepcopy(dict(header.app))
    for function in app["functions"].values():
        for section in (function, *function["variants"].values()):
            if section["model"] or section["code"]:
                for key in ("cold_start", "memory", "exec_time"):
                    if key != "exec_time" or section["exec_time_estimated"]:
                        del section[key]
    return app, header.policy, header.settings, header.peers


def _read_columns(logs: Sequence[tuple[LogHeader, LogReader]], app: App) -> LoggedColumns:
    """Read logs as one, in the order of time: all gateways of a server have the same clock."""
    columns = LogColumnsReader(app)

    def entries(header: LogHeader, reader: LogReader) -> Iterator[tuple[int, LogReader, LogEntry]]:
        for entry in reader:
            yield header.index, reader, entry

    # `merge` reads on in a log only after its last entry was used: the reader is still there.
    for index, reader, entry in merge(
        *(entries(*log) for log in logs), key=lambda each: each[2].now_ns
    ):
        try:
            columns.read(entry.now_ns, entry.event, entry.actions, index)
        except ConfigError as error:
            raise error.located(reader.where) from None
    return columns.columns()


def write_trace(path: Path, arrivals: Arrivals) -> None:
    """Write the arrivals of a log as a trace (CSV), with what its requests asked for."""
    columns = {
        "arrival_ns": arrivals.times_ns.tolist(),
        "pipeline": [arrivals.pipelines[index] for index in arrivals.pipeline.tolist()],
        "client": [arrivals.clients[index] for index in arrivals.client.tolist()],
        "items": arrivals.sizes.tolist(),
    }
    if arrivals.priority is not None:
        columns["priority"] = arrivals.priority.tolist()
    if arrivals.terms is not None:
        for name in ("timeout_ns", "cancel_ns", "cost_usd", "payload_bytes"):
            columns[name] = getattr(arrivals.terms, name).tolist()
    with writing(path, "--trace"), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def unseen_lines(log: CalibratedLog) -> Iterator[str]:
    """Yield one line for each function with batch sizes that the log does not have."""
    functions = {function.name: function for function in log.config.app.functions}
    for result in log.results:
        variants = functions[result.function].variants
        most = max(variant.profile.items_max for variant in variants)
        yield from size_lines(result.function, result.sizes, range(1, most + 1))


def size_lines(function: str, seen: Sequence[int], used: Iterable[int]) -> Iterator[str]:
    """Yield a line about batch sizes between those that were seen, and one about those beyond.

    >>> print(*size_lines("f", [1, 4], [1, 2, 3, 6]), sep="\\n")
    interpolated: batches of 2 to 3 of f (the log has 1, 4)
    assumed: batches of 6 of f (the log has 1, 4)
    """
    has = f"the log has {spans(seen)}"
    unseen = sorted(set(used) - set(seen))
    inside = [size for size in unseen if seen[0] < size < seen[-1]]
    beyond = [size for size in unseen if not seen[0] < size < seen[-1]]
    if inside:
        yield f"interpolated: batches of {spans(inside)} of {function} ({has})"
    if beyond:
        yield f"assumed: batches of {spans(beyond)} of {function} ({has})"


def spans(numbers: Sequence[int]) -> str:
    """Write whole numbers, ascending, as spans.

    >>> spans([1, 3, 4, 5, 8])
    '1, 3 to 5, 8'
    """
    parts = np.split(np.array(numbers), np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(f"{p[0]}" if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts)
