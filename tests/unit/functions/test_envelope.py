"""The envelope and the handler that opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import ConfigError
from headgate.core.model import LAMBDA_PAYLOAD_BYTES_MAX
from headgate.functions.arrays import Array, to_array, to_tensor
from headgate.functions.lambda_handler import Handler
from headgate.functions.lambda_payload import (
    ResponseJson,
    body_bytes,
    decode_answer,
    encode_ping,
    encode_request,
    encode_response,
    open_envelope,
    works_of,
)
from headgate.functions.model import Model
from headgate.functions.tensor import Tensor
from headgate.functions.unbatched import UnbatchedCall, UnbatchedResult, UnbatchedRunner

CODE = """
import time

from headgate.functions import Model


class Doubles(Model):
    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def predict(self, batch):
        if (batch["x"] == 666).any():
            raise ArithmeticError("of all numbers, this one")
        return {"y": batch["x"] * 2}


class Lazy(Doubles):
    def load(self):
        time.sleep(0.03)
"""
APP = """
functions:
  double: {code: "numbers_of_a_function:Doubles", exec_time: [1ms, 1ms, 1ms, 1ms]}
  lazy: {code: "numbers_of_a_function:Lazy", exec_time: 1ms}
pools:
  cloud: {tier: serverless, memory: 1GB}
"""


@pytest.fixture
def handler(tmp_path: Path) -> Handler:
    (tmp_path / "numbers_of_a_function.py").write_text(CODE)
    (tmp_path / "app.yaml").write_text(APP)
    return Handler({"LAMBDA_TASK_ROOT": str(tmp_path), "HEADGATE_APP": "app.yaml"})


def work(id: int, *values: float) -> UnbatchedCall:
    return UnbatchedCall(id, len(values), [to_tensor("x", np.array(values, np.float32))])


def ask(
    handler: Handler, function: str, *works: UnbatchedCall, **options: object
) -> tuple[ResponseJson, list[UnbatchedResult]]:
    """As a platform does it: JSON to JSON."""
    body = encode_request(function, works, **options)  # type: ignore[arg-type]
    answer = handler.handle(json.loads(body), None)
    return decode_answer(json.dumps(answer).encode())


def values(result: UnbatchedResult) -> object:
    return to_array(result.outputs[0]).tolist()


def test_a_batch_comes_back_request_by_request(handler: Handler) -> None:
    answer, results = ask(handler, "double", work(7, 1.0, 2.0), work(9, 3.0))
    assert [(result.task_id, values(result)) for result in results] == [(7, [2, 4]), (9, [6])]
    assert answer.cold
    assert not ask(handler, "double", work(1, 1.0))[0].cold


def test_one_request_breaks_and_not_its_neighbour(handler: Handler) -> None:
    _, (good, bad) = ask(handler, "double", work(1, 1.0), work(2, 666.0))
    assert values(good) == [2.0]
    assert (bad.status, bad.error) == (500, "ArithmeticError: of all numbers, this one")


@pytest.mark.parametrize(
    ("function", "deadline_ms", "gives_up", "status"),
    [
        ("double", 1_000.0, True, 200),
        ("double", None, True, 200),
        ("double", -1.0, True, 504),
        ("double", -1.0, False, 200),  # late is better than never, somebody said
        ("lazy", 15.0, True, 504),  # it passed while the function was loaded
    ],
)
def test_what_nobody_waits_for_is_not_begun(
    handler: Handler, function: str, deadline_ms: float | None, gives_up: bool, status: int
) -> None:
    _, (result,) = ask(handler, function, work(1, 1.0), deadline_ms=deadline_ms, gives_up=gives_up)
    assert result.status == status


def test_a_ping_wakes_and_holds(handler: Handler) -> None:
    answer = handler.handle(json.loads(encode_ping(5)), None)
    assert answer["cold"]
    assert cast(float, answer["took_ms"]) >= 5
    assert answer["results"] == []


def test_what_makes_no_sense_is_an_error_of_the_function(handler: Handler) -> None:
    with pytest.raises(ConfigError, match="no such function"):
        ask(handler, "nobody", work(1, 1.0))
    with pytest.raises(ValueError, match="headgate"):
        handler.handle({"some": "event"}, None)
    with pytest.raises(ValueError, match="version 2"):
        handler.handle({"headgate": 2}, None)
    with pytest.raises(ConfigError, match="HEADGATE_APP"):
        Handler({}).warm_up()


def test_the_function_that_is_named_is_loaded_beforehand(tmp_path: Path) -> None:
    (tmp_path / "numbers_of_a_function.py").write_text(CODE)
    (tmp_path / "app.yaml").write_text(APP)
    environment = {"LAMBDA_TASK_ROOT": str(tmp_path), "HEADGATE_APP": "app.yaml"}
    handler = Handler({**environment, "HEADGATE_FUNCTION": "lazy"})
    handler.warm_up()
    _, (result,) = ask(handler, "lazy", work(1, 1.0), deadline_ms=15.0)
    assert result.status == 200


def test_a_model_that_says_in_a_list_how_unsure_it_is_is_understood() -> None:
    """What looks at an answer after the model must not break on what the model may give."""

    class Unsure(Model):
        def predict(self, batch: dict[str, Array]) -> dict[str, object]:
            return {"y": batch["x"], "unsure": [True] * len(batch["x"])}

    result = UnbatchedRunner(Unsure()).run(work(1, 1.0, 2.0))
    assert (result.status, result.is_unsure) == (200, True)


tensors = st.builds(
    lambda name, data, ones: Tensor(name, "UINT8", (len(data), *ones), memoryview(data)),
    st.text(max_size=20),
    st.binary(max_size=100),
    st.lists(st.just(1), max_size=9),
)


@given(
    st.lists(
        st.builds(UnbatchedCall, st.integers(0, 1 << 62), st.integers(1, 9), st.lists(tensors))
    )
)
def test_nothing_is_lost_on_the_way_and_sizes_are_never_told_too_small(
    works: list[UnbatchedCall],
) -> None:
    trace, tenant = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "t" * 200
    body = encode_request("f" * 200, works, deadline_ms=1.5, traceparent=trace, tenant=tenant)
    assert len(body) <= body_bytes([work.inputs for work in works])
    envelope = open_envelope(json.loads(body))
    assert works_of(envelope) == works
    assert (envelope.deadline_ms, envelope.traceparent, envelope.tenant) == (1.5, trace, tenant)


results = st.builds(
    UnbatchedResult, st.integers(0, 1 << 62), st.lists(tensors, max_size=3), st.text(max_size=20)
)


@given(st.lists(results, max_size=3))
def test_answers_are_as_they_were_however_a_platform_writes_them(
    told: list[UnbatchedResult],
) -> None:
    """Python's own encoder escapes all that is not ASCII, and puts spaces between."""
    answer = encode_response(told, is_cold=False, took_ms=1.0)
    body = json.dumps(answer).encode()
    assert len(body) <= body_bytes([r.outputs for r in told]) + sum(12 * len(r.error) for r in told)
    assert decode_answer(body)[1] == told


def test_a_result_that_an_answer_has_no_room_for_is_told_as_such() -> None:
    """Two of 3 MB are more than 6 MB in base64; the third is small."""
    large = [Tensor("y", "UINT8", (3 << 20,), memoryview(bytes(3 << 20)))]
    answer = encode_response(
        [UnbatchedResult(1, large), UnbatchedResult(2, large), UnbatchedResult(3, [])],
        is_cold=False,
        took_ms=1.0,
    )
    body = json.dumps(answer).encode()
    assert len(body) <= LAMBDA_PAYLOAD_BYTES_MAX
    first, second, third = decode_answer(body)[1]
    assert (first.status, len(first.outputs), third.status) == (200, 1, 200)
    assert (second.status, second.outputs) == (413, [])
    assert "more than a call can carry" in second.error
