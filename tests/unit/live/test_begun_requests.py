"""The memory of requests that have begun: shared by workers, and bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headgate
from headgate.live.worker import begun_requests
from headgate.live.worker.begun_requests import REMEMBERED_NS, BegunRequests, create_memory


@pytest.fixture
def memory_fd() -> Iterator[int]:
    fd = create_memory()
    yield fd
    os.close(fd)


def test_request_begins_once_whichever_worker_asks(memory_fd: int) -> None:
    one, other = BegunRequests(memory_fd), BegunRequests(memory_fd)
    assert one.try_begin(b"a")
    assert not other.try_begin(b"a")
    assert not one.try_begin(b"a")
    assert other.try_begin(b"b")
    assert not one.try_begin(b"b")


def test_worker_that_is_started_later_knows_what_a_dead_one_began(memory_fd: int) -> None:
    """1. A process enters a request and exits. 2. Another that inherits the memory refuses it."""
    code = (
        "import sys; from headgate.live.worker.begun_requests import BegunRequests\n"
        "print(BegunRequests(int(sys.argv[1])).try_begin(b'a'))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, str(memory_fd)],
            pass_fds=[memory_fd],
            env={**os.environ, "PYTHONPATH": str(Path(headgate.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert said == ["True", "False"]


def test_requests_are_forgotten_after_a_while(memory_fd: int) -> None:
    now_ns = [0]
    begun = BegunRequests(memory_fd, lambda: now_ns[0])
    assert begun.try_begin(b"a")
    now_ns[0] = REMEMBERED_NS - 1
    assert not begun.try_begin(b"a")
    now_ns[0] = REMEMBERED_NS
    assert begun.try_begin(b"a")
    assert not BegunRequests(memory_fd, lambda: now_ns[0]).try_begin(b"a")


def test_the_oldest_requests_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch, memory_fd: int
) -> None:
    """The ring has four places: the fifth request takes that of the first."""
    monkeypatch.setattr(begun_requests, "ENTRIES_MAX", 4)
    writer, reader = BegunRequests(memory_fd), BegunRequests(memory_fd)
    for number in range(6):
        assert writer.try_begin(b"%d" % number)
    assert [reader.try_begin(b"%d" % number) for number in (5, 4, 3, 2)] == [False] * 4
    assert reader.try_begin(b"0")
    assert not writer.try_begin(b"0")
    assert not writer.try_begin(b"5")
