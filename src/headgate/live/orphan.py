"""What becomes of a process whose supervisor is gone, killed by whatever: it ends too.

The kernel ends a worker: it may be in the middle of anything, and nobody would start it again. The
gateway has clients to answer, so it is told, and ends itself; if it cannot, a thread does.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1


def signal_on_orphaned(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends. Only Linux does."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def watch_supervisor(
    pipe_fd: int, on_gone: Callable[[], None], on_late: Callable[[], None], limit_s: float
) -> None:
    """Call `on_gone` when nobody reads from a pipe any more, and `on_late` so long after that.

    From a thread of its own: the rest of the process may be stuck.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(pipe_fd, 0)  # that the other end is closed is told always
        poll.poll()
        on_gone()
        time.sleep(limit_s)
        on_late()

    Thread(target=watch, name="supervisor-watch", daemon=True).start()


def end_without_trace(run_dir: Path, group_ids: Iterable[int]) -> NoReturn:
    """End these process groups and our own, and remove the directory they have shared."""
    shutil.rmtree(run_dir, ignore_errors=True)
    for group_id in group_ids:
        with suppress(OSError):
            os.killpg(group_id, signal.SIGKILL)
    if os.getpgrp() == os.getpid():  # else the group is that of whoever started us
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
