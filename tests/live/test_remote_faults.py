"""The far side breaks in every way it can: each request still gets one answer, and one only."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_lambda import FakeLambda
from remote_app import reading, write_app
from served import Served, until, value

pytest.importorskip("boto3")

BURST = 10


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeLambda]:
    with FakeLambda(tmp_path) as platform:
        yield platform


def served_with(cloud: FakeLambda, tmp_path: Path, **options: str) -> Served:
    return Served(write_app(tmp_path, cloud.url, **options))


def burst(served: Served, count: int = BURST) -> None:
    """All are answered, each with its own number, whatever the cloud does."""
    answers = served.ask_together("double", count)
    assert Counter(status for status, _ in answers) == {200: count}
    assert [value(body) for _, body in answers] == [2.0 * n for n in range(count)]


def calls(served: Served, outcome: str) -> float:
    return reading(served.get("/metrics")[1], "headgate_spill_calls_total", outcome=outcome)


def breaker(served: Served) -> float:
    return reading(served.get("/metrics")[1], "headgate_spill_breaker_state", pool="cloud")


def recovers(served: Served, cloud: FakeLambda) -> None:
    """Once the cloud is well again it is used again, and trusted."""

    def is_trusted() -> bool:
        burst(served, 4)
        return breaker(served) == 0 and calls(served, "finished") > 0

    cloud.mode = "well"
    assert until(is_trusted)


def test_a_platform_that_throttles_leaves_the_work_to_the_worker(
    cloud: FakeLambda, tmp_path: Path
) -> None:
    """It says that nothing ran: no failure, no attempt used up, nothing to pay."""
    cloud.mode = "throttle"
    with served_with(cloud, tmp_path) as served:
        burst(served)
        assert calls(served, "throttled") == cloud.calls["throttle"] > 0
        assert calls(served, "failed") == 0
        assert breaker(served) == 0
        assert "serverless" not in served.get("/metrics")[1].partition("cost_usd_total")[2]
        recovers(served, cloud)


@pytest.mark.parametrize("mode", ["fail", "broken", "senseless", "reset"])
def test_a_platform_that_fails_is_left_alone_and_tried_again(
    cloud: FakeLambda, tmp_path: Path, mode: str
) -> None:
    """Nothing is sent twice behind our back, and the breaker shows."""
    cloud.mode = mode
    with served_with(cloud, tmp_path) as served:
        served.ask_together("double", BURST)  # some use up their attempts before it opens
        assert until(lambda: breaker(served) in (1, 2))
        told = json.loads(served.get("/v2/health/ready")[1])
        assert told["breakers"]["cloud"].split(",")[0] in ("open", "half_open")
        ended = "lost" if mode == "reset" else "failed"
        assert calls(served, ended) == cloud.calls[mode]
        recovers(served, cloud)


def test_an_open_breaker_sends_nobody_to_a_platform_that_fails(
    cloud: FakeLambda, tmp_path: Path
) -> None:
    cloud.mode = "fail"
    text = (write_app(tmp_path, cloud.url) / "app.yaml").read_text()
    (tmp_path / "app.yaml").write_text(text.replace("cooldown: 300ms", "cooldown: 60s"))
    with Served(tmp_path) as served:
        served.ask_together("double", BURST)
        assert until(lambda: breaker(served) == 1)
        seen = cloud.calls["fail"]
        burst(served)
        assert cloud.calls["fail"] == seen


def test_a_slow_platform_is_waited_for(cloud: FakeLambda, tmp_path: Path) -> None:
    cloud.mode = "slow"
    cloud.slow_s = 0.6
    with served_with(cloud, tmp_path) as served:
        burst(served)
        assert calls(served, "finished") >= 1
        late = reading(served.get("/metrics")[1], "headgate_requests_total", outcome="late")
        assert late >= 1  # and each of them is told so, not dropped


def test_who_gives_up_is_told_at_the_deadline(cloud: FakeLambda, tmp_path: Path) -> None:
    cloud.mode = "slow"
    cloud.slow_s = 1.0
    with served_with(cloud, tmp_path, policy="serverless_only") as served:
        status, _ = served.ask("double", [1.0], {"X-Request-Timeout-Ms": "200"})
        assert status == 504


def test_a_call_that_hangs_is_given_up_and_repeated(cloud: FakeLambda, tmp_path: Path) -> None:
    cloud.mode = "hang"
    with served_with(cloud, tmp_path, execution_timeout="2s") as served:
        answers = served.ask_together("double", 4)
        # After its deadline nothing is repeated: nobody knows whether it ran.
        assert {status for status, _ in answers} <= {200, 503}
        assert len(answers) == 4
        assert calls(served, "lost") >= 1
        recovers(served, cloud)


def test_a_platform_that_is_gone_and_comes_back(cloud: FakeLambda, tmp_path: Path) -> None:
    cloud.close()
    with served_with(cloud, tmp_path) as served:
        burst(served)
        assert calls(served, "refused") > 0
        assert calls(served, "failed") == calls(served, "lost") == 0
        assert until(lambda: "pool cloud" in served.errors())
        assert until(lambda: "Could not connect" in served.errors())
        cloud.open()
        recovers(served, cloud)


def test_a_worker_that_is_killed_in_a_burst_costs_who_was_alone_with_it_at_most(
    cloud: FakeLambda, tmp_path: Path
) -> None:
    """SIGKILL while requests run here and there: the functions take over what it had."""
    with served_with(cloud, tmp_path) as served:
        answers: list[tuple[int, dict[str, object]]] = []
        thread = threading.Thread(target=lambda: answers.extend(served.ask_together("double", 20)))
        thread.start()
        assert until(lambda: len(cloud.events) >= 1)
        os.kill(served.workers()[0], signal.SIGKILL)
        thread.join()
        statuses = Counter(status for status, _ in answers)
        assert (statuses[200], statuses[503]) in ((20, 0), (19, 1))
        for number, (status, body) in enumerate(answers):
            assert status == 503 or value(body) == 2.0 * number
        requests = reading(served.get("/metrics")[1], "headgate_requests_total")
        assert requests == 20  # one end each
        burst(served)


def test_both_sides_at_once(cloud: FakeLambda, tmp_path: Path) -> None:
    """The worker is killed while the platform throttles: whoever comes back first serves."""
    cloud.mode = "throttle"
    with served_with(cloud, tmp_path) as served:
        answers: list[tuple[int, dict[str, object]]] = []
        thread = threading.Thread(target=lambda: answers.extend(served.ask_together("double", 8)))
        thread.start()
        assert until(lambda: cloud.calls["throttle"] >= 1)
        os.kill(served.workers()[0], signal.SIGKILL)
        thread.join()
        assert len(answers) == 8
        assert {status for status, _ in answers} <= {200, 503}
        recovers(served, cloud)
