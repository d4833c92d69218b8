"""Bodies that SageMaker's clients send, and the answers each kind of them expects.

Beside the Open Inference Protocol (JSON, or Triton's binary form under its own media type) there
are rows for a model of one input: `{"instances": [...]}`, a bare JSON array, or CSV. Anything else
is one opaque string of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, final

from msgspec import Struct

from headgate.functions.tensor import TensorSpec
from headgate.live.call import Call
from headgate.live.gateway import binary
from headgate.live.gateway.answers import Answer, json_lines
from headgate.live.gateway.elements import joined, memoryview_of
from headgate.live.gateway.infer import OipForm
from headgate.live.gateway.oip import InferRequest, InputJson
from headgate.live.gateway.refusal import Refused
from headgate.live.gateway.text import OutputText, ReadText, Understood, WriteText
from headgate.live.serving import Model

TRITON: Final = "application/vnd.sagemaker-triton.binary+json"
_TRITON_SIZE: Final = re.compile(rb";\s*json-header-size=(\d+)\s*$")
_TEXTS: Final = {"application/json": "json", "text/csv": "csv"}


@final
class Parts(Struct, gc=False):
    """A body in parts: the text that is to be read, and what follows it."""

    text: memoryview
    rest: memoryview
    message: ReadText


def is_text(headers: Mapping[bytes, bytes]) -> bool:
    """Whether all of a body is text, going by its media type."""
    return _kind(headers.get(b"content-type", b"")) in _TEXTS


def parts_of(media_type: bytes, body: memoryview, model: Model) -> Parts | None:
    """What is text in a body; None: it is one opaque string of bytes. Raises `Refused`."""
    kind = _kind(media_type)
    if kind == TRITON:
        size = _TRITON_SIZE.search(media_type)
        if size is None:
            raise Refused(400, f"{TRITON} needs json-header-size=N")
        at = binary.json_bytes(size[1], len(body))
        return Parts(body[:at], body[at:], ReadText("oip", model.name))
    if kind not in _TEXTS:
        return None
    spec = model.inputs[0] if len(model.inputs) == 1 else None
    return Parts(body, body[:0], ReadText(_TEXTS[kind], model.name, spec))


def opaque(body: memoryview, model: Model) -> Understood:
    """A body of which nothing is understood, as one string for the model."""
    spec = model.inputs[0] if len(model.inputs) == 1 else TensorSpec("body", "BYTES", (1,))
    described = InputJson(spec.name, (1,) * len(spec.shape), "BYTES")
    return Understood("opaque", InferRequest([described]), [memoryview(joined([body]))])


@final
class BodyForm:
    """How a body of one kind is answered."""

    def __init__(self, model: Model, read: Understood, media_type: bytes) -> None:
        self._model = model
        self._form = read.form
        self._is_triton = _kind(media_type) == TRITON
        self._oip = OipForm(model.name, read.request)
        self.names = self._oip.names

    def answer(self, call: Call) -> Answer:
        """In the form in which was asked."""
        if self._form == "opaque":
            string = _only_string(call)
            if string is not None:
                return Answer(b"", (), [string], _opaque_lines)
        elif self._form != "oip":
            outputs = [OutputText(t.name, t.datatype, t.shape) for t in call.outputs]
            text = WriteText(self._form, self._model.name, "", outputs)
            data = [memoryview_of(tensor) for tensor in call.outputs]
            return Answer(text, data, (), _csv_lines if self._form == "csv" else json_lines)
        answer = self._oip.answer(call)
        if self._is_triton:
            answer.lines = _triton_lines
        return answer


def _kind(media_type: bytes) -> str:
    return media_type.partition(b";")[0].strip().lower().decode("latin-1")


def _only_string(call: Call) -> memoryview | None:
    """The string that is all of an answer, if it is one."""
    if len(call.outputs) != 1 or call.outputs[0].datatype != "BYTES":
        return None
    data = memoryview_of(call.outputs[0])
    size = int.from_bytes(data[:4], "little")
    return data[4:] if len(data) >= 4 and len(data) == 4 + size else None


def _csv_lines(text_bytes: int) -> bytes:
    return b"Content-Type: text/csv; charset=utf-8\r\n"


def _opaque_lines(text_bytes: int) -> bytes:
    return b"Content-Type: application/octet-stream\r\n"


def _triton_lines(text_bytes: int) -> bytes:
    return f"Content-Type: {TRITON};json-header-size={text_bytes}\r\n".encode()
