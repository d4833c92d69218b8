"""Output that cannot be written: nothing blocks, nothing raises, and losses are reported."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.live.telemetry.logs import CHUNK_BYTES_MAX, Output, reopen_standard_fds, text_stream

LIMIT_S = 30.0


class Pipe:
    """A pipe that the test reads."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += os.read(self.read_fd, size - len(data))
        return data

    def close(self) -> None:
        for fd in (self.read_fd, self.write_fd):
            try:
                os.close(fd)
            except OSError as error:
                assert error.errno == errno.EBADF


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_output_is_written_in_order(pipe: Pipe) -> None:
    out = Output(pipe.write_fd)
    for number in range(100):
        out.put(b"%d\n" % number)
    assert out.flush(LIMIT_S)
    assert pipe.read(290) == b"".join(b"%d\n" % number for number in range(100))
    assert out.dropped == 0


def test_unread_pipe_does_not_block_and_drops_are_reported(pipe: Pipe) -> None:
    reported: list[int] = []
    fcntl.fcntl(pipe.write_fd, fcntl.F_SETPIPE_SZ, 4_096)
    out = Output(pipe.write_fd, queue_bytes_max=50_000)
    out.on_recovered = reported.append
    line = b"x" * 4_999 + b"\n"
    for _ in range(1_000):  # far more than the pipe and the queue hold together
        out.put(line)
    assert out.dropped > 500
    assert not out.flush(0.05)  # the timeout holds although nobody reads
    dropped, kept = out.dropped, 1_000 - out.dropped
    assert pipe.read(5_000 * kept) == line * kept
    assert out.flush(LIMIT_S)
    assert reported == [dropped]
    out.put(b"and on\n")
    assert pipe.read(7) == b"and on\n"


def test_closed_pipe_raises_nothing(pipe: Pipe) -> None:
    out = Output(pipe.write_fd)
    os.close(pipe.read_fd)
    for _ in range(10):
        out.put(b"to nobody\n")
    assert out.flush(LIMIT_S)
    assert out.dropped == 10


def test_full_disk_raises_nothing_and_recovery_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[int] = []
    left = 10
    write = os.write

    def full(fd: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = min(left, len(data))
        left -= size
        return write(fd, bytes(data[:size]))

    fd = os.open(tmp_path / "err", os.O_WRONLY | os.O_CREAT)
    try:
        out = Output(fd)
        out.on_recovered = reported.append
        monkeypatch.setattr(os, "write", full)
        out.put(b"cut in the middle\n")
        assert out.flush(LIMIT_S)
        out.put(b"not written\n")
        assert out.flush(LIMIT_S)
        left = 1_000
        out.put(b"a whole line\n")
        assert out.flush(LIMIT_S)
    finally:
        monkeypatch.undo()
        os.close(fd)
    assert (tmp_path / "err").read_bytes() == b"cut in the\na whole line\n"
    assert reported == [2]


def test_non_blocking_pipe(pipe: Pipe) -> None:
    flags = fcntl.fcntl(pipe.write_fd, fcntl.F_GETFL)
    fcntl.fcntl(pipe.write_fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    out = Output(pipe.write_fd)
    piece = b"y" * 200_000
    out.put(piece)
    out.put(piece)
    assert pipe.read(400_000) == piece + piece
    assert out.flush(LIMIT_S)


def test_long_message_is_truncated(pipe: Pipe) -> None:
    out = Output(pipe.write_fd)
    out.put(b"z" * 10_000_000)
    assert pipe.read(CHUNK_BYTES_MAX).endswith(b"z... (cut off)\n")


def test_print_uses_the_output(pipe: Pipe) -> None:
    out = Output(pipe.write_fd)
    stream = text_stream(out, pipe.write_fd)
    print("a", "b", 3, file=stream)
    print("no line yet", end="", file=stream)
    stream.flush()
    stream.buffer.write(b" raw\n")
    stream.write("\udcff \u20ac\n")
    assert out.flush(LIMIT_S)
    expected = "a b 3\nno line yet raw\n\\udcff \u20ac\n".encode()
    assert pipe.read(len(expected)) == expected
    assert stream.fileno() == pipe.write_fd
    assert not stream.isatty()
    stream.close()
    print("still there", file=stream)
    assert pipe.read(12) == b"still there\n"


def test_many_threads_print_whole_lines(pipe: Pipe) -> None:
    out = Output(pipe.write_fd)

    def say(number: int) -> None:
        for _ in range(50):
            out.put(b"%d" % number * 20 + b"\n")

    threads = [threading.Thread(target=say, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = pipe.read(8 * 50 * 21).splitlines()
    assert all(len(set(line)) == 1 for line in lines)
    assert len(lines) == 400


def run(program: str, *, shell: str = "") -> subprocess.CompletedProcess[bytes]:
    """Run Python in a process of its own, whose descriptors a shell may close."""
    command = f'exec "$0" -c "$1" {shell}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, program],
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_forked_child_prints() -> None:
    """A forked process has no writer thread."""
    done = run(
        "import os, sys\n"
        "from headgate.live.telemetry.logs import Output, text_stream\n"
        "out = Output(1)\n"
        "sys.stdout = text_stream(out, 1)\n"
        "print('parent')\n"
        "out.flush(30)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print('child')\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print('parent again')\n"
        "out.flush(30)\n"
    )
    assert (done.stdout, done.stderr) == (b"parent\nchild\nparent again\n", b"")


def test_closed_standard_descriptors_are_reopened() -> None:
    done = run(
        "import os, socket\n"
        "from headgate.live.telemetry.logs import reopen_standard_fds\n"
        "reopen_standard_fds()\n"
        "assert socket.socket().fileno() > 2\n"
        "assert os.path.sameopenfile(2, os.open(os.devnull, os.O_WRONLY))\n"
        "print('kept')\n",
        shell="2>&- <&-",
    )
    assert (done.returncode, done.stdout) == (0, b"kept\n")
    reopen_standard_fds()  # nothing is done if all are open
