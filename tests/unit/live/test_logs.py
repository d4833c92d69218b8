"""Logging: formats, suppression of repetitions, and that it never fails."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.live.telemetry.logs import (
    CHUNK_BYTES_MAX,
    REPEATS_MAX,
    REPEATS_S,
    JsonFormatter,
    RepeatLimiter,
    TextFormatter,
)

TEXT = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (?P<level>[A-Z]+) (?P<logger>\S+) "
    r"\[(?P<process>[^]]+)\] (?P<text>.*)"
)


def record(
    message: str, *arguments: object, level: int = logging.WARNING, **more: object
) -> logging.LogRecord:
    made = logging.LogRecord("headgate.live.x", level, __file__, 1, message, arguments, None)
    made.__dict__.update(more)
    return made


def with_trace(message: str) -> logging.LogRecord:
    made = record("it broke")
    try:
        raise ValueError(message)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def test_text_format() -> None:
    line = TextFormatter("gateway").format(record("%s has %d", "it", 3, request_id="abc-1"))
    match = TEXT.fullmatch(line)
    assert match is not None
    assert match.groupdict() == {
        "level": "WARNING",
        "logger": "headgate.live.x",
        "process": "gateway",
        "text": "it has 3 (request abc-1)",
    }


def test_control_characters_are_escaped() -> None:
    forged = "a\n2026-11-15T18:00:00.000Z ERROR headgate [gateway] forged\r\x1b[2J\x9b"
    named = record("it is called so")
    named.name = forged  # a function may choose any name for its loggers
    for made in (
        record("%s", forged),
        with_trace(forged),
        record("x", request_id=forged),
        named,
    ):
        lines = TextFormatter("worker n1").format(made).split("\n")
        assert TEXT.fullmatch(lines[0]) or made is named
        assert all(line.startswith("    ") for line in lines[1:])
        text = "\n".join(lines)
        assert "forged\\x0d\\x1b[2J\\x9b" in text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


def test_json_format() -> None:
    made = with_trace("a\nb\udcff")
    made.__dict__.update(request_id="abc-1", fields={"status": 200, "odd": object})
    line = JsonFormatter("gateway").format(made)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["level"], found["logger"], found["process"]) == (
        "WARNING",
        "headgate.live.x",
        "gateway",
    )
    assert (found["message"], found["request_id"], found["pid"]) == (
        "it broke",
        "abc-1",
        os.getpid(),
    )
    assert found["status"] == 200
    assert found["exc"].startswith("Traceback (most recent call last)")
    assert re.fullmatch(r"[-\d]+T[:\d]+\.\d{3}Z", found["ts"])


@pytest.mark.parametrize("character", ["A", "\x00", "\U0001f600"])
def test_an_exception_that_holds_a_tensor_fits_a_line(character: str) -> None:
    """Its line is not truncated, which would break JSON; the end of the text is in it, too."""
    made = with_trace(character * 1_000_000 + "the end")
    made.msg = character * 1_000_000
    line = JsonFormatter("worker").format(made)
    assert len(line.encode()) < CHUNK_BYTES_MAX
    found = json.loads(line)
    assert found["exc"].startswith("Traceback") and found["exc"].endswith("the end")
    assert "characters ..." in found["message"]
    made.msg = "it broke"
    text = TextFormatter("worker").format(made)
    assert len(text.encode()) < CHUNK_BYTES_MAX
    assert text.endswith("the end")


def test_repetitions_are_suppressed_and_counted() -> None:
    repeats = RepeatLimiter()
    passed = [repeats.allows(record("%d", number), 0.0) for number in range(100)]
    assert passed == [True] * REPEATS_MAX + [False] * (100 - REPEATS_MAX)
    assert repeats.allows(record("something else"), 0.0)
    assert repeats.expired(REPEATS_S - 1) == []
    (reported,) = repeats.expired(REPEATS_S)
    assert reported.getMessage() == f"suppressed {100 - REPEATS_MAX} repetitions: %d"
    assert repeats.allows(record("%d", 1), REPEATS_S)
    assert repeats.expired(2 * REPEATS_S) == []


def test_last_record_before_suppression_has_a_note() -> None:
    repeats = RepeatLimiter()
    made = [record("again") for _ in range(REPEATS_MAX)]
    for each in made:
        repeats.allows(each, 0.0)
    lines = [TextFormatter("gateway").format(each) for each in made]
    assert lines[-1].endswith("again (repetitions are suppressed and counted for 10 s)")
    assert lines[-2].endswith("again")


PROGRAM = """
import logging, sys, threading, time, warnings
from types import SimpleNamespace
from headgate.live.telemetry import logs
logs.configure(SimpleNamespace(log_level={level!r}, log_format={format!r}), "gateway")
log = logging.getLogger("headgate.live.thing")
{body}
logs.flush()
"""


def run(
    body: str, *, level: str = "info", format: str = "text", **more: object
) -> subprocess.CompletedProcess[str]:
    """Run code in a process with configured logging."""
    program = PROGRAM.format(level=level, format=format, body=body)
    options: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-c", program], text=True, timeout=60, check=False, **options
    )


def lines_of(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str, str]]:
    """Return level, logger and text of each line."""
    found = [TEXT.fullmatch(line) for line in done.stderr.splitlines()]
    return [(m["level"], m["logger"], m["text"]) for m in found if m is not None]


@pytest.mark.parametrize(
    ("level", "levels"),
    [
        ("debug", ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ("warning", ["WARNING", "ERROR"]),
        ("error", ["ERROR"]),
    ],
)
def test_log_levels(level: str, levels: list[str]) -> None:
    body = "for each in ('debug', 'info', 'warning', 'error'): getattr(log, each)(each)"
    assert [line[0] for line in lines_of(run(body, level=level))] == levels


def test_other_loggers_are_logged_from_warnings_on() -> None:
    body = (
        "logging.getLogger('somebody').info('not this')\n"
        "logging.getLogger('somebody').warning('this')\n"
        "warnings.warn('and this')\n"
        "logging.getLogger('headgate.access').info('this too')\n"
    )
    lines = lines_of(run(body, level="debug"))
    assert [(level, name) for level, name, _ in lines] == [
        ("WARNING", "somebody"),
        ("WARNING", "py.warnings"),
        ("INFO", "headgate.access"),
    ]
    quiet = lines_of(run(body, level="error"))
    # the access log has an option of its own
    assert [name for _, name, _ in quiet] == ["headgate.access"]


def test_functions_cannot_break_logging() -> None:
    body = (
        "logging.basicConfig(force=True, stream=sys.stdout, level=10)\nlog.warning('still heard')\n"
    )
    assert lines_of(run(body)) == [("WARNING", "headgate.live.thing", "still heard")]


def test_mismatched_log_arguments() -> None:
    class_body = "class Odd:\n    def __str__(self): raise ValueError('never')\n"
    done = run(class_body + "log.error('%d', 'x')\nlog.error('%s', Odd())\nprint('goes on')")
    assert done.stdout == "goes on\n"
    assert done.stderr.count("cannot be formatted") == 2
    assert "Logging error" not in done.stderr


def test_uncaught_exceptions_are_logged() -> None:
    body = (
        "thread = threading.Thread(target=lambda: 1 / 0, name='t')\n"
        "thread.start()\n"
        "thread.join()\n"
        "raise KeyError('at last')\n"
    )
    done = run(body, format="json")
    assert done.returncode == 1
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert first["message"] == "uncaught exception in thread t: ZeroDivisionError"
    assert (second["level"], second["message"]) == (
        "CRITICAL",
        "uncaught exception, the process exits: KeyError",
    )
    assert "at last" in second["exc"]


def test_flush_before_exit() -> None:
    body = (
        "for number in range(REPEATS + 5): log.warning('again')\n"
        "for number in range(1000): log.info('%d', number)\n"
        "print('no line', end='')\n"
    ).replace("REPEATS", str(REPEATS_MAX))
    done = run(body)
    assert done.stdout == "no line"
    texts = [text for _, _, text in lines_of(done)]
    assert len(texts) == REPEATS_MAX + 1_000 + 1
    assert texts[-1] == "suppressed 5 repetitions: again"


def test_stdout_and_stderr_to_one_file_stay_in_order() -> None:
    body = "for number in range(50):\n    print(number)\n    log.info('%d', number)\n"
    done = run(body, stderr=subprocess.STDOUT)
    numbers = [int(line.rsplit(" ", 1)[-1]) for line in done.stdout.splitlines()]
    assert numbers == [number for number in range(50) for _ in range(2)]


NOISE = (
    "for number in range(3000):\n"
    "    log.error('x' * 1000)\n"
    "    log.info('y' * 1000)\n"
    "    print('z' * 1000, flush=True)\n"
    "    sys.stderr.write('w' * 1000 + chr(10))\n"
    "from pathlib import Path\n"
    "Path({path!r}).write_text('came to its end')\n"
)


@pytest.mark.parametrize("where", ["closed", "unread", "full"])
def test_process_survives_the_loss_of_its_output(tmp_path: Path, where: str) -> None:
    """A closed pipe, one that nobody reads, a full disk."""
    path = tmp_path / "end"
    read_fd, write_fd = os.pipe()
    if where == "closed":
        os.close(read_fd)
    if where == "full":
        os.close(write_fd)
        write_fd = os.open("/dev/full", os.O_WRONLY)
    try:
        done = run(NOISE.format(path=str(path)), stdout=write_fd, stderr=write_fd)
    finally:
        os.close(write_fd)
        if where != "closed":
            os.close(read_fd)
    assert path.read_text() == "came to its end"
    assert done.returncode == 0


def test_process_with_blocked_output_can_be_stopped(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    try:
        program = PROGRAM.format(
            level="info", format="text", body=NOISE.format(path=str(tmp_path / "end"))
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=write_fd, stderr=write_fd
        )
        assert process.wait(60) == 0
    finally:
        os.close(write_fd)
        os.close(read_fd)
    assert process.returncode != -signal.SIGPIPE
