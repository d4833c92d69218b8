"""`forecast`: which forecaster is the cheapest at equal violations."""

from __future__ import annotations

from math import pi, sin
from pathlib import Path

import pytest
from cli_rig import headgate, write

from headgate.planning.forecast import forecast_rules

POISSON = ("--arrivals", "poisson:rate=40/s", "--duration", "10min")


def test_scores_are_ranked_at_equal_violations() -> None:
    found = headgate("forecast", *POISSON, "--json", "--price", "$0.50/h", "--level", "2%").json
    rows = found["forecasters"]
    assert sorted(row["name"] for row in rows) == sorted(forecast_rules())
    assert [row["backend_hours"] for row in rows] == sorted(row["backend_hours"] for row in rows)
    for row in (*rows, found["perfect"]):
        assert row["is_reached"] and row["violations"] == pytest.approx(0.02)
        assert row["cost_usd"] == pytest.approx(row["backend_hours"] * 0.5)
    assert found["perfect"]["error"] == 0.0 < min(row["error"] for row in rows)
    assert (found["buckets"], found["latency_s"], found["window_s"]) == (60, 0.5, 300.0)


def test_the_table(tmp_path: Path) -> None:
    rows = "".join(f"{40 + 30 * sin(2 * pi * second / 600)}\n" for second in range(3000))
    trace = write(tmp_path / "cycle.csv", f"rate\n{rows}")
    ended = headgate("forecast", trace, "--period", "10min")
    assert (ended.code, ended.err) == (0, "")
    assert "set-up 10s, buckets of 10s, 100ms of service within 500ms" in ended.out
    assert "ranked by backend-time at 1 % violations" in ended.out
    assert "cost" not in ended.out.split("ranked")[0]
    names = [line.split(" ")[0] for line in ended.out.splitlines()]
    order = [name for name in names if name in forecast_rules()]
    assert sorted(order) == sorted(forecast_rules())
    assert order[0] == "seasonal"  # it is told the period, and the others see half of one
    by_name = headgate("forecast", "cycle", "--traces", tmp_path, "--period", "10min")
    assert by_name.out.splitlines()[1:] == ended.out.splitlines()[1:]


def test_a_longer_set_up_costs_more() -> None:
    arrivals = ("--arrivals", "mmpp:rates=20/s+60/s,stay=2min+2min", "--duration", "1h", "--json")

    def least_hours(*options: str) -> float:
        ewma = headgate("forecast", *arrivals, *options).json["forecasters"]
        return min(float(row["backend_hours"]) for row in ewma)

    soon, later = least_hours("--setup-time", "0s"), least_hours("--setup-time", "1min")
    assert soon < later < least_hours("--setup-time", "1min", "--level", "0.1%")


def test_a_part_of_the_requests_is_noisier_than_all_of_them() -> None:
    one, many = (
        headgate("forecast", *POISSON, "--frontends", number, "--json").json for number in (1, 16)
    )
    errors = [{row["name"]: row["error"] for row in found["forecasters"]} for found in (one, many)]
    assert all(errors[1][name] > errors[0][name] for name in forecast_rules())
    assert one["perfect"] == many["perfect"]
    assert one["frontends"] == 1 and many["frontends"] == 16


def test_a_level_that_no_scale_reaches(tmp_path: Path) -> None:
    """Bursts after silence: a factor on a forecast of zero does not help, a margin does."""
    rows = "".join(f"{100 if second % 100 >= 90 else 0}\n" for second in range(1000))
    trace = write(tmp_path / "bursts.csv", f"count\n{rows}")
    ended = headgate("forecast", trace, "--window", "20s")
    assert ended.code == 0
    assert "last_value: 100 % violations" not in ended.out  # one backend is always there
    assert "last_value: 9" in ended.out and "with the largest scale" in ended.out
    assert ended.out.endswith("no factor raises a forecast of 0: try --by margin\n")
    rows_found = headgate("forecast", trace, "--window", "20s", "--json").json["forecasters"]
    assert [row["is_reached"] for row in rows_found] == sorted(
        (row["is_reached"] for row in rows_found), reverse=True
    )
    assert not rows_found[-1]["is_reached"]
    added = headgate("forecast", trace, "--window", "20s", "--by", "margin", "--json").json
    assert all(row["is_reached"] for row in added["forecasters"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there are no requests to forecast (allowed: either TRACE or --arrivals PROCESS)"),
        (("x.csv", *POISSON), "--arrivals: is given with a trace (allowed: either TRACE or"),
        (("nosuch.csv",), "TRACE: trace: 'nosuch.csv': no such file"),
        (("--arrivals", "closed:clients=5"), "--arrivals: 'closed:clients=5': is a closed loop"),
        (("--arrivals", "poison:rate=5/s"), "--arrivals: 'poison': unknown kind of arrivals"),
        ((*POISSON, "--level", "0"), "--level: '0': must be above 0 and below 100%"),
        ((*POISSON, "--level", "100%"), "--level: '100%': must be above 0 and below 100%"),
        ((*POISSON, "--level", "2"), "--level: '2': is more than one"),
        ((*POISSON, "--bucket", "0s"), "--bucket: '0s': must be longer than zero"),
        ((*POISSON, "--bucket", "1us"), "poisson:rate=40/s: has 600,000,000 buckets (allowed: up"),
        ((*POISSON, "--setup-time", "-1s"), "--setup-time: '-1s': must not be negative"),
        ((*POISSON, "--setup-time", "10min"), "poisson:rate=40/s: has no requests after the first"),
        ((*POISSON, "--window", "5s"), "--window: '5s': is shorter than a bucket (allowed: at"),
        ((*POISSON, "--period", "5s"), "--period: '5s': is shorter than a bucket (allowed: at"),
        ((*POISSON, "--service-time", "0ms"), "--service-time: '0ms': must be longer than zero"),
        ((*POISSON, "--latency", "50ms"), "--latency: '50ms': no request meets it (allowed: at"),
        ((*POISSON, "--price", "3"), "--price: '3': "),
        ((*POISSON, "--by", "luck"), "forecast: Invalid value for '--by'"),
        ((*POISSON, "--frontends", "0"), "forecast: Invalid value for '--frontends'"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    ended = headgate("forecast", *arguments)
    lines = ended.err.splitlines()
    assert (ended.code, ended.out, len(lines)) == (2, "", 1), ended
    assert lines[0].removeprefix("headgate: error: ").startswith(message), lines[0]
