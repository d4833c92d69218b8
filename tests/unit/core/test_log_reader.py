"""The event log: written, read, cut off, damaged, replayed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from headgate.core.actions import Action
from headgate.core.errors import ConfigError, PolicyError
from headgate.core.event_log import (
    LogEntry,
    LogHeader,
    LogWriter,
    json_lines,
    open_log,
    read_log,
    replay,
    to_wire,
)
from headgate.core.events import BatchFinished, InstanceStarted, NodeJoined, RequestArrived
from headgate.core.policy import PolicyKind
from headgate.core.records import Task
from headgate.core.scheduler.scheduler import Scheduler

from .rig import Rig
from .sample_apps import Fifo, Scripted, make_app

HEADER = LogHeader({"pools": ["gpu"]}, "fifo", {"depth": 3}, seed=7, index=1, peers=2)
HEADER_LINE = (
    '{"headgate_log":3,"app":{"pools":["gpu"]},"policy":"fifo","settings":{"depth":3},'
    '"seed":7,"index":1,"peers":2,"log_id":"","segment":0,"first_seq":0}\n'
)
GOOD_LINE = '[0,5,["NodeLost",3],[["CancelTimer",["t",1]]]]\n'


@pytest.fixture
def entries() -> list[LogEntry]:
    """A request that is met."""
    rig = Rig(make_app(), nodes=1)
    rig.at(5, RequestArrived(0, 0))
    rig.at(6, InstanceStarted(0, 0))
    rig.at(16, BatchFinished(0))
    return rig.entries


def write(path: Path, entries: list[LogEntry]) -> None:
    with open_log(path) as stream:
        writer = LogWriter(json_lines(stream), HEADER)
        for entry in entries:
            writer.write(entry.seq, entry.now_ns, entry.event, entry.actions)
        writer.close()


def plain(entry: LogEntry) -> object:
    return (entry.seq, entry.now_ns, to_wire(entry.event), [to_wire(a) for a in entry.actions])


def test_one_line_per_event_between_the_header_and_the_end_mark() -> None:
    stream = io.StringIO()
    writer = LogWriter(json_lines(stream), HEADER)
    writer.write(0, 5, NodeJoined(3, 0, "n3"), [])
    writer.close()
    lines = '[0,5,["NodeJoined",3,0,"n3",[]],[]]\n[1,5,["end"],[]]\n'
    assert stream.getvalue() == HEADER_LINE + lines


@pytest.mark.parametrize("name", ["run.log", "run.log.gz"])
def test_what_is_written_is_read(tmp_path: Path, entries: list[LogEntry], name: str) -> None:
    write(tmp_path / name, entries)
    header, reader = read_log(tmp_path / name)
    assert header == HEADER
    assert [plain(entry) for entry in reader] == [plain(entry) for entry in entries]
    assert (reader.is_complete, reader.events) == (True, len(entries))


def test_a_compressed_log_is_the_same_bytes_every_time(
    tmp_path: Path, entries: list[LogEntry]
) -> None:
    path = tmp_path / "run.log.gz"
    write(path, entries)
    before = path.read_bytes()
    write(path, entries)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["run.log", "run.log.gz"])
def test_a_line_cut_off_by_a_crash_ends_the_log_and_is_reported(
    tmp_path: Path, entries: list[LogEntry], name: str
) -> None:
    path = tmp_path / name
    write(path, entries)
    path.write_bytes(path.read_bytes()[:-24])
    _, reader = read_log(path)
    seen = [entry.seq for entry in reader]
    assert seen == list(range(len(seen)))
    assert (reader.is_complete, reader.events) == (False, len(seen))
    if path.suffix != ".gz":
        assert len(seen) == len(entries) - 1


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_a_log_cut_between_two_lines_has_no_end_mark(
    tmp_path: Path, entries: list[LogEntry], lines: int
) -> None:
    path = tmp_path / "run.log"
    write(path, entries)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-lines]))
    _, reader = read_log(path)
    assert len(list(reader)) == reader.events == len(entries) + 1 - lines
    assert not reader.is_complete


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_entry_is_named(tmp_path: Path, entries: list[LogEntry], missing: int) -> None:
    path = tmp_path / "run.log"
    write(path, [entry for entry in entries if entry.seq != missing])
    _, reader = read_log(path)
    problem = f"run.log:{missing + 2}: {missing + 1}: entry {missing} is missing before it"
    with pytest.raises(ConfigError, match=problem):
        list(reader)
    reader.close()


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ('[2,5,["end"],[]]\n', "run.log:3: 2: entry 1 is missing before it"),
        ('[0,5,["end"],[]]\n', "run.log:3: .*is out of order"),
        ('[1,5,["end",1],[]]\n', "run.log:3: .*neither an event nor an action"),
        ('[1,5,["end"],[]]\n[2,5,["end"],[]]\n', "run.log:4: follows the end mark"),
        ('[1,5,["rotated"],[]]\n[2,5,["end"],[]]\n', "run.log:4: follows the end mark"),
        ('[1,5,["rotated"],[["CancelTimer",["t",1]]]]\n', "run.log:3: .*neither an event nor"),
    ],
)
def test_an_end_mark_counts_and_ends(tmp_path: Path, end: str, problem: str) -> None:
    """The last entry may be missing too, and then only the mark can tell."""
    path = tmp_path / "run.log"
    path.write_text(HEADER_LINE + GOOD_LINE + end)
    _, reader = read_log(path)
    with pytest.raises(ConfigError, match=problem):
        list(reader)
    reader.close()


def test_a_missing_newline_at_the_very_end_is_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(HEADER_LINE + GOOD_LINE + '[1,5,["end"],[]]')
    _, reader = read_log(path)
    assert len(list(reader)) == 1
    assert reader.is_complete


def test_a_whole_but_wrong_last_line_was_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(HEADER_LINE + '[0,5,["Nothing"],[]]')
    _, reader = read_log(path)
    with pytest.raises(ConfigError, match=r"run\.log:2: .*neither an event"):
        list(reader)
    reader.close()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[0,5,", "is not JSON"),
        ("\xff", "is not JSON"),
        ("", "is not JSON"),
        ("{}", "is not an entry"),
        ("[0,5]", "is not an entry"),
        ("[" * 100_000, "is not JSON"),
        ('[false,5,["NodeLost",3],[]]', "is not an entry"),
        ('["0",5,["NodeLost",3],[]]', "is not an entry"),
        ('[0,5,["NodeLost",3],7]', "is not an entry"),
        ('[0,5,["Nothing"],[]]', "neither an event nor an action"),
        ('[0,5,["CancelTimer",["t",1]],[]]', "is not an event"),
        ('[0,5,["NodeLost",3],[["NodeLost",3]]]', "is not an action"),
        ('[-1,5,["NodeLost",3],[]]', "is out of order"),
        ('[0,-5,["NodeLost",3],[]]', "is out of order"),
    ],
)
def test_damage_is_said_with_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    """A damaged line with a whole line behind it was not cut off by a crash."""
    path = tmp_path / "run.log"
    path.write_text(f"{HEADER_LINE}{line}\n{GOOD_LINE}", encoding="latin-1")
    _, reader = read_log(path)
    with pytest.raises(ConfigError, match=f"run.log:2: .*{problem}"):
        list(reader)
    reader.close()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "run.log:1: is not an event log .allowed: what `headgate serve --log FILE` or "),
        ("[]\n", "run.log:1: is not an event log"),
        ('{"policy":"fifo"}\n', "run.log:1: is not an event log"),
        (HEADER_LINE.replace('log":3', 'log":2'), r"headgate_log: 2: unknown version \(allowed: 3"),
        (HEADER_LINE.replace('ment":0', 'ment":-1'), "segment: -1: must be an integer"),
        (HEADER_LINE.replace('seq":0', 'seq":true'), "first_seq: True: must be an integer"),
        (HEADER_LINE.replace('"seed":7', '"seed":"7"'), r"seed: '7': is missing .*allowed: int"),
        (HEADER_LINE.replace('"policy":"fifo",', ""), "policy: is missing"),
        (HEADER_LINE[:-20], "run.log:1: is not JSON"),
    ],
)
def test_what_is_not_a_log_is_not_read(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "run.log"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_log(path)


def test_a_log_that_cannot_be_opened_or_unpacked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.log: cannot be read: No such file"):
        read_log(tmp_path / "nowhere.log")
    (tmp_path / "fake.gz").write_text(HEADER_LINE)
    with pytest.raises(ConfigError, match=r"fake\.gz:1: cannot be read"):
        read_log(tmp_path / "fake.gz")


def test_a_replay_gives_the_same_actions(entries: list[LogEntry]) -> None:
    result = replay(entries, Scheduler(make_app(), PolicyKind(Fifo)))
    assert (result.events, result.actions, result.first_difference) == (4, 3, None)


def test_a_replay_ends_at_the_first_difference(entries: list[LogEntry]) -> None:
    """Another policy answers the arrival with nothing."""
    result = replay(entries, Scheduler(make_app(), PolicyKind(Scripted)))
    assert (result.events, result.actions) == (2, 0)
    assert result.first_difference is not None
    assert (result.first_difference.seq, result.first_difference.got) == (1, [])
    assert str(result.first_difference).startswith(
        "event 1 at 5 ns, ['RequestArrived', 0, 0, 0, 1, 0, 0, False, 0, 0.0, '']: expected [['S"
    )


class Breaks(Fifo):
    """Breaks at every second arrival, after having ordered something."""

    def on_task_ready(self, task: Task) -> None:
        super().on_task_ready(task)
        if task.request.id % 2:
            raise KeyError("a defect")


def test_a_defect_of_a_policy_comes_out_again_and_so_does_what_follows() -> None:
    """What was ordered before an exception was carried out: the log is one of what happened."""

    def make() -> Scheduler:
        return Scheduler(make_app(), PolicyKind(Breaks))

    scheduler, entries = make(), []
    events = [NodeJoined(0, 0, "n"), *(RequestArrived(number, 0) for number in range(4))]
    events += [InstanceStarted(0, 0), BatchFinished(0)]
    for seq, event in enumerate(events):
        try:
            actions = scheduler.handle(seq, event)
        except PolicyError as error:
            actions = [action for action in error.actions if isinstance(action, Action)]
        except Exception:
            actions = scheduler.actions_so_far
        entries.append(LogEntry(seq, seq, event, actions))
    result = replay(entries, make())
    assert (result.events, result.first_difference) == (len(events), None)
    assert result.actions > 2


def test_the_rest_of_a_log_that_was_stopped_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(HEADER_LINE + GOOD_LINE + '[1,5,["stopped","no room"],[]]\n')
    _, reader = read_log(path)
    assert len(list(reader)) == 1
    assert (reader.is_complete, reader.stopped) == (False, "no room")
