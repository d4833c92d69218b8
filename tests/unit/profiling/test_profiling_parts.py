"""The parts of the profiler that need no process: clients, stores, cores, sentences, pictures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headgate.core.errors import ConfigError
from headgate.planning.latency_model import Characterisation, ColdStart, Point
from headgate.profiling import measure as clients
from headgate.profiling.machine import this_machine, usable_cores
from headgate.profiling.measure import SAMPLES_MAX, measure, median_interval
from headgate.profiling.model_store import fetch
from headgate.profiling.probe_client import MeasureRequest
from headgate.profiling.report import Objective, curves, findings, profile_figure


def wish(concurrency: int, length_s: float = 0.2, precision: float = 1e-9) -> MeasureRequest:
    return MeasureRequest(concurrency, 1, length_s, precision, samples_min=10)


class Clock:
    """The time of the profiler's clients, if only calls take any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        monkeypatch.setattr(clients, "monotonic_ns", lambda: self.now_ns)

    def pass_ms(self, time_ms: int) -> None:
        self.now_ns += time_ms * 1_000_000
        time.sleep(0.0002)  # for whoever looks whether it is over


def test_clients_that_share_one_core_wait_for_one_another() -> None:
    """One at a time, in their order: with four clients each answer takes four times 10 ms."""
    with ThreadPoolExecutor(1) as core:

        def call() -> None:
            core.submit(time.sleep, 0.01).result()

        alone, together = measure(call, wish(1)), measure(call, wish(4, 0.8))
    assert alone.mean >= 10
    assert together.mean > 30
    assert alone.p50 < together.p50
    assert alone.p50_low is not None and alone.p50_high is not None
    assert alone.p50_low <= alone.p50 <= alone.p50_high <= alone.p99


def test_the_first_call_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(monkeypatch), iter([1_000] + [1] * 10_000)
    assert measure(lambda: clock.pass_ms(next(calls)), wish(1, length_s=2.0)).p99 == 1.0


def test_it_ends_when_the_median_is_known_well_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(clients, "_WARM_UP", 0.0)
    found = measure(lambda: clock.pass_ms(1), wish(1, length_s=1e6, precision=0.5))
    assert 10 <= found.samples < SAMPLES_MAX


def test_nothing_is_too_fast_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_WARM_UP", 0.0)
    monkeypatch.setattr("os.sched_yield", lambda: None)  # others may be long about it
    found = measure(lambda: None, wish(2, length_s=1e6))
    assert SAMPLES_MAX <= found.samples <= SAMPLES_MAX + 2


def test_a_call_longer_than_its_time_is_measured_once_by_each() -> None:
    found = measure(lambda: time.sleep(0.06), wish(3, length_s=0.02))
    assert found.samples >= 3
    assert found.p50 > 55


def test_what_a_model_raises_comes_through() -> None:
    def call() -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError):
        measure(call, wish(2))


def test_a_disturbance_widens_the_interval() -> None:
    """The same values: once well mixed, once with all the slow ones in a row."""
    mixed, in_a_row = [1.0, 2.0] * 50, [1.0] * 50 + [2.0] * 50
    assert median_interval(mixed).high - median_interval(mixed).low < 1e-9
    assert median_interval(in_a_row).high - median_interval(in_a_row).low > 0.5


def test_a_quota_leaves_fewer_cores(tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    path.write_text("100000 100000\n")
    assert len(usable_cores(path)) == 1
    path.write_text("max 100000\n")
    everything = usable_cores(path)
    assert everything == sorted(everything, reverse=True) == usable_cores(tmp_path / "none")
    assert this_machine().cores >= 1


def test_a_directory_is_a_store(tmp_path: Path) -> None:
    store, target = tmp_path / "store", tmp_path / "target"
    (store / "models").mkdir(parents=True)
    (store / "models" / "a.onnx").write_text("weights")
    (store / "code.py").write_text("pass")
    target.mkdir()
    fetch(str(store), "models/a.onnx", target)
    assert (target / "models" / "a.onnx").read_text() == "weights"
    assert not (target / "code.py").exists()
    fetch(str(store), None, target)
    assert (target / "code.py").exists()
    for name in ("b.onnx", "models"):
        with pytest.raises(ConfigError, match="--store"):
            fetch(str(store), name, target)


LISTED = b"""<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
<IsTruncated>false</IsTruncated><Contents><Key>v1/a.onnx</Key><Size>7</Size></Contents>
<Contents><Key>v1/../evil</Key><Size>7</Size></Contents></ListBucketResult>"""


class Bucket(BaseHTTPRequestHandler):
    """As much of S3 as a download needs: one bucket with v1/a.onnx in it."""

    def do_HEAD(self) -> None:
        self.answer(b"weights")

    def do_GET(self) -> None:
        self.answer(LISTED if "list-type=2" in self.path else b"weights")

    def answer(self, content: bytes) -> None:
        is_there = self.path.partition("?")[0] in ("/models", "/models/v1/a.onnx")
        self.send_response(200 if is_there else 404)
        self.send_header("Content-Length", str(len(content) if is_there else 0))
        self.send_header("ETag", '"1"')
        self.send_header("Connection", "close")
        self.end_headers()
        if is_there and self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("boto3")
    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "test")
        yield
        server.shutdown()
        thread.join()


def test_a_bucket_is_a_store(bucket: None, tmp_path: Path) -> None:
    """By name below a prefix, as the object itself, or everything there is (and no further)."""
    for number, (store, name) in enumerate(
        [
            ("s3://models/v1", "a.onnx"),
            ("s3://models/v1/a.onnx", "a.onnx"),
            ("s3://models/v1/", None),
        ]
    ):
        target = tmp_path / str(number)
        target.mkdir()
        fetch(store, name, target)
        assert [path.name for path in target.rglob("*")] == ["a.onnx"]
        assert (target / "a.onnx").read_text() == "weights"


def test_a_bucket_without_the_model_is_refused(bucket: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--store: 's3://models/v2': cannot be fetched"):
        fetch("s3://models/v2", "a.onnx", tmp_path)
    with pytest.raises(ConfigError, match="names no bucket"):
        fetch("s3://", "a.onnx", tmp_path)


def test_the_findings_of_the_paper() -> None:
    """Five on two cores within 200 ms, and no use of more than four."""
    paper = Characterisation.surrogate(cores=(1, 2, 4, 6, 8))
    said = findings(paper, Objective(200.0, 0.99))
    assert "no faster (up to 8 were tried)" in said[0] and "4 cores" in said[0]
    assert "2 cores can hold 5 at once within 200 ms at p99." in said
    impossible = findings(paper, Objective(20.0, 0.99))
    assert "2 cores cannot answer even one request within 20 ms at p99." in impossible


def test_the_finding_about_a_cold_start_names_its_longest_part() -> None:
    point = Point(1, 1, 1, 10.0, 10.0, 10.0, 10.0, 9)
    cold = ColdStart(30.0, 200.0, 700.0, 100.0, 20.0)
    said = findings(Characterisation("f", "box", (point,), cold, 3 << 20))
    assert "A cold start takes 1,050 ms, 700 ms of it fetching the model." in said
    assert "It holds 3 MiB of memory at most." in said
    assert any("too few points" in sentence for sentence in said)


def test_the_figure_has_a_line_per_core_count_and_the_objective() -> None:
    pytest.importorskip("matplotlib")
    paper = Characterisation.surrogate(cores=(1, 2), concurrency=(1, 2, 4))
    assert [curve.times_ms for curve in curves(paper)] == [(56, 112, 224), (36, 72, 144)]
    axes = profile_figure(paper, slo_ms=200.0).axes[0]
    legend = axes.get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["1 core", "2 cores", "SLO 200 ms"]
    assert len(axes.get_lines()) == 3
