"""A process that cleans up after a platform that cannot do it itself, because it was killed.

The platform starts it and tells it through a pipe what there is: the process groups of instances,
the control group, the file with the keys. When the platform is gone, however it went, the janitor
ends those processes, removes what was left, and ends. It runs this very file, with the standard
library alone, and stays out of the way of signals that are meant for the platform.
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

_PATIENCE_S: Final = 10.0  # with processes that have been killed
_PAUSE_S: Final = 0.02
_STDIN: Final = 0


@final
class CleanupProcess:
    """The platform's end of the pipe."""

    def __init__(self) -> None:
        """Start the process. Raises `OSError`."""
        file = str(Path(__file__).resolve())
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", file, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what a terminal sends to the platform is not for it
            cwd="/",
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)  # whatever it does, the platform goes on

    def tell(self, kind: Kind, value: object) -> None:
        """Say what there is to clean up, or that there is no more of it."""
        line = json.dumps([kind, str(value)]) + "\n"
        with suppress(OSError):  # it was killed: instances still end by themselves
            os.write(self._pipe.fileno(), line.encode())

    def close(self) -> None:
        """Have it look for what is left, and wait until it has ended."""
        with suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(2 * _PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def kill_control_group(group: Path) -> None:
    """Kill every process in a control group and in those below it, whichever version it is."""
    try:
        (group / "cgroup.kill").write_text("1")
    except OSError:  # older than Linux 5.14, or version 1
        for each in (group, *group.glob("*/")):
            _kill_members(each)


def remove_control_group(group: Path) -> None:
    """Remove a group with those inside of it, unless a process is in one."""
    for each in (*group.glob("*/"), group):
        with suppress(OSError):
            each.rmdir()


def remove_keys(path: Path, platform: str) -> None:
    """Remove the file with a platform's keys, unless it is by now that of another."""
    with suppress(OSError):
        unfinished_keys(path, platform).unlink()
    with suppress(OSError, ValueError):
        if json.loads(path.read_bytes()).get("platform") == platform:
            path.unlink()


def unfinished_keys(path: Path, platform: str) -> Path:
    """Where keys are written before they are put in their place."""
    return path.with_name(f".{path.name}.{platform}")


def _kill_members(group: Path) -> None:
    with suppress(OSError):
        for line in (group / "cgroup.procs").read_text().split():
            if int(line) not in (0, os.getpid()):  # 0 is one that we cannot see
                with suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)


@final
class _Left:
    """What there is to clean up, as far as the platform has told."""

    def __init__(self) -> None:
        self.process_groups: set[int] = set()
        self.paths: dict[str, str] = {}

    def hear(self, line: bytes) -> None:
        kind, value = json.loads(line)
        if kind == "started":
            self.process_groups.add(int(value))
        elif kind == "ended":
            self.process_groups.discard(int(value))
        else:
            self.paths[kind] = value

    def clean_up(self) -> None:
        """Remove everything; try again for a while where a process has to die first."""
        if "keys" in self.paths:
            remove_keys(Path(self.paths["keys"]), self.paths["platform"])
        end_s = time.monotonic() + _PATIENCE_S
        while self._is_left() and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
        if "scratch" in self.paths:
            scratch = Path(self.paths["scratch"])
            for unfinished in scratch.parent.glob(f"{scratch.name}*"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def _is_left(self) -> bool:
        for leader in list(self.process_groups):
            try:
                os.killpg(leader, signal.SIGKILL)
            except OSError:  # there is none of that number any more
                self.process_groups.discard(leader)
        group = Path(self.paths["control_group"]) if "control_group" in self.paths else None
        if group is not None:
            kill_control_group(group)
            remove_control_group(group)
        return bool(self.process_groups) or (group is not None and group.exists())


def _watch(parent: int, left: _Left) -> None:
    """Listen until the platform has gone or has closed the pipe."""
    poll = select.poll()
    poll.register(_STDIN, select.POLLIN)
    # The pipe stays open if the platform's process was copied (forked): its own end is certain.
    with suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(parent), select.POLLIN)
    os.set_blocking(_STDIN, False)
    heard = b""
    is_over = False
    while not is_over:
        is_over = os.getppid() != parent or any(fd != _STDIN for fd, _ in poll.poll())
        with suppress(BlockingIOError):
            while said := os.read(_STDIN, 65_536):
                *lines, heard = (heard + said).split(b"\n")
                for line in lines:
                    left.hear(line)
            is_over = True  # the pipe is closed


def main() -> None:
    """Wait for the end of the platform, whose process is the argument, and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    left = _Left()
    _watch(int(sys.argv[1]), left)
    left.clean_up()


if __name__ == "__main__":
    main()
