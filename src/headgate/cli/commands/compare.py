"""`headgate compare`: the same requests under several policies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from rich.text import Text

from headgate.app import LoadedApp
from headgate.app.names import unknown
from headgate.cli.application import (
    assumed_times,
    load_app,
    warn_of_objectives,
    with_known_times,
)
from headgate.cli.chosen import Chosen, choose
from headgate.cli.comparison import Comparison
from headgate.cli.files import make_directory, writing
from headgate.cli.fit import policies_for
from headgate.cli.options import (
    app_argument,
    assume_exec_option,
    json_option,
    report_option,
    seed_option,
    set_option,
    workload_options,
)
from headgate.cli.runs import Run, run
from headgate.cli.screen import show, show_assumed, show_json
from headgate.cli.workload import WorkloadOptions, choose_workload
from headgate.core.errors import ConfigError
from headgate.metrics.tables import SheetTable


@click.command("compare")
@app_argument
@click.option("--policies", metavar="A,B,C", help="Which ones. Default: all that can take APP.")
@workload_options
@assume_exec_option
@set_option("A setting of one policy, such as balance.batch_max=4. May be repeated.")
@seed_option
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Repeat with N seeds, the first being --seed, and print means.",
)
@json_option
@report_option
def command(
    app: str,
    policies: str | None,
    trace: str | None,
    arrivals: tuple[str, ...],
    duration_ns: int | None,
    sort: bool,
    traces: Path | None,
    assumed_ns: int | None,
    settings: tuple[tuple[str, object], ...],
    seed: int,
    seeds: int,
    as_json: bool,
    report: Path | None,
) -> None:
    """Simulate APP under several policies, side by side.

    All get the same requests. Prints one table; the report has one plot.

    \b
    headgate compare examples/kaas.yaml
    headgate compare examples/kaas.yaml --policies balance,affinity --seeds 5 --report out
    """
    written = load_app(app)
    loaded = with_known_times(written, app, assumed_ns)
    warn_of_objectives(loaded, app)
    chosen = _choose_all(loaded, app, policies, settings)
    options = WorkloadOptions(trace, arrivals, duration_ns, sort, traces)
    if report is not None:
        make_directory(report, "--report")
    runs: dict[str, list[Run]] = {each.name: [] for each in chosen}
    for number in range(seed, seed + seeds):
        workload = choose_workload(loaded, app, options, number)
        for each in chosen:
            title = f"seed {number}," if seeds > 1 else "simulating"
            done, _ = run(loaded, each, workload, seed=number, title=title)
            runs[each.name].append(done)
    comparison = Comparison(app, seed, seeds, runs, assumed_times(written, assumed_ns))
    if report is not None:
        with writing(report, "--report"):
            page = comparison.write(report)
    if as_json:
        show_json(comparison.to_json())
        return
    show(Text(f"{comparison.title}\n", "bold"), SheetTable(comparison.sheet()))
    show_assumed(comparison.assumed)
    if report is not None:
        show(Text(f"report: {page}"))


def _choose_all(
    loaded: LoadedApp,
    where: str,
    policies: str | None,
    settings: Iterable[tuple[str, object]],
) -> list[Chosen]:
    if policies is None:
        names = policies_for(loaded.app)
        if not names:
            choose(loaded, where, None, {})  # says what it is that no policy takes
    else:
        names = [name.strip() for name in policies.split(",")]
        for name in names:
            if names.count(name) > 1:
                problem = "is there twice"
                raise ConfigError(problem, where="--policies", value=name, allowed="each once")
    given: dict[str, dict[str, object]] = {name: {} for name in names}
    for key, value in settings:
        name, dot, setting = key.partition(".")
        if not dot:
            allowed = "POLICY.KEY=VALUE"
            raise ConfigError(
                "does not say of which policy", where="--set", value=key, allowed=allowed
            )
        if name not in given:
            raise unknown("policy", name, names, where="--set", key=None)
        given[name][setting] = value
    return [choose(loaded, where, name, given[name], option="--policies") for name in names]
