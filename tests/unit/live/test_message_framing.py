"""Messages survive any split of the stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.functions.tensor import TaskInputs, Tensor
from headgate.live.ipc.messages import MESSAGE_BYTES_MAX, Frames, Message, Release, RunBatch, frame


def test_tensors_share_the_received_memory() -> None:
    sent = RunBatch(1, 2, 3, 4, [TaskInputs(7, 1, [Tensor("x", "INT8", (2,), memoryview(b"ab"))])])
    data = frame(sent)
    (received,) = Frames().feed(data)
    assert received == sent
    assert isinstance(received, RunBatch)
    view = received.tasks[0].inputs[0].data
    assert isinstance(view, memoryview)
    assert view.obj is data


@given(st.lists(st.lists(st.integers(0, 1 << 40), max_size=40), max_size=8), st.data())
def test_any_split_of_the_stream(offsets: list[list[int]], data: st.DataObject) -> None:
    messages: list[Message] = [Release([*each]) for each in offsets]
    stream = b"".join(frame(message) for message in messages)
    frames = Frames()
    received: list[Message] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received.extend(frames.feed(stream[:size]))
        stream = stream[size:]
    assert received == messages


def test_byte_by_byte() -> None:
    message = Release(list(range(1000)))
    frames = Frames()
    *before, last = [frames.feed(bytes([byte])) for byte in frame(message)]
    assert not any(before)
    assert last == [message]


def test_large_message_in_many_chunks_is_copied_once() -> None:
    """Nothing is decoded or concatenated before the last chunk."""
    tensor = Tensor("x", "INT8", (1 << 24,), memoryview(bytes(1 << 24)))
    stream = memoryview(frame(RunBatch(0, 0, 0, 1, [TaskInputs(0, 1, [tensor])])))
    frames = Frames()
    received: list[Message] = []
    for start in range(0, len(stream), 1 << 14):
        received.extend(frames.feed(bytes(stream[start : start + (1 << 14)])))
    assert len(received) == 1


def test_too_long_message_is_rejected_by_its_length() -> None:
    with pytest.raises(ValueError, match="at most"):
        Frames().feed((MESSAGE_BYTES_MAX + 1).to_bytes(4, "little"))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91\x63", b"\x92\x03\xa1x", b"\x92\x03\x90\x90"])
def test_invalid_message_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="invalid message"):
        Frames().feed(len(body).to_bytes(4, "little") + body)
