"""`headgate fuzz --regret`: runs the regret search, prints its scores and writes lost worlds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from headgate.cli.app_loading import known_policy, write_app
from headgate.cli.options import writing
from headgate.cli.output import Progress, hanging_indent, show, show_json
from headgate.lab.regret.search import (
    RATIO_MIN,
    SHARE_MIN,
    Extreme,
    RegretReport,
    WorldResult,
    search,
)
from headgate.lab.regret.shrink import TRIES_MAX, loss_of, shrink
from headgate.lab.regret.worlds import Truth, World, WorldKind, draw_world
from headgate.metrics.table import rows_table

_KIND_WORDS: Final[dict[WorldKind, str]] = {
    "plain": "",
    "shapes": "shapes and ",
    "single": "a single function and ",
}
_LINES_MAX: Final = 20  # lost worlds that are listed; --json lists all


@dataclass(frozen=True, slots=True)
class RegretSearch:
    """What to search: a policy, the seeds of the worlds, and their service times."""

    policy: str
    seed: int
    count: int
    truth: Truth
    kind: WorldKind
    jobs: int

    def command(self, seed: int) -> str:
        """The command that repeats one world."""
        truth = "" if self.truth == "scattered" else f" --truth {self.truth}"
        worlds = "" if self.kind == "plain" else f" --worlds {self.kind}"
        return f"headgate fuzz --regret{worlds} --policy {self.policy} --seed {seed}{truth}"


def run_regret_search(wanted: RegretSearch, output: Path | None, *, as_json: bool) -> int:
    """Search, print, and write a file for each lost world to `output`; return the exit code."""
    known_policy(wanted.policy, "--policy")
    if output is not None:
        with writing(output, "--shrink"):
            output.mkdir(parents=True, exist_ok=True)
    results: list[WorldResult] = []
    seeds = range(wanted.seed, wanted.seed + wanted.count)
    with Progress(f"searching for what {wanted.policy} loses", wanted.count) as progress:
        for result in search(
            wanted.policy, seeds, truth=wanted.truth, kind=wanted.kind, jobs=wanted.jobs
        ):
            results.append(result)
            progress.update(len(results))
    report = RegretReport(wanted.policy, wanted.truth, tuple(results), wanted.kind)
    written = {} if output is None else dict(_write_lost(report, wanted, output))
    if as_json:
        show_json({**report.to_json(), "written": {s: str(path) for s, path in written.items()}})
    else:
        _show(report, wanted, written)
    return 1 if report.lost else 0


def _write_lost(
    report: RegretReport, wanted: RegretSearch, output: Path
) -> Iterator[tuple[int, Path]]:
    """Shrink each lost world, and write it; yield its seed and the file."""
    for result in report.lost:
        reason, loses = loss_of(result, wanted.policy)
        world = draw_world(result.seed, wanted.truth, wanted.kind)
        with Progress(f"shrinking world {result.seed}", TRIES_MAX) as progress:
            smaller = shrink(world, loses, on_try=progress.update)
        path = output / f"{wanted.policy}-{reason.replace(' ', '-')}-{result.seed}.yaml"
        write_app(path, "--shrink", smaller.spec, _comment(smaller, result, wanted, path))
        yield result.seed, path


def _comment(world: World, result: WorldResult, wanted: RegretSearch, path: Path) -> str:
    """What a file of a lost world says about itself."""
    how = {
        "ratio": f"reaches less than {RATIO_MIN:.0%} of the goodput of {result.best_rival}",
        "share": f"reaches less than {SHARE_MIN:.0%} of the fluid bound",
        "kept": "admits too many requests that it then answers late",
        "best effort": "starves the requests without an objective",
    }[result.losses[0]]
    return (
        f"# A world in which the policy {wanted.policy} {how}. Shrunk from:\n"
        f"#   {wanted.command(result.seed)}\n"
        f"# Run it: headgate simulate {path.name} --policy {wanted.policy} --seed {world.seed}\n"
    )


def _show(report: RegretReport, wanted: RegretSearch, written: dict[int, Path]) -> None:
    show(*_aggregates(report), "")
    lost = report.lost
    if lost:
        show(rows_table([_row(result) for result in lost[:_LINES_MAX]]))
        if len(lost) > _LINES_MAX:
            show(Text(f"and {len(lost) - _LINES_MAX} more: --json lists all\n"))
    for path in written.values():
        show(Text(f"written: {path}"))
    worlds = "1 world" if len(report.judged) == 1 else f"{len(report.judged):,} worlds"
    if lost:
        show(Text(f"{report.policy} loses {len(lost):,} of {worlds}", "bold red"))
        show(Text(f"repeat the worst: {wanted.command(lost[0].seed)}"))
    else:
        show(Text(f"✓ {report.policy} loses none of {worlds}", "green"))


def _aggregates(report: RegretReport) -> Iterator[RenderableType]:
    judged = report.judged
    left_out = len(report.results) - len(judged)
    lines = {
        "worlds": f"{len(judged):,} with {_KIND_WORDS[report.kind]}"
        f"{report.truth} service times"
        + (f"; {left_out} left out: too few requests with objectives" if left_out else ""),
        "share": _mean_and_worst(report.share, "of the fluid bound"),
        "in time": _mean_and_worst(report.share_in_time, "of the bound that minds deadlines"),
        "ratio": _mean_and_worst(report.ratio, "of the best rival's goodput"),
        "kept": _mean_and_worst(report.kept, "of the admitted requests in time"),
        "quantile": f"kept for every objective in {report.quantile_kept:.1%} of the worlds",
        "cost": _mean_and_worst(report.cost, "of the cheapest comparable rival's"),
        "best effort": _mean_and_worst(report.best_effort, "of the capacity while any waits"),
    }
    without = len(judged) - report.ratio.worlds
    if without:
        lines["ratio"] += f"; {without} worlds without: no policy gives each class half its share"
    for label, text in lines.items():
        yield hanging_indent(label, 13, text)


def _mean_and_worst(value: Extreme, of: str) -> str:
    if not value.worlds:
        return "no figure"
    return f"mean {value.mean:.3f}, worst {value.worst:.3f} (seed {value.seed}) {of}"


def _row(result: WorldResult) -> dict[str, object]:
    own = result.own
    return {
        "seed": result.seed,
        "lost by": ", ".join(result.losses),
        "load": f"{result.load:.2f}",
        "share": f"{own.share:.3f}",
        "ratio": "" if isnan(result.ratio) else f"{result.ratio:.3f}",
        "best rival": result.best_rival or "",
        "kept": "" if isnan(own.kept_overall) else f"{own.kept_overall:.3f}",
        "starved": ", ".join(own.starved),
        "world": " ".join(result.features),
    }
