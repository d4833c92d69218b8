"""The benchmark of planning, on pipelines that are small enough for a test."""

from __future__ import annotations

from gzip import open as open_gzip
from pathlib import Path

import pytest

from headgate.lab.bench import planner
from headgate.lab.stage_configs import Prices, infless_configs, law_configs, measured_configs

SMALL = {
    "_STAGES": (1, 2),
    "_CONFIGS": (27, 64),
    "_BASE_STAGES": 2,
    "_BASE_CONFIGS": 27,
    "_BUDGETED": (64,),
    "_SEARCHED": {"measured": 27, "law": 27},
    "_DECISIONS": 50,
    "_SEARCHES": 2,
    "_PLAIN_SEARCHES": 1,
    "_BUILDS": 1,
    "_CELLS": planner._CELLS[:1],
    "_POLICIES": ("esg", "headgate"),
}


def test_it_measures_every_case_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sizes are small; which checks hold depends on the machine, except that results agree."""
    for name, value in SMALL.items():
        monkeypatch.setattr(planner, name, value)
    said: list[str] = []
    result = planner.run(progress=said.append, out=tmp_path)
    built = [row for row in result.rows if "build_ms" in row]
    assert [(row["table"], row["stages"], row["configs"]) for row in built] == [
        (table, stages, configs)
        for table in ("measured", "law")
        for stages, configs in ((1, 27), (2, 27), (2, 64))
    ] + [("law, 1%", 2, 27)]
    assert sum("decision" in row for row in result.rows) == 4
    assert sum("search" in row for row in result.rows) == 8
    assert sum("grouped_search" in row for row in result.rows) == 6
    agrees = next(check for check in result.checks if "agree" in check.claim)
    assert agrees.holds
    assert [path.name for path in result.figures] == ["planner-growth.png"]
    assert said[0] == "measured: 1 stages x 27 configurations"


def test_distributing_an_objective_costs_no_less_than_the_optimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "_BASE_STAGES", 4)
    monkeypatch.setattr(planner, "_BASE_CONFIGS", 27)
    row = planner._measure_groups("law", "moderate")
    assert row["groups"] == "3+1"
    over = row["cost_over_optimum"]
    assert isinstance(over, float) and over >= 1.0


def test_tables_of_candidates(tmp_path: Path) -> None:
    configs = measured_configs("classification")
    assert len({(c.batch, c.cpu_milli, c.gpu_sevenths) for c in configs}) == 252
    one = next(c for c in configs if (c.batch, c.cpu_milli, c.gpu_sevenths) == (1, 1000, 7))
    assert one.cost == Prices().cost(1, 7, one.time_ns, 1)
    assert len(law_configs(10.0, (1, 2), (1, 2), (1, 7))) == 8
    table = tmp_path / "infless.csv.gz"
    rows = "model,vcpu,gpu_pct,batch,latency_ms,infeasible\nssd,2,10,1,60.0,0\nssd,2,10,9,9999,1\n"
    with open_gzip(table, "wt", encoding="utf-8") as stream:
        stream.write(rows)
    (config,) = infless_configs(table, "ssd")
    assert (config.time_ns, config.cpu_milli, config.gpu_sevenths) == (60_000_000, 2000, 1)
