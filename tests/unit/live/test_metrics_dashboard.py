"""The dashboard shows all exposed metrics, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from metrics_rig import READINGS, full_metrics
from prometheus_client.parser import text_string_to_metric_families

from headgate.live.telemetry.prometheus import Exposition

DASHBOARD = Path(__file__).resolve().parents[3] / "grafana" / "headgate.json"
PANELS: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
METRIC = re.compile(r"\b(?:headgate|process)_\w+")


def exposed() -> dict[str, set[str]]:
    """Return every sample name with its labels, including those that Prometheus adds."""
    text, _ = Exposition(full_metrics(), lambda: READINGS).text()
    return {
        sample.name: {*sample.labels, "instance", "job"}
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_uses_exposed_metrics(expression: str) -> None:
    known = exposed()
    names = METRIC.findall(expression)
    assert names
    used = {
        label.strip()
        for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression)
        for label in group.split(",")
    }
    used |= set(re.findall(r"(\w+)=~", expression))
    for name in names:
        assert name in known, f"{name} is not exposed"
        assert used <= known[name], f"{name} has no label {used - known[name]}"


def test_every_metric_is_shown() -> None:
    displayed = {family(name) for expression in EXPRESSIONS for name in METRIC.findall(expression)}
    ours = {family(name) for name in exposed() if name.startswith("headgate_")}
    assert ours == {name for name in displayed if name.startswith("headgate_")}


def family(name: str) -> str:
    return re.sub("_(bucket|count|sum)$", "", name)


def test_brackets_match_and_panels_do_not_overlap() -> None:
    for expression in EXPRESSIONS:
        assert expression.count("(") == expression.count(")")
    taken = set()
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, panel["title"]
                taken.add((x, y))
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
