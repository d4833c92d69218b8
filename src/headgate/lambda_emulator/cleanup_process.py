"""A helper process that cleans up after a platform that was killed and cannot do so itself.

The platform starts the process and reports its resources through a pipe: the process groups of
instances, the control group, the file with the keys. When the platform has exited, for whatever
reason, the cleanup process kills those process groups, removes the files, and exits. The process
runs this file, imports the standard library only, and ignores signals meant for the platform.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, TypeAlias, final

Kind: TypeAlias = Literal["started", "ended", "control_group", "keys", "platform", "scratch"]

_KILL_TIMEOUT_S: Final = 10.0  # to wait for processes that have been killed
_PAUSE_S: Final = 0.02
_STDIN: Final = 0


@final
class CleanupProcess:
    """The platform's handle of its cleanup process."""

    def __init__(self) -> None:
        """Start the process. Raises `OSError`."""
        file = str(Path(__file__).resolve())
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", file, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal go to the platform only
            cwd="/",
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)  # a stuck process must not block the platform

    def notify(self, kind: Kind, value: object) -> None:
        """Report a resource to clean up, or (`ended`) that a process group is gone."""
        line = json.dumps([kind, str(value)]) + "\n"
        with suppress(OSError):  # the process was killed: instances still exit by themselves
            os.write(self._pipe.fileno(), line.encode())

    def close(self) -> None:
        """Close the pipe, which starts the cleanup, and wait until the process has exited."""
        with suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(2 * _KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def kill_control_group(group: Path) -> None:
    """Kill every process in a control group (version 1 or 2) and in its subgroups."""
    try:
        (group / "cgroup.kill").write_text("1")
    except OSError:  # older than Linux 5.14, or version 1
        for each in (group, *group.glob("*/")):
            _kill_members(each)


def remove_control_group(group: Path) -> None:
    """Remove a control group and its subgroups, except those that still contain a process."""
    for each in (*group.glob("*/"), group):
        with suppress(OSError):
            each.rmdir()


def remove_keys(path: Path, platform: str) -> None:
    """Remove the keys file of a platform, unless another platform has overwritten it."""
    with suppress(OSError):
        unfinished_keys(path, platform).unlink()
    with suppress(OSError, ValueError):
        if json.loads(path.read_bytes()).get("platform") == platform:
            path.unlink()


def unfinished_keys(path: Path, platform: str) -> Path:
    """Return the temporary path of a keys file while it is being written."""
    return path.with_name(f".{path.name}.{platform}")


def _kill_members(group: Path) -> None:
    with suppress(OSError):
        for line in (group / "cgroup.procs").read_text().split():
            if int(line) not in (0, os.getpid()):  # 0: a process outside our PID namespace
                with suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)


@final
class _Leftovers:
    """The resources to clean up, as reported by the platform."""

    def __init__(self) -> None:
        self.process_groups: set[int] = set()
        self.paths: dict[str, str] = {}

    def on_message(self, line: bytes) -> None:
        kind, value = json.loads(line)
        if kind == "started":
            self.process_groups.add(int(value))
        elif kind == "ended":
            self.process_groups.discard(int(value))
        else:
            self.paths[kind] = value

    def clean_up(self) -> None:
        """Remove everything; retry for a while, because processes need time to die."""
        if "keys" in self.paths:
            remove_keys(Path(self.paths["keys"]), self.paths["platform"])
        end_s = time.monotonic() + _KILL_TIMEOUT_S
        while self._has_leftovers() and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
        if "scratch" in self.paths:
            scratch = Path(self.paths["scratch"])
            for unfinished in scratch.parent.glob(f"{scratch.name}*"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def _has_leftovers(self) -> bool:
        for leader in list(self.process_groups):
            try:
                os.killpg(leader, signal.SIGKILL)
            except OSError:  # the process group does not exist any more
                self.process_groups.discard(leader)
        group = Path(self.paths["control_group"]) if "control_group" in self.paths else None
        if group is not None:
            kill_control_group(group)
            remove_control_group(group)
        return bool(self.process_groups) or (group is not None and group.exists())


def _watch(parent: int, leftovers: _Leftovers) -> None:
    """Read messages until the platform has exited or has closed the pipe."""
    poll = select.poll()
    poll.register(_STDIN, select.POLLIN)
    # A forked child of the platform keeps the pipe open, so also watch the process itself.
    with suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(parent), select.POLLIN)
    os.set_blocking(_STDIN, False)
    pending = b""
    has_ended = False
    while not has_ended:
        has_ended = os.getppid() != parent or any(fd != _STDIN for fd, _ in poll.poll())
        with suppress(BlockingIOError):
            while chunk := os.read(_STDIN, 65_536):
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    leftovers.on_message(line)
            has_ended = True  # end of file: the pipe is closed


def main() -> None:
    """Wait until the platform, whose process ID is the argument, has exited; then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leftovers = _Leftovers()
    _watch(int(sys.argv[1]), leftovers)
    leftovers.clean_up()


if __name__ == "__main__":
    main()
