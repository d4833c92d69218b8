"""The dashboard shows all exposed metrics, and no others."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from metrics_rig import READINGS, full_metrics
from prometheus_client.parser import text_string_to_metric_families

from headgate.core.circuit_breaker import BreakerState
from headgate.live.telemetry.merged_pages import merge_pages
from headgate.live.telemetry.metrics import FaasPoolGauges
from headgate.live.telemetry.prometheus import Exposition

DASHBOARD = Path(__file__).resolve().parents[3] / "grafana" / "headgate.json"
PANELS: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
METRIC = re.compile(r"\b(?:headgate|process)_\w+")


def exposed() -> dict[str, set[str]]:
    """Return every sample name of two gateways with its labels, and those that Prometheus adds."""
    pool = FaasPoolGauges(BreakerState.CLOSED, "", 1, {"met": 2}, pings=3, spent_usd=0.5)
    readings = replace(READINGS, faas_pools={"functions": pool})
    text, _ = Exposition(full_metrics(), lambda: readings).text()
    return {
        sample.name: {*sample.labels, "instance", "job"}
        for family in text_string_to_metric_families(merge_pages({0: text, 1: text}).decode())
        for sample in family.samples
    }


def test_instances_that_gateways_share_are_counted_once() -> None:
    """Each gateway reports all of them: a sum would show twice as many with two gateways."""
    replicas = [expression for expression in EXPRESSIONS if "headgate_replicas" in expression]
    assert replicas
    assert all("max without (gateway) (headgate_replicas)" in each for each in replicas)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_uses_exposed_metrics(expression: str) -> None:
    known = exposed()
    names = METRIC.findall(expression)
    assert names
    used = {
        label.strip()
        for group in re.findall(r"(?:by|on|without) \(([^)]*)\)", expression)
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
