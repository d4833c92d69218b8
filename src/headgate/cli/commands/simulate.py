"""`headgate simulate`: simulates an application under one policy."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Final

import click
from rich.text import Text

from headgate.cli.app_loading import (
    load_for_simulation,
    of_one_gateway,
    select_policy,
    with_admission,
)
from headgate.cli.options import (
    OutputPath,
    WorkloadOptions,
    admission_option,
    app_argument,
    assume_exec_option,
    check_not_read,
    gateways_option,
    json_option,
    make_directory,
    policy_option,
    report_option,
    seed_option,
    set_option,
    workload_options,
    writing,
)
from headgate.cli.output import SummaryView, show, show_assumed, show_json
from headgate.cli.simulation import SimulatedRun, logging_to, run
from headgate.cli.workload import choose_workload, trace_files
from headgate.metrics.columns import RunColumns
from headgate.metrics.report import write_report
from headgate.metrics.summary import Summary, missed_at_start
from headgate.metrics.table import group_table, resource_table

_RESOURCES_MAX: Final = 16  # longer tables are in the JSON and in the report only


@click.command("simulate")
@app_argument
@workload_options
@assume_exec_option
@policy_option
@set_option("A setting of the policy, such as batch_max=4. May be repeated.")
@admission_option
@seed_option
@json_option
@report_option
@click.option(
    "--log",
    type=OutputPath(),
    metavar="FILE",
    help="File for the event log, for headgate replay; a .gz file is compressed.",
)
@gateways_option("Gateways that share the load and the pools. The log is that of the first one.")
@click.option("--validate", is_flag=True, help="Check the whole state after every event. Slow.")
def command(
    app: str,
    workload_options: WorkloadOptions,
    assumed_ns: int | None,
    policy: str | None,
    settings: tuple[tuple[str, object], ...],
    admission: str | None,
    seed: int,
    as_json: bool,
    report: Path | None,
    log: Path | None,
    gateways: int,
    validate: bool,
) -> None:
    """Simulate APP under a policy and print the results.

    \b
    headgate simulate examples/kaas.yaml
    headgate simulate examples/kaas.yaml --policy affinity --report out
    headgate simulate app.yaml --arrivals poisson:rate=50/s --duration 10min --json
    """
    config, assumed = load_for_simulation(app, assumed_ns)
    config = with_admission(config, app, admission)
    selected = select_policy(config, app, policy, dict(settings))
    platforms = config.app
    config = of_one_gateway(config, app, selected, gateways)
    workload = choose_workload(config, app, workload_options, seed)
    check_not_read(log, "--log", [Path(app), *trace_files(config, workload_options)])
    make_directory(report, "--report")
    with logging_to(log, config, selected, seed, gateways) as observer:
        result, columns = run(
            config,
            selected,
            workload,
            seed=seed,
            gateways=gateways,
            platforms=platforms,
            validate=validate,
            records_spans=report is not None,
            observer=observer,
        )
    if report is not None:
        _write(report, app, result, columns, assumed)
    if as_json:
        settings_used = {"settings": selected.settings, "assumed_exec_time": assumed}
        show_json({"app": app, **result.to_json(), **settings_used})
    else:
        _show(app, result)
        _show_start(result.summary, columns)
        show_assumed(assumed)
        _show_files(report, log, None if observer is None else observer.events)


def _write(
    report: Path, app: str, result: SimulatedRun, columns: RunColumns, assumed: dict[str, str]
) -> None:
    meta: dict[str, object] = {"app": app, "policy": result.policy, "seed": result.seed}
    if assumed:
        meta["assumed_exec_time"] = assumed
    with writing(report, "--report"):
        title = f"{Path(app).stem} under {result.policy}"
        write_report(report, columns, result.summary, meta, title=title)


def _show(app: str, result: SimulatedRun) -> None:
    summary = result.summary
    show(Text(f"{app} under {result.policy}, seed {result.seed}\n", "bold"), SummaryView(summary))
    if len(summary.pipelines) > 1:
        show(group_table("Pipelines", summary.pipelines))
    if len(summary.clients) > 1:
        show(group_table("Clients", summary.clients))
    if len(summary.resources) <= _RESOURCES_MAX:
        show(resource_table(summary.resources))
    speed = f"{result.sim_requests_per_s:,.0f} requests/s"
    show(Text(f"simulated in {result.took_s:.2f} s, {speed}", "dim"))


def _show_start(summary: Summary, columns: RunColumns) -> None:
    """Print how many misses are due to the beginning of the run, before anything was loaded."""
    at_start = missed_at_start(columns.requests) if summary.cold_starts else 0
    if at_start:
        missed = summary.requests - summary.met - summary.cancelled
        who = "requests that arrived before the first result of their pipeline, with nothing loaded"
        remedy = "a longer --duration gives them less weight, `cold_start: 0s` leaves starts out"
        show(Text(f"{at_start:,} of the {missed:,} misses are of {who}; {remedy}", "yellow"))


def _show_files(report: Path | None, log: Path | None, events: int | None) -> None:
    if report is not None:
        show(Text(f"report: {report / 'report.html'}"))
    if log is not None:
        show(Text(f"log: {log}, {events:,} events; replay with: headgate replay {quote(str(log))}"))
