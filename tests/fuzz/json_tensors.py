"""Fuzz target: the JSON of a request. It is refused, or it is consistent tensors."""

from __future__ import annotations

from fuzzing import fuzz

from headgate.functions.arrays import to_array
from headgate.functions.tensor import Tensor
from headgate.live.gateway.codec.text import ReadText, read_text
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip import json as oip
from headgate.live.gateway.oip.http import read_tensors
from headgate.live.gateway.oip.messages import InferResponse

LIMITS = GatewayConfig(elements_max=1 << 16)
REFUSALS = (400, 413)

SEEDS = [
    b'{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[1,2.5,-3e4,4]}]}',
    b'{"inputs":[{"name":"x","shape":[2,2],"datatype":"INT8","data":[[1,2],[3,-4]]}]}',
    b'{"inputs":[{"name":"x","shape":[3],"datatype":"BYTES","data":["a","\\u00e9",""]}]}',
    b'{"inputs":[{"name":"x","shape":[1,1,2],"datatype":"BOOL","data":[[[true,false]]]}]}',
    b'{"id":"7","inputs":[{"name":"x","shape":[1],"datatype":"UINT64","data":[18446744073709551615]'
    b'}],"parameters":{"priority":1,"timeout":5},"outputs":[{"name":"y","parameters":{}}]}',
    b'{"inputs":[{"name":"x","shape":[0,9],"datatype":"FP16","data":[]}]}',
    b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP64","data":[1e999],"parameters":null}]}',
]


def check(tensors: list[Tensor]) -> None:
    """Assert that a worker can read the tensors and that a response can be made of them."""
    for tensor in tensors:
        if tensor.datatype != "BF16":
            assert to_array(tensor).shape == tensor.shape
    try:
        text = oip.encode(InferResponse("m", [oip.output(tensor) for tensor in tensors]))
    except RequestError as refused:
        assert refused.status == 406, refused.message
    else:
        assert text.startswith(b'{"model_name":"m"')


def target(data: bytes) -> None:
    """Read a request."""
    try:
        tensors = read_tensors(read_text(ReadText("oip", "m"), data, LIMITS), LIMITS)
    except RequestError as refused:
        assert refused.status in REFUSALS, refused.message
        return
    check(tensors)


if __name__ == "__main__":
    fuzz(target, SEEDS)
