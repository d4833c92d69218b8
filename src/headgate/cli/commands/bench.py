"""`headgate bench`: benchmarks Headgate against its targets and against other systems."""

from __future__ import annotations

import click

from headgate.cli.options import json_option
from headgate.cli.output import Progress, show_json, show_list, show_result
from headgate.lab.bench import bench_names, find_bench


@click.command("bench")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> int:
    """Run the benchmark NAME; without a name, list the benchmarks.

    Exits with 1 if a check does not hold.
    """
    if name is None:
        titles = [(bench, find_bench(bench).TITLE) for bench in bench_names()]
        show_list(titles, "headgate bench NAME", as_json=as_json)
        return 0
    bench = find_bench(name)
    with Progress(bench.NAME) as progress:
        result = bench.run(progress=progress.describe)
    if as_json:
        show_json(result.to_json())
    else:
        show_result(result, bench.TITLE, "docs/benchmarks.md says what limits it")
    return 1 if result.failing else 0
