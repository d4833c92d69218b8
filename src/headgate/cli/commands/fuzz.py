"""`headgate fuzz`: tests a policy on random applications, workloads and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click
from rich.text import Text

from headgate.cli.app_loading import known_policy
from headgate.cli.options import OutputPath, json_option, seed_option
from headgate.cli.output import Progress, hanging_indent, show, show_json
from headgate.cli.regret import RegretSearch, run_regret_search
from headgate.lab.regret.worlds import TRUTHS, WORLD_KINDS, Truth, WorldKind
from headgate.metrics.format import format_cell
from headgate.sim.fuzz import FuzzReport, fuzz


@click.command("fuzz")
@click.option(
    "--policy",
    metavar="NAME",
    help="Policy to test. Required; with --regret, the default is headgate.",
)
@seed_option
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=1,
    metavar="K",
    help="Number of cases: seeds N, N + 1, ... Default: 1.",
)
@click.option(
    "--regret", is_flag=True, help="Search for worlds in which the policy does worse than others."
)
@click.option(
    "--truth",
    type=click.Choice(TRUTHS),
    help="With --regret: service times as profiled, scattered around the profile by 10 %, or with "
    "profiles that are wrong by up to 30 % as well. Default: scattered.",
)
@click.option(
    "--worlds",
    type=click.Choice(WORLD_KINDS),
    help="With --regret: which worlds; plain, with builds that run in several shapes on nodes with "
    "CPUs and GPUs, or of a single function in batches. Default: plain.",
)
@click.option(
    "--shrink",
    type=OutputPath(),
    metavar="DIR",
    help="With --regret: write a small application file for each world that is lost.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1, max=256),
    metavar="N",
    help="With --regret: number of processes. Default: 1.",
)
@json_option
def command(
    policy: str | None,
    seed: int,
    count: int,
    regret: bool,
    truth: Truth | None,
    worlds: WorldKind | None,
    shrink: Path | None,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Run a policy on random cases with random faults, under every invariant checker.

    Each seed is a case: an application, a workload and a fault plan. It is run twice and its log is
    replayed. Exits with 1 if a case fails, and prints the command that repeats it.

    With --regret each seed is a world without faults, and the policy is scored: its goodput beside
    a fluid bound and beside every other policy that supports the world, the share of admitted
    requests that were in time, and the cost. Exits with 1 if a world is lost. docs/regret.md
    defines the scores.

    \b
    headgate fuzz --policy balance --seed 7
    headgate fuzz --policy affinity --count 200
    headgate fuzz --regret --count 100 --jobs 4 --shrink lost/
    headgate fuzz --regret --worlds shapes --count 60
    """
    if regret:
        search = RegretSearch(
            policy or "headgate", seed, count, truth or "scattered", worlds or "plain", jobs or 1
        )
        return run_regret_search(search, shrink, as_json=as_json)
    for option, value in (
        ("--truth", truth),
        ("--worlds", worlds),
        ("--shrink", shrink),
        ("--jobs", jobs),
    ):
        if value is not None:
            raise click.UsageError(f"{option} is for --regret only.")
    if policy is None:
        raise click.MissingParameter(param_type="option", param_hint="'--policy'")
    known_policy(policy, "--policy")
    reports: list[FuzzReport] = []
    with Progress(f"fuzzing {policy}", count) as progress:
        for number in range(seed, seed + count):
            reports.append(fuzz(policy, number))
            progress.update(len(reports))
    if as_json:
        show_json(_to_json(policy, seed, reports))
    else:
        _show(policy, reports)
    return 0 if all(report.is_ok for report in reports) else 1


def _to_json(policy: str, seed: int, reports: list[FuzzReport]) -> dict[str, object]:
    return {
        "policy": policy,
        "seed": seed,
        "count": len(reports),
        "checks": list(reports[0].checks),
        "events": _sum([report.events for report in reports]),
        "outcomes": _sum([report.outcomes for report in reports]),
        "failures": [
            {"seed": report.seed, "repeat": report.command, "problems": list(report.failures)}
            for report in reports
            if not report.is_ok
        ],
    }


def _show(policy: str, reports: list[FuzzReport]) -> None:
    outcomes = _sum([report.outcomes for report in reports])
    show(
        hanging_indent("requests", 10, format_cell(outcomes) or "none"),
        hanging_indent("events", 10, format_cell(_sum([report.events for report in reports]))),
        hanging_indent("checks", 10, ", ".join(reports[0].checks)),
        "",
    )
    failing = [report for report in reports if not report.is_ok]
    for report in failing:
        show(
            Text(report.command, "bold"),
            *(hanging_indent("✗", 2, text) for text in report.failures),
        )
    cases = "1 case" if len(reports) == 1 else f"{len(reports):,} cases"
    if failing:
        show(Text(f"{policy} fails in {len(failing):,} of {cases}", "bold red"))
    else:
        show(Text(f"✓ {policy} passes {cases}", "green"))


def _sum(counts: list[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total.most_common())
