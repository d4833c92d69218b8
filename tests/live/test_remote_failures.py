"""Failures of the remote platform: each request still gets exactly one response."""

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
    """Send a burst; all requests are answered, each with its own number, whatever the platform
    does.
    """
    answers = served.ask_together("double", count)
    assert Counter(status for status, _ in answers) == {200: count}
    assert [value(body) for _, body in answers] == [2.0 * n for n in range(count)]


def calls(served: Served, outcome: str) -> float:
    return reading(served.get("/metrics")[1], "headgate_faas_calls_total", outcome=outcome)


def breaker(served: Served) -> float:
    return reading(served.get("/metrics")[1], "headgate_faas_breaker_state", pool="cloud")


def recovers(served: Served, cloud: FakeLambda) -> None:
    """Check that the platform is used again, and the breaker closed, once it works."""

    def is_trusted() -> bool:
        burst(served, 4)
        return breaker(served) == 0 and calls(served, "finished") > 0

    cloud.mode = "well"
    assert until(is_trusted)


def test_throttled_calls_run_on_the_worker(cloud: FakeLambda, tmp_path: Path) -> None:
    """Throttling says that nothing ran: no failure, no attempt used up, nothing billed."""
    cloud.mode = "throttle"
    with served_with(cloud, tmp_path) as served:
        burst(served)
        assert calls(served, "throttled") == cloud.calls["throttle"] > 0
        assert calls(served, "failed") == 0
        assert breaker(served) == 0
        assert "serverless" not in served.get("/metrics")[1].partition("cost_usd_total")[2]
        recovers(served, cloud)


@pytest.mark.parametrize("mode", ["fail", "broken", "senseless", "reset"])
def test_failing_platform_opens_the_breaker_and_recovers(
    cloud: FakeLambda, tmp_path: Path, mode: str
) -> None:
    """The client library repeats nothing, and the breaker state is visible."""
    cloud.mode = mode
    with served_with(cloud, tmp_path) as served:
        served.ask_together("double", BURST)  # some use up their attempts before the breaker opens
        assert until(lambda: breaker(served) in (1, 2))
        reported = json.loads(served.get("/v2/health/ready")[1])
        assert reported["breakers"]["cloud"].split(",")[0] in ("open", "half_open")
        ended = "lost" if mode == "reset" else "failed"
        assert calls(served, ended) == cloud.calls[mode]
        recovers(served, cloud)


def test_open_breaker_blocks_calls(cloud: FakeLambda, tmp_path: Path) -> None:
    cloud.mode = "fail"
    text = (write_app(tmp_path, cloud.url) / "app.yaml").read_text()
    (tmp_path / "app.yaml").write_text(text.replace("cooldown: 300ms", "cooldown: 60s"))
    with Served(tmp_path) as served:
        served.ask_together("double", BURST)
        assert until(lambda: breaker(served) == 1)
        observed = cloud.calls["fail"]
        burst(served)
        assert cloud.calls["fail"] == observed


def test_slow_platform(cloud: FakeLambda, tmp_path: Path) -> None:
    cloud.mode = "slow"
    cloud.slow_s = 0.6
    with served_with(cloud, tmp_path) as served:
        burst(served)
        assert calls(served, "finished") >= 1
        late = reading(served.get("/metrics")[1], "headgate_requests_total", outcome="late")
        assert late >= 1  # each gets an error response instead of being dropped


def test_hard_deadline_is_answered_on_time(cloud: FakeLambda, tmp_path: Path) -> None:
    cloud.mode = "slow"
    cloud.slow_s = 1.0
    with served_with(cloud, tmp_path, policy="serverless_only") as served:
        status, _ = served.ask("double", [1.0], {"X-Request-Timeout-Ms": "200"})
        assert status == 504


def test_hanging_call_times_out_and_is_retried(cloud: FakeLambda, tmp_path: Path) -> None:
    cloud.mode = "hang"
    with served_with(cloud, tmp_path, execution_timeout="2s") as served:
        answers = served.ask_together("double", 4)
        # After the deadline nothing is retried: it is unknown whether the call ran.
        assert {status for status, _ in answers} <= {200, 503}
        assert len(answers) == 4
        assert calls(served, "lost") >= 1
        recovers(served, cloud)


def test_platform_that_is_down_and_returns(cloud: FakeLambda, tmp_path: Path) -> None:
    cloud.close()
    with served_with(cloud, tmp_path) as served:
        burst(served)
        assert calls(served, "refused") > 0
        assert calls(served, "failed") == calls(served, "lost") == 0
        assert until(lambda: "pool cloud" in served.errors())
        assert until(lambda: "Could not connect" in served.errors())
        cloud.open()
        recovers(served, cloud)


def test_worker_killed_in_a_burst(cloud: FakeLambda, tmp_path: Path) -> None:
    """SIGKILL while requests run on both sides: the platform takes over; at most the request that
    was alone in its batch fails.
    """
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
        assert requests == 20  # one outcome each
        burst(served)


def test_worker_killed_while_the_platform_throttles(cloud: FakeLambda, tmp_path: Path) -> None:
    """Whichever side recovers first serves."""
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
