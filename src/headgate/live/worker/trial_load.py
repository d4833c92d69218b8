"""Trial load: loads a suspect function in a separate process before a worker loads it.

    python -m headgate.live.worker.trial_load RUN_DIR VARIANT_ID PARENT_PID --heartbeat-fd FD

The process reports success on a pipe. An exit status would not do, because `load` may exit with
any. The worker limits its time and memory and kills it, it dies with its parent, and it has a lower
CPU priority than others on the same cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Final

from headgate.core.model import UNLIMITED
from headgate.functions.loader import load_runner
from headgate.live.deployment import read_deployment
from headgate.live.ipc.crash_markers import CrashMarkers
from headgate.live.telemetry import logs
from headgate.live.worker.model_cache import failure_reason, log_once
from headgate.system.process import ChildProcess, describe_exit, set_parent_death_signal

POLL_S: Final = 0.02
SUCCESS: Final = b"ok"
NICENESS: Final = 10


def run_trial(run_dir: Path, variant_id: int, *, limit_s: float, memory_bytes: int) -> str:
    """Load a function in a separate process; return why it failed, empty if it succeeded."""
    arguments = [str(run_dir), str(variant_id), str(os.getpid())]
    process = ChildProcess("trial", __name__, arguments)
    try:
        problem = _watch(process, memory_bytes, limit_s)
        process.kill()
        status = process.process.wait()
        process.poll_output()
    finally:
        process.close()
    if process.output:
        return "" if process.output == SUCCESS else process.output.decode("utf-8", "replace")
    return problem or f"ProcessDied: {describe_exit(status)} while loading"


def _watch(process: ChildProcess, memory_bytes: int, limit_s: float) -> str:
    """Wait for the process to exit; return which limit it has exceeded, if any."""
    while not process.wait(POLL_S):
        if memory_bytes < UNLIMITED and process.private_bytes() > memory_bytes:
            return "MemoryError: loading exceeds the memory of the pool"
        if time.monotonic() > process.started_s + limit_s:
            return "TimeoutError: loading timed out"
    return ""


def main() -> None:
    """Load the function and report the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("variant_id", type=int)
    parser.add_argument("parent_pid", type=int)
    parser.add_argument("--heartbeat-fd", type=int, help="gets the result")
    options = parser.parse_args()
    set_parent_death_signal(signal.SIGKILL, options.parent_pid)
    os.nice(NICENESS)
    deployment = read_deployment(options.run_dir)
    config = deployment.load()
    variant = config.app.variants[options.variant_id]
    logs.configure(config.serve, f"trial of {variant.name}")
    reply = SUCCESS
    try:
        load_runner(config.app, config.sources, deployment.base, variant)
    except BaseException as error:  # a model may raise anything
        reason = failure_reason(error, variant.name)
        log_once(CrashMarkers(options.run_dir), variant.name, reason, error)
        reply = reason.encode("utf-8", "replace")
    logs.flush()
    os.write(options.heartbeat_fd, reply)
    os._exit(0)


if __name__ == "__main__":
    main()
