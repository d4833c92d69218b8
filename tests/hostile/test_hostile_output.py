"""Output that cannot be written must neither end nor delay a server."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served import children_of, until

LIMIT_S = 60.0
CODE = """
import sys

import numpy as np

from headgate.functions import Model


class Chatty(Model):
    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def predict(self, batch):
        print("asked for", batch["x"], "x" * 10_000, flush=True)
        print("x" * 10_000, file=sys.stderr, flush=True)
        sys.stdout.buffer.write(b"bytes, too")
        if (batch["x"] == 666).any():
            raise ArithmeticError("of all numbers, this one " + "x" * 10_000)
        return {"y": batch["x"] * 2}
"""
APP = """
functions: {chatty: {code: "chatty:Chatty", exec_time: 1ms}}
pools: {local: {tier: dedicated, nodes: 1, cpus: 1}}
serve: {lame_duck: 0, drain: 2s, execution_timeout: 20s, access_log: true, log_level: debug}
"""


class Running:
    """A server with its output on any descriptor, on a port that the test chooses."""

    def __init__(self, directory: Path, stdout: int, stderr: int) -> None:
        (directory / "chatty.py").write_text(CODE)
        (directory / "app.yaml").write_text(APP)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "headgate", "serve", "app.yaml", "--port", str(self.port)]
        self.process = subprocess.Popen(command, cwd=directory, stdout=stdout, stderr=stderr)

    def end(self) -> int:
        """Stop the server. Returns its exit status."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()

    def ask(self, value: float) -> int:
        """The status of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [value]}
        try:
            connection.request("POST", "/v2/models/chatty/infer", json.dumps({"inputs": [tensor]}))
            return connection.getresponse().status
        finally:
            connection.close()

    def replace(self, module: str) -> None:
        """Kill the only process of a kind, and wait until another serves in its place."""
        (before,) = children_of(self.process.pid, module)
        os.kill(before, signal.SIGKILL)
        assert until(lambda: children_of(self.process.pid, module) not in ([], [before]))
        assert until(self.is_ready)

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@contextmanager
def output_pipe(kind: str) -> Iterator[int]:
    """A descriptor that output cannot be written to, or not for long."""
    if kind == "/dev/full":
        fd = os.open(kind, os.O_WRONLY)
        yield fd
        os.close(fd)
        return
    read_fd, write_fd = os.pipe()
    if kind == "a closed pipe":
        os.close(read_fd)
    else:  # a full pipe
        os.set_blocking(write_fd, False)
        try:
            while True:
                os.write(write_fd, b"x" * 4096)
        except BlockingIOError:
            pass
        os.set_blocking(write_fd, True)
    yield write_fd
    os.close(write_fd)
    if kind != "a closed pipe":
        os.close(read_fd)


@pytest.mark.parametrize(
    ("kind", "streams"),
    [
        ("a closed pipe", "stderr"),
        ("a full pipe that nobody reads", "both"),
        ("/dev/full", "stderr"),
        pytest.param("a closed pipe", "both", marks=pytest.mark.slow),
        pytest.param("a full pipe that nobody reads", "stderr", marks=pytest.mark.slow),
        pytest.param("/dev/full", "both", marks=pytest.mark.slow),
    ],
)
def test_a_server_survives_the_loss_of_its_output(tmp_path: Path, kind: str, streams: str) -> None:
    """A function prints and raises, a worker dies, a gateway dies: requests are served."""
    with output_pipe(kind) as fd:
        running = Running(tmp_path, fd if streams == "both" else subprocess.DEVNULL, fd)
        try:
            assert until(running.is_ready)
            assert [running.ask(number) for number in range(20)] == [200] * 20
            assert [running.ask(666.0) for _ in range(20)] == [500] * 20
            for module in ("headgate.live.worker", "headgate.live.gateway"):
                running.replace(module)
                assert running.ask(1.0) == 200
                assert running.ask(666.0) == 500
            assert running.process.poll() is None
        finally:
            status = running.end()
        assert status == 0


def test_dropped_lines_are_counted_when_output_works_again(tmp_path: Path) -> None:
    with output_pipe("a full pipe that nobody reads") as fd:
        running = Running(tmp_path, subprocess.DEVNULL, fd)
        try:
            assert until(running.is_ready)
            for _ in range(500):  # some 10 MB: far more than is kept
                assert running.ask(1.0) == 200
            read_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
            text = b""

            def is_reported() -> bool:
                nonlocal text
                try:
                    text = text[-200:] + os.read(read_fd, 1 << 20)
                except BlockingIOError:
                    assert running.ask(1.0) == 200
                return b"lines of output could not be written" in text

            try:
                assert until(is_reported)
            finally:
                os.close(read_fd)
        finally:
            running.end()
