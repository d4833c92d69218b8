"""The server under test: a process that is awaited, measured, and stopped with all its children.

Also peers as data, and their virtual environments.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final

import msgspec

import headgate
from headgate.config.source import read_yaml
from headgate.core.errors import ConfigError
from headgate.lab.bench.live.load_driver import is_correct
from headgate.loadgen.requests import Body, fetch, parse_address

_START_S: Final = 90.0
_STOP_S: Final = 30.0
_POLL_S: Final = 0.01
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_INSTALL_S: Final = 1_800
_MARK: Final = "installed"  # file with the requirements that were installed


class PeerRoute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Path and body encoding of requests for one model."""

    path: str
    body: str
    command: tuple[str, ...] = ()


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server and its configuration. Peers of one `group` are variants of the same server."""

    name: str
    group: str
    folder: Path
    command: tuple[str, ...] = ()
    models: dict[str, PeerRoute] = {}
    environment: dict[str, str] = {}
    is_ours: bool = False
    is_baseline: bool = False

    @property
    def requirements(self) -> Path | None:
        """Requirements of its virtual environment; None: it runs in the current environment."""
        path = self.folder / "requirements.txt"
        return path if path.exists() else None


def read_peers(path: Path) -> list[Peer]:
    """Read the list of peers. Raises `ConfigError`."""
    try:
        entries = msgspec.convert(read_yaml(str(path)), dict[str, dict[str, object]])
        peers = [{"name": name, "group": name, **entry} for name, entry in entries.items()]
        return msgspec.convert(
            peers, list[Peer], dec_hook=lambda _, folder: path.parent / str(folder)
        )
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=str(path)) from None


class ServerError(Exception):
    """A server cannot be measured; the message is one line."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server process that responds correctly."""

    pid: int
    url: str  # with the path
    first_response_s: float  # since the start of the process

    def memory_mib(self) -> float:
        """Return the resident memory of all its processes; shared pages count for each."""
        pages = 0
        for pid in [self.pid, *descendants(self.pid)]:
            with suppress(OSError, IndexError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * _PAGE_BYTES / 2**20


@contextmanager
def server_process(
    command: Sequence[str],
    ready_url: Callable[[str], str | None],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
) -> Iterator[Running]:
    """Run a server inside the block. Raises `ServerError`.

    `ready_url` is called with the server's output until it returns the URL of the ready server.
    """
    with TemporaryFile() as output:
        began_s = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (url := ready_url(_text(output))) is None:
                if process.poll() is not None:
                    last = _last_line(_text(output))
                    raise ServerError(f"exited with {process.returncode}: {last}")
                if time.monotonic() - began_s > _START_S:
                    raise ServerError(f"does not start: {_last_line(_text(output))}")
                time.sleep(_POLL_S)
            yield Running(process.pid, url, time.monotonic() - began_s)
        finally:
            _stop(process, stop_signal)


@contextmanager
def running(
    peer: Peer, model: str, python: Path, models: Path, body: Body, expected: list[float]
) -> Iterator[Running]:
    """Serve a model by a peer inside the block. Raises `ServerError`."""
    route = peer.models[model]
    port = _free_ports(3)
    placeholders = {
        "python": str(python),
        "bin": str(python.parent),
        "folder": str(peer.folder.absolute()),
        "models": str(models.absolute()),
        "model": model,
        "port": str(port),
        "port_2": str(port + 1),
        "port_3": str(port + 2),
    }
    command = [part.format(**placeholders) for part in route.command or peer.command]
    own = {key: value.format(**placeholders) for key, value in peer.environment.items()}
    address = parse_address(f"http://127.0.0.1:{port}{route.path}")

    def ready_url(output: str) -> str | None:
        try:
            status, content = fetch(address, "POST", address.path, body, timeout_s=5.0)
        except OSError:  # nothing listens yet
            return None
        if status == 200 and not is_correct(content, expected):
            last = _last_line(output)
            problem = f"no correct response: status 200: {content[:150]!r}; output: {last}"
            raise ServerError(problem)
        return f"http://127.0.0.1:{port}{route.path}" if status == 200 else None

    environment = {**_base_environment(peer), **own}
    with server_process(command, ready_url, cwd=peer.folder, env=environment) as server:
        yield server


def descendants(pid: int) -> list[int]:
    result: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with suppress(OSError):
                    children = [int(child) for child in (task / "children").read_text().split()]
                    result += children
                    waiting += children
    return result


def _stop(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """Stop a process and its descendants: first by a signal that it handles, then by SIGKILL."""
    others = _start_times([process.pid, *descendants(process.pid)])
    with suppress(ProcessLookupError):
        process.send_signal(first)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    process.kill()
    process.wait()
    # Kill descendants that are still the same process (PIDs are reused), and wait for their exit,
    # which keeps them out of the next measurement.
    end_s = time.monotonic() + _STOP_S
    while time.monotonic() < end_s:
        left = [
            pid for pid, start_time in _start_times(others).items() if others[pid] == start_time
        ]
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _start_times(pids: Iterable[int]) -> dict[int, str]:
    """Return the start time of each running process, which distinguishes it after PID reuse."""
    start_times = {}
    for pid in pids:
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":  # not a zombie
                start_times[pid] = fields[19]
    return start_times


def _text(output: IO[bytes]) -> str:
    """Return what a server has written. Its own file position is shared, so this does not seek."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), size, 0).decode(errors="replace")


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:200] if lines else "nothing"


def _base_environment(peer: Peer) -> dict[str, str]:
    """Return this process's environment without variables that affect another Python."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if peer.requirements is None:
        variables["PYTHONPATH"] = str(Path(headgate.__file__).parents[1])
    return variables


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with suppress(OSError, OverflowError):
                for offset in range(1, count):
                    with socket.socket() as other:
                        other.bind(("127.0.0.1", port + offset))
                return port


class NotInstalledError(Exception):
    """A peer cannot be installed; the message is one line."""


def python_of(requirements: Path | None, cache: Path, name: str) -> Path:
    """Return the Python of a peer's virtual environment, created on first use and cached.

    Raises `NotInstalledError`.
    """
    if requirements is None:
        return Path(sys.executable)
    home = (cache / name).absolute()
    python, mark = home / "bin" / "python", home / _MARK
    requirements_text = requirements.read_text(encoding="utf-8")
    if mark.exists() and mark.read_text(encoding="utf-8") == requirements_text:
        return python
    venv.create(home, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run(
            [*pip, "install", "--requirement", str(requirements.absolute())],
            capture_output=True,
            text=True,
            check=True,
            timeout=_INSTALL_S,
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError((lines or ["pip failed"])[-1][:200]) from None
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"pip took longer than {_INSTALL_S} s") from None
    mark.write_text(requirements_text, encoding="utf-8")
    return python
