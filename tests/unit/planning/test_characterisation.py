"""Characterisations: exact at measured points, fitted elsewhere, written to and read from files."""

from __future__ import annotations

import json

import pytest

from headgate.core.errors import ConfigError
from headgate.planning.capacity.latency_model import Characterisation, ColdStart, Point, profile_of

START = ColdStart(process_ms=30, imports_ms=200, fetch_ms=50, load_ms=100, first_call_ms=25)


def point(cores: float, concurrency: int, p50_ms: float, batch: int = 1) -> Point:
    return Point(
        cores, concurrency, batch, p50_ms, p50_ms, 1.5 * p50_ms, 2 * p50_ms, 100, p50_ms, p50_ms
    )


MEASURED = Characterisation(
    "f",
    "test",
    (
        point(1, 1, 10.0),
        point(1, 2, 19.0),
        point(1, 4, 37.0),
        point(2, 1, 6.0),
        point(2, 2, 11.0),
        point(2, 4, 24.0),
        point(2, 1, 20.0, batch=4),
    ),
    START,
    1_000_000,
)


@pytest.mark.parametrize("point", MEASURED.points)
@pytest.mark.parametrize(
    ("quantile", "field"), [(0.5, "p50_ms"), (0.95, "p95_ms"), (0.99, "p99_ms")]
)
def test_it_is_exact_at_the_points(point: Point, quantile: float, field: str) -> None:
    predicted_ms = MEASURED.time_ms(point.cores, point.concurrency, point.batch, quantile)
    assert predicted_ms == getattr(point, field)


def test_between_the_points_it_lies_between_the_times() -> None:
    assert 19.0 < MEASURED.time_ms(1, 3) < 37.0
    assert 6.0 < MEASURED.time_ms(2, 1, batch=2) < 20.0
    assert MEASURED.time_ms(1, 3, quantile=0.99) > MEASURED.time_ms(1, 3, quantile=0.9)
    assert (MEASURED.cores, MEASURED.concurrencies, MEASURED.batches) == ((1, 2), (1, 2, 4), (1, 4))


def test_quantiles_rise_even_where_the_table_is_odd() -> None:
    """A p95 below the median is noise of a few samples: no quantile may fall for it."""
    odd = Point(1, 1, 1, 10.0, 10.0, 9.0, 11.0, 3)
    times = [odd.time_ms(quantile) for quantile in (0.1, 0.5, 0.7, 0.95, 0.97, 0.99, 0.999, 1.0)]
    assert times == sorted(times)
    assert times[-1] > 11.0


def test_the_surrogate_is_the_papers_curve() -> None:
    paper = Characterisation.surrogate()
    assert paper.time_ms(2, 5) == 180.0 and paper.time_ms(8, 6) == 156.0
    assert paper.time_ms(3, 1) == pytest.approx(16 + 40 / 3)  # was not among the points
    assert paper.surface.knee == 4


def test_files_carry_everything() -> None:
    document = json.loads(json.dumps(MEASURED.to_json()))
    assert document["schema"] == "headgate-profile/1"
    assert Characterisation.from_json(document | {"machine": {"cores": 2}}) == MEASURED


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], "headgate-profile/1"),
        ({"schema": "headgate-profile/9"}, "headgate-profile/1"),
        ({"schema": "headgate-profile/1", "function": "f", "device": "d"}, "points"),
        (MEASURED.to_json() | {"points": []}, "a point"),
        (MEASURED.to_json() | {"points": [{"cores": "two"}]}, "points[0].cores"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(document: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Characterisation.from_json(document, "profile.json")
    assert str(caught.value).startswith("profile.json: ")
    assert problem in str(caught.value)


def test_a_time_of_nothing_is_no_point() -> None:
    with pytest.raises(ValueError, match="more than zero"):
        point(1, 1, 0.0)


def test_a_profile_for_the_scheduler() -> None:
    profile = profile_of(MEASURED, cores=2)
    assert profile.exec_ns[0] == 6_000_000 and profile.exec_ns[3] == 20_000_000
    assert list(profile.exec_ns) == sorted(profile.exec_ns)
    assert profile.slowdown[0] == 1.0 and profile.slowdown[3] == pytest.approx(4.0)
    assert profile.time_ns(1, 2) == pytest.approx(11_000_000, rel=1e-6)
    assert profile.memory_bytes == 1_000_000
    # Of the first call only what a warm one would not take: 25 - 6 ms.
    assert profile.cold_start_ns == (30 + 200 + 50 + 100 + 19) * 1_000_000


def test_a_profile_at_a_quantile_is_slower_at_the_same_concurrency() -> None:
    slow, usual = profile_of(MEASURED, 1, 0.95), profile_of(MEASURED, 1)
    assert slow.exec_ns[0] == 15_000_000
    assert slow.slowdown[1] == pytest.approx(usual.slowdown[1])


def test_a_first_call_that_is_quicker_than_usual_costs_nothing_extra() -> None:
    quick = ColdStart(1, 1, 1, 1, first_call_ms=2)
    found = Characterisation("f", "test", (point(1, 1, 10.0),), quick)
    assert profile_of(found, 1).cold_start_ns == 4_000_000


def test_noise_never_makes_concurrency_or_larger_batches_faster() -> None:
    noisy = (point(1, 1, 10.0), point(1, 2, 9.0), point(1, 3, 8.0), point(1, 1, 9.5, batch=2))
    profile = profile_of(Characterisation("f", "test", noisy), 1)
    assert profile.slowdown == (1.0, 1.0, 1.0)
    assert profile.exec_ns == (10_000_000, 10_000_000)
