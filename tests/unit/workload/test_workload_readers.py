from __future__ import annotations

import gzip
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload import Arrivals, layouts, read_trace


def write(directory: Path, text: str, name: str = "trace.csv") -> Path:
    path = directory / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def write_parquet(directory: Path, columns: dict[str, list[object]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), directory / "trace.parquet")
    return directory / "trace.parquet"


def names_of(arrivals: Arrivals) -> list[str]:
    return [arrivals.pipelines[index] for index in arrivals.pipeline]


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_one_row_per_request(tmp_path: Path, name: str) -> None:
    text = "arrival_s,model,client,items,tokens\n0.1,a,x,2,9\n0.3,b,x,1,9\n1421637.5,a,y,4,9\n"
    arrivals = read_trace(write(tmp_path, text, name))
    assert arrivals.times_ns.tolist() == [100_000_000, 300_000_000, 1_421_637_500_000_000]
    assert names_of(arrivals) == ["a", "b", "a"]
    assert arrivals.clients == ("x", "y")
    assert arrivals.sizes.tolist() == [2, 1, 4]
    assert arrivals.duration_ns == 1_421_637_500_000_001


def test_timestamps_start_at_zero_and_stay_exact(tmp_path: Path) -> None:
    """As floats, these two timestamps of 2023 would be 200 ns apart or equal."""
    text = "timestamp\n1700000000.000000001\n1700000000.000000101\n"
    assert read_trace(write(tmp_path, text)).times_ns.tolist() == [0, 100]


def test_dates_start_at_zero(tmp_path: Path) -> None:
    text = "TIMESTAMP,Tokens\n2023-11-16 18:15:46.6805900,5\n2023-11-16 18:15:50.9951000,6\n"
    assert read_trace(write(tmp_path, text)).times_ns.tolist() == [0, 4_314_510_000]
    zoned = "ts\n2024-05-10T00:00:00+02:00\n2024-05-09T23:00:00Z\n"
    assert read_trace(write(tmp_path, zoned)).times_ns.tolist() == [0, 3600 * SECOND_NS]


def test_rows_out_of_order_are_sorted_with_sort(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_ms,pipeline\n5,a\n3,b\n4,c\n")
    with pytest.raises(ConfigError, match=r"csv:3: arrival_ms: '3': is earlier.*\(5\).*--sort"):
        read_trace(path)
    arrivals = read_trace(path, sort=True)
    assert arrivals.times_ns.tolist() == [3_000_000, 4_000_000, 5_000_000]
    assert names_of(arrivals) == ["b", "c", "a"]


def test_priorities_above_the_default_are_negative(tmp_path: Path) -> None:
    """As `headgate calibrate` writes those of clients that send a priority."""
    arrivals = read_trace(write(tmp_path, "arrival_s,priority\n1,-3\n2,0\n3,4\n"))
    assert arrivals.priority is not None
    assert arrivals.priority.tolist() == [-3, 0, 4]


def test_the_time_column_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, "creation_time,gpu\n7,1\n9,1\n")
    arrivals = read_trace(path, layout="requests", time_column="creation_time")
    assert arrivals.times_ns.tolist() == [0, 2 * SECOND_NS]
    with pytest.raises(ConfigError, match=r"start: no such column \(allowed: creation_time, gpu\)"):
        read_trace(path, layout="requests", time_column="start")


@pytest.mark.parametrize("column", ["rps", "count"])
def test_one_row_per_step_keeps_counts(tmp_path: Path, column: str) -> None:
    arrivals = read_trace(write(tmp_path, f"{column}\n3\n0\n2\n"))
    assert np.bincount(arrivals.times_ns // SECOND_NS).tolist() == [3, 0, 2]
    assert arrivals.duration_ns == 3 * SECOND_NS


def test_fractions_of_a_rate_are_carried_over(tmp_path: Path) -> None:
    arrivals = read_trace(write(tmp_path, "rps\n2.5\n2.5\n"))
    assert np.bincount(arrivals.times_ns // SECOND_NS).tolist() == [3, 2]


def test_a_step_can_be_longer(tmp_path: Path) -> None:
    """In steps of ten seconds a count stays a count, and 2 rps are 20 arrivals."""
    ten_s = 10 * SECOND_NS
    counts = read_trace(write(tmp_path, "count\n3\n0\n2\n"), step_ns=ten_s, spacing="even")
    assert (counts.times_ns // ten_s).tolist() == [0, 0, 0, 2, 2]
    assert len(read_trace(write(tmp_path, "rps\n2\n"), step_ns=ten_s)) == 20


def test_a_rate_is_an_average(tmp_path: Path) -> None:
    path = write(tmp_path, "rate\n" + "2.5\n" * 4000)
    counts = np.bincount(read_trace(path, seed=1).times_ns // SECOND_NS, minlength=4000)
    assert counts.mean() == pytest.approx(2.5, rel=0.05)
    assert counts.var() == pytest.approx(2.5, rel=0.1)
    assert len(read_trace(path, draw="exact")) == 10_000


@pytest.mark.parametrize(
    "header", ["HashOwner,HashApp,HashFunction,Trigger,1,2,3", "x,y,func,Trigger,1,2,3"]
)
def test_azure_functions_2019(tmp_path: Path, header: str) -> None:
    path = write(tmp_path, f"{header}\no1,a1,f1,http,2,0,1\no2,a2,f2,queue,0,0,3\n")
    arrivals = read_trace(path, seed=1)
    minutes = (arrivals.times_ns // (60 * SECOND_NS)).tolist()
    assert minutes == [0, 0, 2, 2, 2, 2]
    assert names_of(arrivals)[:2] == ["f1", "f1"]
    assert sorted(names_of(arrivals)[2:]) == ["f1", "f2", "f2", "f2"]
    assert arrivals.clients == (("o1", "o2") if "HashOwner" in header else ("default",))
    assert arrivals.duration_ns == 180 * SECOND_NS


def test_azure_functions_2021_arrive_before_they_end(tmp_path: Path) -> None:
    text = "app,func,end_timestamp,duration\na,f,10,9.5\nb,g,11,0.5\na,f,12,12.5\n"
    arrivals = read_trace(write(tmp_path, text))
    assert arrivals.times_ns.tolist() == [0, SECOND_NS, 11 * SECOND_NS]
    assert names_of(arrivals) == ["f", "f", "g"]
    assert [arrivals.clients[index] for index in arrivals.client] == ["a", "a", "b"]


def test_azure_functions_2021_sample(tmp_path: Path) -> None:
    arrivals = read_trace(write(tmp_path, "arrival_s,func_id,duration\n0.5,7,60\n1,8,2\n"))
    assert arrivals.times_ns.tolist() == [SECOND_NS // 2, SECOND_NS]
    assert arrivals.pipelines == ("7", "8")


def test_parquet_has_the_same_columns(tmp_path: Path) -> None:
    requests = write_parquet(tmp_path, {"arrival_s": [0.25, 1.0], "model": ["a", "b"]})
    assert read_trace(requests).times_ns.tolist() == [SECOND_NS // 4, SECOND_NS]
    steps = write_parquet(tmp_path, {"count": [3, 0, 1]})
    assert np.bincount(read_trace(steps).times_ns // SECOND_NS).tolist() == [3, 0, 1]
    hole = write_parquet(tmp_path, {"count": [3, None, 1]})
    with pytest.raises(ConfigError, match=r"parquet:3: count: '': is not a number"):
        read_trace(hole)


def test_a_damaged_parquet_file_is_a_one_line_error(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, {"count": [3, 0, 1]})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="cannot be read as Parquet") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install headgate\[parquet\]"):
        read_trace(tmp_path / "trace.parquet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv: is empty"),
        ("rps\n", "trace.csv: has a header but no rows"),
        ("rps\n5\nfive\n", "trace.csv:3: rps: 'five': is not a number"),
        ("rps\n5\nnan\n", "trace.csv:3: rps: 'nan': is not a finite number"),
        ("rps\n5\n-1\n", "trace.csv:3: rps: '-1': must not be negative"),
        ("rps\n5\n\n6\n", "trace.csv:3: the row has 0 cells, the header 1"),
        ("arrival_s,model\n1,a\n2\n", "trace.csv:3: the row has 1 cells, the header 2"),
        ("arrival_s,model\n1,a\n-2,a\n", "trace.csv:3: arrival_s: '-2': must not be negative"),
        ("arrival_s,model\n1,a\n2s,a\n", "trace.csv:3: arrival_s: '2s': is not a number"),
        ("arrival_s\n1e999999999\n", "arrival_s: '1e999999999': is more than 292 years"),
        ("arrival_s,items\n1,0\n", "items: '0': is not a whole number from 1 to"),
        ("arrival_s,priority\n1,2147483648\n", "priority: '2147483648': is not a whole number"),
        ('arrival_s,model\n1,"a\nb"\n2,"c\nd"\nx,e\n', "trace.csv:6: arrival_s: 'x'"),
        ("time\n2023-11-16 18:15:46\nlater\n", "trace.csv:3: time: 'later': is not a date"),
        ("func,Trigger,1,2\nf,http,1,1.5\n", "trace.csv:2: 2: '1.5': is not a whole number"),
        ("func,Trigger,1,2\n", "has a header but no rows"),
        ("t,value\n1,2\n", "no layout has the columns t,value .*requests: one of arrival_s, .*rps"),
        ("time\n2500-01-01T00:00:00\n", "csv:2: time: '2500-.*': is more than 292 years"),
        ("time\n9999-12-31T23:00:00-12:00\n", "is more than 292 years"),
        ("time,model, Time\n1,a,2\n", "trace.csv: columns: 'time': appears twice"),
        ("count\n5\n3.5\n", "trace.csv:3: count: '3.5': is not a whole number"),
        ("count\n1e12\n", r"trace.csv: 1e\+12 arrivals are too many"),
    ],
)
def test_a_bad_file_is_a_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_trace(write(tmp_path, text))
    assert "\n" not in str(caught.value).replace("\\n", "")


def test_blank_lines_at_the_end_are_no_steps(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, "rps\n1\n\n\n")).duration_ns == SECOND_NS


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_truncated_gzip_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path, "rps\n" + "17\n23\n5\n" * 5000, "trace.csv.gz")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(ConfigError, match="the gzip stream is truncated or damaged"):
        read_trace(path)


def test_a_file_whose_suffix_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_text("rps\n1\n")
    with pytest.raises(ConfigError, match="truncated or damaged"):
        read_trace(tmp_path / "a.csv.gz")
    (tmp_path / "b.csv").write_bytes(gzip.compress(b"rps\n1\n"))
    with pytest.raises(ConfigError, match=r"b\.csv: is not text in UTF-8"):
        read_trace(tmp_path / "b.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path)


def test_parquet_dates_have_the_same_limit(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, {"timestamp": [datetime(2500, 1, 1, tzinfo=UTC)]})
    with pytest.raises(ConfigError, match=r"parquet:2: timestamp: .*is more than 292 years"):
        read_trace(path)


@pytest.mark.parametrize("name", ["gone.csv", "gone.csv.gz", "gone.parquet"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: no such file"):
        read_trace(tmp_path / name)


def test_an_unknown_layout_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'apache': unknown layout .*auto, .*requests, steps"):
        read_trace(tmp_path / "x.csv", layout="apache")


@pytest.mark.parametrize("layout", list(layouts()))
def test_each_layout_refuses_other_columns(tmp_path: Path, layout: str) -> None:
    with pytest.raises(ConfigError, match=r"trace.csv: has .*allowed: "):
        read_trace(write(tmp_path, "t,value\n1,2\n"), layout=layout)
