"""The harness of `bench live`: the list of peers, response checks, comparison, processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from load_server import Response, serving
from msgspec import structs

from headgate.lab.bench import find_bench
from headgate.lab.bench.live import (
    PeerMeasurementPlan,
    PeersResult,
    ServerSession,
    live_checks,
    report,
)
from headgate.lab.bench.live.load_driver import (
    LoadMeasurement,
    _measure_closed_loop,
    is_correct,
    make_request,
)
from headgate.lab.bench.live.models import SHAPES, BareOnnxRuntime, example
from headgate.lab.bench.live.server_process import (
    NotInstalledError,
    Peer,
    PeerRoute,
    ServerError,
    python_of,
    read_peers,
    running,
)
from headgate.loadgen.requests import Body

PEERS = Path(__file__).parents[3] / "benchmarks" / "peers"
BODY = Body(b"{}", {})


def peer(name: str, *, is_ours: bool = False) -> Peer:
    """Return a peer that serves the echo."""
    return Peer(name, name, PEERS, (), {"echo": PeerRoute("/", "values")}, is_ours=is_ours)


def session(server: Peer, rate: float, p99_ms: float = 0.8, number: int = 0) -> ServerSession:
    """Return a session with equal figures at every concurrency."""
    measurements = {c: LoadMeasurement(rate, p99_ms / 2, p99_ms, 0) for c in (1, 8, 32, 64)}
    return ServerSession(server, "echo", number, 1.0, 100.0, measurements)


def test_peers_file() -> None:
    """One peer is Headgate, the baseline is first and last; every peer serves every model."""
    result = read_peers(PEERS / "peers.yaml")
    assert [c.name for c in result if c.is_ours] == ["Headgate"]
    assert result[0].is_baseline
    assert result[-1].is_baseline
    assert {c.group for c in result if c.is_baseline} == {"FastAPI by hand"}
    peers = {c.group for c in result if not c.is_ours and not c.is_baseline}
    assert peers == {"Ray Serve", "LitServe", "BentoML", "MLServer", "KServe"}
    for each in result:
        assert (each.requirements is None) == each.is_ours
        for model, route in each.models.items():
            assert make_request(route.body, example(model)).content
            assert route.command or each.command
        assert set(each.models) == set(SHAPES)
    assert find_bench("live").NAME == "live"


@pytest.mark.parametrize("kind", ["oip", "values"])
def test_echoed_request_is_a_correct_response(kind: str) -> None:
    """A JSON request contains the numbers of the tensor, so echoing it is correct."""
    x = example("echo")
    assert is_correct(make_request(kind, x).content, x.ravel().tolist())


def test_correct_and_incorrect_responses() -> None:
    numbers = [0.25, 0.5]
    assert is_correct(b"head" + np.array(numbers, np.float32).tobytes(), numbers)
    assert is_correct(json.dumps({"predictions": [numbers]}).encode(), numbers)
    assert not is_correct(json.dumps({"predictions": [[0.25, 0.6]]}).encode(), numbers)
    assert not is_correct(json.dumps({"error": "sorry"}).encode(), numbers)
    assert not is_correct(b"\xff" * 8, numbers)


def test_rates_are_compared_within_a_round() -> None:
    """The machine was twice as fast in the second round; the ratio is 4 in both."""
    ours, other = peer("Ours", is_ours=True), peer("Peer")
    result = PeersResult(PeerMeasurementPlan((ours, other), Path(), models=("echo",)))
    for number, speed in enumerate((1000.0, 2000.0)):
        result.sessions += [
            session(ours, 4 * speed, 1.0, number),
            session(other, speed, 2.0, number),
        ]
    (ratio, *_) = live_checks(result)
    assert (ratio.measured, ratio.holds) == ("4.0x", True)
    assert all(check.holds for check in live_checks(result) if "p99" in check.claim)


def test_best_variant_of_a_peer_counts() -> None:
    ours, slow = peer("Ours", is_ours=True), peer("Peer, slow")
    slow = structs.replace(slow, group="Peer")
    fast = structs.replace(slow, name="Peer, fast")
    result = PeersResult(PeerMeasurementPlan((ours, slow, fast), Path(), models=("echo",)))
    result.sessions += [session(ours, 4000), session(slow, 100), session(fast, 2000)]
    (ratio, *_) = live_checks(result)
    assert (ratio.measured, ratio.holds) == ("2.0x", False)


def test_missing_peers_are_named() -> None:
    """Checks against a missing peer fail, and the rows have the reason."""
    ours, other = peer("Ours", is_ours=True), peer("Peer")
    found = PeersResult(PeerMeasurementPlan((ours, other), Path(), models=("echo",)))
    found.sessions.append(session(ours, 4000))
    found.missing["Peer", "echo"] = "not installed: no such version"
    result = report(found)
    assert [c.measured for c in result.failing] == [
        "not installed: no such version",
        "Peer is missing",
    ]
    assert any(row.get("missing") == "not installed: no such version" for row in result.rows)


def test_share_of_bare_onnx_runtime() -> None:
    ours = peer("Ours", is_ours=True)
    result = PeersResult(PeerMeasurementPlan((ours,), Path(), models=("cnn",)))
    result.bare.append(BareOnnxRuntime("cnn", 1, 2000.0, 0.5))
    result.sessions.append(replace(session(ours, 1700, p99_ms=1.6), model="cnn"))
    measured = {check.claim.partition(":")[0]: check.measured for check in live_checks(result)}
    assert measured["cnn, concurrency 32, binary tensors"] == 0.85
    assert measured["cnn, concurrency 1"] == 0.3


def test_server_process_lifecycle(tmp_path: Path) -> None:
    """The server has a child process that would outlive it; both are stopped."""
    _write_server(tmp_path)
    who = _served(tmp_path, "0.5, 1.5")
    with running(who, "echo", python_of(None, tmp_path, ""), tmp_path, BODY, [0.5, 1.5]) as server:
        child = int((tmp_path / "child").read_text())
        assert 5 < server.memory_mib() < 500
        assert server.first_response_s > 0
    assert not _is_alive(server.pid)
    assert not _is_alive(child)


def test_server_that_responds_incorrectly_or_exits(tmp_path: Path) -> None:
    _write_server(tmp_path)
    python = python_of(None, tmp_path, "")
    with (
        pytest.raises(ServerError, match="no correct response: status 200"),
        running(_served(tmp_path, "7, 7"), "echo", python, tmp_path, BODY, [0.5, 1.5]),
    ):
        pass
    with (
        pytest.raises(ServerError, match="exited with 1: ValueError"),
        running(_served(tmp_path, "x"), "echo", python, tmp_path, BODY, [0.5, 1.5]),
    ):
        pass


@pytest.mark.slow  # it creates a virtual environment
def test_failed_installation_has_a_reason(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("./no-such-folder\n", encoding="utf-8")
    with pytest.raises(NotInstalledError, match="ERROR"):
        python_of(requirements, tmp_path, "peer")


def test_closed_loop_measurement() -> None:
    with serving(lambda number: Response(500 if number == 3 else 200, after_s=0.01)) as server:
        measurement = _measure_closed_loop(f"{server.url}/x", BODY, 2, 1.0)
    assert measurement.requests_per_s > 0
    assert 5 < measurement.p50_ms <= measurement.p99_ms, (
        "timers of the server may be a little early"
    )


def _is_alive(pid: int) -> bool:
    """Whether a process runs and is not a zombie."""
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
