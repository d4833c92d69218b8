"""Shared memory: contents, reuse of freed blocks, and invalid offsets."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.functions.tensor import Block
from headgate.live.ipc.shared_memory import Arena

PAGE = 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(16 * PAGE)
    yield arena
    arena.close()


def test_reader_sees_what_was_written(arena: Arena) -> None:
    block = arena.allocate(memoryview(b"elements"))
    assert block is not None
    theirs = Arena.attach(os.dup(arena.fd), arena.size)
    view = theirs.view(block)
    assert bytes(view) == b"elements"
    assert view.readonly
    assert arena.view(block).readonly
    theirs.close()
    assert bytes(view) == b"elements"  # existing views stay valid


def test_reader_can_neither_write_nor_shrink(arena: Arena) -> None:
    with pytest.raises(OSError):
        mmap.mmap(arena.fd, arena.size)
    with pytest.raises(OSError):
        os.ftruncate(arena.fd, 0)
    with pytest.raises(OSError):
        os.write(arena.fd, b"mine")


def test_memory_has_no_name(arena: Arena) -> None:
    """Only the descriptor gives access, and child programs do not inherit it."""
    found = os.fstat(arena.fd)
    assert found.st_nlink == 0
    assert str(Path(f"/proc/self/fd/{arena.fd}").readlink()).startswith("/memfd:")
    assert not os.get_inheritable(arena.fd)


def test_unsealed_memory_is_rejected() -> None:
    fd = os.memfd_create("trap", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    with pytest.raises(ValueError, match="not sealed"):
        Arena.attach(fd, PAGE)
    with pytest.raises(OSError):
        os.fstat(fd)  # closed nevertheless
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(ValueError, match="cannot map shared memory"),
    ):
        Arena.attach(os.dup(file.fileno()), PAGE)


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, -1), (16 * PAGE, 1), (1, 16 * PAGE)])
def test_block_outside_the_region_is_an_error(arena: Arena, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="outside the region"):
        arena.view(Block(offset, size))


def test_only_allocated_blocks_can_be_freed_once(arena: Arena) -> None:
    block = arena.allocate(memoryview(b"x"))
    assert block is not None
    arena.free(block.offset)
    for offset in (block.offset, 1, -1):
        with pytest.raises(ValueError, match="no block"):
            arena.free(offset)


def test_full_arena_returns_none(arena: Arena) -> None:
    page = memoryview(bytes(PAGE))
    blocks = [arena.allocate(page) for _ in range(16)]
    assert None not in blocks
    assert arena.allocate(page) is None
    assert blocks[7] is not None
    arena.free(blocks[7].offset)
    assert arena.allocate(memoryview(bytes(2 * PAGE))) is None
    assert arena.allocate(page) == blocks[7]


def test_adjacent_free_blocks_are_merged(arena: Arena) -> None:
    """Full of small blocks, all freed in any order: a large one fits again."""
    blocks = [arena.allocate(memoryview(bytes(PAGE))) for _ in range(16)]
    for block in blocks[::2] + blocks[1::2]:
        assert block is not None
        arena.free(block.offset)
    assert arena.allocate(memoryview(bytes(16 * PAGE))) == Block(0, 16 * PAGE)


def test_closed_arena_has_no_room(arena: Arena) -> None:
    closed = Arena.create(PAGE)
    closed.close()
    assert closed.allocate(memoryview(b"x")) is None


@given(st.lists(st.tuples(st.integers(0, 5 * PAGE), st.booleans()), max_size=60))
def test_blocks_never_overlap_and_none_is_lost(steps: list[tuple[int, bool]]) -> None:
    """After any sequence contents are intact, and in the end the whole region can be allocated."""
    arena = Arena.create(32 * PAGE)
    held: list[tuple[Block, bytes]] = []
    try:
        for number, (size, frees) in enumerate(steps):
            if frees and held:
                block, _ = held.pop(size % len(held))
                arena.free(block.offset)
                continue
            content = bytes([number]) * size
            given_block = arena.allocate(memoryview(content))
            if given_block is not None:
                held.append((given_block, content))
        for block, content in held:
            assert bytes(arena.view(block)) == content
            arena.free(block.offset)
        assert arena.allocate(memoryview(bytes(32 * PAGE))) is not None
    finally:
        arena.close()
