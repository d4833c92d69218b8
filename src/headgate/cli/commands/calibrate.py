"""`headgate calibrate`: makes an application that simulates what an event log recorded."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path
from shlex import quote

import click
import numpy as np
from rich.text import Text

from headgate.cli.app_loading import write_app
from headgate.cli.calibration import (
    CalibratedLog,
    client_overhead_option,
    read_calibrated,
    unseen_lines,
    write_trace,
)
from headgate.cli.options import OutputPath, check_not_read, json_option
from headgate.cli.output import show, show_json
from headgate.core.clock import MILLISECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.states import OUTCOME_NAMES
from headgate.metrics.summary import count_outcomes
from headgate.metrics.table import rows_table


@click.command("calibrate")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=OutputPath(), metavar="FILE", help="Write the calibrated application (YAML)."
)
@click.option("--trace", type=OutputPath(), metavar="FILE", help="Write the arrivals (CSV).")
@client_overhead_option
@json_option
def command(
    logs: tuple[Path, ...],
    out: Path | None,
    trace: Path | None,
    overheads_ns: tuple[int, ...],
    as_json: bool,
) -> None:
    """Measure service times in LOG, and write an application that simulates it.

    Service times relative to their profile become the ground truth of the simulation, the times
    of starts its cold starts, and the requests its workload. Then simulate what another policy, or
    one more node, would have done. Of several gateways, give the logs of all.

    \b
    headgate calibrate run.log --out day.yaml --trace day.csv
    headgate simulate day.yaml --trace day.csv
    """
    for path, option in ((out, "--out"), (trace, "--trace")):
        check_not_read(path, option, list(logs))
    if out is not None and trace is not None and out.resolve() == trace.resolve():
        problem = "is the file of --out as well, which would be overwritten"
        raise ConfigError(problem, where="--trace", value=str(trace), allowed="another file")
    read = read_calibrated(*logs)
    if out is not None:
        write_app(out, "--out", read.spec(overheads_ns))
    if trace is not None:
        write_trace(trace, read.arrivals())
    if as_json:
        show_json({**_to_json(read), "missing": read.missing or None})
    else:
        _show(read, out, trace)
        if read.missing:
            show(Text(read.missing, "yellow"))


def _to_json(read: CalibratedLog) -> dict[str, object]:
    columns = read.columns
    outcomes = zip(OUTCOME_NAMES, count_outcomes(columns.requests), strict=True)
    return {
        "log": read.name,
        "requests": len(columns.requests),
        **dict(outcomes),
        "own_deadlines": int(np.count_nonzero(columns.timeout_ns)),
        "cancelled_by_clients": int(np.count_nonzero(columns.cancel_ns)),
        "batches": len(columns.batches),
        **asdict(read.delays),
        "functions": [asdict(result) for result in read.results],
    }


def _show(read: CalibratedLog, out: Path | None, trace: Path | None) -> None:
    columns, results = read.columns, read.results
    counts = f"{len(columns.requests):,} requests in {len(columns.batches):,} batches"
    show(Text(f"{read.name}: {counts}; service time over profile:\n", "bold"))
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
    if read.delays.arrival_ns:
        delays_ms = [ns / MILLISECOND_NS for ns in astuple(read.delays)]
        lengthens = "a request that arrives lengthens the batches that run by {:.2g} ms"
        show(Text(f"{lengthens}, and by {{:.2g}} ms more if it is refused".format(*delays_ms)))
    for line in unseen_lines(read):
        show(Text(line, "yellow"))
    if out is not None and trace is None and not read.config.workload.streams:
        show(Text(f"written: {out}; to simulate it, write the requests of the log: --trace FILE"))
    elif out is not None:
        with_trace = f" --trace {quote(str(trace))}" if trace is not None else ""
        with_gateways = f" --gateways {read.gateways}" if read.gateways > 1 else ""
        show(Text(f"try it: headgate simulate {quote(str(out))}{with_trace}{with_gateways}"))
    elif trace is not None:
        show(Text(f"trace: {trace}"))
