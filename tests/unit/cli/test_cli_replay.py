"""`headgate replay`: replaying event logs, and tracing one request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_rig import EXAMPLES, KAAS, headgate, rotated

from headgate.cli.app_loading import load_app, select_policy
from headgate.cli.simulation import logging_to
from headgate.core.request_trace import TRACED_MAX
from headgate.policies import find_policy, policy_names


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
            lines[number] = json.dumps(entry, separators=(",", ":"))
            log.write_text("\n".join(lines) + "\n")
            return int(entry[0])
    raise AssertionError(f"there is no {kind}")


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_replays_identically(tmp_path: Path, policy: str) -> None:
    log = tmp_path / "run.log.gz"
    capabilities = find_policy(policy).capabilities
    app, duration = EXAMPLES / "ensemble.yaml" if capabilities.pipelines else KAAS, "300ms"
    if capabilities.needs_serverless:
        app, duration = EXAMPLES / "burst.yaml", "2s"
    options = ("--duration", duration, "--seed", 3, "--policy", policy, "--log", log)
    headgate("simulate", app, *options)
    found = headgate("replay", log, "--json").json
    assert (found["policy"], found["is_identical"], found["difference"]) == (policy, True, None)
    assert found["events"] > 20


def test_a_log_that_was_changed(log: Path) -> None:
    """A request from another function: the dispatch in the log does not follow from it."""
    seq = change(log, "RequestArrived", [0, 1])
    ended = headgate("replay", log, "--json")
    assert (ended.code, ended.json["is_identical"]) == (1, False)
    assert ended.json["difference"]["seq"] == seq
    assert ended.json["difference"]["logged"] != ended.json["difference"]["decided"]
    shown = headgate("replay", log)
    assert (shown.code, shown.err) == (1, "")
    assert f"event {seq} is decided differently" in shown.out


def test_an_impossible_event(log: Path) -> None:
    seq = change(log, "BatchFinished", [999_999])
    ended = headgate("replay", log)
    assert (ended.code, ended.out) == (2, "")
    message = f"{log}:{seq + 2}: the Scheduler refuses the event: batch 999999 was never sent"
    assert ended.err == f"headgate: error: {message}\n"


@pytest.mark.parametrize("options", [(), ("--request", 0)])
def test_a_field_of_a_wrong_type(log: Path, options: tuple[object, ...]) -> None:
    seq = change(log, "BatchFinished", ["ten"])
    ended = headgate("replay", log, *options)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert f"{log}:{seq + 2}: " in ended.err
    assert "wrong type" in ended.err


@pytest.mark.parametrize("cut", ["a line", "a part of a line"])
def test_a_log_that_was_cut_short(log: Path, cut: str) -> None:
    """As after a crash: what is there is replayed, and a note says that the end is missing."""
    assert headgate("replay", log, "--json").json["complete"] is True
    assert "end mark" not in headgate("replay", log).out
    lines = log.read_text().splitlines(keepends=True)
    rest = lines[-2][:20] if cut == "a part of a line" else ""
    log.write_text("".join(lines[:-2]) + rest)
    events = len(lines) - 3
    note = f"the log ends without its end mark after {events} events: it was cut short, or is"
    ended = headgate("replay", log)
    assert ended.code == 0
    assert note in ended.out
    assert note in headgate("replay", log, "--request", 0).out
    found = headgate("replay", log, "--json").json
    assert (found["complete"], found["is_identical"], found["events"]) == (False, True, events)


def test_a_missing_entry(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:5] + lines[6:]))
    ended = headgate("replay", log)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"headgate: error: {log}:6: 5: entry 4 is missing before it\n"


def test_a_failed_run_leaves_a_log_without_end_mark(tmp_path: Path) -> None:
    log, config = tmp_path / "run.log", load_app(KAAS)
    with (
        pytest.raises(KeyboardInterrupt),
        logging_to(log, config, select_policy(config, KAAS, None, {}), 0),
    ):
        raise KeyboardInterrupt
    assert headgate("replay", log, "--json").json["complete"] is False


def test_the_help_says_what_is_not_detected() -> None:
    output = " ".join(headgate("replay", "--help").out.split())
    assert (
        "decisions are compared: edits of a log that change no decision are not detected" in output
    )


def test_a_trace_with_unknown_ids(log: Path) -> None:
    """A trace decides nothing, so it works on a log that no Scheduler would accept."""
    change(log, "RequestArrived", [0, 55, -1])
    text = log.read_text()
    assert '["Dispatch",0,' in text
    log.write_text(re.sub(r'\["Dispatch",0,\d+', '["Dispatch",0,77', text))
    output = headgate("replay", log, "--request", 0).out
    assert "request 0 arrived: 55, from -1" in output
    assert "dispatch batch 0 of 77 to " in output


def test_the_trace_of_a_request(log: Path) -> None:
    output = headgate("replay", log, "--request", 0).out.splitlines()
    assert "request 0 arrived: " in output[0]
    assert any("-> start instance 0 of " in line and "on gpu1" in line for line in output)
    assert "-> settle request 0, met" in output[-1]
    entries = headgate("replay", log, "--request", 0, "--json").json
    assert entries[0]["event"][:2] == ["RequestArrived", 0]
    assert entries[-1]["actions"][-1][:2] == ["Settle", 0]


def test_a_request_that_is_not_in_the_log(log: Path) -> None:
    ended = headgate("replay", log, "--request", 123_456)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"headgate: error: {log}: --request: '123456': no such request (")


def with_ids(log: Path, *ids: str) -> None:
    """Give the first requests of a simulated log the ids of clients, as a gateway does."""
    left, lines = list(ids), log.read_text().splitlines()
    for number, line in enumerate(lines[1:], start=1):
        entry = json.loads(line)
        if left and entry[2][0] == "RequestArrived":
            entry[2] += [0.0, left.pop(0)]
            lines[number] = json.dumps(entry, separators=(",", ":"))
    log.write_text("\n".join(lines) + "\n")


def test_the_trace_by_the_id_of_the_answer(log: Path) -> None:
    """The id changes no decision, and finds what the number finds."""
    with_ids(log, "c0ffee-1", "c0ffee-2")
    assert headgate("replay", log, "--json").json["is_identical"]
    output = headgate("replay", log, "--request", "c0ffee-2").out
    assert "request 1 (id c0ffee-2) arrived: " in output
    assert output == headgate("replay", log, "--request", 1).out
    ended = headgate("replay", log, "--request", "c0ffee-3")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"headgate: error: {log}: --request: 'c0ffee-3': no such request")


def test_an_id_of_many_requests(log: Path) -> None:
    """The first ones are traced, and a line says that there are others."""
    with_ids(log, *["same"] * (TRACED_MAX + 2))
    ended = headgate("replay", log, "--request", "same")
    assert (ended.code, ended.out.count("(id same) arrived")) == (0, TRACED_MAX)
    note = "2 more requests have the id 'same': name one of them by its number in the log"
    assert ended.err == f"headgate: warning: {log}: {note}\n"
    ended = headgate("replay", log, "--request", TRACED_MAX, "--json")
    assert (ended.json[0]["event"][1], ended.err) == (TRACED_MAX, "")


# --- logs that were rotated ----------------------------------------------------------------------


def test_a_rotated_log_is_replayed_as_a_whole(log: Path) -> None:
    path = rotated(log)
    assert len(list(path.parent.glob("live.log.*"))) > 3
    whole = headgate("replay", log, "--json").json
    for each in (path, path.with_name("live.log.2")):
        found = headgate("replay", each, "--json").json
        assert {**found, "log": ""} == {**whole, "log": ""}
    assert headgate("replay", path, "--request", 0, "--json").json == (
        headgate("replay", log, "--request", 0, "--json").json
    )


def test_a_log_without_its_beginning_is_traced_and_not_replayed(log: Path) -> None:
    path = rotated(log, keep=2)
    ended = headgate("replay", path)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert re.fullmatch(
        rf"headgate: error: {path}: segments 0-\d+ are gone, and with that the first \d+ events: "
        r"what is left can be traced \(--request\) and calibrated, but not replayed\n",
        ended.err,
    )
    last = json.loads(path.read_text().splitlines()[-2])
    assert last[2][0] == "BatchFinished"
    settled = next(action[1] for action in last[3] if action[0] == "Settle")
    output = headgate("replay", path, "--request", settled)
    assert output.code == 0
    assert "are gone, and with that the first" in output.out
    assert f"settle request {settled}, " in output.out


def test_a_log_that_was_stopped_says_why(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    seq, now_ns, _, _ = json.loads(lines[-1])
    log.write_text("".join(lines[:-1]) + json.dumps([seq, now_ns, ["stopped", "no room"], []]))
    ended = headgate("replay", log)
    assert ended.code == 0
    assert f"the log was ended after {seq} events: no room" in ended.out
    found = headgate("replay", log, "--json").json
    assert (found["complete"], found["stopped"], found["is_identical"]) == (False, "no room", True)


def test_a_log_holds_no_hashes_of_keys(tmp_path: Path) -> None:
    app, log = tmp_path / "app.yaml", tmp_path / "run.log"
    hashed = "sha256:" + 64 * "a"
    text = Path(KAAS).read_text()
    assert "vision: {}" in text
    app.write_text(text.replace("vision: {}", f'vision: {{key: "{hashed}"}}'))
    headgate("simulate", app, "--duration", "200ms", "--log", log)
    assert "sha256" not in log.read_text()
    assert 32 * "a" not in log.read_text()
    assert headgate("replay", log, "--json").json["is_identical"] is True
