"""Fuzz target: binary tensors after their JSON. They are refused, or they are consistent.

The first line of the input is the header with the length of the JSON.
"""

from __future__ import annotations

from fuzzing import fuzz
from json_tensors import LIMITS, REFUSALS, check

from headgate.live.gateway.codec.text import ReadText, read_text
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip.http import OipFormat, json_bytes, read_tensors


def seed(text: bytes, raw: bytes) -> bytes:
    return b"%d\n%b%b" % (len(text), text, raw)


SEEDS = [
    seed(
        b'{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}',
        b"\x00\x00\x80\x3f\x00\x00\x00\x40",
    ),
    seed(
        b'{"parameters":{"binary_data_output":true},"inputs":[{"name":"x","shape":[2],"datatype":'
        b'"BYTES","parameters":{"binary_data_size":9}},{"name":"y","shape":[1],"datatype":"INT8",'
        b'"data":[1]}],"outputs":[{"name":"y","parameters":{"binary_data":true}}]}',
        b"\x01\x00\x00\x00a\x00\x00\x00\x00",
    ),
    seed(
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"BF16","parameters":{"binary_data_size":2}},'
        b'{"name":"z","shape":[0],"datatype":"BYTES","parameters":{"binary_data_size":0}}]}',
        b"ab",
    ),
]


def target(data: bytes) -> None:
    """Read a request."""
    length, _, body = data.partition(b"\n")
    try:
        at = json_bytes(length, len(body))
        read = read_text(ReadText("oip", "m"), memoryview(body)[:at], LIMITS)
        tensors = read_tensors(read, LIMITS, memoryview(body)[at:])
        OipFormat("m", read.request)
    except RequestError as refused:
        assert refused.status in REFUSALS, refused.message
        return
    check(tensors)


if __name__ == "__main__":
    fuzz(target, SEEDS)
