"""A probe, as the profiler sees it: a process of its own on pinned cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from time import monotonic_ns
from types import TracebackType
from typing import Final, Self, final

import msgspec
from msgspec import Struct

from headgate.core.errors import ConfigError
from headgate.planning.latency_model import ColdStart

# What the profiler and its probe say to each other: a line of JSON each time.


@final
class ProbeTask(Struct, frozen=True):
    """What a probe is to measure. It is also a `functions.source.Source`."""

    function: str
    model: str | None
    code: str | None
    options: dict[str, object]
    base: str  # the application's directory
    cores: list[int] = []  # to stay on
    store: str | None = None  # where the model is fetched from first
    copy: str = ""  # an empty directory to fetch it into


@final
class Started(Struct, frozen=True):
    """The function is loaded and was called once. Times are monotonic, or lengths, in ns."""

    ready_ns: int  # when the process ran its first line
    imports_ns: int
    fetch_ns: int
    load_ns: int
    first_call_ns: int
    batches: bool  # whether several items can go together


@final
class MeasureRequest(Struct, frozen=True):
    """One place to measure at, and when that is enough."""

    concurrency: int
    batch: int
    length_s: float
    precision: float  # of the median: half its confidence interval over itself
    samples_min: int


@final
class Measurement(Struct, frozen=True):
    """What was measured there, in ms."""

    mean: float
    p50: float
    p95: float
    p99: float
    samples: int
    p50_low: float | None
    p50_high: float | None


@final
class ProbeAnswer(Struct, omit_defaults=True):
    """From the probe: one of these."""

    started: Started | None = None
    found: Measurement | None = None
    peak_bytes: int = 0  # the most memory that the process held until now
    error: str = ""


# How many threads the libraries behind NumPy and its friends start. They look when imported.
_THREADS: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


@final
class Probe:
    """Use it as a context: inside, the function is loaded and was called once.

    Raises `ConfigError` for whatever goes wrong with the function, also later; `patience_s` is how
    long it may take over any one answer.
    """

    def __init__(self, task: ProbeTask, patience_s: float) -> None:
        self._task = task
        self._patience_s = patience_s
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            copy = stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-profile-"))
            self._complaints = stack.enter_context(tempfile.TemporaryFile())
            task = msgspec.structs.replace(self._task, copy=copy)
            threads = str(len(task.cores))
            package_dir = str(Path(__file__).parents[2])
            paths = [package_dir, *filter(None, [os.environ.get("PYTHONPATH")])]
            began_ns = monotonic_ns()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headgate.profiling.probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env=os.environ
                | dict.fromkeys(_THREADS, threads)
                | {"PYTHONPATH": os.pathsep.join(paths)},
            )
            stack.callback(self._end)
            started = self._ask(task).started
            assert started is not None
            self.cold_start = ColdStart(
                process_ms=(started.ready_ns - began_ns) / 1e6,
                imports_ms=started.imports_ns / 1e6,
                fetch_ms=started.fetch_ns / 1e6,
                load_ms=started.load_ns / 1e6,
                first_call_ms=started.first_call_ns / 1e6,
            )
            self.batches = started.batches
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def measure(self, wish: MeasureRequest) -> Measurement:
        """Return what it found."""
        found = self._ask(wish).found
        assert found is not None
        return found

    def _ask(self, message: ProbeTask | MeasureRequest) -> ProbeAnswer:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(self._patience_s, process.kill)
        timer.start()
        try:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        where = self._task.function
        if not line:
            raise ConfigError(self._obituary(), where=where)
        answer = msgspec.json.decode(line, type=ProbeAnswer)
        if answer.error:
            said = answer.error
            is_placed = said.startswith((f"{where}:", "--store:"))
            raise ConfigError(said) if is_placed else ConfigError(said, where=where)
        self.peak_bytes = max(self.peak_bytes, answer.peak_bytes)
        return answer

    def _obituary(self) -> str:
        """What became of a process that says nothing any more."""
        status = self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read()[-2000:].decode(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        if status == -signal.SIGKILL:
            took = f"the {self._patience_s:.0f} s it was given may be over, or the memory"
            return f"was killed while it was measured ({took}){last}"
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"its process ended with {name}{last}"

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
