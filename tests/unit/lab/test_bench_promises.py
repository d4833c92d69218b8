"""The checks of the benchmark `promises`, on results made by hand."""

from __future__ import annotations

from math import nan
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.states import Outcome
from headgate.lab.bench._paced_server import Paced
from headgate.lab.bench.promises import (
    PipelineStep,
    PromisesPlan,
    SlowResult,
    TenantsResult,
    report,
    slow_result,
)
from headgate.loadgen.requests import LoadOptions
from headgate.loadgen.results import LoadResult, Rows, make_result
from headgate.workload import arrivals_at

FLAT = PipelineStep(1.0, 100.0, 100.0, 1.0, 100.0, 1.0)


def test_every_claim_has_a_check() -> None:
    good = report(
        [TenantsResult("http", 500.0, 100, 99, 80.0, 1)],
        [SlowResult(5.0, 800, 400, 320, 300, 300)],
        [FLAT, PipelineStep(3.0, 300.0, 90.0, 0.99, 95.0, 1.0)],
    )
    assert len(good.rows) == 4 and len(good.checks) == 7
    assert good.failing == []


@pytest.mark.parametrize(
    ("tenants", "slow", "pipeline", "claim"),
    [
        ([TenantsResult("grpc", 500.0, 100, 98, 80.0, 2)], [], [], "beside a flood over grpc"),
        ([TenantsResult("http", 500.0, 0, 0, nan, 0)], [], [], "beside a flood over http"),
        ([], [SlowResult(10.0, 800, 200, 159, 9, 9)], [], "10 times slower: share of what could"),
        ([], [SlowResult(5.0, 800, 400, 400, 9, 8)], [], "5 times slower: in time from 2 s"),
        ([], [SlowResult(5.0, 800, 400, 400, 0, 0)], [], "5 times slower: in time from 2 s"),
        ([], [], [FLAT, PipelineStep(3, 300, 89, 1, 90, 1)], "live: goodput relative"),
        ([], [], [FLAT, PipelineStep(3, 300, 95, 0.98, 90, 1)], "live: share of the admitted"),
        ([], [], [FLAT, PipelineStep(3, 300, 95, 1, 90, 0.9)], "simulated: share of the admitted"),
    ],
)
def test_a_broken_promise_fails_its_check(
    tenants: list[TenantsResult], slow: list[SlowResult], pipeline: list[PipelineStep], claim: str
) -> None:
    (failing,) = report(tenants, slow, pipeline).failing
    assert claim in failing.claim


def test_requests_of_a_slow_period_are_counted_by_when_they_were_due() -> None:
    """One request a second; slow from 2 to 6 s, recovered by 7 s. The last is late."""
    plan = PromisesPlan(
        before_seconds=2.0, slow_seconds=4.0, recovery_seconds=1.0, after_seconds=4.0
    )
    sent = answered([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], late=(3, 6, 9))
    assert slow_result(plan, 5.0, sent) == SlowResult(5.0, 4, 4, 3, 3, 2)
    assert slow_result(plan, 200.0, sent).possible == 2  # at half a request a second


def answered(at_s: list[int], late: tuple[int, ...]) -> LoadResult:
    rows = Rows()
    for second in at_s:
        rows.add(second * SECOND_NS, second * SECOND_NS)
    arrivals = arrivals_at(np.array(at_s) * SECOND_NS, 10 * SECOND_NS)
    result = make_result(rows, arrivals, LoadOptions(), 1)
    result.__dict__["outcome"] = np.array(
        [Outcome.LATE if second in late else Outcome.MET for second in at_s], np.int8
    )
    return result


def test_paced_function_takes_its_time(tmp_path: Path) -> None:
    """2 ms and 1 ms for each of three items; ten times as long once the file says so."""
    factor = tmp_path / "factor"
    model = Paced(2.0, 1.0, takes="a+b", gives="c", factor_file=str(factor))
    assert set(model.inputs) == {"a", "b"} and set(model.outputs) == {"c"}
    batch = {name: np.ones(3, np.float32) for name in "ab"}

    def took_ms() -> float:
        began_s = monotonic()
        assert model.predict(batch)["c"].tolist() == [1, 1, 1]
        return 1e3 * (monotonic() - began_s)

    assert took_ms() >= 5.0
    factor.write_text("10")
    assert took_ms() >= 50.0
