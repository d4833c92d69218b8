"""`python -m headgate.live.worker RUN_DIR NODE_ID`: the worker of one node."""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

from headgate.core.model import UNLIMITED, App
from headgate.live.deployment import NodeSpec, listen, read_deployment, socket_path
from headgate.live.telemetry import logs
from headgate.live.telemetry.logs import exit_process
from headgate.system.process import (
    keep_freed_memory,
    set_parent_death_signal,
    thread_variables,
)

_CAUGHT: Final = (signal.SIGTERM, signal.SIGUSR1)


def main() -> int:
    """Run the worker of a node; return the exit status."""
    set_parent_death_signal(signal.SIGKILL)
    # Service managers send SIGTERM to all processes of a service. The gateway still has requests
    # for this worker, and the supervisor sends SIGUSR1 when it has not. Not SIG_IGN: child
    # processes would inherit it.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT),
        after_in_child=_restore_signals,
    )
    options = _parse_arguments()
    run_dir = Path(options.run_dir)
    deployment = read_deployment(run_dir)
    node = next(node for node in deployment.nodes if node.id == options.node_id)
    config = deployment.load()
    logs.configure(config.serve, f"worker {node.name}")
    may_spin = deployment.may_spin(config.serve.gateways)  # counted before the process is pinned
    _configure_process(node, config.app)
    listener = listen(socket_path(run_dir, node.id))

    from headgate.live.worker.server import Server  # noqa: PLC0415  imports NumPy: after the above

    server = Server(
        listener,
        run_dir,
        node,
        config,
        deployment.base,
        heartbeat_fd=options.heartbeat_fd,
        begun_fd=options.begun_fd,
        hang_ns=int(options.hang_s * 1e9),
        may_spin=may_spin,
    )
    return server.serve()


def _restore_signals() -> None:
    """Give a process that a function has forked the signals of any process.

    It has inherited handlers, and `multiprocessing.Pool` ends its processes with SIGTERM and waits
    for them. SIGINT stays ignored: a terminal sends it to all processes, and the worker goes on.
    """
    signal.set_wakeup_fd(-1)  # it would wake the worker
    for number in _CAUGHT:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)  # one that came since the fork counts


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headgate.live.worker", description=__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("node_id", type=int)
    parser.add_argument("--heartbeat-fd", type=int, help="gets a heartbeat byte twice a second")
    parser.add_argument(
        "--begun-fd", type=int, help="memory of requests that have begun; default: one of its own"
    )
    parser.add_argument("--hang-s", type=float, default=60.0, help="timeout of a batch")
    return parser.parse_args()


def _configure_process(node: NodeSpec, app: App) -> None:
    """Pin the process to its cores, limit the threads of its libraries, and set its name.

    Where memory is limited, what is freed goes back to the system: it would count as used.
    """
    if app.pools[node.pool_id].memory_bytes >= UNLIMITED:
        keep_freed_memory()
    if node.cores:
        os.sched_setaffinity(0, node.cores)
    cores = len(os.sched_getaffinity(0))
    os.environ.update(thread_variables(library_threads(app, node.pool_id, cores)))
    with suppress(OSError):  # the name is for process listings only
        Path("/proc/self/comm").write_text(f"headgate-{node.name}"[:15])


def library_threads(app: App, pool_id: int, cores: int) -> int:
    """Return the threads of the libraries behind NumPy, which all functions of a worker share.

    As many as the largest shape has CPUs, since there is one setting for the process: all cores if
    a function declares no CPUs.
    """
    counts = [
        min(times.shape.cores or cores, cores)
        for variant in app.variants
        if pool_id in variant.pool_ids
        for times in variant.shapes
    ]
    return max(counts, default=cores)


if __name__ == "__main__":
    exit_process(main())
