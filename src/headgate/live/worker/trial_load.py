"""Trial load: loads a suspect function in a separate process before a worker loads it.

    python -m headgate.live.worker.trial_load RUN_DIR VARIANT_ID REPLY_FD PARENT_PID

The process reports success on a pipe. An exit status would not do, because `load` may exit with
any. The worker limits its time and memory and kills it, it dies with its parent, and it has a lower
CPU priority than others on the same cores.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from headgate.core.clock import NEVER_NS
from headgate.functions.loader import load_runner
from headgate.live.deployment import read_deployment
from headgate.live.ipc.crash_markers import CrashMarkers
from headgate.live.telemetry import logs
from headgate.live.worker.loading import failure_reason, log_once
from headgate.system.child_process import describe_exit, private_bytes

POLL_S: Final = 0.02
SUCCESS: Final = b"ok"
REPLY_BYTES_MAX: Final = 65_536
NICENESS: Final = 10
_PR_SET_PDEATHSIG: Final = 1


def run_trial(run_dir: Path, variant_id: int, *, limit_s: float, memory_bytes: int) -> str:
    """Load a function in a separate process; return why it failed, empty if it succeeded."""
    reply_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    arguments = [str(run_dir), str(variant_id), str(write_fd), str(os.getpid())]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            pass_fds=[write_fd],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            problem = _watch(process, time.monotonic() + limit_s, memory_bytes)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its child processes
            status = process.wait()
        with suppress(BlockingIOError):  # there is no reply
            reply = os.read(reply_fd, REPLY_BYTES_MAX)
            return "" if reply == SUCCESS else reply.decode("utf-8", "replace")
        return problem or f"ProcessDied: {describe_exit(status)} while loading"
    finally:
        os.close(write_fd)
        os.close(reply_fd)


def _watch(process: subprocess.Popen[bytes], until_s: float, memory_bytes: int) -> str:
    """Wait for the process to exit; return which limit it has exceeded, if any."""
    while process.poll() is None:
        if memory_bytes < NEVER_NS and private_bytes(process.pid) > memory_bytes:
            return "MemoryError: loading exceeds the memory of the pool"
        if time.monotonic() > until_s:
            return "TimeoutError: loading timed out"
        time.sleep(POLL_S)
    return ""


def main() -> None:
    """Load the function and report the result."""
    run_dir = Path(sys.argv[1])
    variant_id, reply_fd, parent_pid = (int(argument) for argument in sys.argv[2:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent has died before PDEATHSIG was set
        os._exit(1)
    os.nice(NICENESS)
    deployment = read_deployment(run_dir)
    config = deployment.load()
    variant = config.app.variants[variant_id]
    logs.configure(config.serve, f"trial of {variant.name}")
    reply = SUCCESS
    try:
        load_runner(config.app, config.sources, deployment.base, variant)
    except BaseException as error:  # a model may raise anything
        reason = failure_reason(error, variant.name)
        log_once(CrashMarkers(run_dir), variant.name, reason, error)
        reply = reason.encode("utf-8", "replace")
    logs.flush()
    os.write(reply_fd, reply)
    os._exit(0)


if __name__ == "__main__":
    main()
