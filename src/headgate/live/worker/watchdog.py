"""Heartbeat and hang watchdog of a worker.

Tells the supervisor that the worker is alive, and exits the process if a function hangs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from threading import Lock, Thread
from typing import Final, final

from headgate.live.telemetry.logs import HUNG_EXIT, exit_process
from headgate.live.worker.executor import Executor

_LOG: Final = logging.getLogger(__name__)

HEARTBEAT_S: Final = 0.5


@final
class Watchdog:
    """Sends heartbeats from a thread of its own, so that neither a long batch nor a long read
    delays them.
    """

    def __init__(
        self,
        name: str,
        fd: int | None,
        executor: Executor,
        lock: Lock,
        on_supervisor_gone: Callable[[], None],
    ) -> None:
        self._name = name
        self._fd = fd
        self._executor = executor
        self._lock = lock
        self._on_supervisor_gone = on_supervisor_gone

    def start(self) -> None:
        """Start the thread. `on_supervisor_gone` is called when the other end of the pipe is
        closed.
        """
        if self._fd is not None:
            os.set_blocking(self._fd, False)
        self._send_heartbeat()  # now, because a function that holds the GIL may delay the thread
        Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._exit_if_hung()
            with self._lock:  # take the lock: a deadlocked worker must stop sending heartbeats
                self._send_heartbeat()
            time.sleep(HEARTBEAT_S)

    def _exit_if_hung(self) -> None:
        now_ns = time.monotonic_ns()
        job = self._executor.overdue_job(now_ns)
        if job is not None:
            seconds = (now_ns - job.began_ns) / 1e9
            _LOG.error(
                "worker %s: %s hung for %.1f s; the worker exits",
                self._name,
                job.description,
                seconds,
            )
            exit_process(HUNG_EXIT)

    def _send_heartbeat(self) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, b".")
        except BlockingIOError:
            pass  # the pipe is full: the supervisor is busy
        except OSError:  # the supervisor has died
            self._fd = None
            self._on_supervisor_gone()
