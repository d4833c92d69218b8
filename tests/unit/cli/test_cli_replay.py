"""`headgate replay`: a log decides itself again, and tells stories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_rig import EXAMPLES, KAAS, headgate

from headgate.policies import policy_names


@pytest.fixture(name="log")
def make_log(tmp_path: Path) -> Path:
    """A log of a few dozen requests."""
    log = tmp_path / "run.log"
    ended = headgate("simulate", KAAS, "--duration", "200ms", "--log", log)
    assert f"headgate replay {log}" in ended.out
    return log


def change(log: Path, kind: str, edit: list[object]) -> int:
    """Change the fields of the first event of this kind, and return its number."""
    lines = log.read_text().splitlines()
    for number, line in enumerate(lines[1:], start=1):
        entry = json.loads(line)
        if entry[2][0] == kind:
            entry[2][1 : 1 + len(edit)] = edit
            lines[number] = json.dumps(entry)
            log.write_text("\n".join(lines) + "\n")
            return int(entry[0])
    raise AssertionError(f"there is no {kind}")


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_decides_the_same_again(tmp_path: Path, policy: str) -> None:
    log = tmp_path / "run.log.gz"
    options = ("--duration", "300ms", "--seed", 3, "--policy", policy, "--log", log)
    headgate("simulate", EXAMPLES / "ensemble.yaml", *options)
    found = headgate("replay", log, "--json").json
    assert (found["policy"], found["is_identical"], found["difference"]) == (policy, True, None)
    assert found["events"] > 20


def test_a_log_that_was_changed(log: Path) -> None:
    """A request from another function: the dispatch that was logged does not follow."""
    seq = change(log, "RequestArrived", [0, 1])
    ended = headgate("replay", log, "--json")
    assert (ended.code, ended.json["is_identical"]) == (1, False)
    assert ended.json["difference"]["seq"] == seq
    assert ended.json["difference"]["logged"] != ended.json["difference"]["decided"]
    shown = headgate("replay", log)
    assert (shown.code, shown.err) == (1, "")
    assert f"event {seq} is decided differently" in shown.out


def test_an_event_that_cannot_have_happened(log: Path) -> None:
    change(log, "BatchFinished", [999_999])
    ended = headgate("replay", log)
    assert ended.code == 1
    assert "the Scheduler refuses an event" in ended.out
    assert "999999" in ended.out


def test_a_log_cut_off_by_a_crash(log: Path) -> None:
    log.write_text(log.read_text()[:-20])
    ended = headgate("replay", log)
    assert ended.code == 0
    assert "cut off" in ended.out
    assert headgate("replay", log, "--json").json["is_truncated"] is True


def test_the_story_of_a_request(log: Path) -> None:
    told = headgate("replay", log, "--story", 0).out.splitlines()
    assert "request 0 arrived: " in told[0]
    assert any("-> start instance 0 of " in line and "on gpu1" in line for line in told)
    assert "-> settle request 0, met" in told[-1]
    entries = headgate("replay", log, "--story", 0, "--json").json
    assert entries[0]["event"][:2] == ["RequestArrived", 0]
    assert entries[-1]["actions"][-1][:2] == ["Settle", 0]


def test_a_request_that_is_not_in_the_log(log: Path) -> None:
    ended = headgate("replay", log, "--story", 123_456)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"headgate: error: {log}: --story: 123456: no such request\n"
