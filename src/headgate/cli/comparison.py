"""Several policies side by side: the table, the plot, and the files of a comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headgate.cli.runs import Run
from headgate.cli.screen import plain
from headgate.cli.spread import mean_summary, spread_json, spread_sheet
from headgate.metrics.report.comparison_plots import comparison_figure
from headgate.metrics.report.html_report import Picture, Tile, html_page
from headgate.metrics.report.style import save_png, to_svg
from headgate.metrics.sheet import Sheet, comparison_sheet, format_value
from headgate.metrics.summary import Summary


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of one workload, by policy; each policy has one per seed."""

    app: str
    seed: int
    seeds: int
    runs: dict[str, list[Run]]
    assumed: dict[str, str]  # by variant: how long it was said to take, as nobody has measured it

    @property
    def title(self) -> str:
        """What is compared."""
        seeds = f"seed {self.seed}"
        if self.seeds > 1:
            seeds = f"{self.seeds} seeds from {self.seed}, means ± half their 95 % interval"
        return f"{self.app}, {seeds}"

    def sheet(self) -> Sheet:
        """One row per policy."""
        if self.seeds == 1:
            return comparison_sheet(self._means())
        return spread_sheet([(name, _summaries(runs)) for name, runs in self.runs.items()])

    def to_json(self) -> dict[str, object]:
        """One entry per run, and over several seeds the means by policy."""
        content: dict[str, object] = {
            "app": self.app,
            "seed": self.seed,
            "seeds": self.seeds,
            "policies": list(self.runs),
            "runs": [run.to_json() for runs in self.runs.values() for run in runs],
            "assumed_exec": self.assumed,
        }
        if self.seeds > 1:
            means = {name: spread_json(_summaries(runs)) for name, runs in self.runs.items()}
            content["means"] = means
        return content

    def write(self, directory: Path) -> Path:
        """Write the page, the plot and the numbers; return where the page is."""
        means = self._means()
        text = json.dumps(plain(self.to_json()), indent=2)
        (directory / "comparison.json").write_text(text + "\n", encoding="utf-8")
        meta: dict[str, object] = {"app": self.app, "seed": self.seed, "seeds": self.seeds}
        if self.assumed:
            meta["assumed_exec"] = self.assumed
        pictures: list[Picture] = []
        if find_spec("matplotlib") is not None:
            figure = comparison_figure(means)
            pictures.append(
                Picture("The same requests under each policy", to_svg(figure, "compared"))
            )
            save_png(figure, directory / "comparison.png")
        else:
            meta["plots"] = "need matplotlib: pip install headgate[report]"
        tiles = [
            Tile(format_value("share", summary.slo_attainment), f"met by {name}")
            for name, summary in means
        ]
        page = directory / "report.html"
        title = f"{Path(self.app).stem}: {len(means)} policies"
        page.write_text(html_page(title, meta, tiles, pictures, [self.sheet()]), encoding="utf-8")
        return page

    def _means(self) -> list[tuple[str, Summary]]:
        return [(name, mean_summary(_summaries(runs))) for name, runs in self.runs.items()]


def _summaries(runs: list[Run]) -> list[Summary]:
    return [run.summary for run in runs]
