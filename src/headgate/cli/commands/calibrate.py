"""`headgate calibrate`: from the log of a live day to an application that simulates that day."""

from __future__ import annotations

import csv
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import click
import yaml
from rich.text import Text

from headgate.cli.options import OutputPath, check_not_read, json_option, writing
from headgate.cli.output import Progress, rows_table, show, show_json
from headgate.config import AppConfig, from_spec
from headgate.config.loader import without_defaults
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogHeader, read_log
from headgate.core.states import OUTCOME_NAMES
from headgate.core.units import parse_duration
from headgate.metrics.calibration import CalibrationResult, calibrate, calibrated
from headgate.metrics.from_log import LoggedColumns, read_columns
from headgate.metrics.summary import count_outcomes


def request_ns(text: str) -> int:
    """Read `0.5ms`."""
    return parse_duration(text, where="--request")


@click.command("calibrate")
@click.argument("log", type=click.Path(path_type=Path))
@click.option(
    "--out", type=OutputPath(), metavar="FILE", help="Write the calibrated application (YAML)."
)
@click.option("--trace", type=OutputPath(), metavar="FILE", help="Write the arrivals (CSV).")
@click.option(
    "outside_ns",
    "--request",
    type=request_ns,
    default="0ms",
    metavar="TIME",
    help="What a request takes that no log can see, such as 0.5ms: what a client measures, less"
    " the total that Server-Timing gives.",
)
@json_option
def command(
    log: Path, out: Path | None, trace: Path | None, outside_ns: int, as_json: bool
) -> None:
    """Say how long things really took in LOG, and write what simulates it.

    The times of batches over their profile become the truth of the simulation, and the requests
    its workload: so that one can ask what another policy, or one node more, would have done.

    \b
    headgate calibrate run.log --out day.yaml --trace day.csv
    headgate simulate day.yaml --trace day.csv
    """
    for path, option in ((out, "--out"), (trace, "--trace")):
        check_not_read(path, option, [log])
    header, loaded, columns, missing = _read(log)
    truths = calibrate(loaded.app, columns.batches)
    if not truths:
        problem = "no batch ran to its end in it: there is nothing to go by"
        raise ConfigError(problem, where=str(log))
    if out is not None:
        _write_app(out, header, calibrated(header.app, truths, outside_ns))
    if trace is not None:
        _write_trace(trace, loaded, columns)
    if as_json:
        show_json({**_to_json(log, columns, truths), "missing": missing or None})
    else:
        _show(log, columns, truths, out, trace)
        if missing:
            show(Text(missing, "yellow"))


def _read(log: Path) -> tuple[LogHeader, AppConfig, LoggedColumns, str]:
    header, entries = read_log(log)
    with closing(entries):
        loaded = from_spec(header.app, f"{log}:1: app")
        with Progress(f"reading {log.name}"):
            try:
                columns = read_columns(entries, loaded.app)
            except ConfigError as error:
                if error.where is not None:
                    raise
                raise ConfigError(
                    error.problem,
                    where=entries.where,
                    key=error.key,
                    value=error.value,
                    allowed=error.allowed,
                ) from None
    return header, loaded, columns, entries.missing


def _write_app(path: Path, header: LogHeader, spec: dict[str, object]) -> None:
    # The policy that decided, which the command line may have chosen.
    named = {"name": header.policy, **header.settings}
    spec["policy"] = named if header.settings else header.policy
    text = yaml.safe_dump(
        without_defaults(spec), sort_keys=False, default_flow_style=None, width=100
    )
    with writing(path, "--out"):
        path.write_text(text, encoding="utf-8")


def _write_trace(path: Path, loaded: AppConfig, columns: LoggedColumns) -> None:
    pipelines = [pipeline.name for pipeline in loaded.app.pipelines]
    clients = [client.name for client in loaded.app.clients]
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
    log: Path, columns: LoggedColumns, truths: list[CalibrationResult]
) -> dict[str, object]:
    outcomes = zip(OUTCOME_NAMES, count_outcomes(columns.requests), strict=True)
    return {
        "log": str(log),
        "requests": len(columns.requests),
        **dict(outcomes),
        "own_deadlines": int(columns.own_deadline.sum()),
        "batches": len(columns.batches),
        "functions": [asdict(truth) for truth in truths],
    }


def _show(
    log: Path,
    columns: LoggedColumns,
    truths: list[CalibrationResult],
    out: Path | None,
    trace: Path | None,
) -> None:
    found = f"{len(columns.requests):,} requests in {len(columns.batches):,} batches"
    show(Text(f"{log}: {found}; times over profile:\n", "bold"))
    show(
        rows_table(
            [
                {
                    "function": truth.function,
                    "batches": truth.batches,
                    "mean": round(truth.mean, 3),
                    "p50": round(truth.p50, 3),
                    "p99": round(truth.p99, 3),
                }
                for truth in truths
            ]
        )
    )
    own = int(columns.own_deadline.sum())
    if own:
        problem = "came with a deadline of their own: a simulation gives them the objective's"
        show(Text(f"{own:,} requests {problem}", "yellow"))
    if out is not None:
        with_trace = f" --trace {trace}" if trace is not None else ""
        show(Text(f"try it: headgate simulate {out}{with_trace}"))
    elif trace is not None:
        show(Text(f"trace: {trace}"))
