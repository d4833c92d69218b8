"""The event log of a gateway: buffered, rotated, bounded, and never blocking."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogHeader, LogReader, read_log
from headgate.core.events import BatchLost
from headgate.live import event_log
from headgate.live.event_log import EventLog, Rotation

HEADER = LogHeader({"clients": {}}, "headgate", {}, 0)
USUAL = Rotation()
TINY = Rotation(size_bytes=400, keep=1_000)


def written(
    path: Path, events: int, rotation: Rotation = USUAL, clock: Callable[[], int] | None = None
) -> None:
    """Write and close a log of this many events, each flushed by itself."""
    log = EventLog(path, HEADER, rotation, clock=clock or (lambda: 0))
    for number in range(events):
        log.record(number, BatchLost(number), [])
        log.flush()
    log.close()


def entries_of(path: Path) -> tuple[list[int], LogReader]:
    _, reader = read_log(path)
    return [entry.seq for entry in reader], reader


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_log_round_trip(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.log", HEADER, USUAL)
    log.record(5, BatchLost(1), [])
    log.record(7, BatchLost(2), [])
    log.close()
    header, entries = read_log(tmp_path / "a.log")
    assert header.policy == "headgate"
    assert [(entry.seq, entry.now_ns) for entry in entries] == [(0, 5), (1, 7)]
    assert entries.is_complete
    assert names(tmp_path) == ["a.log"]


def test_unclosed_log_is_incomplete(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.log", HEADER, USUAL)
    log.record(5, BatchLost(1), [])
    log.flush()
    assert log.sync()
    numbers, entries = entries_of(tmp_path / "a.log")
    assert (numbers, entries.is_complete) == ([0], False)
    log.close()


def test_log_is_private_to_its_owner(tmp_path: Path) -> None:
    written(tmp_path / "a.log", 20, TINY)
    assert len(names(tmp_path)) > 2
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("events", [1, 5, 100])
def test_segments_are_read_in_order_whichever_is_named(tmp_path: Path, events: int) -> None:
    written(tmp_path / "a.log", events, TINY)
    assert all(path.stat().st_size < 1_000 for path in tmp_path.iterdir())
    assert (len(names(tmp_path)) > 10) == (events == 100)
    for path in tmp_path.iterdir():
        numbers, entries = entries_of(path)
        assert (numbers, entries.is_complete, entries.missing) == (list(range(events)), True, "")


def test_total_size_is_bounded(tmp_path: Path) -> None:
    written(tmp_path / "a.log", 200, Rotation(size_bytes=400, keep=3))
    assert len(names(tmp_path)) == 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * 1_000


def test_log_without_its_beginning_can_be_read(tmp_path: Path) -> None:
    written(tmp_path / "a.log", 200, Rotation(size_bytes=400, keep=3))
    numbers, entries = entries_of(tmp_path / "a.log")
    assert numbers == list(range(entries.first_seq, 200))
    assert 0 < entries.first_seq < 199
    assert entries.is_complete
    gone = f"gone, and with that the first {entries.first_seq} events"
    assert entries.missing.startswith("segments 0-") and entries.missing.endswith(gone)


def test_missing_segment_is_named(tmp_path: Path) -> None:
    written(tmp_path / "a.log", 100, TINY)
    (tmp_path / "a.log.5").unlink()
    _, entries = read_log(tmp_path / "a.log")
    with pytest.raises(ConfigError, match="segment 4 of the log is missing, but later ones exist"):
        list(entries)


def test_truncated_segment_does_not_match_the_next(tmp_path: Path) -> None:
    written(tmp_path / "a.log", 100, TINY)
    lines = (tmp_path / "a.log.5").read_text().splitlines(keepends=True)
    (tmp_path / "a.log.5").write_text("".join(lines[:-2]))
    _, entries = read_log(tmp_path / "a.log")
    with pytest.raises(ConfigError, match="the segment begins with entry"):
        list(entries)
    entries.close()


def test_log_is_rotated_by_age(tmp_path: Path) -> None:
    now_ns = 0

    def clock() -> int:
        return now_ns

    log = EventLog(tmp_path / "a.log", HEADER, Rotation(age_ns=100), clock=clock)
    for now_ns in range(0, 1_000, 10):
        log.record(now_ns, BatchLost(1), [])
        log.flush()
    log.flush()  # the newest segment is empty, so it is not rotated again
    log.close()
    numbers, entries = entries_of(tmp_path / "a.log")
    assert len(names(tmp_path)) == 9  # `keep` segments and the newest
    assert numbers[-1] == 99
    assert entries.is_complete


def test_log_is_read_while_it_is_rotated(tmp_path: Path) -> None:
    """The newest segment has been renamed since the reader listed the files."""
    log = EventLog(tmp_path / "a.log", HEADER, TINY)

    def write(first: int, last: int) -> None:
        for number in range(first, last):
            log.record(number, BatchLost(number), [])
            log.flush()
        assert log.sync()

    write(0, 50)
    _, entries = read_log(tmp_path / "a.log")
    assert next(entries).seq == 0
    write(50, 100)
    assert [entry.seq for entry in entries][:60] == list(range(1, 61))
    log.close()


def test_next_gateway_starts_a_log_and_prunes_old_segments(tmp_path: Path) -> None:
    """After any number of restarts there are never more files than are to be kept."""
    for _ in range(7):
        written(tmp_path / "a.log", 3, Rotation(keep=2))
    assert names(tmp_path) == ["a.log", "a.log.5", "a.log.6"]
    for name in names(tmp_path):
        numbers, entries = entries_of(tmp_path / name)
        assert (numbers, entries.is_complete) == ([0, 1, 2], True)


def test_two_gateways_at_one_path(tmp_path: Path) -> None:
    """The old gateway continues in the renamed file and leaves the path to the new one."""
    old = EventLog(tmp_path / "a.log", HEADER, TINY)
    old.record(0, BatchLost(1), [])
    new = EventLog(tmp_path / "a.log", HEADER, TINY)
    for number in range(100):
        old.record(number, BatchLost(number), [])
        old.flush()
        assert old.sync()
    new.record(1, BatchLost(7), [])
    new.close()
    old.close()
    assert names(tmp_path) == ["a.log", "a.log.1"]
    assert entries_of(tmp_path / "a.log")[0] == [0]
    numbers, entries = entries_of(tmp_path / "a.log.1")
    assert numbers == list(range(len(numbers))) and len(numbers) > 1
    assert (entries.is_complete, entries.stopped) == (
        False,
        "another gateway writes to the path now",
    )


def test_other_files_are_neither_overwritten_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("functions: {}\n")
    with pytest.raises(ConfigError, match="exists and is not an event log"):
        EventLog(tmp_path / "a.yaml", HEADER, USUAL)
    assert (tmp_path / "a.yaml").read_text() == "functions: {}\n"
    (tmp_path / "a.log.3").write_text("mine\n")
    written(tmp_path / "a.log", 100, Rotation(size_bytes=400, keep=0))
    assert names(tmp_path) == ["a.log", "a.log.3", "a.yaml"]
    assert (tmp_path / "a.log.3").read_text() == "mine\n"


def test_full_disk_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(Path("/dev/full"), HEADER, USUAL)
    for number in range(3):
        log.record(number, BatchLost(1), [])
        log.flush()
        log.sync()
    log.close()
    assert len(caplog.messages) == 1
    assert "No space left on device; serving continues" in caplog.messages[0]


@pytest.mark.parametrize("breaks_at", range(1, 12))
def test_disk_full_at_any_write(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    breaks_at: int,
) -> None:
    """What was written before can be read: it is the beginning of the log."""
    writes = 0
    write = os.write

    def full(fd: int, data: bytes) -> int:
        nonlocal writes
        writes += 1
        if writes >= breaks_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:100])  # never written as a whole

    monkeypatch.setattr(os, "write", full)
    written(tmp_path / "a.log", 20, TINY)
    monkeypatch.undo()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    if breaks_at > 2:  # otherwise not even the header is written
        numbers, entries = entries_of(tmp_path / "a.log")
        assert numbers == list(range(len(numbers)))
        assert not entries.is_complete


def test_unwritable_directory_stops_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: object) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    written(tmp_path / "a.log", 50, TINY)
    numbers, entries = entries_of(tmp_path / "a.log")
    assert 0 < len(numbers) < 50
    assert entries.stopped
    assert len(caplog.messages) == 1
    assert "cannot be rotated: Permission denied; serving continues" in caplog.messages[0]


def test_slow_disk_does_not_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the disk; if the backlog exceeds its limit, the log ends with an error."""
    goes_on = threading.Event()
    write = os.write

    def slow(fd: int, data: bytes) -> int:
        assert goes_on.wait(60)
        return write(fd, data)

    log = EventLog(tmp_path / "a.log", HEADER, USUAL)
    assert log.sync()
    monkeypatch.setattr(os, "write", slow)
    monkeypatch.setattr(event_log, "BACKLOG_BYTES_MAX", 10_000)
    for number in range(1_000):
        log.record(number, BatchLost(number), [])
        log.flush()
    assert len(caplog.messages) == 1
    assert "the disk is too slow; serving continues" in caplog.messages[0]
    goes_on.set()
    log.close()
    numbers, entries = entries_of(tmp_path / "a.log")
    assert numbers == list(range(len(numbers))) and 100 < len(numbers) < 1_000
    assert entries.stopped == "the disk is too slow"


def test_unencodable_event_stops_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path / "a.log", HEADER, USUAL)
    log.record(1, BatchLost(1), [])
    log.record(2, object(), [])  # type: ignore[arg-type]
    log.record(3, BatchLost(1), [])
    log.close()
    numbers, entries = entries_of(tmp_path / "a.log")
    assert (numbers, entries.is_complete) == ([0], False)
    assert entries.stopped.startswith("an event cannot be written: ")
    assert len(caplog.messages) == 1


def test_unwritable_path_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/a\.log: --log: cannot be written"):
        EventLog(tmp_path / "nowhere" / "a.log", HEADER, USUAL)


def test_each_segment_has_a_header(tmp_path: Path) -> None:
    written(tmp_path / "a.log", 20, TINY)
    headers = [
        json.loads(path.read_text().splitlines()[0])
        for path in sorted(tmp_path.iterdir(), key=lambda path: (path.suffix == ".log", path.name))
    ]
    assert len({header["log_id"] for header in headers}) == 1
    by_segment = {header["segment"]: header["first_seq"] for header in headers}
    assert sorted(by_segment) == list(range(len(headers)))
    assert sorted(by_segment.values()) == [by_segment[n] for n in sorted(by_segment)]
    assert USUAL.age_ns == NEVER_NS
