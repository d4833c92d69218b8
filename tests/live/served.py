"""A real server, `headgate serve` in a process of its own, clients on its port, other commands."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

START_S = 120.0  # far more than needed: the machine may be busy
END_S = 30.0
ANSWER_S = 60.0


class Served:
    """`headgate serve` of a directory with an `app.yaml`, from ready to gone.

    `mark` is in the environment of all its processes, whoever their parent is. `errors_fd` is where
    its standard error goes instead of the file that `errors` reads.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        app: str = "app.yaml",
        errors_fd: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.mark = f"HEADGATE_TEST_SERVER={uuid.uuid4().hex}"
        self._errors = (directory / "stderr.txt").open("w+")
        command = [sys.executable, "-m", "headgate", "serve", app, "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=self._errors if errors_fd is None else errors_fd,
            text=True,
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "HEADGATE_TEST_SERVER": self.mark.partition("=")[2],
                **(environment or {}),
            },
        )
        self.url = ""
        self.grpc_address = ""
        self.banner = ""

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        killer = threading.Timer(START_S, self.process.kill)
        killer.start()
        for line in self.process.stdout:
            self.banner += line
            if line.startswith("serving "):
                self.url = line.split()[1]
            if line.startswith("gRPC on "):
                self.grpc_address = line.split()[2]
            if line.startswith("try it"):
                self.banner += self.process.stdout.readline()
                break
        killer.cancel()
        if not self.url:
            self.__exit__(None, None, None)
            raise AssertionError(f"it did not start: {self.errors()}")
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def errors(self) -> str:
        """Return its standard error so far."""
        return (self.directory / "stderr.txt").read_text()

    def children(self, module: str) -> list[int]:
        """Process ids of its workers (`headgate.live.worker`) or gateways."""
        return children_of(self.process.pid, module)

    def workers(self) -> list[int]:
        return self.children("headgate.live.worker")

    def ray_hosts(self) -> list[int]:
        return self.children("headgate.live.ray_host")

    def gateways(self) -> list[int]:
        return self.children("headgate.live.gateway")

    def connect(self, timeout_s: float = ANSWER_S) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        return http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)

    def get(self, path: str) -> tuple[int, str]:
        connection = self.connect()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def ask(
        self, model: str, values: list[float], headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, object]]:
        """Send one request of FP32 values called `x`; return its status and body."""
        connection = self.connect()
        try:
            return ask_on(connection, model, values, headers)
        finally:
            connection.close()

    def ask_together(self, model: str, count: int) -> list[tuple[int, dict[str, object]]]:
        """Send this many requests concurrently: the n-th sends the value n."""
        answers: list[tuple[int, dict[str, object]] | None] = [None] * count

        def ask(number: int) -> None:
            answers[number] = self.ask(model, [float(number)])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert None not in answers
        return [answer for answer in answers if answer is not None]


def children_of(pid: int, module: str) -> list[int]:
    """Return the child processes of a process whose command line has the name of a module."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # it has ended
            if module in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


def executions(directory: Path) -> Counter[str]:
    """Return how often each number was run, by the functions that write `ran.txt`."""
    path = directory / "ran.txt"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def run_headgate(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a directory, to its end."""
    command = [sys.executable, "-m", "headgate", *arguments]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=START_S, check=False
    )


def run_json(directory: Path, *arguments: str) -> Any:
    """Run a command that must succeed, and return the JSON that it prints."""
    done = run_headgate(directory, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ask_on(
    connection: http.client.HTTPConnection,
    model: str,
    values: list[float],
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, object]]:
    """Send one request on an open connection."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(values)], "data": values}
    connection.request(
        "POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}), headers or {}
    )
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def value(body: dict[str, object]) -> object:
    """Return the only number in a response."""
    outputs = body["outputs"]
    assert isinstance(outputs, list)
    return outputs[0]["data"][0]


def until(is_true: Callable[[], Any], limit_s: float = 60.0) -> bool:
    """Return whether a condition becomes true within the timeout."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if is_true():
            return True
        time.sleep(0.02)
    return False
