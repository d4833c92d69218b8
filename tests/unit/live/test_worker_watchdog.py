"""The heartbeat of a worker, and that it stops when the worker is stuck."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from threading import Event, Lock

from headgate.live.worker.executor import Executor
from headgate.live.worker.server import HEARTBEAT_S, Watchdog


def make_watchdog(fd: int | None, lock: Lock, on_gone: Callable[[], None]) -> Watchdog:
    return Watchdog("w", fd, Executor(lambda job: None), lock, on_gone)


def is_readable(fd: int, limit_s: float) -> bool:
    return bool(select.select([fd], [], [], limit_s)[0])


def test_first_heartbeat_is_immediate_and_a_deadlocked_worker_sends_no_more() -> None:
    read_fd, write_fd = os.pipe()
    lock = Lock()
    with lock:
        make_watchdog(write_fd, lock, lambda: None).start()
        assert os.read(read_fd, 16) == b"."
        assert not is_readable(read_fd, 2 * HEARTBEAT_S)
    assert is_readable(read_fd, 60)


def test_a_closed_pipe_is_reported() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    gone = Event()
    make_watchdog(write_fd, Lock(), gone.set).start()
    assert gone.is_set()
