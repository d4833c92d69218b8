"""A killed platform leaves no instance, no control group and no keys file."""

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
from platform_rig import Caller, eventually, is_running

from headgate.lambda_emulator import client_options
from headgate.lambda_emulator.cleanup_process import CleanupProcess, remove_control_group

# Starts a child process that would outlive the instance, and never responds.
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
    """The platform command in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    keys: Path
    cpu: str

    def groups(self) -> list[Path]:
        """Return the control groups of the platform, in any hierarchy."""
        name = f"headgate-{self.process.pid}-*"
        return [each for top in Path("/sys/fs/cgroup").glob("*") for each in top.glob(name)] + list(
            Path("/sys/fs/cgroup").glob(name)
        )

    def cleanup_processes(self) -> list[int]:
        """Return the cleanup processes of the platform."""
        platform = str(self.process.pid).encode()
        result = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                command = path.read_bytes().split(b"\0")
                is_cleanup = any(each.endswith(b"cleanup_process.py") for each in command)
                if is_cleanup and platform in command:
                    result.append(int(path.parent.name))
        return result


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
def test_cleanup_after_platform_is_killed(tmp_path: Path, cpu: str) -> None:
    """With a busy instance and an idle one, with and without cgroup quotas."""
    began = tmp_path / "began"
    with started(tmp_path, "--cpu", cpu) as platform:
        caller = Caller(client_options(platform.url))
        caller.create("idle")
        caller.create("busy", BUSY, Timeout=900)
        pids = [caller.invoke("idle", {}).body["pid"]]

        def call() -> None:
            with suppress(BotoCoreError):  # the connection breaks when the platform is killed
                caller.invoke("busy", {"began": str(began)})

        thread = threading.Thread(target=call)
        thread.start()
        assert eventually(began.exists)
        pids += [int(word) for word in began.read_text().split()]
        assert all(is_running(pid) for pid in pids) and len(pids) == 3
        assert bool(platform.groups()) == ("control group" in platform.cpu)
        assert platform.keys.is_file() and len(platform.cleanup_processes()) == 1
        platform.process.kill()
        platform.process.wait()
        thread.join()
        caller.boto.close()
        assert eventually(lambda: not any(is_running(pid) for pid in pids))
        assert eventually(lambda: not platform.groups())
        assert eventually(lambda: not platform.keys.exists())
        assert eventually(lambda: not platform.cleanup_processes())


def test_starting_instance_exits_when_platform_is_killed(tmp_path: Path) -> None:
    """The instance exits by itself, without the cleanup process."""
    with started(tmp_path) as platform:
        caller = Caller(client_options(platform.url))
        caller.create("f", "import time\ntime.sleep(600)\n")

        def call() -> None:
            with suppress(BotoCoreError):
                caller.invoke("f", {})

        thread = threading.Thread(target=call)
        thread.start()
        assert eventually(
            lambda: bool(_children(platform.process.pid) - set(platform.cleanup_processes()))
        )
        children = _children(platform.process.pid)
        os.kill(platform.cleanup_processes()[0], signal.SIGKILL)  # leave it to the instance
        platform.process.kill()
        thread.join()
        caller.boto.close()
    assert eventually(lambda: not any(is_running(pid) for pid in children))
    # Without the cleanup process, only the next platform would remove the groups.
    assert eventually(lambda: all(_is_removed(group) for group in platform.groups()))
    platform.keys.unlink(missing_ok=True)


def test_cleanup_process_survives_signals_to_the_process_group(tmp_path: Path) -> None:
    """A service manager signals all processes at once; the cleanup must still be complete."""
    with started(tmp_path) as platform:
        caller = Caller(client_options(platform.url))
        caller.create("f")
        pid = caller.invoke("f", {}).body["pid"]
        caller.boto.close()
        (cleanup,) = platform.cleanup_processes()
        for each in (cleanup, platform.process.pid):
            os.kill(each, signal.SIGTERM)
        assert platform.process.wait(60) == 0
        assert not is_running(pid) and not platform.groups() and not platform.keys.exists()
        assert not platform.cleanup_processes()


def test_unfinished_packages_are_removed(tmp_path: Path) -> None:
    """Closing the pipe alone starts the cleanup."""
    cleanup = CleanupProcess()
    (tmp_path / ".unfinished-1-a").mkdir()
    (tmp_path / "finished").mkdir()
    cleanup.notify("scratch", tmp_path / ".unfinished-1-")
    cleanup.close()
    assert [each.name for each in tmp_path.iterdir()] == ["finished"]


def test_platform_survives_a_killed_cleanup_process(tmp_path: Path) -> None:
    cleanup = CleanupProcess()
    cleanup._process.kill()
    cleanup._process.wait()
    cleanup.notify("started", 1)
    cleanup.close()


def _is_removed(group: Path) -> bool:
    remove_control_group(group)
    return not group.exists()


def _children(pid: int) -> set[int]:
    result = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(pid):
                result.add(int(path.parent.name))
    return result
