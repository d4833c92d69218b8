"""The log of a gateway: written in pieces, bounded, and never in the way of serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.core.errors import ConfigError
from headgate.core.events import BatchLost
from headgate.core.log import LogHeader, read_log
from headgate.live.event_log import EventLog

HEADER = LogHeader({}, "headgate", {}, 0)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.log", HEADER, complain=pytest.fail)
    log.record(5, BatchLost(1), [])
    log.record(7, BatchLost(2), [])
    log.close()
    header, entries = read_log(tmp_path / "a.log")
    assert header.policy == "headgate"
    assert [(entry.seq, entry.now_ns) for entry in entries] == [(0, 5), (1, 7)]
    assert entries.is_complete


def test_a_log_that_was_not_closed_is_cut_short(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.log", HEADER, complain=pytest.fail)
    log.record(5, BatchLost(1), [])
    log.flush()
    _, entries = read_log(tmp_path / "a.log")
    assert len(list(entries)) == 1
    assert not entries.is_complete
    log.close()


def test_the_largest_size_ends_it_with_one_complaint(tmp_path: Path) -> None:
    complaints: list[str] = []
    log = EventLog(tmp_path / "a.log", HEADER, complain=complaints.append, size_max=1_000)
    for number in range(1_000):
        log.record(number, BatchLost(number), [])
        log.flush()
    log.close()
    assert (tmp_path / "a.log").stat().st_size <= 1_000
    assert len(complaints) == 1
    assert "largest size; serving goes on" in complaints[0]


def test_a_full_disk_ends_it_with_one_complaint() -> None:
    complaints: list[str] = []
    log = EventLog(Path("/dev/full"), HEADER, complain=complaints.append)
    log.flush()
    log.record(1, BatchLost(1), [])
    log.close()
    assert len(complaints) == 1
    assert "No space left" in complaints[0]


def test_a_place_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/a\.log: --log: cannot be written"):
        EventLog(tmp_path / "nowhere" / "a.log", HEADER, complain=pytest.fail)
