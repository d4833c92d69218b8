from __future__ import annotations

import math

import pytest
from metrics_runs import Row, busy_run, make_run

from headgate.metrics.format import Quantity, format_cell, format_value, format_values, significant
from headgate.metrics.summary import summarise
from headgate.metrics.table import (
    comparison_table,
    group_table,
    render,
    resource_table,
    summary_table,
)

BUSY = summarise(busy_run())
ONE = summarise(make_run([Row(0, 0, 20)]))


@pytest.mark.parametrize(
    ("quantity", "values", "unit", "cells"),
    [
        ("time_ms", [0.0005, 0.25], "µs", ("0.50", "250.00")),
        ("time_ms", [12.0, 9000.0], "ms", ("12", "9,000")),
        ("time_ms", [12.0, 20_000.0], "s", ("0.012", "20.000")),
        ("share", [0.99954, math.nan], "%", ("99.95", "-")),
        ("usd", [12.5, 0.0], "$", ("12.50", "0.00")),
        ("usd", [0.00123], "$", ("0.00123",)),
        ("count", [1_234_567], "", ("1,234,567",)),
        ("rate", [], "/s", ()),
    ],
)
def test_one_unit_and_precision_per_column(
    quantity: Quantity, values: list[float], unit: str, cells: tuple[str, ...]
) -> None:
    assert format_values(quantity, values) == (unit, cells)


def test_format_value() -> None:
    assert format_value("usd", 3.0) == "$3.00"
    assert format_value("time_ms", math.nan) == "-"
    assert format_value("time_ms", 999.7) == "1,000 ms"
    assert format_value("rate", 7.0) == "7/s"
    assert format_value("bytes", 300 << 20) == "300 MiB"
    assert significant(7.56e-5) == "0.0000756"
    assert significant(-1.5e-12) == "-1.5e-12"
    assert (format_cell(12_345.6), format_cell(9_999.7)) == ("12,346", "10,000")


def test_a_comparison_fits_eighty_columns_and_aligns() -> None:
    text = render(comparison_table([("headgate", ONE), ("round_robin", BUSY)]), width=80)
    lines = text.splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= 80
    assert len(lines[4]) == len(lines[5])  # the last column is right-aligned
    assert lines[4].startswith("headgate     100.00  ")


def test_a_narrow_terminal_gets_all_columns_in_blocks() -> None:
    rows = [("headgate", ONE), ("round_robin", BUSY)]
    narrow, wide = render(comparison_table(rows), width=40), render(comparison_table(rows))
    assert max(map(len, narrow.splitlines())) <= 40
    assert narrow.count("round_robin") > 1
    assert "…" not in narrow
    assert set(wide.split()) == set(narrow.replace("─", "").split()) | {wide.splitlines()[3]}


def test_one_run_is_a_list_of_values() -> None:
    text = render(summary_table(ONE))
    assert text.startswith("Summary\n")
    assert "latency p99.9        20.0  ms\n" in text


def test_labels_are_not_markup_and_a_file_gets_no_colour() -> None:
    text = render(comparison_table([("[red]a[/red]", ONE), ("b", ONE)]))
    assert "[red]a[/red]" in text
    assert "\x1b" not in text
    assert "\x1b" in render(comparison_table([("a", ONE), ("b", ONE)]), has_colour=True)


def test_groups_and_resources() -> None:
    text = render(group_table("Clients", BUSY.clients), resource_table(BUSY.resources))
    assert "web & co" in text
    assert "cpu-0 $x$" in text
