"""The jobs of a worker (run a batch, load, unload and try models) and the threads that run them.

The thread that reads from gateways passes jobs to other threads. There are as many threads as jobs
ever ran at once, which the slots of the `Backend` limit. A thread that has finished a job handles
the completion itself: handing it back to the reading thread would cost two context switches per
batch. A job shorter than a context switch runs inline, in the reading thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import Final, final

from headgate.core.actions import Dispatch, LoadWeights, StartInstance
from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.errors import error_text
from headgate.core.model import Variant
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.loader import LoadedFunction
from headgate.functions.tensor import Block, TaskInputs, TaskResult
from headgate.live.ipc.messages import MESSAGE_BYTES_MAX, BatchRan, frame
from headgate.live.ipc.shared_memory import INLINE_BYTES_MAX, Arena
from headgate.live.telemetry.logs import INTERNAL_ERROR_EXIT, exit_process
from headgate.live.worker.begun_requests import BegunRequests
from headgate.live.worker.connection import GatewayConnection
from headgate.live.worker.model_cache import Loader, LoadError, ModelCache
from headgate.live.worker.trial_load import run_trial
from headgate.system.threads import DaemonThreads

OUTCOME_UNKNOWN: Final = "a request with this id has begun before, and its outcome is unknown"
SLOW_LOAD_NS: Final = 5 * SECOND_NS
PROBLEM_BYTES_MAX: Final = 8192  # upper bound for an error in a message
_LOG: Final = logging.getLogger(__name__)


class Job:
    """A unit of work for a thread."""

    description: str  # shown to people if the job takes too long
    is_awaited = True  # a draining worker finishes the job first
    began_ns = 0  # 0: not started
    limit_ns: int  # timeout
    slow_ns = NEVER_NS  # a job that takes longer is named in the log

    def run(self) -> None:
        """Do the work. Never raises."""
        raise NotImplementedError

    def on_done(self) -> None:
        """Handle the completion."""


@final
class Executor:
    """Runs jobs in threads, which call `on_done` with each finished job.

    Nothing is locked: the caller must serialise `submit` and `finish`.
    """

    def __init__(self, on_done: Callable[[Job], None]) -> None:
        self.running: set[Job] = set()
        self.inline_job: Job | None = None  # to be run by the creating thread with `run_here`
        self._home_thread = get_ident()
        self._on_done = on_done
        self._threads = DaemonThreads("executor")

    def submit(self, job: Job, *, runs_inline: bool = False) -> None:
        """Start a job at once; with `runs_inline`, in the creating thread if that is the caller."""
        self.running.add(job)
        if runs_inline and self.inline_job is None and get_ident() == self._home_thread:
            self.inline_job = job
            return
        self._threads.run(partial(self._run_in_thread, job), len(self.running))

    def run_here(self, job: Job) -> None:
        job.began_ns = monotonic_ns()
        job.run()
        self._on_done(job)

    def finish(self, job: Job) -> None:
        """Remove a job and handle its completion."""
        self.running.discard(job)
        job.on_done()

    def is_busy(self) -> bool:
        """Whether a job is running that must finish before the process may exit."""
        return any(job.is_awaited for job in list(self.running))

    def slow_jobs(self, now_ns: int) -> list[Job]:
        """Return the jobs that take longer than they should."""
        return [
            job
            for job in list(self.running)
            if job.began_ns and now_ns - job.began_ns > job.slow_ns
        ]

    def overdue_job(self, now_ns: int) -> Job | None:
        """Return a job that has exceeded its timeout, if any."""
        for job in list(self.running):
            if job.began_ns and now_ns - job.began_ns > job.limit_ns:
                return job
        return None

    def _run_in_thread(self, job: Job) -> None:
        try:
            self.run_here(job)
        except BaseException:  # a defect of the worker, not of a function: its state is unknown
            _LOG.critical("internal error: the worker exits", exc_info=True)
            exit_process(INTERNAL_ERROR_EXIT)


@final
@dataclass(eq=False)
class BatchJob(Job):
    """Runs one batch; afterwards `reply` is the message to the gateway."""

    action: Dispatch
    tasks: list[TaskInputs]
    runner: BatchRunner
    connection: GatewayConnection
    callback: Callable[[BatchJob], None]
    limit_ns: int
    begun: BegunRequests | None = None  # None: tasks run however often they have before
    reply = b""

    def __post_init__(self) -> None:
        self.description = f"a batch of {self.runner.name!r}"

    def run(self) -> None:
        runner = self.runner
        new, begun_before = enter_begun(self.begun, self.tasks)
        results = (runner.run(new) if new else []) + begun_before
        share_outputs(results, self.connection.arena)
        ended_ns = monotonic_ns()
        runner.mean_exec_ns += (ended_ns - self.began_ns - runner.mean_exec_ns) / 8
        for task in self.tasks:
            task.inputs.clear()
        batch_id = self.action.batch_id
        self.reply = ran_message(self.connection, batch_id, self.began_ns, ended_ns, results)

    def on_done(self) -> None:
        self.callback(self)


@final
@dataclass(eq=False)
class PrepareJob(Job):
    """Prepares an instance; afterwards either `loaded` or `error` is set."""

    action: StartInstance | LoadWeights
    variant: Variant
    model_cache: ModelCache | None
    callback: Callable[[PrepareJob], None]
    limit_ns: int
    shape_id: int = 0  # of the instance
    loaded: LoadedFunction | None = None
    error: str = ""
    slow_ns = SLOW_LOAD_NS

    def __post_init__(self) -> None:
        self.description = f"loading {self.variant.name!r}"

    def run(self) -> None:
        """Take a model from the cache. `LoadWeights` needs nothing: host memory has all weights."""
        if self.model_cache is None:
            return
        try:
            self.loaded = self.model_cache.acquire(self.variant, self.shape_id)
        except BaseException as error:  # possibly out of memory
            self.error = str(error) if isinstance(error, LoadError) else error_text(error)

    def on_done(self) -> None:
        self.callback(self)


@final
@dataclass(eq=False)
class UnloadJob(Job):
    """Unloads a function."""

    variant: Variant
    loaded: LoadedFunction
    model_cache: ModelCache
    limit_ns: int

    def __post_init__(self) -> None:
        self.description = f"unloading {self.variant.name!r}"

    def run(self) -> None:
        self.model_cache.release(self.variant, self.loaded, keep=False)


@final
@dataclass(eq=False)
class TrialJob(Job):
    """Loads a suspect function in a separate process, to find out whether it kills it."""

    variant: Variant
    loader: Loader
    run_dir: Path
    trial_ns: int
    memory_bytes: int
    is_awaited = False
    limit_ns = NEVER_NS  # the trial has a timeout of its own

    def __post_init__(self) -> None:
        self.description = f"a trial of {self.variant.name!r}"

    def run(self) -> None:
        limit_s, memory_bytes = self.trial_ns / 1e9, self.memory_bytes
        try:
            reason = run_trial(
                self.run_dir, self.variant.id, limit_s=limit_s, memory_bytes=memory_bytes
            )
        except OSError as error:  # no process could be created
            reason = error_text(error)
        self.loader.end_trial(self.variant, reason)


def enter_begun(
    begun: BegunRequests | None, tasks: list[TaskInputs]
) -> tuple[list[TaskInputs], list[TaskResult]]:
    """Return the tasks that may run, and the results of those that have begun before."""
    if begun is None or not any(task.run_once_key for task in tasks):
        return tasks, []
    new: list[TaskInputs] = []
    begun_before: list[TaskResult] = []
    for task in tasks:
        if not task.run_once_key or begun.try_begin(task.run_once_key):
            new.append(task)
        else:
            begun_before.append(TaskResult(task.task_id, [], OUTCOME_UNKNOWN, 503))
    return new, begun_before


def share_outputs(results: list[TaskResult], arena: Arena) -> None:
    """Move large outputs into shared memory."""
    for result in results:
        for tensor in result.outputs:
            if isinstance(tensor.data, memoryview) and tensor.data.nbytes >= INLINE_BYTES_MAX:
                # None: the arena is full, and the tensor is sent inside the message.
                tensor.data = arena.allocate(tensor.data) or tensor.data


def ran_message(
    connection: GatewayConnection,
    batch_id: int,
    began_ns: int,
    ended_ns: int,
    results: list[TaskResult],
) -> bytes:
    """Encode the results of a batch, with the blocks that it has released.

    A result that cannot be encoded, or has no room, fails on its own.
    """
    ran = BatchRan(batch_id, began_ns, ended_ns, results, connection.take_released())
    try:
        return frame(ran)
    except Exception:  # sizes are computed only if encoding all at once has failed
        bytes_left = MESSAGE_BYTES_MAX
        bytes_left -= PROBLEM_BYTES_MAX * (1 + len(ran.results) + len(ran.released))
        for index, result in enumerate(ran.results):
            size, problem = _framed_bytes(result)
            if size > bytes_left:
                problem = f"its outputs of {size} bytes exceed the size limit of the reply"
            if problem:
                for tensor in result.outputs:
                    if isinstance(tensor.data, Block):
                        connection.arena.free(tensor.data.offset)
                ran.results[index] = TaskResult(result.task_id, [], problem, 500)
            else:
                bytes_left -= size
        return frame(ran)


def _framed_bytes(result: TaskResult) -> tuple[int, str]:
    """Return the size of an encoded result, and the problem if it cannot be encoded."""
    try:
        return len(frame(BatchRan(0, 0, 0, [result]))), ""
    except Exception as error:
        return 0, error_text(error)
