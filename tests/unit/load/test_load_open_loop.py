"""Requests go out at their own times, and every one of them ends in exactly one way."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from load_server import Answer, serving

from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.outcome import Outcome
from headgate.load import (
    Body,
    LoadOptions,
    Standing,
    Trouble,
    run_closed_loop,
    run_open_loop,
    summarise_load,
)
from headgate.workload import Arrivals, arrivals_at, deterministic, named

BODY = Body(b"{}", {"Content-Type": "application/json"})


def every(step_ms: float, count: int) -> Arrivals:
    """So many requests, evenly spaced."""
    times_ns = (np.arange(count) * step_ms * MILLISECOND_NS).astype(np.int64)
    return arrivals_at(times_ns, int(times_ns[-1]) + MILLISECOND_NS)


def test_a_stalled_server_does_not_slow_the_sender() -> None:
    """The first answer takes 200 ms. The others are sent all the same, each at its time."""
    with serving(lambda number: Answer(after_s=0.2 if number == 0 else 0)) as server:
        result = run_open_loop(f"{server.url}/x", every(5, 20), LoadOptions(body=BODY))
    assert (result.status == 200).all()
    assert result.sent_ns[-1] < result.ended_ns[0]
    assert result.latency_ns[0] >= 200 * MILLISECOND_NS
    assert np.median(result.latency_ns) < 100 * MILLISECOND_NS


def test_waiting_for_a_connection_counts() -> None:
    """With one connection and answers of 30 ms, the third of three waits for two others."""
    options = LoadOptions(body=BODY, connections_max=1)
    with serving(lambda _: Answer(after_s=0.03)) as server:
        result = run_open_loop(f"{server.url}/x", every(0, 3), options)
    assert result.connections == 1
    assert result.latency_ns[2] >= 85 * MILLISECOND_NS
    assert result.connection_wait_ns[2] >= 55 * MILLISECOND_NS
    assert result.lag_ns[2] < result.connection_wait_ns[2], "it was not the sender's doing"


def test_statuses_and_headers_become_outcomes() -> None:
    answers = [
        Answer(),
        Answer(headers={"X-Headgate-Outcome": "late"}),
        Answer(429),
        Answer(504),
        Answer(500),
        Answer(422, {"x-headgate-outcome": "rejected"}),
        Answer(hangs_up=True),
        Answer(headers={"Connection": "close"}),
    ]
    with serving(lambda number: answers[number]) as server:
        result = run_open_loop(f"{server.url}/x", every(20, len(answers)), LoadOptions(body=BODY))
    assert result.outcome.tolist() == [
        Outcome.MET,
        Outcome.LATE,
        Outcome.REJECTED,
        Outcome.EXPIRED,
        Outcome.FAILED,
        Outcome.REJECTED,
        Outcome.FAILED,
        Outcome.MET,
    ]
    assert result.trouble.tolist() == [0] * 6 + [Trouble.LOST, 0]
    summary = summarise_load(result)
    assert summary.answers == {
        "200": 3,
        "429": 1,
        "504": 1,
        "500": 1,
        "422": 1,
        "connection lost": 1,
    }
    assert summary.rejected_p50_ms > 0


def test_the_clients_own_objective_decides_what_is_late() -> None:
    """The server says late and answers at once, or says nothing and takes 60 ms."""
    answers = [Answer(headers={"X-Headgate-Outcome": "late"}), Answer(after_s=0.06)]
    options = LoadOptions(body=BODY, slo_ns=50 * MILLISECOND_NS)
    with serving(lambda number: answers[number]) as server:
        result = run_open_loop(f"{server.url}/x", every(30, 2), options)
    assert result.outcome.tolist() == [Outcome.MET, Outcome.LATE]
    assert (result.to_run().requests.deadline_ns - result.intended_ns).tolist() == [
        50 * MILLISECOND_NS
    ] * 2


def test_patience_ends() -> None:
    """Both those under way and those still waiting are given up, at the same age."""
    options = LoadOptions(body=BODY, connections_max=1, timeout_ns=60 * MILLISECOND_NS)
    with serving(lambda _: Answer(after_s=10)) as server:
        result = run_open_loop(f"{server.url}/x", every(1, 3), options)
    assert result.trouble.tolist() == [Trouble.TIMED_OUT] * 3
    assert result.latency_ns.tolist() == [60 * MILLISECOND_NS] * 3
    assert result.outcome.tolist() == [Outcome.EXPIRED] * 3


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/x"
        result = run_open_loop(url, every(1, 5), LoadOptions(body=BODY))
    assert result.trouble.tolist() == [Trouble.REFUSED] * 5
    assert (result.sent_ns == NEVER_NS).all()


def test_what_the_server_tells_of_its_own_time() -> None:
    timing = {"Server-Timing": "queue;dur=1.5, exec;dur=2.25"}
    with serving(lambda number: Answer(headers=timing if number else {})) as server:
        result = run_open_loop(f"{server.url}/x", every(1, 2), LoadOptions(body=BODY))
    assert result.timings_ns["queue"].tolist() == [NEVER_NS, 1_500_000]
    started_ns = result.to_run().requests.started_ns
    assert started_ns[0] == NEVER_NS
    assert result.intended_ns[1] <= started_ns[1] <= result.ended_ns[1]


def test_each_pipeline_is_a_model_and_payloads_fit_it() -> None:
    """Without a payload, the tensors are those the metadata ask for."""
    arrivals = named(every(5, 2), "my model", "someone")
    with serving() as server:
        result = run_open_loop(server.url, arrivals, LoadOptions(headers={"X-Key": "k"}))
    assert (result.pipelines, result.clients) == (("my model",), ("someone",))
    assert set(server.paths) == {b"/v2/models/my%20model/infer"}
    assert b'"name":"x","datatype":"FP32","shape":[1,8]' in server.bodies[0]
    assert server.headers[0][b"x-key"] == b"k"


def test_what_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match="does not say what to send"):
        run_open_loop("http://127.0.0.1:1", every(1, 1))
    with pytest.raises(ConfigError, match="is not a URL of a server"):
        run_open_loop("ftp://host", every(1, 1))
    with pytest.raises(ConfigError, match="is not a header"):
        run_open_loop(
            "http://127.0.0.1:1/x", every(1, 1), LoadOptions(body=BODY, headers={"A": "b\r\nC: d"})
        )


def test_it_tells_how_it_goes() -> None:
    heard: list[Standing] = []
    with serving(lambda number: Answer(429 if number % 2 else 200)) as server:
        arrivals = deterministic(200, SECOND_NS // 2)
        run_open_loop(f"{server.url}/x", arrivals, LoadOptions(body=BODY), on_standing=heard.append)
    assert heard[-1].sent >= heard[-1].ended > 0
    assert heard[-1].outcomes[Outcome.MET] > 0 < heard[-1].outcomes[Outcome.REJECTED]
    assert 0 < heard[-1].p50_ms <= heard[-1].p99_ms


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    """Three clients and answers of 20 ms: 150 requests per second at most, after the warm-up."""
    with serving(lambda _: Answer(after_s=0.02)) as server:
        result = run_closed_loop(
            f"{server.url}/x",
            3,
            300 * MILLISECOND_NS,
            LoadOptions(body=BODY),
            warm_up_ns=50 * MILLISECOND_NS,
        )
        seen = len(server.bodies)
    assert result.connections == 3
    assert len(result) < seen, "those of the warm-up are not counted"
    assert 6 <= len(result) <= 45
    assert result.intended_ns.min() >= 0
    assert 10 < summarise_load(result).run.throughput_rps <= 150


def test_a_closed_loop_outlives_a_connection() -> None:
    with serving(lambda number: Answer(hangs_up=number == 2)) as server:
        result = run_closed_loop(f"{server.url}/x", 1, 200 * MILLISECOND_NS, LoadOptions(body=BODY))
    assert result.outcome.tolist().count(Outcome.FAILED) == 1
    assert len(result) > 5
