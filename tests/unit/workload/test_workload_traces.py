"""Finding traces, and reading public ones if HEADGATE_TRACES names a directory of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload import find_trace, read_trace


def test_a_path_takes_precedence_over_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    traces = tmp_path / "traces"
    traces.mkdir()
    for path in (tmp_path / "a.csv", traces / "a.csv", traces / "b.csv.gz", traces / "b.csv"):
        path.touch()
    assert find_trace("a.csv", traces) == Path("a.csv")
    assert find_trace("a", traces) == traces / "a.csv"
    assert find_trace("b", traces) == traces / "b.csv.gz"
    assert find_trace("b.csv", traces) == traces / "b.csv"


def test_a_missing_trace_lists_the_available_ones(tmp_path: Path) -> None:
    (tmp_path / "calm.csv.gz").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"'wild': no such trace \(allowed: calm.csv.gz\)"):
        find_trace("wild", tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        find_trace("wild", tmp_path / "gone")
    with pytest.raises(ConfigError, match="HEADGATE_TRACES"):
        find_trace("wild")


def test_a_directory_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    with pytest.raises(ConfigError, match=r"/more': is a directory \(allowed: a file"):
        find_trace(str(tmp_path / "more"))
    with pytest.raises(ConfigError, match=r"'more': is a directory \(allowed"):
        find_trace("more", tmp_path)


@pytest.fixture
def public_traces() -> Path:
    directory = os.environ.get("HEADGATE_TRACES")
    if not directory:
        pytest.skip("HEADGATE_TRACES names no directory of public traces")
    return Path(directory)


@pytest.mark.parametrize(
    ("name", "requests", "duration_s", "idc_10s"),
    [
        ("azure_llm_2023_conv", 12_340, 2100.5, 3.55),
        ("azure_llm_2023_code", 6_521, 2055.0, 70.83),
        ("mooncake_synthetic", 3_993, 1022.0, 1.18),
        ("nasa_http_1995_persec_week1", 567_785, 604_800, 4.38),
        ("alibaba_genai_lora_requests", 16_093, 1_421_637, 1.33),
    ],
)
def test_public_traces_have_their_known_statistics(
    public_traces: Path, name: str, requests: int, duration_s: float, idc_10s: float
) -> None:
    arrivals = read_trace(find_trace(name, public_traces))
    counts = np.bincount(arrivals.times_ns // (10 * SECOND_NS))[:-1]  # the last step is shorter
    assert len(arrivals) == requests
    assert arrivals.duration_ns == pytest.approx(duration_s * SECOND_NS, rel=1e-4)
    assert counts.var() / counts.mean() == pytest.approx(idc_10s, rel=0.03)


@pytest.mark.slow
def test_thirteen_days_of_twitter_are_read_in_seconds(public_traces: Path) -> None:
    arrivals = read_trace(find_trace("twitter_2021_08_persec_d01_d13", public_traces))
    assert len(arrivals) == 71_571_977
    assert arrivals.mean_rate_per_s == pytest.approx(63.721, rel=1e-4)


def test_public_samples_of_azure_functions_are_recognised(public_traces: Path) -> None:
    minutes = read_trace(find_trace("azure_functions_2019_permin_sample", public_traces))
    assert (len(minutes.pipelines), minutes.duration_ns) == (2, 86_400 * SECOND_NS)
    calls = read_trace(find_trace("azure_functions_2021_sample200", public_traces))
    assert len(calls) == 106
