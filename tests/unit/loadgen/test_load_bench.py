"""The harness of `bench live`: its peer list, its checks of responses, and missing peers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from load_server import Response, serving

from headgate.lab.bench import find_bench
from headgate.lab.bench.live import report
from headgate.lab.bench.live.load_driver import LoadMeasurement, _own, is_right, make_request
from headgate.lab.bench.live.measure import (
    PeerMeasurementPlan,
    PeersResult,
    ServerSession,
    live_checks,
)
from headgate.lab.bench.live.models import SHAPES, BareOnnxRuntime, example
from headgate.lab.bench.live.server_process import (
    NotInstalledError,
    Peer,
    PeerRoute,
    ServerError,
    python_of,
    read_contestants,
    running,
)
from headgate.loadgen import Body

PEERS = Path(__file__).parents[3] / "benchmarks" / "peers"
BODY = Body(b"{}", {})


def contestant(name: str, *, is_ours: bool = False) -> Peer:
    """Somebody who serves the echo."""
    return Peer(name, name, PEERS, (), {"echo": PeerRoute("/", "values")}, is_ours=is_ours)


def stay(who: Peer, rate: float, p99_ms: float = 0.8, number: int = 0) -> ServerSession:
    """A turn with the same figures at every concurrency."""
    laps = {c: LoadMeasurement(rate, p99_ms / 2, p99_ms, 0) for c in (1, 8, 32, 64)}
    return ServerSession(who, "echo", number, 1.0, 100.0, laps)


def test_the_list_of_peers() -> None:
    """One is ours, the baseline is first and last; each serves every model in a known way."""
    found = read_contestants(PEERS / "contestants.yaml")
    assert [c.name for c in found if c.is_ours] == ["Headgate"]
    assert found[0].is_baseline
    assert found[-1].is_baseline
    assert {c.peer for c in found if c.is_baseline} == {"FastAPI by hand"}
    peers = {c.peer for c in found if not c.is_ours and not c.is_baseline}
    assert peers == {"Ray Serve", "LitServe", "BentoML", "MLServer", "KServe"}
    for each in found:
        assert (each.requirements is None) == each.is_ours
        for model, route in each.models.items():
            assert make_request(route.body, example(model)).content
            assert route.command or each.command
        assert set(each.models) == set(SHAPES)
    assert find_bench("live").NAME == "live"


@pytest.mark.parametrize("kind", ["oip", "values"])
def test_request_bodies_decode_to_the_input(kind: str) -> None:
    """What carries a tensor as JSON holds its numbers, so as an answer it would be right."""
    x = example("echo")
    assert is_right(make_request(kind, x).content, x.ravel().tolist())


def test_correct_and_wrong_responses() -> None:
    wanted = [0.25, 0.5]
    assert is_right(b"head" + np.array(wanted, np.float32).tobytes(), wanted)
    assert is_right(json.dumps({"predictions": [wanted]}).encode(), wanted)
    assert not is_right(json.dumps({"predictions": [[0.25, 0.6]]}).encode(), wanted)
    assert not is_right(json.dumps({"error": "sorry"}).encode(), wanted)
    assert not is_right(b"\xff" * 8, wanted)


def test_rates_are_compared_within_a_round() -> None:
    """The machine was twice as fast in the second round; the ratio is 4 in both."""
    ours, peer = contestant("Ours", is_ours=True), contestant("Peer")
    found = PeersResult(PeerMeasurementPlan((ours, peer), Path(), models=("echo",)))
    for number, speed in enumerate((1000.0, 2000.0)):
        found.stays += [stay(ours, 4 * speed, 1.0, number), stay(peer, speed, 2.0, number)]
    (ratio, *_) = live_checks(found)
    assert (ratio.measured, ratio.holds) == ("4.0x", True)
    assert all(check.holds for check in live_checks(found) if "p99" in check.claim)


def test_a_better_row_of_the_same_peer_counts() -> None:
    ours, slow = contestant("Ours", is_ours=True), contestant("Peer, slow")
    slow = replace(slow, peer="Peer")
    fast = replace(slow, name="Peer, fast")
    found = PeersResult(PeerMeasurementPlan((ours, slow, fast), Path(), models=("echo",)))
    found.stays += [stay(ours, 4000), stay(slow, 100), stay(fast, 2000)]
    (ratio, *_) = live_checks(found)
    assert (ratio.measured, ratio.holds) == ("2.0x", False)


def test_missing_peers_are_named() -> None:
    """No check against a missing peer holds, and the tables say why it is missing."""
    ours, peer = contestant("Ours", is_ours=True), contestant("Peer")
    found = PeersResult(PeerMeasurementPlan((ours, peer), Path(), models=("echo",)))
    found.stays.append(stay(ours, 4000))
    found.missing["Peer", "echo"] = "not installed: no such version"
    result = report(found)
    assert [c.measured for c in result.failing] == [
        "not installed: no such version",
        "Peer is missing",
    ]
    assert any(row.get("missing") == "not installed: no such version" for row in result.rows)


def test_the_overhead_over_the_bare_runtime() -> None:
    ours = contestant("Ours", is_ours=True)
    found = PeersResult(PeerMeasurementPlan((ours,), Path(), models=("cnn",)))
    found.alone.append(BareOnnxRuntime("cnn", 1, 2000.0, 0.5))
    found.stays.append(replace(stay(ours, 1700, p99_ms=1.6), model="cnn"))
    measured = {check.claim.partition(":")[0]: check.measured for check in live_checks(found)}
    assert measured["cnn, 32 at a time, binary tensors"] == 0.85
    assert measured["cnn, one at a time"] == 0.3


def test_a_server_is_started_queried_measured_and_stopped(tmp_path: Path) -> None:
    """It has a child that would outlive it; both are gone in the end."""
    _write_server(tmp_path)
    who = _served(tmp_path, "0.5, 1.5")
    with running(who, "echo", python_of(None, tmp_path, ""), tmp_path, BODY, [0.5, 1.5]) as server:
        child = int((tmp_path / "child").read_text())
        assert 5 < server.memory_mib() < 500
        assert server.first_answer_s > 0
    assert not _is_alive(server.pid)
    assert not _is_alive(child)


def test_a_server_with_wrong_responses_or_that_dies(tmp_path: Path) -> None:
    _write_server(tmp_path)
    python = python_of(None, tmp_path, "")
    with (
        pytest.raises(ServerError, match="no right answer: answers 200"),
        running(_served(tmp_path, "7, 7"), "echo", python, tmp_path, BODY, [0.5, 1.5]),
    ):
        pass
    with (
        pytest.raises(ServerError, match="ended with 1: ValueError"),
        running(_served(tmp_path, "x"), "echo", python, tmp_path, BODY, [0.5, 1.5]),
    ):
        pass


@pytest.mark.slow  # it makes an environment
def test_a_failed_installation_reports_its_reason(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("./no-such-folder\n", encoding="utf-8")
    with pytest.raises(NotInstalledError, match="ERROR"):
        python_of(requirements, tmp_path, "peer")


def test_the_own_closed_loop_client_measures() -> None:
    with serving(lambda number: Response(500 if number == 3 else 200, after_s=0.01)) as server:
        lap = _own(f"{server.url}/x", BODY, 2, 1.0)
    assert lap.requests_per_s > 0
    assert 5 < lap.p50_ms <= lap.p99_ms, "timers of the server may be a little early"


def _is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended may still be listed until its parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _served(folder: Path, numbers: str) -> Peer:
    route = PeerRoute("/x", "values", ("{python}", "server.py", "{port}", numbers))
    return Peer("Tiny", "Tiny", folder, (), {"echo": route})


def _write_server(folder: Path) -> None:
    text = """
        import json, subprocess, sys
        from http.server import BaseHTTPRequestHandler, HTTPServer

        numbers = [float(part) for part in sys.argv[2].split(",")]
        child = subprocess.Popen(["sleep", "60"])
        open("child", "w").write(str(child.pid))

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                content = json.dumps({"y": numbers}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
    (folder / "server.py").write_text(dedent(text), encoding="utf-8")
