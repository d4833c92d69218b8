"""Full-length attacks and what they cost: one line per figure, with its bound.

    python tests/hostile/figures.py [--case NAME] [--seconds S]

Measures the `headgate` that Python finds: with PYTHONPATH=OTHER/src, another version. Connects to
127.0.0.1 only, and ends every process that it starts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import grpc

sys.path.append(str(Path(__file__).resolve().parents[1] / "live"))

from attacks import BOMBS, Attack, SilentClients, connect_at_once, every, grpc_message
from harness import (
    Bystander,
    BystanderResults,
    PeakMemory,
    kill_all,
    marked_processes,
    write_app,
    write_certificate,
)
from served import Served, until

import headgate

KEY = "open sesame"
PAUSE_S = 0.2  # between two attacks of one client
GRPC_MESSAGES = 60
GRPC_BYTES = 60_000_000
# The memory budget is 512 MiB; the process also holds the program itself and the copy of a message
# that is being sent to a worker.
MEMORY_MB_MAX = 1024
MEMORY_WITHOUT_KEY_MB_MAX = 300
SILENT = 2_000
CONNECTIONS = 300
CLOSED_S_MAX = 15.0
LIMIT_S = 120.0  # that a case may take beyond the length of its attack


@dataclass(frozen=True)
class Figure:
    """One line of the output."""

    what: str
    value: str
    bound: str
    is_kept: bool


Figures = Iterator[Figure]
Case = Callable[[Path, float], Figures]


def beside_a_broken_function(directory: Path, seconds: float) -> Figures:
    """Four requests in 12 s to a function that cannot load."""
    app = """
functions:
  healthy: {code: "misdeeds:Numbers", batch_max: 4}
  broken: {code: "misdeeds:Unloadable", batch_max: 4}
pools: {local: {tier: dedicated, nodes: 1, cpus: 1}}
"""
    with Served(write_app(directory, app)) as served, Bystander(served.url, "healthy") as bystander:
        statuses = Counter(_ask(served, "broken", [1.0]) for _ in every(3.0, seconds))
        results = bystander.stop()
        lines = len(served.errors().splitlines())
    note = f"broken: {dict(statuses)}, {lines} lines on stderr"
    yield _in_time("healthy function beside a broken one", results, 0.99, note)


def beside_parser_bombs(directory: Path, seconds: float) -> Figures:
    """One client sends requests that are expensive to read, one after the other."""
    app = """
functions:
  small: {code: "misdeeds:Numbers", batch_max: 4, pools: [here]}
  plain: {code: "misdeeds:Numbers", batch_max: 4, pools: [there]}
  halves: {code: "misdeeds:Halves", batch_max: 1, pools: [there]}
pools:
  here: {tier: dedicated, nodes: 1, cpus: 1}
  there: {tier: dedicated, nodes: 1, cpus: 1}
serve: {execution_timeout: 5s}
"""
    for name, make in BOMBS.items():
        bomb = make()
        with Served(write_app(directory / name, app)) as served:
            before = served.gateways()
            with (
                Bystander(served.url, "small") as bystander,
                PeakMemory(served.gateways) as peak,
            ):
                statuses = Counter(bomb.send(served.url) for _ in every(PAUSE_S, seconds))
                results = bystander.stop()
            is_running = served.gateways() == before
        p99_ms, most_ms = results.percentile_ms(99), results.percentile_ms(100)
        suffix = "" if is_running else ", gateway killed"
        yield Figure(
            f"bystander beside {name}",
            f"p99 {p99_ms:.0f} ms, max {most_ms:.0f} ms, {results.share_in_time:.2%} in time "
            f"({dict(statuses)}, gateway {peak.bytes_max / 1e6:.0f} MB{suffix})",
            "p99 < 50 ms",
            p99_ms < 50 and is_running,
        )


def grpc_memory(directory: Path, seconds: float) -> Figures:
    """Large messages, all at once, with a key and without one."""
    hashed = hashlib.sha256(KEY.encode()).hexdigest()
    app = f"""
functions: {{rows: {{code: "misdeeds:Rows", batch_max: 1}}}}
pools: {{local: {{tier: dedicated, nodes: 1, cpus: 1}}}}
clients: {{ali: {{key: "sha256:{hashed}"}}}}
"""
    message = grpc_message("rows", GRPC_BYTES)
    cases = {
        "with": ((("x-api-key", KEY),), MEMORY_MB_MAX),
        "without": ((), MEMORY_WITHOUT_KEY_MB_MAX),
    }
    for name, (metadata, most_mb) in cases.items():
        with Served(write_app(directory / name, app), "--grpc-port", "0") as served:
            with PeakMemory(served.gateways) as peak:
                codes = _flood(served.grpc_address, message, metadata, max(30.0, seconds))
            is_running = bool(served.gateways())
        peak_mb = peak.bytes_max / 1e6
        yield Figure(
            f"gateway under {GRPC_MESSAGES} gRPC messages of 60 MB, {name} a key",
            f"{peak_mb:.0f} MB ({dict(codes)})",
            f"<= {most_mb} MB",
            peak_mb <= most_mb and is_running,
        )


def _flood(
    address: str, message: bytes, metadata: tuple[tuple[str, str], ...], seconds: float
) -> Counter[str]:
    options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    channels = [grpc.insecure_channel(address, options) for _ in range(GRPC_MESSAGES)]
    codes: Counter[str] = Counter()
    try:
        method = "/inference.GRPCInferenceService/ModelInfer"
        calls = []
        for channel in channels:
            stub: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            calls.append(stub.future(message, timeout=seconds, metadata=metadata))
        for call in calls:
            codes[call.code().name] += 1
    finally:
        for channel in channels:
            channel.close()
    return codes


def beside_segfaults(directory: Path, seconds: float) -> Figures:
    """One request in 4 s kills its worker."""
    app = """
functions: {both: {code: "misdeeds:Segfaults", batch_max: 4}}
pools: {local: {tier: dedicated, nodes: 2, cpus: 1}}
"""
    with Served(write_app(directory, app)) as served:
        bystander = Bystander(served.url, "both", deadline_ms=1000.0)
        with bystander, PeakMemory(served.workers) as workers:
            statuses = Counter(_ask(served, "both", [666.0]) for _ in every(4.0, seconds))
            results = bystander.stop()
        deaths = len(workers.pids_sampled) - 2
    yield Figure(
        "other requests beside a segfault every 4 s",
        f"{results.share_in_time:.2%} answered ({dict(statuses)}, {deaths} workers died)",
        ">= 95 %",
        results.share_in_time >= 0.95,
    )


def beside_exceptions(directory: Path, seconds: float) -> Figures:
    """One request in a hundred raises, among others in the same batches."""
    app = """
functions: {both: {code: "misdeeds:Raises", batch_max: 4, options: {takes_s: 0.004}}}
pools: {local: {tier: dedicated, nodes: 1, cpus: 1}}
"""
    with (
        Served(write_app(directory, app)) as served,
        Bystander(
            served.url, "both", rate_per_s=200, deadline_ms=5000.0, sends_deadline=False
        ) as bystander,
    ):
        statuses = Counter(_ask(served, "both", [666.0]) for _ in every(0.5, seconds))
        results = bystander.stop()
    yield Figure(
        "other requests beside 1 % that raise",
        f"{results.share_ok:.2%} answered (raising: {dict(statuses)})",
        "100 %",
        results.share_ok == 1.0,
    )


def silent_tls_clients(directory: Path, seconds: float) -> Figures:
    """Clients that connect to a TLS port and send nothing."""
    app = f"""
functions: {{plain: {{code: "misdeeds:Numbers", batch_max: 4}}}}
serve: {{tls_certificate: cert.pem, tls_key: key.pem, connections_max: {CONNECTIONS}}}
"""
    write_certificate(directory)
    with Served(write_app(directory, app)) as served:
        (gateway,) = served.gateways()
        own = _sockets(gateway)
        held_max, closed_s = 0, float("inf")
        with Bystander(served.url, "plain") as bystander, SilentClients(served.url, SILENT) as many:
            served_s = _first_served(served.url, many.opened_s, max(90.0, seconds))
            while (elapsed_s := time.monotonic() - many.opened_s) < max(90.0, seconds):
                held_max = max(held_max, _sockets(gateway) - own)
                if not many.held():
                    closed_s = elapsed_s
                    break
                time.sleep(0.05)
            results = bystander.stop()
    yield Figure(
        f"{SILENT} silent TLS clients",
        f"{held_max} held, closed after {closed_s:.1f} s; bystander: {results.share_in_time:.1%} "
        f"in time; a new client served after {served_s():.1f} s",
        f"<= {CONNECTIONS + 30} held, gone and a new one served within {CLOSED_S_MAX:.0f} s",
        held_max <= CONNECTIONS + 30 and max(closed_s, served_s()) <= CLOSED_S_MAX,
    )


def _sockets(pid: int) -> int:
    try:
        links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return 0  # one was closed meanwhile; there are more samples
    return sum(link.startswith("socket:") for link in links)


def _first_served(url: str, start_s: float, limit_s: float) -> Callable[[], float]:
    """Try new connections in a thread. Returns a function for when the first one was served."""
    served_after_s = [float("inf")]

    def ask() -> None:
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}'
        while time.monotonic() - start_s < limit_s:
            if Attack("plain", body).send(url, timeout_s=2.0) == 200:
                served_after_s[0] = time.monotonic() - start_s
                return
            time.sleep(0.1)

    thread = threading.Thread(target=ask)
    thread.start()

    def result() -> float:
        thread.join()
        return served_after_s[0]

    return result


def sigterm_under_load(directory: Path, seconds: float) -> Figures:
    """SIGTERM under load: to the supervisor, and to all its processes at once."""
    app = """
functions: {plain: {code: "misdeeds:Numbers", batch_max: 4, options: {takes_s: 0.002}}}
pools: {local: {tier: dedicated, nodes: 1, cpus: 1}}
serve: {lame_duck: 1s, drain: 5s}
"""
    for name in ("the supervisor", "all processes"):
        with (
            Served(write_app(directory / name[:3], app)) as served,
            Bystander(
                served.url, "plain", rate_per_s=200, deadline_ms=5000, sends_deadline=False
            ) as bystander,
        ):
            time.sleep(min(3.0, seconds))
            everybody = marked_processes(served.mark)
            for pid in [served.process.pid] if name == "the supervisor" else everybody:
                os.kill(pid, signal.SIGTERM)
            signalled_s = time.monotonic()
            has_ended = until(lambda: served.process.poll() is not None)
            took_s = time.monotonic() - signalled_s
            results = bystander.stop()
        unanswered = results.errors["timeout"]
        after = results.between(signalled_s, signalled_s + 1.0)
        yield Figure(
            f"SIGTERM to {name} under load",
            f"{results.resets} resets, {unanswered} unanswered, ended after {took_s:.1f} s with "
            f"status {served.process.returncode}; within the lame-duck time {after.share_ok:.0%} "
            f"({dict(results.statuses)} {dict(results.errors)})",
            "no reset, all answered, served on for 1 s",
            has_ended and not results.resets and not unanswered and after.share_ok > 0.95,
        )


def connects_at_once(directory: Path, seconds: float) -> Figures:
    """A burst of connections."""
    app = 'functions: {plain: {code: "misdeeds:Numbers"}}\n'
    with Served(write_app(directory, app)) as served:
        connected = min(connect_at_once(served.url, 500, 1.0) for _ in range(3))
    yield Figure(
        "500 connects at once", f"{connected} within 1 s (worst of 3)", "500", connected == 500
    )


def stderr_closed(directory: Path, seconds: float) -> Figures:
    """Stderr is closed while a function raises and a worker is killed."""
    app = """
functions: {plain: {code: "misdeeds:Raises", batch_max: 1}}
pools: {local: {tier: dedicated, nodes: 1, cpus: 1}}
"""
    read_fd, write_fd = os.pipe()
    with Served(write_app(directory, app), errors_fd=write_fd) as served:
        os.close(write_fd)
        os.close(read_fd)
        raised = _ask(served, "plain", [666.0])
        after_raise = _ask(served, "plain", [1.0])
        kill_all(served.workers())
        time.sleep(1.0)
        after_kill = _ask(served, "plain", [1.0])
        is_up = served.process.poll() is None
    yield Figure(
        "stderr closed; a function raises, a worker is killed",
        f"{raised}, then {after_raise}; after the kill {after_kill}, "
        f"{'still serving' if is_up else 'server ended'}",
        "500, 200, 200, still serving",
        (raised, after_raise, after_kill, is_up) == (500, 200, 200, True),
    )


CASES: dict[str, Case] = {
    "broken": beside_a_broken_function,
    "bombs": beside_parser_bombs,
    "grpc": grpc_memory,
    "segfaults": beside_segfaults,
    "exceptions": beside_exceptions,
    "tls": silent_tls_clients,
    "sigterm": sigterm_under_load,
    "connects": connects_at_once,
    "stderr": stderr_closed,
}


def _ask(served: Served, model: str, values: list[float]) -> int:
    """The status of one request; 0 without a response."""
    body = f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1],"data":{values}}}]}}'
    return Attack(model, body.encode()).send(served.url, timeout_s=20.0)


def _in_time(what: str, results: BystanderResults, least: float, note: str) -> Figure:
    value = f"{results.share_in_time:.2%} in time ({note})"
    return Figure(what, value, f">= {least:.0%}", results.share_in_time >= least)


@contextmanager
def _within(limit_s: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {limit_s:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _run(name: str, seconds: float) -> Iterator[Figure]:
    """The figures of one case; a failed case is a figure too."""
    limit_s = LIMIT_S + seconds * len(BOMBS)
    with tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True) as directory:
        try:
            with _within(limit_s):
                yield from CASES[name](Path(directory), seconds)
        except Exception as error:  # the other cases still run
            yield Figure(name, f"{type(error).__name__}: {error}", "a figure", False)


def main() -> int:
    """Measure and print. Returns 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", action="append", choices=[*CASES], help="default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of an attack")
    options = parser.parse_args()
    os.environ["HEADGATE_FIGURES"] = own = uuid.uuid4().hex
    print(f"headgate {headgate.__version__} in {Path(headgate.__file__).parent}", flush=True)
    are_kept = True
    try:
        for name in options.case or CASES:
            for figure in _run(name, options.seconds):
                are_kept &= figure.is_kept
                mark = "ok " if figure.is_kept else "NOT"
                print(f"{mark} {figure.what}: {figure.value} [{figure.bound}]", flush=True)
    finally:
        kill_all(set(marked_processes(own)) - {os.getpid()})
    return 0 if are_kept else 1


if __name__ == "__main__":
    sys.exit(main())
