"""`headgate demo`: hybrid serving, live on this machine, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from rich.text import Text

import headgate
from headgate.cli.options import make_directory, writing
from headgate.cli.output import Progress, hanging_indent, show
from headgate.cli.plan_output import sentences
from headgate.core.errors import ConfigError
from headgate.lab.demo.hybrid import (
    PROFILE_S,
    DemoResult,
    Planned,
    check_rows,
    prepare,
    run_demo,
    run_rows,
    write_demo_page,
)
from headgate.lab.demo.setup import DemoSchedule
from headgate.metrics.table import rows_table
from headgate.profiling.profiler import usable_cores
from headgate.system.process import OtherProcesses

_DISTURBED: Final = 0.2  # cores that others use while the demonstration runs
MODEL: Final = Path(headgate.__file__).parents[2] / "examples/recommender/recommender.onnx"


@click.group("demo", no_args_is_help=False)
def command() -> None:
    """Demonstrate Headgate on this machine."""


@command.command("hybrid")
@click.option(
    "--step",
    "step_s",
    type=click.FloatRange(min=0.5, max=60),
    default=DemoSchedule().step_s,
    metavar="S",
    help=f"Seconds of each burst, and of the pause after it. Default: {DemoSchedule().step_s:g}.",
)
@click.option("--report", type=click.Path(path_type=Path), default=Path("out/demo"), metavar="DIR")
def hybrid(step_s: float, report: Path) -> None:
    """Serve the recommender under bursts, without and with functions.

    Profiles the recommender on this machine, plans capacity, serves it from one core, and spills
    over to functions on another. Then simulates the same, and compares the two.
    """
    if not MODEL.is_file():
        problem = "is missing: the demonstration needs a checkout of Headgate"
        raise ConfigError(problem, where=str(MODEL))
    make_directory(report, "--report")
    others = OtherProcesses()
    with Progress("profiling the recommender") as progress:
        planned = prepare(MODEL, DemoSchedule(step_s=step_s), PROFILE_S, progress.describe)
    explanation = sentences(planned.plan, planned.scale.measured, None, planned.prices)
    _show_plan(planned, explanation)
    with Progress("serving") as progress:
        result = run_demo(planned, progress.describe)
    with writing(report, "--report"):
        page = write_demo_page(result, explanation, report)
    _show_runs(result)
    if (taken := others.cpus()) > _DISTURBED:
        cores = len(usable_cores())
        text = f"Disturbed: other processes used {taken:.1f} of {cores} cores meanwhile."
        show(
            Text(
                f"{text} Live times are longer for it, and may differ from simulated ones.",
                "yellow",
            )
        )
    show(Text(f"report: {page}"))


def _show_plan(planned: Planned, explanation: list[str]) -> None:
    scale = planned.scale
    show(Text(f"The recommender, {scale.sessions} sessions a request, on this machine\n", "bold"))
    times = [
        {
            "at_once": point.concurrency,
            "p50_ms": round(point.p50_ms, 1),
            "p95_ms": round(point.p95_ms, 1),
        }
        for point in scale.measured.points
        if point.cores == 1
    ]
    show(rows_table(times, "Response times on one core"))
    show(*(hanging_indent("-", 2, sentence) for sentence in explanation))


def _show_runs(result: DemoResult) -> None:
    scale = result.planned.scale
    quiet, burst = scale.rates_per_s
    load = f"{quiet:.0f} requests/s, {burst:.0f}/s in bursts"
    show(Text(f"\n{load}; objective {scale.slo_ms:g} ms\n", "bold"))
    show(rows_table(run_rows(result)))
    notes = (
        "Predicted: simulated by the profile alone. Rows without a live run are not this machine.",
        "Simulated: with the service times in the log of the live run, of requests and of calls.",
        "Simulated functions share one core; "
        f"live ones share one of {len(usable_cores())} with the gateway and the client, too.",
    )
    show(*(hanging_indent("-", 2, note) for note in notes))
    show(rows_table(check_rows(result), "\nDo live, simulated and planned agree?"))
