"""`headgate reproduce`: runs an experiment of a paper and checks the claims of the paper."""

from __future__ import annotations

from pathlib import Path

import click

from headgate.cli.options import OutputPath, json_option, make_directory, writing
from headgate.cli.output import Progress, show_json, show_list, show_result
from headgate.lab.experiments import (
    Experiment,
    Result,
    experiment_names,
    find_experiment,
    run_experiment,
)


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("is_all", "--all", is_flag=True, help="Run every experiment.")
@click.option("--quick", is_flag=True, help="Fewer seeds and points: seconds, not minutes.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes of an experiment that can have several.",
)
@json_option
@click.option(
    "--out", type=OutputPath(), metavar="DIR", help="Write the figures to this directory."
)
def command(
    name: str | None,
    is_all: bool,
    quick: bool,
    jobs: int | None,
    as_json: bool,
    out: Path | None,
) -> int:
    """Run the experiment NAME; without a name, list them.

    Prints its rows, and for every claim of the paper what was expected and what was measured.
    A claim that is known not to hold is marked, with the page that explains why. Exits with 1 if
    any other check does not hold, or if a claim that is known not to hold does hold.
    """
    if name is not None and is_all:
        raise click.UsageError("Give a NAME or --all, not both.")
    if name is None and not is_all:
        titles = [(each, find_experiment(each).TITLE) for each in experiment_names()]
        usage = "headgate reproduce NAME [--quick] [--out DIR], or --all"
        show_list(titles, usage, as_json=as_json)
        return 0
    make_directory(out, "--out")
    names = experiment_names() if name is None else [name]
    results = [_run(find_experiment(each), quick, jobs, out, as_json) for each in names]
    if as_json:
        content = [result.to_json() for result in results]
        show_json(content if is_all else content[0])
    return 0 if all(result.is_as_expected for result in results) else 1


def _run(
    experiment: Experiment, quick: bool, jobs: int | None, out: Path | None, as_json: bool
) -> Result:
    with Progress(experiment.NAME) as progress, writing(out, "--out"):
        result = run_experiment(
            experiment, quick=quick, out=out, progress=progress.describe, jobs=jobs
        )
    if not as_json:
        show_result(result, experiment.TITLE, "docs/papers says why")
    return result
