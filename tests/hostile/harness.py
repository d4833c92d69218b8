"""Tools for attacks on a real server: a bystander client, and measurements of processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
DEADLINE_MS = 100.0
FUNCTIONS = '''
import ctypes
import os
import time

import numpy as np

from headgate.functions import Model


class Numbers(Model):
    """Doubles its input; subclasses misbehave on some values."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def __init__(self, takes_s=0.0):
        self.takes_s = takes_s

    def predict(self, batch):
        time.sleep(self.takes_s)
        for value in batch["x"]:
            self.check(float(value))
        return {"y": batch["x"] * 2}

    def check(self, value):
        pass


class Unloadable(Numbers):
    def load(self):
        time.sleep(0.2)  # as if reading weights
        raise RuntimeError("the weights are missing")


class Segfaults(Numbers):
    def check(self, value):
        if value == 666:
            ctypes.string_at(0)


class Raises(Numbers):
    def check(self, value):
        if value == 666:
            raise ArithmeticError("of all numbers, this one")


class Halves(Model):
    """FP16 in, FP16 out: at least four bytes of JSON for two bytes of data."""

    inputs = {"x": "FP16[-1, -1]"}
    outputs = {"y": "FP16[-1, -1]"}

    def predict(self, batch):
        return {"y": batch["x"]}


class Rows(Model):
    inputs = {"x": "FP32[-1, -1]"}
    outputs = {"y": "FP32[-1]"}

    def predict(self, batch):
        return {"y": batch["x"][:, 0]}
'''


def write_app(directory: Path, app: str) -> Path:
    """Write an application beside `misdeeds.py`, which has the functions above; the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "misdeeds.py").write_text(FUNCTIONS)
    (directory / "app.yaml").write_text(app)
    return directory


def write_certificate(directory: Path) -> None:
    """Write a self-signed `cert.pem` and its `key.pem` for 127.0.0.1."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        cwd=directory,
        check=True,
        capture_output=True,
    )


@dataclass(frozen=True)
class Row:
    """One request of a bystander."""

    due_s: float  # on the monotonic clock
    status: int  # 0: no response
    latency_ms: float  # from when it was due
    error: str  # timeout, refused, reset, closed (before a response), cut (within one); or empty


@dataclass(frozen=True)
class BystanderResults:
    """The results of a bystander's requests."""

    rows: tuple[Row, ...]
    deadline_ms: float

    def between(self, start_s: float, end_s: float) -> BystanderResults:
        """The requests that were due between two times."""
        rows = tuple(row for row in self.rows if start_s <= row.due_s < end_s)
        return BystanderResults(rows, self.deadline_ms)

    @property
    def statuses(self) -> Counter[int]:
        """Responses by status; 0 is none."""
        return Counter(row.status for row in self.rows)

    @property
    def errors(self) -> Counter[str]:
        """Requests without a response, by error."""
        return Counter(row.error for row in self.rows if row.error)

    @property
    def share_ok(self) -> float:
        """The share of requests with status 200."""
        return self.statuses[200] / max(1, len(self.rows))

    @property
    def share_in_time(self) -> float:
        """The share of requests with status 200 before their deadline."""
        in_time = [r for r in self.rows if r.status == 200 and r.latency_ms <= self.deadline_ms]
        return len(in_time) / max(1, len(self.rows))

    @property
    def resets(self) -> int:
        """Requests whose connection ended before their response was complete."""
        return sum(self.errors[name] for name in ("reset", "closed", "cut"))

    def percentile_ms(self, percent: float) -> float:
        """A percentile of the latency of all requests, failed ones included (nearest rank)."""
        latencies_ms = sorted(row.latency_ms for row in self.rows)
        if not latencies_ms:
            return math.nan
        return latencies_ms[max(0, math.ceil(len(latencies_ms) * percent / 100) - 1)]

    def __str__(self) -> str:
        percentiles = ", ".join(f"p{p} {self.percentile_ms(p):.0f} ms" for p in (50, 99, 100))
        return (
            f"{len(self.rows)} requests, {self.share_in_time:.2%} in time, {percentiles}; "
            f"{dict(self.statuses)} {dict(self.errors)}"
        )


class Bystander:
    """A well-behaved client in a process of its own, from entering the context to `stop`.

    with Bystander(served.url, "plain") as bystander:
        attack()
        results = bystander.stop()
    assert results.share_in_time > 0.99
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        rate_per_s: float = 60.0,
        deadline_ms: float = DEADLINE_MS,
        sends_deadline: bool = True,
        timeout_s: float = 10.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        own = {"X-Request-Timeout-Ms": f"{deadline_ms:g}"} if sends_deadline else {}
        self._deadline_ms = deadline_ms
        self._timeout_s = timeout_s
        settings = {
            "url": url,
            "model": model,
            "rate_per_s": rate_per_s,
            "timeout_s": timeout_s,
            "headers": {**own, **(headers or {})},
        }
        script = str(Path(__file__).with_name("bystander.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "sending\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def stop(self) -> BystanderResults:
        """Send no more, wait for the responses, and return the results."""
        output, _ = self._process.communicate(timeout=self._timeout_s + 60)
        rows = [Row(*json.loads(line)) for line in output.splitlines()]
        return BystanderResults(tuple(sorted(rows, key=lambda row: row.due_s)), self._deadline_ms)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it does not exist."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def descendants(pid: int) -> list[int]:
    """Ids of a process and its descendants that are running."""
    found, to_visit = [], [pid]
    while to_visit:
        at = to_visit.pop()
        if is_running(at):
            found.append(at)
        for path in Path(f"/proc/{at}/task").glob("*/children"):
            try:
                to_visit += [int(word) for word in path.read_text().split()]
            except OSError:
                continue  # the process has ended meanwhile
    return found


def marked_processes(mark: str) -> list[int]:
    """Running processes that inherited an environment variable, whatever their parent is.

    Finds processes that a server has left behind: see `Served.mark`.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_ours = mark.encode() in path.read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        if is_ours and is_running(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes that still exist."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def run_directories(pids: Iterable[int]) -> set[Path]:
    """The run directories in the command lines of a server's processes."""
    found = set()
    for pid in pids:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        paths = (Path(argument) for argument in arguments if "/headgate-" in argument)
        found |= {path for path in paths if path.is_dir()}
    return found


class PeakMemory:
    """The peak memory of a set of processes, sampled in a thread, and their ids.

    with PeakMemory(served.gateways) as peak:
        attack()
    assert peak.bytes_max < 1 << 30
    """

    def __init__(self, pids: Callable[[], Iterable[int]], every_s: float = 0.01) -> None:
        self._pids = pids
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.bytes_first = 0
        self.bytes_max = 0
        self.pids_sampled: set[int] = set()

    def __enter__(self) -> Self:
        self.bytes_first = self._measure()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._measure()
            except OSError:
                continue  # a process ended meanwhile

    def _measure(self) -> int:
        pids = list(self._pids())
        self.pids_sampled.update(pids)
        held_bytes = sum(map(rss_bytes, pids))
        self.bytes_max = max(self.bytes_max, held_bytes)
        return held_bytes
