"""Swayam and its rivals: the failing claims are those that the page documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paper_page import missed_goals, quick_result

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.lab.experiments import find_experiment, run_experiment
from headgate.lab.experiments.autoscaling.agreement import (
    BACKENDS_KILLED,
    KILLED,
    AgreementCase,
    run_agreement,
)
from headgate.lab.experiments.autoscaling.environment import (
    DURATION_NS,
    REQUESTS_MAX,
    SERVICES,
    ServiceScenario,
)
from headgate.lab.experiments.autoscaling.results import CLAIRVOYANT

PAGE = "docs/papers/swayam.md"
GENERATED = [service for service in SERVICES if not service.file]


@pytest.mark.slow
def test_the_quick_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are complete, figures are written, JSON is valid, and failing claims are documented."""
    monkeypatch.delenv("HEADGATE_TRACES", raising=False)
    result = quick_result("swayam", tmp_path)
    rows = [row for row in result.rows if "/ ClairA2" in row]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    assert {"swayam", "static_partition", "headgate", CLAIRVOYANT} <= set(policies)
    services = list(dict.fromkeys(row["service"] for row in rows))
    assert [(row["service"], row["policy"]) for row in rows] == [
        (service, policy) for service in services for policy in policies
    ]
    assert {check.claim for check in result.failing} == missed_goals(PAGE, "quick")
    assert not result.outdated


@pytest.mark.parametrize("service", GENERATED, ids=lambda service: service.name)
def test_a_service_has_its_mean_load(service: object) -> None:
    """At most so many requests in three hours, and execution times of the given mean."""
    scenario = ServiceScenario(next(s for s in SERVICES if s is service), 5.0)
    arrivals, exec_ns = scenario.arrivals(seed=0), scenario.exec_ns(seed=0)
    assert len(arrivals) == pytest.approx(scenario.service.rate_per_s * 3 * 3600, rel=0.02)
    assert len(arrivals) <= 1.02 * REQUESTS_MAX
    assert arrivals.duration_ns == DURATION_NS
    assert exec_ns.mean() == pytest.approx(scenario.service.exec_ns, rel=0.01)
    assert exec_ns.std() / exec_ns.mean() == pytest.approx(scenario.service.cv, rel=0.05)
    assert exec_ns.max() < scenario.service.response_max_ns


def test_the_step_doubles_the_rate() -> None:
    step = next(service for service in SERVICES if service.name == "step")
    times_ns = ServiceScenario(step, 5.0, duration_ns=90 * MINUTE_NS).arrivals(seed=0).times_ns
    thirds = np.bincount(times_ns // (30 * MINUTE_NS))
    assert thirds[1] / thirds[0] == pytest.approx(2.0, rel=0.05)
    assert thirds[2] / thirds[0] == pytest.approx(1.0, rel=0.05)


def test_a_trace_keeps_its_shape(tmp_path: Path) -> None:
    """Of a window that triples its rate half-way, each half keeps its share."""
    service = next(service for service in SERVICES if service.name == "calm")
    seconds = DURATION_NS // SECOND_NS
    counts = [0] * service.start_s + [20] * (seconds // 2) + [60] * (seconds // 2)
    lines = ["rps", *map(str, counts)]
    (tmp_path / f"{service.file}.csv").write_text("\n".join(lines), encoding="utf-8")
    times_ns = ServiceScenario(service, 5.0, tmp_path).arrivals(seed=0).times_ns
    assert len(times_ns) == pytest.approx(REQUESTS_MAX, rel=0.02)
    late = np.count_nonzero(times_ns >= DURATION_NS // 2)
    assert late / len(times_ns) == pytest.approx(0.75, abs=0.01)


def test_a_killed_frontend_is_seen_in_the_samples() -> None:
    """Samples are taken from the first minute on; in the middle third one of eight is away."""
    run = run_agreement(AgreementCase(KILLED, 6 * MINUTE_NS, 1.0), seed=0)
    counts = [len(needs) for needs in run.needs]
    assert counts == [8] * 7 + [7] * 12 + [8] * 11  # a sample precedes a fault of the same time
    assert run.spread <= run.largest
    assert min(map(min, run.needs)) >= 1


def test_backends_beyond_those_that_are_killed_go_on() -> None:
    run = run_agreement(AgreementCase(BACKENDS_KILLED, 3 * MINUTE_NS, 1.0), seed=0).run
    assert run.met > 0.95
    assert run.setups > 5  # what was killed is replaced


def test_only_some_experiments_take_a_number_of_processes() -> None:
    with pytest.raises(ConfigError, match="--jobs: 3: the number of processes of kaas-traces"):
        run_experiment(find_experiment("kaas-traces"), quick=True, out=None, progress=print, jobs=3)
