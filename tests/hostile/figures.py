"""What each attack costs, in full length: one line per figure, with the bound that it has to keep.

    python tests/hostile/figures.py [--case NAME] [--seconds S]

It measures the `headgate` that Python finds: with PYTHONPATH=OTHER/src, another version. It talks
to 127.0.0.1 only, and every process that it starts is ended with it.
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
    PeakMemory,
    Seen,
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
# What clients can make the gateway hold is 512 MiB; beside it there are the program itself and
# the copy that is being passed on.
MEMORY_MB_MAX = 1024
MEMORY_WITHOUT_KEY_MB_MAX = 300
SILENT = 2_000
CONNECTIONS = 300
LET_GO_S_MAX = 15.0
LIMIT_S = 120.0  # that a case may take beyond the length of its attack


@dataclass(frozen=True)
class Figure:
    """One line."""

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
        seen = bystander.stop()
        lines = len(served.errors().splitlines())
    note = f"broken: {dict(statuses)}, {lines} lines on stderr"
    yield _in_time("healthy function beside a broken one", seen, 0.99, note)


def beside_parser_bombs(directory: Path, seconds: float) -> Figures:
    """One client sends one after the other what is dear to read."""
    app = """
functions:
  innocent: {code: "misdeeds:Numbers", batch_max: 4, pools: [here]}
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
                Bystander(served.url, "innocent") as bystander,
                PeakMemory(served.gateways) as peak,
            ):
                statuses = Counter(bomb.send(served.url) for _ in every(PAUSE_S, seconds))
                seen = bystander.stop()
            is_there = served.gateways() == before
        p99_ms, most_ms = seen.percentile_ms(99), seen.percentile_ms(100)
        fate = "" if is_there else ", gateway killed"
        yield Figure(
            f"bystander beside {name}",
            f"p99 {p99_ms:.0f} ms, max {most_ms:.0f} ms, {seen.share_in_time:.2%} in time "
            f"({dict(statuses)}, gateway {peak.bytes_max / 1e6:.0f} MB{fate})",
            "p99 < 50 ms",
            p99_ms < 50 and is_there,
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
            is_there = bool(served.gateways())
        peak_mb = peak.bytes_max / 1e6
        yield Figure(
            f"gateway under {GRPC_MESSAGES} gRPC messages of 60 MB, {name} a key",
            f"{peak_mb:.0f} MB ({dict(codes)})",
            f"<= {most_mb} MB",
            peak_mb <= most_mb and is_there,
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
    """One request in 4 s kills whoever runs it."""
    app = """
functions: {both: {code: "misdeeds:Segfaults", batch_max: 4}}
pools: {local: {tier: dedicated, nodes: 2, cpus: 1}}
"""
    with Served(write_app(directory, app)) as served:
        bystander = Bystander(served.url, "both", deadline_ms=1000.0)
        with bystander, PeakMemory(served.workers) as workers:
            statuses = Counter(_ask(served, "both", [666.0]) for _ in every(4.0, seconds))
            seen = bystander.stop()
        deaths = len(workers.pids_seen) - 2
    yield Figure(
        "innocents beside a segfault every 4 s",
        f"{seen.share_in_time:.2%} answered ({dict(statuses)}, {deaths} workers died)",
        ">= 95 %",
        seen.share_in_time >= 0.95,
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
        seen = bystander.stop()
    yield Figure(
        "innocents beside 1 % that raise",
        f"{seen.share_ok:.2%} answered (raising: {dict(statuses)})",
        "100 %",
        seen.share_ok == 1.0,
    )


def silent_tls_clients(directory: Path, seconds: float) -> Figures:
    """Clients that connect where TLS is spoken, and say nothing."""
    app = f"""
functions: {{plain: {{code: "misdeeds:Numbers", batch_max: 4}}}}
serve: {{tls_certificate: cert.pem, tls_key: key.pem, connections_max: {CONNECTIONS}}}
"""
    write_certificate(directory)
    with Served(write_app(directory, app)) as served:
        (gateway,) = served.gateways()
        own = _sockets(gateway)
        held_max, let_go_s = 0, float("inf")
        with Bystander(served.url, "plain") as bystander, SilentClients(served.url, SILENT) as many:
            served_s = _first_served(served.url, many.opened_s, max(90.0, seconds))
            while (elapsed_s := time.monotonic() - many.opened_s) < max(90.0, seconds):
                held_max = max(held_max, _sockets(gateway) - own)
                if not many.held():
                    let_go_s = elapsed_s
                    break
                time.sleep(0.05)
            seen = bystander.stop()
    yield Figure(
        f"{SILENT} silent TLS clients",
        f"{held_max} held, let go after {let_go_s:.1f} s; who was there: {seen.share_in_time:.1%} "
        f"in time; a new client served after {served_s():.1f} s",
        f"<= {CONNECTIONS + 30} held, gone and a new one served within {LET_GO_S_MAX:.0f} s",
        held_max <= CONNECTIONS + 30 and max(let_go_s, served_s()) <= LET_GO_S_MAX,
    )


def _sockets(pid: int) -> int:
    try:
        links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return 0  # one was closed while they were looked at: there are more looks
    return sum(link.startswith("socket:") for link in links)


def _first_served(url: str, start_s: float, limit_s: float) -> Callable[[], float]:
    """Try new connections, again and again, in a thread; when the first one was served."""
    found = [float("inf")]

    def ask() -> None:
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}'
        while time.monotonic() - start_s < limit_s:
            if Attack("plain", body).send(url, timeout_s=2.0) == 200:
                found[0] = time.monotonic() - start_s
                return
            time.sleep(0.1)

    thread = threading.Thread(target=ask)
    thread.start()

    def result() -> float:
        thread.join()
        return found[0]

    return result


def sigterm_under_load(directory: Path, seconds: float) -> Figures:
    """Told to end while requests come: to the supervisor, and to all its processes at once."""
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
            told_s = time.monotonic()
            has_ended = until(lambda: served.process.poll() is not None)
            took_s = time.monotonic() - told_s
            seen = bystander.stop()
        unanswered = seen.errors["timeout"]
        after = seen.between(told_s, told_s + 1.0)
        yield Figure(
            f"SIGTERM to {name} under load",
            f"{seen.resets} resets, {unanswered} unanswered, ended after {took_s:.1f} s with "
            f"status {served.process.returncode}; within the lame-duck time {after.share_ok:.0%} "
            f"({dict(seen.statuses)} {dict(seen.errors)})",
            "no reset, all answered, served on for 1 s",
            has_ended and not seen.resets and not unanswered and after.share_ok > 0.95,
        )


def connects_at_once(directory: Path, seconds: float) -> Figures:
    """As many connections as a burst brings, in one go."""
    app = 'functions: {plain: {code: "misdeeds:Numbers"}}\n'
    with Served(write_app(directory, app)) as served:
        connected = min(connect_at_once(served.url, 500, 1.0) for _ in range(3))
    yield Figure(
        "500 connects at once", f"{connected} within 1 s (worst of 3)", "500", connected == 500
    )


def stderr_closed(directory: Path, seconds: float) -> Figures:
    """Nobody reads what the server says when a function raises and a worker is killed."""
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
    """Status of one request; 0 where there is no answer."""
    body = f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1],"data":{values}}}]}}'
    return Attack(model, body.encode()).send(served.url, timeout_s=20.0)


def _in_time(what: str, seen: Seen, least: float, note: str) -> Figure:
    value = f"{seen.share_in_time:.2%} in time ({note})"
    return Figure(what, value, f">= {least:.0%}", seen.share_in_time >= least)


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
    """The figures of one case; a case that fails is one too."""
    limit_s = LIMIT_S + seconds * len(BOMBS)
    with tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True) as directory:
        try:
            with _within(limit_s):
                yield from CASES[name](Path(directory), seconds)
        except Exception as error:  # whatever it is, the other cases are still to come
            yield Figure(name, f"{type(error).__name__}: {error}", "a figure", False)


def main() -> int:
    """Measure, print, and return 1 if a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", action="append", choices=[*CASES], help="default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of an attack")
    chosen = parser.parse_args()
    os.environ["HEADGATE_FIGURES"] = own = uuid.uuid4().hex
    print(f"headgate {headgate.__version__} in {Path(headgate.__file__).parent}", flush=True)
    are_kept = True
    try:
        for name in chosen.case or CASES:
            for figure in _run(name, chosen.seconds):
                are_kept &= figure.is_kept
                mark = "ok " if figure.is_kept else "NOT"
                print(f"{mark} {figure.what}: {figure.value} [{figure.bound}]", flush=True)
    finally:
        kill_all(set(marked_processes(own)) - {os.getpid()})
    return 0 if are_kept else 1


if __name__ == "__main__":
    sys.exit(main())
