"""`headgate compare`: simulates the same workload under several policies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from headgate.cli.app_loading import (
    SelectedPolicy,
    load_for_simulation,
    of_one_gateway,
    select_policy,
    supports_gateways,
)
from headgate.cli.options import (
    WorkloadOptions,
    app_argument,
    assume_exec_option,
    gateways_option,
    json_option,
    make_directory,
    report_option,
    seed_option,
    set_option,
    workload_options,
    writing,
)
from headgate.cli.output import show, show_assumed, show_json
from headgate.cli.simulation import SimulatedRun, run
from headgate.cli.workload import choose_workload
from headgate.config import AppConfig
from headgate.core.errors import ConfigError, unknown_name_error
from headgate.core.model import App
from headgate.metrics.columns import RunColumns
from headgate.metrics.confidence import mean_interval
from headgate.metrics.format import Quantity, json_value, percent
from headgate.metrics.report.comparison_plots import PANELS, comparison_plots
from headgate.metrics.report.write import write_page
from headgate.metrics.summary import Summary
from headgate.metrics.table import Column, Fields, ReportTable, comparison_table, format_column
from headgate.policies import find_policy, policies_for

_MEANS: Final[Fields] = (
    ("met", "share", "slo_attainment"),
    ("goodput", "rate", "goodput_rps"),
    ("wait", "time_ms", "mean_wait_ms"),
    ("p99", "time_ms", "p99_ms"),
    ("cold", "share", "cold_request_share"),
    ("busy", "share", "utilisation"),
    ("cost", "usd", "cost_usd"),
)


@click.command("compare")
@app_argument
@click.option(
    "--policies", metavar="A,B,C", help="Policies to compare. Default: all that support APP."
)
@workload_options
@assume_exec_option
@set_option("A setting of one policy, such as balance.batch_max=4. May be repeated.")
@gateways_option("Gateways that share the load and the pools, under every policy.")
@seed_option
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Repeat with N seeds, starting at --seed, and print means.",
)
@json_option
@report_option
def command(
    app: str,
    policies: str | None,
    workload_options: WorkloadOptions,
    assumed_ns: int | None,
    settings: tuple[tuple[str, object], ...],
    gateways: int,
    seed: int,
    seeds: int,
    as_json: bool,
    report: Path | None,
) -> None:
    """Simulate APP under several policies, side by side.

    All policies get the same requests. Prints one table; the report has one plot.

    \b
    headgate compare examples/kaas.yaml
    headgate compare examples/kaas.yaml --policies balance,affinity --seeds 5 --report out
    """
    config, assumed = load_for_simulation(app, assumed_ns)
    selected = _select_policies(config, app, policies, settings, gateways)
    configs = {each.name: of_one_gateway(config, app, each, gateways) for each in selected}
    make_directory(report, "--report")
    runs: dict[str, list[SimulatedRun]] = {each.name: [] for each in selected}
    rented: dict[str, int] = {}
    for number in range(seed, seed + seeds):
        workload = choose_workload(config, app, workload_options, number)
        for each in selected:
            title = f"seed {number}," if seeds > 1 else "simulating"
            result, columns = run(
                configs[each.name],
                each,
                workload,
                seed=number,
                gateways=gateways,
                platforms=config.app,
                title=title,
            )
            runs[each.name].append(result)
            rented.update(_rented_at_start(config.app, each.name, columns))
    comparison = Comparison(app, gateways, seed, seeds, runs, assumed, rented)
    if report is not None:
        with writing(report, "--report"):
            page = comparison.write(report)
    if as_json:
        show_json(comparison.to_json())
        return
    table = replace(comparison.table(), title="")
    show(Text(f"{comparison.title}\n", "bold"), table)
    show_assumed(comparison.assumed)
    if comparison.boots:
        show(Text(comparison.boots, "yellow"))
    if report is not None:
        show(Text(f"report: {page}"))


def _rented_at_start(app: App, policy: str, columns: RunColumns) -> dict[str, int]:
    """Return how many nodes with a boot time a policy rented at time 0; {} if it rents none."""
    boots = {pool.name for pool in app.pools if pool.is_elastic and pool.boot_ns}
    rented = [use for use in columns.resources if use.pool in boots and use.up_ns]
    return {policy: sum(use.is_rented_at_start for use in rented)} if rented else {}


def _select_policies(
    config: AppConfig,
    where: str,
    policies: str | None,
    settings: Iterable[tuple[str, object]],
    gateways: int,
) -> list[SelectedPolicy]:
    if policies is None:
        names = policies_for(config.app)
        if gateways > 1:
            names = [name for name in names if supports_gateways(find_policy(name))]
        if not names:
            # Of this one it is said what it does not support.
            return [select_policy(config, where, None, {})]
    else:
        names = [name.strip() for name in policies.split(",") if name.strip()]
        if not names:
            allowed = "names of policies, such as balance,headgate"
            raise ConfigError("names none", where="--policies", value=policies, allowed=allowed)
        for name in names:
            if names.count(name) > 1:
                problem = "is named twice"
                raise ConfigError(problem, where="--policies", value=name, allowed="each name once")
    given: dict[str, dict[str, object]] = {name: {} for name in names}
    for key, value in settings:
        name, dot, setting = key.partition(".")
        if not dot:
            allowed = "POLICY.KEY=VALUE"
            raise ConfigError("does not name its policy", where="--set", value=key, allowed=allowed)
        if name not in given:
            raise unknown_name_error("policy", name, names, where="--set", key=None)
        given[name][setting] = value
    return [select_policy(config, where, name, given[name], option="--policies") for name in names]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of one workload by policy, one for each seed."""

    app: str
    gateways: int
    seed: int
    seeds: int
    runs: dict[str, list[SimulatedRun]]
    assumed: dict[str, str]  # by variant: assumed execution time of what nobody has measured
    rented: dict[str, int]  # by policy that rents nodes with a boot time: how many at time 0

    @property
    def boots(self) -> str:
        """A sentence on which policies began with nodes that need no boot, unless all are alike."""
        ready = [f"{name} {count}" for name, count in self.rented.items() if count]
        booting = [name for name, count in self.rented.items() if not count]
        if not ready or not booting:
            return ""
        how = " (at time 0 it rents what prewarm_nodes says)" if "headgate" in booting else ""
        return (
            f"nodes rented at time 0, which need no boot: {', '.join(ready)}; "
            f"every node boots under {', '.join(sorted(booting, key='headgate'.__eq__))}{how}"
        )

    @property
    def title(self) -> str:
        seeds = f"seed {self.seed}"
        if self.seeds > 1:
            seeds = (
                f"{self.seeds} seeds from {self.seed}, means ± half of the 95 % confidence interval"
            )
        gateways = f", {self.gateways} gateways" if self.gateways > 1 else ""
        return f"{self.app}{gateways}, {seeds}"

    def table(self) -> ReportTable:
        if self.seeds == 1:
            return comparison_table(self._means())
        return seeds_table([(name, _summaries(runs)) for name, runs in self.runs.items()])

    def to_json(self) -> dict[str, object]:
        """Return all runs and, over several seeds, the means by policy."""
        content: dict[str, object] = {
            "app": self.app,
            "gateways": self.gateways,
            "seed": self.seed,
            "seeds": self.seeds,
            "policies": list(self.runs),
            "runs": [run.to_json() for runs in self.runs.values() for run in runs],
            "assumed_exec_time": self.assumed,
        }
        if self.seeds > 1:
            means = {name: seeds_json(_summaries(runs)) for name, runs in self.runs.items()}
            content["means"] = means
        return content

    def write(self, directory: Path) -> Path:
        """Write the HTML page, the plot and the numbers; return the path of the page."""
        means = self._means()
        text = json.dumps(json_value(self.to_json()), indent=2)
        (directory / "comparison.json").write_text(text + "\n", encoding="utf-8")
        meta: dict[str, object] = {"app": self.app, "seed": self.seed, "seeds": self.seeds}
        if self.gateways > 1:
            meta["gateways"] = self.gateways
        if self.assumed:
            meta["assumed_exec_time"] = self.assumed
        tiles = {f"met by {name}": percent(summary.slo_attainment) for name, summary in means}
        title = f"{Path(self.app).stem}: {len(means)} policies"
        plots = comparison_plots(means)
        return write_page(directory, title, meta, tiles, plots, [self.table()])[0]

    def _means(self) -> list[tuple[str, Summary]]:
        return [(name, mean_summary(_summaries(runs))) for name, runs in self.runs.items()]


def _summaries(runs: list[SimulatedRun]) -> list[Summary]:
    return [run.summary for run in runs]


def seeds_table(rows: Sequence[tuple[str, Sequence[Summary]]]) -> ReportTable:
    """Return one row per policy: means over seeds, with half of the 95 % confidence interval."""
    columns = [format_column("", "text", [label for label, _ in rows])]
    for title, quantity, name in _MEANS:
        columns.append(_column(title, quantity, [_mean_and_half(runs, name) for _, runs in rows]))
    return ReportTable(
        "Means over seeds, with half of the 95 % confidence interval", tuple(columns)
    )


def seeds_json(runs: Sequence[Summary]) -> dict[str, object]:
    """Return the mean and half interval of each column of `seeds_table`."""
    keys = ("mean", "half_interval")
    return {name: dict(zip(keys, _mean_and_half(runs, name), strict=True)) for _, _, name in _MEANS}


def mean_summary(runs: Sequence[Summary]) -> Summary:
    """Return a summary with the means of the values that the comparison plots."""
    means: dict[str, Any] = {name: _mean_and_half(runs, name)[0] for _, _, name in PANELS}
    return replace(runs[0], **means)


def _mean_and_half(runs: Sequence[Summary], name: str) -> tuple[float, float]:
    """Return the mean of one value of the runs, and half of its interval; NaN does not count."""
    values: list[float] = [getattr(run, name) for run in runs]
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return nan, nan
    interval = mean_interval(finite)
    return interval.mean, interval.high - interval.mean


def _column(title: str, quantity: Quantity, pairs: Sequence[tuple[float, float]]) -> Column:
    """Format each mean and half interval in one cell, in one unit and with the same decimals."""
    both = format_column(title, quantity, [number for pair in pairs for number in pair])
    means, halves = both.cells[::2], both.cells[1::2]
    width = max(map(len, halves))
    cells = (f"{mean} ±{half:>{width}}" for mean, half in zip(means, halves, strict=True))
    return Column(title, both.unit, tuple(cells))
