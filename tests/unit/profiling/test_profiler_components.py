"""Profiler components without a probe process: stores, cores, summary, figure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headgate.core.errors import ConfigError
from headgate.planning.capacity.latency_model import Characterisation, ColdStart, Point
from headgate.profiling.probed_function import fetch
from headgate.profiling.profiler import this_machine, usable_cores
from headgate.profiling.report import Objective, curves, profile_figure, summarise


def test_usable_cores_respect_cpu_quota(tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    path.write_text("100000 100000\n")
    assert len(usable_cores(path)) == 1
    path.write_text("max 100000\n")
    everything = usable_cores(path)
    assert everything == sorted(everything, reverse=True) == usable_cores(tmp_path / "none")
    assert this_machine().cores >= 1


def test_fetch_from_directory(tmp_path: Path) -> None:
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
    """A minimal S3 server: one bucket with the object v1/a.onnx."""

    def do_HEAD(self) -> None:
        self.respond(b"weights")

    def do_GET(self) -> None:
        self.respond(LISTED if "list-type=2" in self.path else b"weights")

    def respond(self, content: bytes) -> None:
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


def test_fetch_from_s3(bucket: None, tmp_path: Path) -> None:
    """By name below a prefix, by its full key, or everything below a prefix (no `..`)."""
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


def test_fetch_missing_s3_object(bucket: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--store: 's3://models/v2': cannot be fetched"):
        fetch("s3://models/v2", "a.onnx", tmp_path)
    with pytest.raises(ConfigError, match="names no bucket"):
        fetch("s3://", "a.onnx", tmp_path)


def test_summary_of_the_paper_surrogate() -> None:
    """Two cores serve five within 200 ms; more than four cores are no faster."""
    paper = Characterisation.surrogate(cores=(1, 2, 4, 6, 8))
    sentences = summarise(paper, Objective(200.0, 0.99))
    assert (
        "more cores are no faster (measured up to 8)" in sentences[0] and "4 cores" in sentences[0]
    )
    assert "2 cores can serve 5 at once within 200 ms at p99." in sentences
    impossible = summarise(paper, Objective(20.0, 0.99))
    assert "2 cores cannot serve even one request within 20 ms at p99." in impossible


def test_summary_names_longest_part_of_cold_start() -> None:
    point = Point(1, 1, 1, 10.0, 10.0, 10.0, 10.0, 9)
    cold = ColdStart(30.0, 200.0, 700.0, 100.0, 20.0)
    sentences = summarise(Characterisation("f", "box", (point,), cold, 3 << 20))
    assert "A cold start takes 1.05 s, 700 ms of it fetching the model." in sentences
    assert "The peak memory is 3 MiB." in sentences
    assert any("too few points" in sentence for sentence in sentences)


def test_figure_has_a_line_per_core_count_and_the_slo() -> None:
    pytest.importorskip("matplotlib")
    paper = Characterisation.surrogate(cores=(1, 2), concurrency=(1, 2, 4))
    assert [curve.times_ms for curve in curves(paper)] == [(56, 112, 224), (36, 72, 144)]
    axes = profile_figure(paper, slo_ms=200.0).axes[0]
    legend = axes.get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["1 core", "2 cores", "SLO 200 ms"]
    assert len(axes.get_lines()) == 3
