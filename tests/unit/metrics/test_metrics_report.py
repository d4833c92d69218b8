from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from metrics_runs import Row, Span, busy_run, make_run, node

from headgate.core.errors import ConfigError
from headgate.metrics.report import write_report
from headgate.metrics.report.chrome_trace import chrome_trace
from headgate.metrics.report.write import html_page, write_parquet
from headgate.metrics.summary import summarise
from headgate.metrics.table import group_table

VOID = {"meta", "br", "img", "link", "input", "hr"}
META: dict[str, object] = {"policy": "headgate", "app": "<script>alert(2)</script>", "seed": 3}


class WellFormed(HTMLParser):
    """Fails if a tag is closed that is not the innermost open one; records all tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "new"
    run = busy_run()
    written = write_report(path, run, summarise(run), META, title="A & B")
    assert sorted(written) == sorted(path.iterdir())
    return path


def test_all_report_files_are_written(directory: Path) -> None:
    plots = {"outcomes", "goodput", "latency", "waits", "utilisation", "schedule"}
    names = {path.name for path in directory.iterdir()}
    assert names == {
        "summary.json",
        "trace.json",
        "requests.parquet",
        "report.html",
        *(f"{plot}.png" for plot in plots),
    }
    for plot in plots:
        assert (directory / f"{plot}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_is_well_formed_and_fetches_nothing(directory: Path) -> None:
    page = (directory / "report.html").read_text(encoding="utf-8")
    parser = WellFormed()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert {"svg", "table", "h1", "figure"} <= parser.tags
    assert not {"script", "link", "img", "iframe"} & parser.tags
    addresses = re.findall(r"https?://[^\s\"'<>]*", page)
    assert set(addresses) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_names_and_figures_of_any_length_fit_into_the_tiles() -> None:
    """As many tiles to a row as there is room for, and names without spaces are broken."""
    page = html_page("t", {}, {"met by autoscale_concurrency": "$0.000863"}, {}, [])
    assert "repeat(auto-fill, minmax(8.5rem, 1fr))" in page
    assert ".tile span { overflow-wrap: anywhere; }" in page


def test_the_page_escapes_user_text(directory: Path) -> None:
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "<title>A &amp; B</title>" in page
    assert "&lt;script&gt;alert(2)&lt;/script&gt;" in page
    assert "web &amp; co" in page


def test_ids_are_unique_and_every_reference_has_its_target(directory: Path) -> None:
    """Several SVG pictures in one page must not share ids, or clips and glyphs get mixed up."""
    page = (directory / "report.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:href="#|url\(#)([^")]*)', page)
    assert references
    assert set(references) <= set(ids)


def test_the_same_run_gives_the_same_files(directory: Path, tmp_path: Path) -> None:
    run = busy_run()
    for path in write_report(tmp_path, run, summarise(run), META, title="A & B"):
        assert path.read_bytes() == (directory / path.name).read_bytes(), path.name


def test_summary_json_holds_the_numbers_and_the_meta(directory: Path) -> None:
    document = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    assert document["meta"] == META
    assert document["summary"] == summarise(busy_run()).to_json()


def test_parquet_rows_are_the_requests(directory: Path) -> None:
    table = pq.read_table(directory / "requests.parquet")
    run = busy_run()
    assert table.num_rows == len(run.requests)
    assert table["arrival_ns"].to_pylist() == run.requests.arrival_ns.tolist()
    rejected = table.to_pylist()[80]
    assert (rejected["request"], rejected["outcome"]) == (80, "rejected")
    assert rejected["started_ns"] is None  # it never started
    assert rejected["client"] == "web & co"
    assert rejected["cold"] is False
    assert (rejected["pool"], rejected["node"]) == (None, None)  # it never ran
    assert table["pool"][0].as_py() == "gpu"
    assert table["node"][0].as_py() == "gpu-0 <b>"


def test_trace_events_have_what_viewers_need() -> None:
    run = busy_run()
    events = chrome_trace(run)["traceEvents"]
    assert isinstance(events, list)
    assert json.loads(json.dumps(events)) == events
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= set(event)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(run.spans)
    assert {event["cat"] for event in spans} == {"start", "load", "run"}
    first = min(spans, key=lambda event: (event["ts"], event["tid"]))
    assert (first["ts"], first["dur"], first["name"]) == (0.0, 40_000.0, "start resnet")
    assert first["args"] == {"instance": 0, "items": 1}
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert names == {"gpu", "cpu", "gpu-0 <b>", "cpu-0 $x$", "cpu-0 $x$ #2"}


def test_a_long_trace_is_truncated_with_a_mark() -> None:
    run = make_run([], [Span(0, 10 * i, 10 * i + 5) for i in range(9)], [node()])
    events = chrome_trace(run, spans_max=4)["traceEvents"]
    assert isinstance(events, list)
    assert sum(event["ph"] == "X" for event in events) == 4
    assert [e["name"] for e in events if e["ph"] == "i"] == ["truncated: the first 4 of 9 spans"]


def test_an_empty_run_has_a_report_without_plots(tmp_path: Path) -> None:
    run = make_run([], clients=(), pipelines=())
    names = {path.name for path in write_report(tmp_path, run, summarise(run), {})}
    assert names == {"summary.json", "trace.json", "requests.parquet", "report.html"}


def test_without_extras_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    run = busy_run()
    names = {path.name for path in write_report(tmp_path, run, summarise(run), {})}
    assert names == {"summary.json", "trace.json", "report.html"}
    assert "pip install headgate[report]" in (tmp_path / "report.html").read_text("utf-8")
    with pytest.raises(ConfigError, match=r"pip install headgate\[parquet\]"):
        write_parquet(tmp_path / "r.parquet", run)


def test_a_long_table_is_truncated_in_the_page() -> None:
    clients = tuple(f"client-{index}" for index in range(300))
    run = make_run([Row(0, 0, 1, client=299)], clients=clients)
    page = html_page("t", {}, {}, {}, [group_table("Clients", summarise(run).clients)])
    assert "client-199" in page
    assert "client-200" not in page
    assert "100 more rows are in summary.json" in page
