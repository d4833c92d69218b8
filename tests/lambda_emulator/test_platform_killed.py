"""A platform that is killed leaves nothing: no instance, no control group, no keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError
from platform_rig import Caller, eventually

from headgate.lambda_emulator import client_options
from headgate.lambda_emulator.cleanup_process import CleanupProcess, remove_control_group

# Works, has a child that would outlive it, and never answers.
BUSY = """
import os, subprocess, time
def handle(event, context):
    child = subprocess.Popen(("sleep", "600"))
    with open(event["began"] + ".part", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(event["began"] + ".part", event["began"])
    time.sleep(600)
"""


@dataclass
class Started:
    """The command in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    keys: Path
    cpu: str

    def groups(self) -> list[Path]:
        """The control groups that it has made, wherever groups are."""
        name = f"headgate-{self.process.pid}-*"
        return [each for top in Path("/sys/fs/cgroup").glob("*") for each in top.glob(name)] + list(
            Path("/sys/fs/cgroup").glob(name)
        )

    def janitors(self) -> list[int]:
        """Processes that were started to clean up after it."""
        wanted = str(self.process.pid).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                command = path.read_bytes().split(b"\0")
                is_cleanup = any(each.endswith(b"cleanup_process.py") for each in command)
                if is_cleanup and wanted in command:
                    found.append(int(path.parent.name))
        return found


@contextmanager
def started(tmp_path: Path, *options: str) -> Iterator[Started]:
    command = (sys.executable, "-m", "headgate", "lambda-local", "--port", "0", *options)
    server = subprocess.Popen(
        (*command, "--directory", tmp_path / "data"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    with server, server.stdout:
        first = server.stdout.readline()
        keys = next(line for line in server.stdout if line.startswith("  keys: "))
        try:
            yield Started(server, first.split()[1], Path(keys.split()[1]), first)
        finally:
            server.kill()


@pytest.mark.parametrize("cpu", ["auto", "affinity"])
def test_a_platform_that_is_killed(tmp_path: Path, cpu: str) -> None:
    """With a busy instance and an idle one. A quota is not there on every machine."""
    began = tmp_path / "began"
    with started(tmp_path, "--cpu", cpu) as platform:
        caller = Caller(client_options(platform.url))
        caller.create("idle")
        caller.create("busy", BUSY, Timeout=900)
        pids = [caller.invoke("idle", {}).body["pid"]]

        def call() -> None:
            with suppress(BotoCoreError):  # the connection ends with the platform
                caller.invoke("busy", {"began": str(began)})

        thread = threading.Thread(target=call)
        thread.start()
        assert eventually(began.exists)
        pids += [int(word) for word in began.read_text().split()]
        assert all(_runs(pid) for pid in pids) and len(pids) == 3
        assert bool(platform.groups()) == ("control group" in platform.cpu)
        assert platform.keys.is_file() and len(platform.janitors()) == 1
        platform.process.kill()
        platform.process.wait()
        thread.join()
        caller.boto.close()
        assert eventually(lambda: not any(_runs(pid) for pid in pids))
        assert eventually(lambda: not platform.groups())
        assert eventually(lambda: not platform.keys.exists())
        assert eventually(lambda: not platform.janitors())


def test_an_instance_that_starts_while_the_platform_is_killed(tmp_path: Path) -> None:
    """Nobody has been told of it yet: it notices by itself."""
    with started(tmp_path) as platform:
        caller = Caller(client_options(platform.url))
        caller.create("f", "import time\ntime.sleep(600)\n")

        def call() -> None:
            with suppress(BotoCoreError):
                caller.invoke("f", {})

        thread = threading.Thread(target=call)
        thread.start()
        assert eventually(lambda: bool(_children(platform.process.pid) - set(platform.janitors())))
        children = _children(platform.process.pid)
        os.kill(platform.janitors()[0], signal.SIGKILL)  # so it is left to the instance
        platform.process.kill()
        thread.join()
        caller.boto.close()
    assert eventually(lambda: not any(_runs(pid) for pid in children))
    # Nobody was left to remove it but the next platform.
    assert eventually(lambda: all(_is_removed(group) for group in platform.groups()))
    platform.keys.unlink(missing_ok=True)


def test_signals_that_end_a_platform_do_not_end_its_janitor_first(tmp_path: Path) -> None:
    """A service manager sends them to all processes at once; everything is gone afterwards."""
    with started(tmp_path) as platform:
        caller = Caller(client_options(platform.url))
        caller.create("f")
        pid = caller.invoke("f", {}).body["pid"]
        caller.boto.close()
        (janitor,) = platform.janitors()
        for each in (janitor, platform.process.pid):
            os.kill(each, signal.SIGTERM)
        assert platform.process.wait(60) == 0
        assert not _runs(pid) and not platform.groups() and not platform.keys.exists()
        assert not platform.janitors()


def test_what_was_not_unpacked_to_its_end(tmp_path: Path) -> None:
    """The janitor also hears of the end through the pipe alone."""
    janitor = CleanupProcess()
    (tmp_path / ".unfinished-1-a").mkdir()
    (tmp_path / "finished").mkdir()
    janitor.tell("scratch", tmp_path / ".unfinished-1-")
    janitor.close()
    assert [each.name for each in tmp_path.iterdir()] == ["finished"]


def test_a_janitor_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    janitor = CleanupProcess()
    janitor._process.kill()
    janitor._process.wait()
    janitor.tell("started", 1)
    janitor.close()


def _is_removed(group: Path) -> bool:
    remove_control_group(group)
    return not group.exists()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # that of a zombie is empty
    except OSError:
        return False


def _children(pid: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.add(int(path.parent.name))
    return found
