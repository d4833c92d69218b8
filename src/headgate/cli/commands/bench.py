"""`headgate bench`: benchmarks Headgate against its targets and against other systems."""

from __future__ import annotations

from pathlib import Path

import click

from headgate.cli.app_loading import known_policy
from headgate.cli.options import OutputPath, json_option, make_directory, writing
from headgate.cli.output import Progress, show_json, show_list, show_result
from headgate.lab.bench import Bench, bench_names, find_bench, takes


@click.command("bench")
@click.argument("name", required=False)
@click.option("--policy", metavar="NAME", help="Policy, for benchmarks that take one.")
@click.option(
    "--out", type=OutputPath(), metavar="DIR", help="Write the figures to this directory."
)
@json_option
def command(name: str | None, policy: str | None, out: Path | None, as_json: bool) -> int:
    """Run the benchmark NAME; without a name, list the benchmarks.

    Exits with 1 if a check does not hold.
    """
    if name is None:
        titles = [(bench, find_bench(bench).TITLE) for bench in bench_names()]
        show_list(titles, "headgate bench NAME", as_json=as_json)
        return 0
    bench = find_bench(name)
    options = _options(bench, policy, out)
    with Progress(bench.NAME) as progress, writing(out, "--out"):
        result = bench.run(progress=progress.describe, **options)
    if as_json:
        show_json(result.to_json())
    else:
        show_result(result, bench.TITLE, "docs/benchmarks.md says what limits it")
    return 1 if result.failing else 0


def _options(bench: Bench, policy: str | None, out: Path | None) -> dict[str, object]:
    """Return the options that were given. Raises if the benchmark does not take one of them."""
    given = {key: value for key, value in (("policy", policy), ("out", out)) if value is not None}
    for key in given:
        if not takes(bench, key):
            raise click.UsageError(f"The benchmark {bench.NAME} does not take --{key}.")
    if policy is not None:
        known_policy(policy, "--policy")
    make_directory(out, "--out")
    return dict(given)
