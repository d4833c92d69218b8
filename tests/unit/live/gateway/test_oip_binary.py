"""Binary tensors, and both decoders under arbitrary input."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from gateway_rig import Reply, Rig, run
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headgate.functions.tensor import ITEM_BYTES, Tensor
from headgate.live.gateway.codec.text import ReadText, read_text
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip import json as oip
from headgate.live.gateway.oip.http import read_tensors
from headgate.live.gateway.oip.json import pack_strings, split_strings, to_json

LIMITS = GatewayConfig(elements_max=10_000)
OIP = ReadText("oip", "m")
FLOATS = struct.pack("<2f", 1.0, 2.5)
NUMPY = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


def described(size: object = 8, **more: object) -> dict[str, object]:
    parameters = {"binary_data_size": size}
    return {
        "name": "x",
        "shape": [1, 2],
        "datatype": "FP32",
        "parameters": parameters,
        **more,
    }


async def ask(rig: Rig, text: object, raw: bytes, length: object = None) -> Reply:
    data = json.dumps(text).encode()
    length = len(data) if length is None else length
    return await rig.infer(data + raw, f"Inference-Header-Content-Length: {length}")


def test_binary_inputs_and_json_outputs() -> None:
    async def scenario(rig: Rig) -> None:
        reply = await ask(rig, {"inputs": [described()]}, FLOATS)
        assert reply.json["outputs"][0]["data"] == [1.0, 2.5]
        assert "inference-header-content-length" not in reply.headers

    run(scenario)


@pytest.mark.parametrize(
    "more",
    [
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": "x", "parameters": {"binary_data": True}}]},
    ],
)
def test_binary_outputs(more: dict[str, object]) -> None:
    async def scenario(rig: Rig) -> None:
        reply = await ask(rig, {"inputs": [described()], **more}, FLOATS)
        assert reply.headers["content-type"] == "application/octet-stream"
        at = int(reply.headers["inference-header-content-length"])
        (output,) = json.loads(reply.body[:at])["outputs"]
        assert output["parameters"] == {"binary_data_size": 8}
        assert "data" not in output
        assert reply.body[at:] == FLOATS

    run(scenario)


@pytest.mark.parametrize(
    ("text", "raw", "length", "expected_text"),
    [
        ({"inputs": [described(9)]}, FLOATS, None, "8 bytes are left"),
        ({"inputs": [described(-8)]}, FLOATS, None, "binary_data_size"),
        ({"inputs": [described(True)]}, FLOATS, None, "binary_data_size"),
        ({"inputs": [described("8")]}, FLOATS, None, "binary_data_size"),
        ({"inputs": [described(10**30)]}, FLOATS, None, "binary_data_size"),
        ({"inputs": [described(4)]}, FLOATS[:4], None, "need 8"),
        ({"inputs": [described(4)]}, FLOATS, None, "need 8"),
        ({"inputs": [described()]}, FLOATS + b"x", None, "belong to no input"),
        ({"inputs": [described(data=[1, 2])]}, FLOATS, None, "both"),
        ({"inputs": [described()]}, FLOATS, 10**6, "length of the JSON"),
        ({"inputs": [described()]}, FLOATS, -1, "length of the JSON"),
        ({"inputs": [described()]}, FLOATS, "1e3", "length of the JSON"),
        ({"inputs": [described()]}, FLOATS, 3, "cannot be parsed"),
        ({"inputs": [described(datatype="BYTES")]}, FLOATS, None, "a length does not fit"),
        ({"inputs": [described(datatype="BYTES")]}, b"\0" * 8 + b"", None, "expected"),
        ({"inputs": [described(4, datatype="BYTES")]}, b"\0" * 4, None, "is not 2 strings"),
    ],
)
def test_wrong_sizes_are_refused(
    text: object, raw: bytes, length: object, expected_text: str
) -> None:
    async def scenario(rig: Rig) -> None:
        reply = await ask(rig, text, raw, length)
        assert reply.status == 400
        assert expected_text in reply.json["error"]
        assert not rig.runtime.calls

    run(scenario)


@given(st.lists(st.binary(max_size=20)))
def test_packed_strings_round_trip(parts: list[bytes]) -> None:
    assert [bytes(part) for part in split_strings(memoryview(pack_strings(parts)))] == parts


@given(st.data())
def test_json_and_binary_inputs_are_equal(data: st.DataObject) -> None:
    """Every number, sent either way and nested or flat, gives the same bytes, and round-trips."""
    datatype = data.draw(st.sampled_from(sorted(NUMPY)))
    shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=3, max_side=3))
    elements = {"allow_nan": False, "allow_infinity": False} if datatype[:2] == "FP" else None
    array = data.draw(arrays.arrays(NUMPY[datatype], shape, elements=elements))
    raw = array.tobytes()
    for listed in (array.tolist(), array.ravel().tolist()):
        text = {"inputs": [{"name": "x", "shape": shape, "datatype": datatype, "data": listed}]}
        (tensor,) = read_tensors(read_text(OIP, json.dumps(text).encode(), LIMITS), LIMITS)
        assert bytes(tensor.data) == raw  # type: ignore[arg-type]
    size = {"binary_data_size": len(raw)}
    text = {"inputs": [{"name": "x", "shape": shape, "datatype": datatype, "parameters": size}]}
    read = read_text(OIP, json.dumps(text).encode(), LIMITS)
    (tensor,) = read_tensors(read, LIMITS, memoryview(raw))
    assert list(to_json(tensor)) == array.ravel().tolist()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from([*ITEM_BYTES, "x"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["name", "shape", "datatype", "data", "inputs", "parameters", "binary_data_size"]
            ),
            inner,
            max_size=7,
        )
    ),
    max_leaves=12,
)
NEARLY = st.fixed_dictionaries(
    {
        "inputs": st.lists(
            st.fixed_dictionaries(
                {
                    "name": st.just("x") | VALUES,
                    "shape": st.lists(st.integers(-1, 3), max_size=4) | VALUES,
                    "datatype": st.sampled_from(sorted(ITEM_BYTES)) | VALUES,
                },
                optional={
                    "data": st.lists(st.integers(-5, 300) | VALUES, max_size=4) | VALUES,
                    "parameters": st.fixed_dictionaries(
                        {}, optional={"binary_data_size": st.integers(-1, 9) | VALUES}
                    ),
                },
            ),
            max_size=2,
        )
    }
)


@given(NEARLY | VALUES, st.binary(max_size=16))
def test_decoders_return_valid_tensors_or_raise(text: object, raw: bytes) -> None:
    """Any input gives `RequestError` with a 400, or tensors whose bytes agree with their shapes."""
    try:
        read = read_text(OIP, json.dumps(text).encode(), LIMITS)
    except RequestError as refused:
        assert refused.status == 400
        return
    for rest in (memoryview(b""), memoryview(raw)):
        try:
            made = read_tensors(read, LIMITS, rest)
        except RequestError as refused:
            assert refused.status == 400
            assert "\n" not in refused.message
            continue
        for tensor in made:
            _check_whole(tensor)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        oip.decode(b'{"inputs":' + data, LIMITS)


def _check_whole(tensor: Tensor) -> None:
    count = int(np.prod(tensor.shape, dtype=object))
    assert isinstance(tensor.data, memoryview)
    if tensor.datatype == "BYTES":
        assert len(split_strings(tensor.data)) == count
    else:
        assert len(tensor.data) == count * ITEM_BYTES[tensor.datatype]
