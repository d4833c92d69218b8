"""`headgate simulate`: one run of an application under one policy."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from rich.text import Text

from headgate.cli.app_loading import (
    assumed_times,
    choose,
    load_app,
    warn_of_objectives,
    with_known_times,
)
from headgate.cli.options import (
    OutputPath,
    app_argument,
    assume_exec_option,
    check_not_read,
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
from headgate.cli.workload import WorkloadOptions, choose_workload, trace_files
from headgate.metrics.columns import RunColumns
from headgate.metrics.report import write_report
from headgate.metrics.table import group_view, resource_view

_RESOURCES_MAX: Final = 16  # more are in the JSON and in the report


@click.command("simulate")
@app_argument
@workload_options
@assume_exec_option
@policy_option
@set_option("A setting of the policy, such as batch_max=4. May be repeated.")
@seed_option
@json_option
@report_option
@click.option(
    "--log",
    type=OutputPath(),
    metavar="FILE",
    help="Write every event and action there, for headgate replay; .gz is compressed.",
)
@click.option("--validate", is_flag=True, help="Check the whole state after every event. Slow.")
def command(
    app: str,
    trace: str | None,
    arrivals: tuple[str, ...],
    duration_ns: int | None,
    sort: bool,
    traces: Path | None,
    assumed_ns: int | None,
    policy: str | None,
    settings: tuple[tuple[str, object], ...],
    seed: int,
    as_json: bool,
    report: Path | None,
    log: Path | None,
    validate: bool,
) -> None:
    """Simulate APP under a policy and print what came of it.

    \b
    headgate simulate examples/kaas.yaml
    headgate simulate examples/kaas.yaml --policy affinity --report out
    headgate simulate app.yaml --arrivals poisson:rate=50/s --duration 10min --json
    """
    written = load_app(app)
    loaded = with_known_times(written, app, assumed_ns)
    assumed = assumed_times(written, assumed_ns)
    warn_of_objectives(loaded, app)
    chosen = choose(loaded, app, policy, dict(settings))
    options = WorkloadOptions(trace, arrivals, duration_ns, sort, traces)
    workload = choose_workload(loaded, app, options, seed)
    check_not_read(log, "--log", [Path(app), *trace_files(loaded, options)])
    if report is not None:
        make_directory(report, "--report")
    with logging_to(log, loaded, chosen, seed) as observer:
        done, columns = run(
            loaded,
            chosen,
            workload,
            seed=seed,
            validate=validate,
            records_spans=report is not None,
            observer=observer,
        )
    if report is not None:
        _write(report, app, done, columns, assumed)
    if as_json:
        settings_used = {"settings": chosen.settings, "assumed_exec": assumed}
        show_json({"app": app, **done.to_json(), **settings_used})
    else:
        _show(app, done)
        show_assumed(assumed)
        _show_files(report, log, None if observer is None else observer.events)


def _write(
    report: Path, app: str, done: SimulatedRun, columns: RunColumns, assumed: dict[str, str]
) -> None:
    meta: dict[str, object] = {"app": app, "policy": done.policy, "seed": done.seed}
    if assumed:
        meta["assumed_exec"] = assumed
    with writing(report, "--report"):
        title = f"{Path(app).stem} under {done.policy}"
        write_report(report, columns, done.summary, meta, title=title)


def _show(app: str, done: SimulatedRun) -> None:
    summary = done.summary
    show(Text(f"{app} under {done.policy}, seed {done.seed}\n", "bold"), SummaryView(summary))
    if len(summary.pipelines) > 1:
        show(group_view("Pipelines", summary.pipelines))
    if len(summary.clients) > 1:
        show(group_view("Clients", summary.clients))
    if len(summary.resources) <= _RESOURCES_MAX:
        show(resource_view(summary.resources))
    speed = f"{done.sim_requests_per_s:,.0f} requests/s"
    show(Text(f"simulated in {done.took_s:.2f} s, {speed}", "dim"))


def _show_files(report: Path | None, log: Path | None, events: int | None) -> None:
    if report is not None:
        show(Text(f"report: {report / 'report.html'}"))
    if log is not None:
        show(Text(f"log: {log}, {events:,} events; headgate replay {log} decides them again"))
