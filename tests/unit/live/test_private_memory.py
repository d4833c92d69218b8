"""The private memory of a process, and what becomes of memory that is freed."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from headgate.live.ipc.shared_memory import Arena
from headgate.system.process import private_bytes

SIZE = 64 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_shared_memory_does_not_count() -> None:
    """Otherwise a worker would be killed for what its gateway has sent."""
    arena = Arena.create(SIZE)
    try:
        before_bytes, before_resident_bytes = private_bytes(), resident_bytes()
        data = bytes(SIZE // 64)
        for _ in range(64):
            assert arena.allocate(memoryview(data)) is not None
        assert resident_bytes() - before_resident_bytes > SIZE // 2
        assert private_bytes() - before_bytes < SIZE // 4
    finally:
        arena.close()


def test_private_memory_counts() -> None:
    before_bytes = private_bytes()
    weights = np.ones(SIZE, np.uint8)
    assert private_bytes() - before_bytes > SIZE // 2
    assert weights.sum() == SIZE


def test_exited_process_has_no_memory() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    assert private_bytes(process.pid) > 0
    process.kill()
    process.wait()
    assert private_bytes(process.pid) == 0


TENSORS = """
import resource
from headgate.system.process import keep_freed_memory
{first}
for _ in range(200):
    tensors = [b"x" * 100_000 for _ in range(8)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def faults(first: str) -> int:
    """Return the page faults of a process that makes and frees tensors again and again."""
    command = [sys.executable, "-c", TENSORS.format(first=first)]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def test_memory_of_tensors_is_used_again_without_page_faults() -> None:
    """The C library gives 0.8 MB back each time, 200 pages, unless it is told to keep them."""
    assert faults("") - faults("keep_freed_memory()") > 100 * 200
