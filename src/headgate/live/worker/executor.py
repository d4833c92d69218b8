"""Jobs, and the threads that do them.

The thread that listens to gateways leaves jobs to others, of which there are as many as jobs ever
ran at once; the Backend's slots limit that. One that has finished goes on by itself: waiting for
the listening thread would cost two switches between threads per batch. A job that is shorter than
such a switch the listening thread does itself, before it listens again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, get_ident
from time import monotonic_ns
from typing import Final, final

from headgate.core.actions import Dispatch, LoadWeights, StartInstance
from headgate.core.clock import NEVER_NS
from headgate.core.model import Variant
from headgate.functions.error_text import error_text
from headgate.functions.tensor import Block
from headgate.live.ipc.messages import MESSAGE_BYTES_MAX, BatchRan, TaskInputs, TaskResult, frame
from headgate.live.telemetry.logs import BROKEN_EXIT, exit_process
from headgate.live.worker.connection import GatewayConnection
from headgate.live.worker.loading import Loader, LoadError
from headgate.live.worker.model_cache import ModelCache
from headgate.live.worker.runner import BatchRunner
from headgate.live.worker.trial_load import run_trial

_LOG: Final = logging.getLogger(__name__)


class Job:
    """Something to do in a thread of its own."""

    description = "something"  # for people, who see it when it takes too long
    is_awaited = True  # a worker that leaves finishes it first
    began_ns = 0  # 0: not yet
    limit_ns = 0  # how long it may take

    def run(self) -> None:
        """Do it. Raises nothing."""
        raise NotImplementedError

    def on_done(self) -> None:
        """Act on it being done."""


@final
class Executor:
    """Runs jobs in threads, which call `on_done` when they have done one.

    Nothing here is locked: `submit` and `finish` must not overlap.
    """

    def __init__(self, on_done: Callable[[Job], None]) -> None:
        self.running: set[Job] = set()
        self.inline_job: Job | None = None  # for the thread that made this, to `run_here`
        self._home_thread = get_ident()
        self._on_done = on_done
        self._queue: SimpleQueue[Job] = SimpleQueue()
        self._threads = 0

    def submit(self, job: Job, *, runs_inline: bool = False) -> None:
        """Have it begun at once."""
        self.running.add(job)
        if runs_inline and self.inline_job is None and get_ident() == self._home_thread:
            self.inline_job = job
            return
        if len(self.running) > self._threads:
            self._threads += 1
            # A daemon: a job that hangs must not keep the process from ending.
            Thread(target=self._run_thread, name=f"executor-{self._threads}", daemon=True).start()
        self._queue.put(job)

    def run_here(self, job: Job) -> None:
        """Do it right here."""
        job.began_ns = monotonic_ns()
        job.run()
        self._on_done(job)

    def finish(self, job: Job) -> None:
        """Act on a job being done."""
        self.running.discard(job)
        job.on_done()

    def is_busy(self) -> bool:
        """Whether there is a job that must be finished before the process may end."""
        return any(job.is_awaited for job in list(self.running))

    def overdue_job(self, now_ns: int) -> Job | None:
        """Return a job that takes longer than it may."""
        for job in list(self.running):
            if job.began_ns and now_ns - job.began_ns > job.limit_ns:
                return job
        return None

    def _run_thread(self) -> None:
        while True:
            try:
                self.run_here(self._queue.get())
            except BaseException:  # ours, not the function's: nothing can be relied on any more
                _LOG.critical("the worker is broken, and ends itself", exc_info=True)
                exit_process(BROKEN_EXIT)


# What a worker does in its threads: run a batch, load a model, try one, let one go.


PROBLEM_BYTES_MAX: Final = 8192  # what an error takes of a message, at most


@final
class BatchJob(Job):
    """Runs one batch; afterwards `reply` is what the gateway is told."""

    def __init__(
        self,
        action: Dispatch,
        tasks: list[TaskInputs],
        runner: BatchRunner,
        connection: GatewayConnection,
        callback: Callable[[BatchJob], None],
        limit_ns: int,
    ) -> None:
        self.description = f"a batch of {runner.name!r}"
        self.action = action
        self.limit_ns = limit_ns
        self.reply = b""
        self._tasks = tasks
        self._runner = runner
        self._connection = connection
        self._callback = callback

    def run(self) -> None:
        """Run it, and frame the answer."""
        runner = self._runner
        results = runner.run(self._tasks, self._connection.arena)
        ended_ns = monotonic_ns()
        runner.mean_exec_ns += (ended_ns - self.began_ns - runner.mean_exec_ns) / 8
        for task in self._tasks:
            task.inputs.clear()
        batch_id = self.action.batch_id % GatewayConnection.IDS
        returned = self._connection.take_released()
        self.reply = self._frame(BatchRan(batch_id, self.began_ns, ended_ns, results, returned))

    def _frame(self, ran: BatchRan) -> bytes:
        """Return the message. What cannot be sent, or is too large for it, fails by itself."""
        try:
            return frame(ran)
        except Exception:  # the usual case is not looked at piece by piece
            left_bytes = MESSAGE_BYTES_MAX
            left_bytes -= PROBLEM_BYTES_MAX * (1 + len(ran.results) + len(ran.released))
            for index, result in enumerate(ran.results):
                size, problem = _framed_bytes(result)
                if size > left_bytes:
                    problem = f"its outputs are {size} bytes, for which the answer has no room"
                if problem:
                    self._free_outputs(result)
                    ran.results[index] = TaskResult(result.task_id, [], problem, 500)
                else:
                    left_bytes -= size
            return frame(ran)

    def _free_outputs(self, result: TaskResult) -> None:
        for tensor in result.outputs:
            if isinstance(tensor.data, Block):
                self._connection.arena.free(tensor.data.offset)

    def on_done(self) -> None:
        """Tell who waits for it."""
        self._callback(self)


@final
class PrepareJob(Job):
    """Makes an instance ready; afterwards it has a `runner` or an `error`."""

    def __init__(
        self,
        action: StartInstance | LoadWeights,
        variant: Variant,
        model_cache: ModelCache | None,
        callback: Callable[[PrepareJob], None],
        limit_ns: int,
    ) -> None:
        self.description = f"loading {variant.name!r}"
        self.action = action
        self.variant = variant
        self.limit_ns = limit_ns
        self.runner: BatchRunner | None = None
        self.error = ""
        self._model_cache = model_cache
        self._callback = callback

    def run(self) -> None:
        """Take a model from the stock. Weights are in host memory always: they need no loading."""
        if self._model_cache is None:
            return
        try:
            self.runner = self._model_cache.acquire(self.variant)
        except BaseException as error:  # there may be no memory for anything
            self.error = str(error) if isinstance(error, LoadError) else error_text(error)

    def on_done(self) -> None:
        """Tell who waits for it."""
        self._callback(self)


@final
class UnloadJob(Job):
    """Lets a model go."""

    def __init__(
        self, variant: Variant, runner: BatchRunner, model_cache: ModelCache, limit_ns: int
    ) -> None:
        self.description = f"unloading {variant.name!r}"
        self.limit_ns = limit_ns
        self._variant = variant
        self._runner = runner
        self._model_cache = model_cache

    def run(self) -> None:
        """Have it unloaded."""
        self._model_cache.release(self._variant, self._runner, keep=False)


@final
class TrialJob(Job):
    """Loads a function that may end its process in a process of its own, to see what happens."""

    is_awaited = False
    limit_ns = NEVER_NS  # the trial is watched by itself

    def __init__(
        self, variant: Variant, loader: Loader, run_dir: Path, limit_ns: int, memory_bytes: int
    ) -> None:
        self.description = f"a trial of {variant.name!r}"
        self._variant = variant
        self._loader = loader
        self._run_dir = run_dir
        self._limit_s = limit_ns / 1e9
        self._memory_bytes = memory_bytes

    def run(self) -> None:
        """Try it."""
        try:
            reason = run_trial(
                self._run_dir,
                self._variant.id,
                limit_s=self._limit_s,
                memory_bytes=self._memory_bytes,
            )
        except OSError as error:  # there is no room for another process, or no memory
            reason = error_text(error)
        self._loader.end_trial(self._variant, reason)


def _framed_bytes(result: TaskResult) -> tuple[int, str]:
    """Return how many bytes a result is in a message, and what is wrong if it cannot be in one."""
    try:
        return len(frame(BatchRan(0, 0, 0, [result]))), ""
    except Exception as error:
        return 0, error_text(error)
