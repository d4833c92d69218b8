"""The profiler's side of a probe: starts a probe process on pinned cores and talks to it.

Profiler and probe exchange one line of JSON per message.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Timer
from time import monotonic_ns
from typing import Self, final

import msgspec
from msgspec import Struct

from headgate.core.errors import ConfigError
from headgate.functions.measure import Measurement, MeasureRequest
from headgate.planning.capacity.latency_model import ColdStart
from headgate.system.process import ProcessTree, thread_variables


@final
class ProbeTask(Struct, frozen=True):
    """The function that a probe is to load. It is also a `functions.loader.FunctionSource`."""

    function: str
    model: str | None
    code: str | None
    options: dict[str, object]
    base: str  # the application's directory
    cores: list[int] = []  # to pin the probe to
    store: str | None = None  # model store to fetch the model from first
    copy: str = ""  # an empty directory to fetch the model into


@final
class Started(Struct, frozen=True):
    """Cold start of a function that is now loaded and was called once."""

    ready_ns: int  # monotonic time of the first statement of the process
    cold_start: ColdStart  # the profiler adds the start of the process
    batches: bool  # whether the model accepts batches of several items


@final
class ProbeReply(Struct, omit_defaults=True):
    """A message of the probe: `started`, `measurement` or `error` is set."""

    started: Started | None = None
    measurement: Measurement | None = None
    peak_bytes: int = 0  # peak resident memory of the probe so far
    error: str = ""


@final
class Probe:
    """A probe process, as a context manager: inside, the function is loaded and was called once.

    Entering and `measure` raise `ConfigError` for any failure of the function, and if a reply takes
    longer than `timeout_s`.
    """

    def __init__(self, task: ProbeTask, timeout_s: float) -> None:
        self._task = task
        self._timeout_s = timeout_s
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            copy = stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-profile-"))
            self._stderr = stack.enter_context(tempfile.TemporaryFile())
            task = msgspec.structs.replace(self._task, copy=copy)
            package_dir = str(Path(__file__).parents[2])
            paths = [package_dir, *filter(None, [os.environ.get("PYTHONPATH")])]
            began_ns = monotonic_ns()
            self._child = ProcessTree(
                [sys.executable, "-m", "headgate.profiling.probe", *map(str, task.cores)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                environment={
                    **thread_variables(len(task.cores)),
                    "PYTHONPATH": os.pathsep.join(paths),
                },
            )
            stack.callback(self._child.close)
            started = self._call(task).started
            assert started is not None
            process_ms = (started.ready_ns - began_ns) / 1e6
            self.cold_start = replace(started.cold_start, process_ms=process_ms)
            self.batches = started.batches
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def measure(self, request: MeasureRequest) -> Measurement:
        """Measure a grid point."""
        measurement = self._call(request).measurement
        assert measurement is not None
        return measurement

    def _call(self, message: ProbeTask | MeasureRequest) -> ProbeReply:
        process = self._child.process
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(self._timeout_s, self._child.kill)
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
            raise ConfigError(self._exit_reason(), where=where)
        reply = msgspec.json.decode(line, type=ProbeReply)
        if reply.error:
            text = reply.error
            has_location = text.startswith((f"{where}:", "--store:"))
            raise ConfigError(text) if has_location else ConfigError(text, where=where)
        self.peak_bytes = max(self.peak_bytes, reply.peak_bytes)
        return reply

    def _exit_reason(self) -> str:
        """Return why the probe has exited, as text."""
        status = self._child.process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read()[-2000:].decode(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        if status == -signal.SIGKILL:
            cause = f"timeout of {self._timeout_s:.0f} s, or out of memory"
            return f"the probe process was killed ({cause}){last}"
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"the probe process exited with {name}{last}"
