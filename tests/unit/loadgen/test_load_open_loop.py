"""Open-loop and closed-loop load: send times, outcomes and failures of requests."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from load_server import Response, serving

from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.states import Outcome
from headgate.loadgen.loops import run_closed_loop, run_open_loop
from headgate.loadgen.requests import Body, LoadOptions
from headgate.loadgen.results import FailureReason, LoadProgress, summarise_load
from headgate.workload import Arrivals, arrivals_at, named

BODY = Body(b"{}", {"Content-Type": "application/json"})


def every(step_ms: float, count: int) -> Arrivals:
    """Return `count` evenly spaced requests."""
    times_ns = (np.arange(count) * step_ms * MILLISECOND_NS).astype(np.int64)
    return arrivals_at(times_ns, int(times_ns[-1]) + MILLISECOND_NS)


def test_a_stalled_server_does_not_slow_the_sender() -> None:
    """The first response waits until all others are sent; they are, none before its time."""
    arrivals = every(5, 20)

    def respond(number: int) -> Response:
        if number:
            return Response()
        return Response(201, until=lambda: len(server.bodies) == len(arrivals))

    with serving(respond) as server:
        result = run_open_loop(f"{server.url}/x", arrivals, LoadOptions(body=BODY))
    (stalled,) = np.flatnonzero(result.status == 201)
    assert (np.delete(result.status, stalled) == 200).all()
    assert (result.sent_ns >= arrivals.times_ns).all()
    assert result.ended_ns[stalled] > result.sent_ns.max()
    assert result.latency_ns[stalled] >= arrivals.times_ns[-1] - arrivals.times_ns[stalled]


def test_waiting_for_a_connection_counts() -> None:
    """With one connection, the third of three requests waits for the responses to two others."""
    options = LoadOptions(body=BODY, connections_max=1)
    with serving(lambda _: Response(after_s=0.03)) as server:
        result = run_open_loop(f"{server.url}/x", every(0, 3), options)
    assert result.connections == 1
    assert (result.sent_ns[1:] >= result.ended_ns[:-1]).all()
    assert result.reached_ns[2] < result.ended_ns[0], "it was not the sender's doing"
    assert result.connection_wait_ns[2] > result.ended_ns[1] - result.ended_ns[0] > 0
    assert result.latency_ns[2] > result.connection_wait_ns[2]


def test_statuses_and_headers_become_outcomes() -> None:
    answers = [
        Response(),
        Response(headers={"X-Headgate-Outcome": "late"}),
        Response(429),
        Response(504),
        Response(500),
        Response(422, {"x-headgate-outcome": "rejected"}),
        Response(503),  # draining, say
        Response(503, {"x-headgate-outcome": "failed"}),
        Response(closes=True),
        Response(headers={"Connection": "close"}),
    ]
    options = LoadOptions(body=BODY, connections_max=1)  # one after the other, in their order
    with serving(lambda number: answers[number]) as server:
        result = run_open_loop(f"{server.url}/x", every(1, len(answers)), options)
    assert result.outcome.tolist() == [
        Outcome.MET,
        Outcome.LATE,
        Outcome.REJECTED,
        Outcome.EXPIRED,
        Outcome.FAILED,
        Outcome.REJECTED,
        Outcome.REJECTED,
        Outcome.FAILED,
        Outcome.FAILED,
        Outcome.MET,
    ]
    assert result.failure.tolist() == [0] * 8 + [FailureReason.LOST, 0]
    summary = summarise_load(result)
    assert summary.answers == {
        "200": 3,
        "429": 1,
        "504": 1,
        "500": 1,
        "422": 1,
        "503": 2,
        "connection lost": 1,
    }
    assert summary.rejected_p50_ms > 0
    assert summary.run.admitted_kept == 2 / 7, "what was refused had no promise"


def test_the_slo_of_the_client_decides_what_is_late() -> None:
    """The server reports an early response as late, or nothing about a late one."""
    late = {"X-Headgate-Outcome": "late"}
    cases: tuple[tuple[int, dict[str, str], int], ...] = (
        (30 * SECOND_NS, late, Outcome.MET),
        (MILLISECOND_NS, {}, Outcome.LATE),
    )
    for slo_ns, headers, outcome in cases:
        options = LoadOptions(body=BODY, slo_ns=slo_ns)
        with serving(lambda _: Response(headers=headers, after_s=0.01)) as server:  # noqa: B023
            result = run_open_loop(f"{server.url}/x", every(1, 2), options)
        assert result.outcome.tolist() == [outcome] * 2
        deadlines_ns = result.to_run().requests.deadline_ns
        assert (deadlines_ns - result.intended_ns).tolist() == [slo_ns] * 2


def test_requests_time_out() -> None:
    """Requests in flight and requests that wait for a connection time out at the same age."""
    options = LoadOptions(body=BODY, connections_max=1, timeout_ns=60 * MILLISECOND_NS)
    with serving(lambda _: Response(after_s=10)) as server:
        result = run_open_loop(f"{server.url}/x", every(1, 3), options)
    assert result.failure.tolist() == [FailureReason.TIMED_OUT] * 3
    assert result.latency_ns.tolist() == [60 * MILLISECOND_NS] * 3
    assert result.outcome.tolist() == [Outcome.EXPIRED] * 3


def test_a_refused_connection_is_recorded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/x"
        result = run_open_loop(url, every(1, 5), LoadOptions(body=BODY))
    assert result.failure.tolist() == [FailureReason.REFUSED] * 5
    assert result.outcome.tolist() == [Outcome.REJECTED] * 5
    assert (result.sent_ns == NEVER_NS).all()


def test_server_timings_are_recorded() -> None:
    timing = {"Server-Timing": "queue;dur=1.5, exec;dur=2.25"}
    options = LoadOptions(body=BODY, connections_max=1)  # one after the other, in their order
    with serving(lambda number: Response(headers=timing if number else {})) as server:
        result = run_open_loop(f"{server.url}/x", every(1, 2), options)
    assert result.timings_ns["queue"].tolist() == [NEVER_NS, 1_500_000]
    started_ns = result.to_run().requests.started_ns
    assert started_ns[0] == NEVER_NS
    assert result.intended_ns[1] <= started_ns[1] <= result.ended_ns[1]


def test_median_timings_are_those_of_results() -> None:
    """Two of three requests are rejected at once, and have only a total."""
    served = Response(headers={"Server-Timing": "queue;dur=10, exec;dur=20, total;dur=31"})
    rejected = Response(status=429, headers={"Server-Timing": "total;dur=0.1"})
    options = LoadOptions(body=BODY, connections_max=1)
    with serving(lambda number: rejected if number else served) as server:
        summary = summarise_load(run_open_loop(f"{server.url}/x", every(1, 3), options))
    assert summary.timings_p50_ms == {"queue": 10.0, "exec": 20.0, "total": 31.0}


def test_each_pipeline_is_a_model_with_matching_payloads() -> None:
    """Without a payload, tensors are generated from the metadata."""
    arrivals = named(every(5, 2), "my model", "someone")
    with serving() as server:
        result = run_open_loop(server.url, arrivals, LoadOptions(headers={"X-Key": "k"}))
    assert (result.pipelines, result.clients) == (("my model",), ("someone",))
    assert set(server.paths) == {b"/v2/models/my%20model/infer"}
    assert b'"name":"x","datatype":"FP32","shape":[1,8]' in server.bodies[0]
    assert server.headers[0][b"x-key"] == server.metadata_headers[0][b"x-key"] == b"k"


def test_requests_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ConfigError, match="say what to send"):
        run_open_loop("http://127.0.0.1:1", every(1, 1))
    with pytest.raises(ConfigError, match="is not a URL of a server"):
        run_open_loop("ftp://host", every(1, 1))
    with pytest.raises(ConfigError, match="is not a valid header"):
        run_open_loop(
            "http://127.0.0.1:1/x", every(1, 1), LoadOptions(body=BODY, headers={"A": "b\r\nC: d"})
        )
    with pytest.raises(ConfigError, match="is not a valid header"):  # before it asks for metadata
        run_open_loop(
            "http://127.0.0.1:1", every(1, 1), LoadOptions(model="m", headers={"A": "\u00e9"})
        )


def test_progress_is_reported() -> None:
    """The last request is answered only after the others have been reported."""
    heard: list[LoadProgress] = []

    def respond(number: int) -> Response:
        until = None if number < 9 else lambda: any(word.ended == 9 for word in heard)
        return Response(429 if number % 2 else 200, until=until)

    with serving(respond) as server:
        options = LoadOptions(body=BODY)
        run_open_loop(f"{server.url}/x", every(1, 10), options, on_progress=heard.append)
    word = next(word for word in heard if word.ended == 9)
    assert word.sent == 10
    assert (word.outcomes[Outcome.MET], word.outcomes[Outcome.REJECTED]) == (5, 4)
    assert 0 < word.p50_ms <= word.p99_ms


def test_a_closed_loop_keeps_its_concurrency() -> None:
    """Three clients, and responses that wait until all three have sent a request."""

    def respond(number: int) -> Response:
        return Response(after_s=0.01, until=lambda: number > 5 or len(server.bodies) >= 3)

    with serving(respond) as server:
        result = run_closed_loop(
            f"{server.url}/x",
            3,
            SECOND_NS,
            LoadOptions(body=BODY),
            warm_up_ns=50 * MILLISECOND_NS,
        )
        received = len(server.bodies)
    assert result.connections == server.open_count_max == 3
    assert 0 < len(result) < received, "those of the warm-up are not counted"
    assert (result.status == 200).all()
    assert result.intended_ns.min() >= 0


def test_a_closed_loop_survives_a_lost_connection() -> None:
    with serving(lambda number: Response(closes=number == 2)) as server:
        result = run_closed_loop(f"{server.url}/x", 1, SECOND_NS, LoadOptions(body=BODY))
    assert result.outcome.tolist().count(Outcome.FAILED) == 1
    assert result.outcome.tolist().index(Outcome.FAILED) < len(result) - 1
