"""The command line as a process: exit status, pipes, terminals and tracebacks."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from cli_rig import KAAS, headgate

from headgate.cli import output as progress_module
from headgate.cli.output import Progress

SOURCE = Path(__file__).parents[3] / "src"
COMMAND = (sys.executable, "-m", "headgate")


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    return {**kept, "PYTHONPATH": str(SOURCE), "TERM": "xterm-256color", **extra}


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment(), check=False
    )


def on_a_terminal(*arguments: str, **extra: str) -> str:
    """Run with stdout on a terminal, and return what is printed."""
    reader, writer = pty.openpty()
    with subprocess.Popen([*COMMAND, *arguments], stdout=writer, env=environment(**extra)):
        os.close(writer)
        shown = b""
        try:
            while chunk := os.read(reader, 65_536):
                shown += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(reader)
    return shown.decode()


def test_bad_input_is_one_line_and_no_traceback() -> None:
    ended = process("simulate", "nosuch.yaml")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "headgate: error: nosuch.yaml: cannot be read: No such file or directory\n"
    )


def test_our_own_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(reference: str) -> None:
        raise ZeroDivisionError(reference)

    monkeypatch.setattr("headgate.cli.commands.check.load_app", break_down)
    with pytest.raises(ZeroDivisionError):
        headgate("check", KAAS)


def test_the_reader_may_close_the_pipe() -> None:
    """As in `headgate schema | head -0`."""
    command = [*COMMAND, "schema"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 141


@pytest.mark.parametrize("arguments", ["schema", "--help", f"check {KAAS}"])
def test_output_that_cannot_be_written_is_one_line(arguments: str) -> None:
    for target, reason in ((">/dev/full", "No space left on device"), (">&-", "stdout is closed")):
        ended = subprocess.run(
            f"{' '.join(COMMAND)} {arguments} {target}",
            shell=True,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
        message = f"headgate: error: the output cannot be written: {reason}\n"
        assert (ended.returncode, ended.stderr) == (2, message)


def test_bad_input_has_its_status_where_stderr_cannot_be_written() -> None:
    ended = subprocess.run(
        f"{' '.join(COMMAND)} check nosuch.yaml 2>/dev/full",
        shell=True,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 2


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def want_too_much(reference: str) -> None:
        raise MemoryError(reference)

    monkeypatch.setattr("headgate.cli.commands.check.load_app", want_too_much)
    ended = headgate("check", KAAS)
    assert ended.code == 2
    assert ended.err == "headgate: error: out of memory\n"


def test_colour_is_for_terminals_that_want_it() -> None:
    assert "\x1b[" in on_a_terminal("check", KAAS)
    assert "\x1b[" not in on_a_terminal("check", KAAS, NO_COLOR="1")
    assert "\x1b[" not in on_a_terminal("check", KAAS, TERM="dumb")
    assert "\x1b[" not in process("check", KAAS).stdout


def test_a_terminal_that_knows_only_ascii() -> None:
    shown = on_a_terminal("check", KAAS, PYTHONIOENCODING="ascii")
    assert "is valid" in shown


class FakeTerminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_appears_only_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_module, "_PATIENCE_S", 3600.0)
    with Progress("quick", 10) as progress:
        progress.update(5)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress_module, "_PATIENCE_S", 0.0)
    with Progress("slow", 10) as progress:
        progress._timer.join()
        progress.update(5)
        progress.describe("slower")
    assert "slow" in terminal.getvalue()


def test_there_is_no_progress_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("anything") as progress:
        progress.describe("something")
        progress.update(1)
    assert capsys.readouterr().err == ""


WAITS = """
import time
from headgate.cli.commands import schema
from headgate.cli.main import main

def wait(**options):
    try:
        print("started", flush=True)
        time.sleep(60)
    finally:
        print("ended", flush=True)

schema.command.callback = wait
main()
"""


@contextmanager
def waiting_command(first: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command that waits, after a line of Python, until it has started."""
    with subprocess.Popen(
        [sys.executable, "-c", first + WAITS, "schema"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_ends_what_it_has_started_when_it_is_terminated(number: signal.Signals) -> None:
    """1. A command has started a server, say. 2. A signal ends it. 3. It stops the server first."""
    with waiting_command(f"import signal; signal.signal({int(number)}, signal.SIG_DFL)") as process:
        assert process.stdout is not None
        process.send_signal(number)
        assert process.stdout.read() == "ended\n"
    assert process.returncode == 128 + number


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup: a terminal that is closed ends nothing."""
    with waiting_command("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert process.returncode == 128 + signal.SIGTERM
