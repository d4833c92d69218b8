"""`headgate calibrate`: makes an application that simulates what an event log recorded."""

from __future__ import annotations

import csv
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import click
from rich.text import Text

from headgate.cli.app_loading import write_app
from headgate.cli.options import OutputPath, check_not_read, json_option, writing
from headgate.cli.output import Progress, show, show_json
from headgate.config import AppConfig, from_spec
from headgate.config.build import variant_spec
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogHeader, read_log
from headgate.core.states import OUTCOME_NAMES
from headgate.core.units import format_duration, parse_duration
from headgate.metrics.from_log import (
    CalibrationResult,
    LoggedColumns,
    calibrate,
    calibrated,
    read_columns,
)
from headgate.metrics.summary import count_outcomes
from headgate.metrics.table import rows_table


def client_overheads_ns(text: str) -> tuple[int, ...]:
    """Parse durations, such as `0.5ms,2ms`."""
    return tuple(parse_duration(each, where="--client-overhead") for each in text.split(","))


@click.command("calibrate")
@click.argument("log", type=click.Path(path_type=Path))
@click.option(
    "--out", type=OutputPath(), metavar="FILE", help="Write the calibrated application (YAML)."
)
@click.option("--trace", type=OutputPath(), metavar="FILE", help="Write the arrivals (CSV).")
@click.option(
    "overheads_ns",
    "--client-overhead",
    type=client_overheads_ns,
    default="0ms",
    metavar="TIME,...",
    help="Time of a request that no log can see, such as 0.5ms: the latency that a client"
    " measures, less the total in Server-Timing. Several are equally likely. Default: 0ms.",
)
@json_option
def command(
    log: Path,
    out: Path | None,
    trace: Path | None,
    overheads_ns: tuple[int, ...],
    as_json: bool,
) -> None:
    """Measure service times in LOG, and write an application that simulates it.

    Service times relative to their profile become the ground truth of the simulation, the times
    of starts its cold starts, and the requests its workload. Then simulate what another policy, or
    one more node, would have done.

    \b
    headgate calibrate run.log --out day.yaml --trace day.csv
    headgate simulate day.yaml --trace day.csv
    """
    for path, option in ((out, "--out"), (trace, "--trace")):
        check_not_read(path, option, [log])
    header, config, columns, missing = _read(log)
    results = calibrate(config.app, columns.batches)
    if not results:
        problem = "no batch completed in the log: there is nothing to calibrate with"
        raise ConfigError(problem, where=str(log))
    if out is not None:
        spec = calibrated(header.app, results, overheads_ns)
        for variant_id, start_ns in columns.start_ns.items():
            # A worker has loaded its functions before it is ready, which was before the log began:
            # a simulation must not wait for that again.
            name = config.app.variants[variant_id].name
            variant_spec(spec, name)["cold_start"] = format_duration(start_ns)
        # The policy of the log, which the command line may have selected.
        policy = {"name": header.policy, **header.settings}
        spec["policy"] = policy if header.settings else header.policy
        write_app(out, "--out", spec)
    if trace is not None:
        _write_trace(trace, config, columns)
    if as_json:
        show_json({**_to_json(log, columns, results), "missing": missing or None})
    else:
        _show(log, columns, results, out, trace)
        if missing:
            show(Text(missing, "yellow"))


def _read(log: Path) -> tuple[LogHeader, AppConfig, LoggedColumns, str]:
    header, entries = read_log(log)
    with closing(entries):
        config = from_spec(header.app, f"{log}:1: app")
        with Progress(f"reading {log.name}"):
            try:
                columns = read_columns(entries, config.app)
            except ConfigError as error:
                raise error.located(entries.where) from None
    return header, config, columns, entries.missing


def _write_trace(path: Path, config: AppConfig, columns: LoggedColumns) -> None:
    pipelines = [pipeline.name for pipeline in config.app.pipelines]
    clients = [client.name for client in config.app.clients]
    requests = columns.requests
    with writing(path, "--trace"), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_ns", "pipeline", "client", "items"))
        writer.writerows(
            (arrival_ns, pipelines[pipeline], clients[client], items)
            for arrival_ns, pipeline, client, items in zip(
                requests.arrival_ns.tolist(),
                requests.pipeline.tolist(),
                requests.client.tolist(),
                columns.items.tolist(),
                strict=True,
            )
        )


def _to_json(
    log: Path, columns: LoggedColumns, results: list[CalibrationResult]
) -> dict[str, object]:
    outcomes = zip(OUTCOME_NAMES, count_outcomes(columns.requests), strict=True)
    return {
        "log": str(log),
        "requests": len(columns.requests),
        **dict(outcomes),
        "own_deadlines": int(columns.own_deadline.sum()),
        "batches": len(columns.batches),
        "functions": [asdict(result) for result in results],
    }


def _show(
    log: Path,
    columns: LoggedColumns,
    results: list[CalibrationResult],
    out: Path | None,
    trace: Path | None,
) -> None:
    counts = f"{len(columns.requests):,} requests in {len(columns.batches):,} batches"
    show(Text(f"{log}: {counts}; service time over profile:\n", "bold"))
    show(
        rows_table(
            [
                {
                    "function": result.function,
                    "batches": result.batches,
                    "mean": round(result.mean, 3),
                    "p50": round(result.p50, 3),
                    "p99": round(result.p99, 3),
                }
                for result in results
            ]
        )
    )
    count = int(columns.own_deadline.sum())
    if count:
        note = "had a deadline of their own: a simulation gives them that of the objective"
        show(Text(f"{count:,} requests {note}", "yellow"))
    if out is not None:
        with_trace = f" --trace {trace}" if trace is not None else ""
        show(Text(f"try it: headgate simulate {out}{with_trace}"))
    elif trace is not None:
        show(Text(f"trace: {trace}"))
