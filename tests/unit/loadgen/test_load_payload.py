"""Payloads: generated tensors have the shapes that the metadata of a model require."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import ConfigError
from headgate.functions.tensor import ITEM_BYTES
from headgate.loadgen.requests import InputSpec, make_body, read_body
from headgate.loadgen.results import parse_timings

NUMBERS = sorted(set(ITEM_BYTES) - {"BYTES", "BF16"})


@given(
    st.sampled_from(NUMBERS),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(1, 5),
)
def test_binary_tensors_have_their_size(datatype: str, rest: list[int], items: int) -> None:
    """The headers give the length of the JSON, which gives the length of each tensor."""
    spec = InputSpec("x", datatype, (-1, *rest))
    body = make_body([spec], items, Random(1), is_binary=True)
    length = int(body.headers["Inference-Header-Content-Length"])
    (tensor,) = json.loads(body.content[:length])["inputs"]
    assert tensor["shape"] == [items, *rest]
    size = int(np.prod(tensor["shape"])) * ITEM_BYTES[datatype]
    assert tensor["parameters"]["binary_data_size"] == size == len(body.content) - length


@given(st.sampled_from([*NUMBERS, "BYTES"]), st.integers(1, 5))
def test_json_tensors_have_their_elements(datatype: str, items: int) -> None:
    body = make_body([InputSpec("x", datatype, (-1, 3, -1))], items, Random(1))
    (tensor,) = json.loads(body.content)["inputs"]
    assert tensor["shape"] == [items, 3, 1]
    assert len(tensor["data"]) == items * 3


def test_strings_are_preceded_by_their_length() -> None:
    body = make_body([InputSpec("x", "BYTES", (2,))], 1, Random(1), is_binary=True)
    length = int(body.headers["Inference-Header-Content-Length"])
    raw = body.content[length:]
    assert raw[0:4] == raw[5:9] == b"\x01\x00\x00\x00"


def test_the_seed_determines_the_payload() -> None:
    spec = [InputSpec("x", "FP32", (4,))]
    assert make_body(spec, 1, Random(1)) == make_body(spec, 1, Random(1))
    assert make_body(spec, 1, Random(1)) != make_body(spec, 1, Random(2))


@pytest.mark.parametrize(
    ("spec", "items", "problem"),
    [
        (InputSpec("x", "BF16", (1,)), 1, "cannot be generated"),
        (InputSpec("x", "FP32", (1, 8)), 2, "does not accept requests of 2 items"),
        (InputSpec("x", "FP32", (10**6, 10**6)), 1, "has an unusable shape"),
        (InputSpec("x", "FP32", (4, -2)), 1, "has an unusable shape"),
    ],
)
def test_payloads_that_cannot_be_generated(spec: InputSpec, items: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_body([spec], items, Random(1))


def test_payload_files(tmp_path: Path) -> None:
    """A file is sent verbatim; its content determines the content type."""
    for content, kind in ((b'{"a": 1}', "application/json"), (b"\xff\x00", "application/octet-")):
        (tmp_path / "payload").write_bytes(content)
        body = read_body(tmp_path / "payload")
        assert body.content == content
        assert body.headers["Content-Type"].startswith(kind)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_body(tmp_path / "missing")


@given(st.lists(st.binary(max_size=40)))
def test_malformed_server_timings_are_ignored(texts: list[bytes]) -> None:
    for column in parse_timings(texts).values():
        assert len(column) == len(texts)
        assert (column >= 0).all()
