"""CSV import: bundled tables, measurements of Lambda, and invalid files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from headgate.core.errors import ConfigError
from headgate.profiling.profile_file import (
    LAMBDA_MB_PER_CORE,
    bundled_profile,
    read_tables,
)

CONCURRENT = """function,device,cores,concurrency,mean_ms,p50_ms,p95_ms,p99_ms,requests_per_s
a,box,1,1,11,10,20,30,90
a,box,1,2,22,20,40,60,90
b,box,1,1,5,5,5,5,200
"""
BATCHES = """function,device,cores,batch,median_ms,p95_ms,first_call_ms,samples
a,box,1,1,99,,,1
a,box,1,4,35,,,7
"""
CALLS = """lambda_memory_mb,model,client_total_ms,load_ms,infer_ms,status,rep,suspect
512,a,29027,,,timeout,0,0
1769,a,5000,300,100,ok,0,0
1769,a,5000,300,120,ok,1,0
1769,a,5000,300,9000,ok,2,1
3538,a,3000,300,60,ok,0,0
"""


def written(directory: Path, text: str, name: str = "table.csv") -> Path:
    path = directory / name
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_two_tables_make_one_characterisation(tmp_path: Path) -> None:
    """The first table wins at equal grid points; missing tails are scaled from other rows."""
    paths = [written(tmp_path, CONCURRENT), written(tmp_path, BATCHES, "batches.csv")]
    result = read_tables(paths, "a")
    assert (result.function, result.device) == ("a", "box")
    assert [(p.concurrency, p.batch, p.p50_ms, p.samples) for p in result.points] == [
        (1, 1, 10.0, 0),
        (1, 4, 35.0, 7),
        (2, 1, 20.0, 0),
    ]
    assert (result.points[1].p95_ms, result.points[1].p99_ms) == (70.0, 105.0)


def test_lambda_calls_become_points_by_memory(tmp_path: Path) -> None:
    result = read_tables([written(tmp_path, CALLS, "calls.csv.gz")])
    assert LAMBDA_MB_PER_CORE == 1769
    assert [(p.cores, p.p50_ms, p.samples) for p in result.points] == [(1, 110, 2), (2, 60, 1)]


def test_table_without_function_column(tmp_path: Path) -> None:
    path = written(tmp_path, "cores,median_ms\n1,10\n2,6\n")
    assert read_tables([path], "mine").time_ms(2, 1) == 6.0
    with pytest.raises(ConfigError, match="--function"):
        read_tables([path])


@pytest.mark.parametrize(
    ("text", "function", "problem"),
    [
        ("gpu_sevenths,median_ms\n1,2\n", None, "wrong columns: gpu_sevenths, median_ms"),
        ("", None, "wrong columns: none"),
        (CONCURRENT, None, "--function: contains several functions: select one (allowed: a, b)"),
        (CONCURRENT, "aa", "did you mean a?"),
        ("cores,p50_ms\n1,fast\n", "f", "table.csv:2: p50_ms: 'fast': must be a number"),
        ("cores,p50_ms\n0,1\n", "f", "cores: '0'"),
        ("cores,p50_ms,concurrency\n1,1,1.5\n", "f", "concurrency: '1.5': must be a whole"),
        ("cores,p50_ms\n", "f", "contains no times of f"),
        ("cores,p50_ms,concurrency\n1,1,1e9\n", "f", "points[0].concurrency: 1000000000: is out"),
        (
            "cores,p50_ms\n1,1e300\n",
            "f",
            "mean_ms: 1e+300: is out of range (allowed: 1e-06 to 100,0",
        ),
    ],
)
def test_invalid_tables_are_rejected(
    tmp_path: Path, text: str, function: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tables([written(tmp_path, text)], function)
    assert problem in str(caught.value)


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    missing, broken = tmp_path / "missing.csv", tmp_path / "broken.csv.gz"
    broken.write_bytes(b"cores,p50_ms\n1,2\n")
    for path in (missing, broken):
        with pytest.raises(ConfigError, match=path.name):
            read_tables([path])


def test_bundled_tables() -> None:
    for name in ("bert", "classification", "recommender"):
        result = bundled_profile(name)
        assert list(result.cores) == [1, 2, 4, 8, 16]
        assert result.concurrencies[-1] == 20 and result.batches[-1] > 1
        assert result.surface.mean_error is not None and result.surface.mean_error < 0.2
    with pytest.raises(ConfigError, match="recommender"):
        bundled_profile("recomender")
