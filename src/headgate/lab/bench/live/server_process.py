"""One contestant's server: started, asked until it answers rightly, weighed, and ended for sure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final

import msgspec

import headgate
from headgate.config.source import read_yaml
from headgate.core.errors import ConfigError
from headgate.lab.bench.live.load_driver import is_right
from headgate.loadgen import Body, parse_address
from headgate.loadgen.requests import fetch

# Who takes part, as data: how it is started, where it listens, what it is sent.


class PeerRoute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one model is asked."""

    path: str
    body: str
    command: tuple[str, ...] = ()


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    folder: str
    models: dict[str, PeerRoute]
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    peer: str | None = None
    is_ours: bool = False
    is_baseline: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to serve the models. Ways of the same `peer` are its own to choose from."""

    name: str
    peer: str
    folder: Path
    command: tuple[str, ...]
    models: dict[str, PeerRoute]
    environment: dict[str, str] = field(default_factory=dict)
    is_ours: bool = False
    is_baseline: bool = False

    @property
    def requirements(self) -> Path | None:
        """What its own environment needs; None: it runs in ours."""
        path = self.folder / "requirements.txt"
        return path if path.exists() else None


def read_contestants(path: Path) -> list[Peer]:
    """Read the list of who takes part."""
    try:
        entries = msgspec.convert(read_yaml(str(path)), dict[str, _Entry])
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=str(path)) from None
    return [
        Peer(
            name=name,
            peer=entry.peer or name,
            folder=path.parent / entry.folder,
            command=entry.command,
            models=entry.models,
            environment=entry.environment,
            is_ours=entry.is_ours,
            is_baseline=entry.is_baseline,
        )
        for name, entry in entries.items()
    ]


_START_S: Final = 90.0
_STOP_S: Final = 15.0
_POLL_S: Final = 0.01
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ServerError(Exception):
    """Why a contestant cannot be measured, in one line."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers rightly."""

    pid: int
    url: str  # with the path
    first_answer_s: float  # since the command was given

    def memory_mib(self) -> float:
        """What all its processes hold, pages that they share counted for each."""
        pages = 0
        for pid in [self.pid, *descendants(self.pid)]:
            with suppress(OSError, IndexError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * _PAGE_BYTES / 2**20


@contextmanager
def running(
    contestant: Peer,
    model: str,
    python: Path,
    models: Path,
    body: Body,
    expected: list[float],
) -> Iterator[Running]:
    """Serve a model until the end of the block. Raises ServerError."""
    route = contestant.models[model]
    port = _free_ports(3)
    filled = {
        "python": str(python),
        "bin": str(python.parent),
        "folder": str(contestant.folder.absolute()),
        "models": str(models.absolute()),
        "model": model,
        "port": str(port),
        "port_2": str(port + 1),
        "port_3": str(port + 2),
    }
    command = [part.format(**filled) for part in route.command or contestant.command]
    environment = {k: v.format(**filled) for k, v in contestant.environment.items()}
    url = f"http://127.0.0.1:{port}{route.path}"
    with TemporaryFile() as output:
        began_s = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=contestant.folder,
            env={**_surroundings(contestant), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _await_answer(process, url, body, expected, began_s, output)
            yield Running(process.pid, url, time.monotonic() - began_s)
        finally:
            _end(process)


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with suppress(OSError):
                    children = [int(child) for child in (task / "children").read_text().split()]
                    found += children
                    waiting += children
    return found


def _await_answer(
    process: subprocess.Popen[bytes],
    url: str,
    body: Body,
    expected: list[float],
    began_s: float,
    output: IO[bytes],
) -> None:
    address = parse_address(url)
    last = "nothing listens"
    while time.monotonic() - began_s < _START_S:
        if process.poll() is not None:
            raise ServerError(f"ended with {process.returncode}: {_last_line(output)}")
        try:
            status, content = fetch(address, "POST", address.path, body, timeout_s=5.0)
        except OSError:
            time.sleep(_POLL_S)
            continue
        if status == 200 and is_right(content, expected):
            return
        last = f"answers {status}: {content[:150]!r}"
        if status == 200:
            break
        time.sleep(_POLL_S)
    raise ServerError(f"no right answer: {last}; it says: {_last_line(output)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and whatever it started: politely, then not."""
    others = _births([process.pid, *descendants(process.pid)])
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    process.kill()
    process.wait()
    # Those that outlived it, as long as they are still the same: numbers are used again. Waiting
    # for their end keeps them out of the next one's measurement.
    end_s = time.monotonic() + _STOP_S
    while time.monotonic() < end_s:
        left = [pid for pid, birth in _births(others).items() if others[pid] == birth]
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _births(pids: Iterable[int]) -> dict[int, str]:
    """When each process that still runs began: that tells it from a later one of its number."""
    births = {}
    for pid in pids:
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":  # ended, only not yet looked after
                births[pid] = fields[19]
    return births


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "nothing"


def _surroundings(contestant: Peer) -> dict[str, str]:
    """Our environment, without what would lead another Python to our packages."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if contestant.requirements is None:
        kept["PYTHONPATH"] = str(Path(headgate.__file__).parents[1])
    return kept


def _free_ports(count: int) -> int:
    """Return the first of so many neighbouring ports that are free now."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with suppress(OSError, OverflowError):
                for offset in range(1, count):
                    with socket.socket() as other:
                        other.bind(("127.0.0.1", port + offset))
                return port


# An environment of its own for each peer, made once and kept.


_TIMEOUT_S: Final = 1_800
_MARK: Final = "installed"  # holds the requirements that were installed


class NotInstalledError(Exception):
    """Why a peer cannot take part, in one line."""


def python_of(requirements: Path | None, cache: Path, name: str) -> Path:
    """Return the Python that runs a contestant, with what it needs installed.

    Raises NotInstalledError.
    """
    if requirements is None:
        return Path(sys.executable)
    home = (cache / name).absolute()
    python, mark = home / "bin" / "python", home / _MARK
    wanted = requirements.read_text(encoding="utf-8")
    if mark.exists() and mark.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(home, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run(
            [*pip, "install", "--requirement", str(requirements.absolute())],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError((lines or ["pip failed"])[-1][:200]) from None
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"pip took longer than {_TIMEOUT_S} s") from None
    mark.write_text(wanted, encoding="utf-8")
    return python
