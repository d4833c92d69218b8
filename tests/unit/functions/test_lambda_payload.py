"""The payload of FaaS calls and the handler that decodes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from headgate.core.errors import ConfigError
from headgate.core.model import LAMBDA_PAYLOAD_BYTES_MAX
from headgate.functions.arrays import to_array, to_tensor
from headgate.functions.lambda_handler import Handler
from headgate.functions.lambda_payload import (
    ResponseJson,
    body_bytes,
    decode_response,
    encode_ping,
    encode_request,
    encode_response,
    parse_call,
)
from headgate.functions.tensor import Block, TaskInputs, TaskResult, Tensor

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


def task(id: int, *values: float) -> TaskInputs:
    return TaskInputs(id, len(values), [to_tensor("x", np.array(values, np.float32))])


def ask(
    handler: Handler, function: str, *tasks: TaskInputs, **options: object
) -> tuple[ResponseJson, list[TaskResult]]:
    """Call the handler as a platform does: JSON to JSON."""
    body = encode_request(function, tasks, **options)  # type: ignore[arg-type]
    answer = handler.handle(json.loads(body), None)
    response = decode_response(json.dumps(answer).encode())
    return response, response.results


def values(result: TaskResult) -> object:
    return to_array(result.outputs[0]).tolist()


def test_batch_has_one_result_per_request(handler: Handler) -> None:
    answer, results = ask(handler, "double", task(7, 1.0, 2.0), task(9, 3.0))
    assert [(result.task_id, values(result)) for result in results] == [(7, [2, 4]), (9, [6])]
    assert answer.cold
    assert not ask(handler, "double", task(1, 1.0))[0].cold


def test_bad_request_fails_by_itself(handler: Handler) -> None:
    _, (good, bad) = ask(handler, "double", task(1, 1.0), task(2, 666.0))
    assert values(good) == [2.0]
    assert (bad.status, bad.error) == (500, "ArithmeticError: of all numbers, this one")


@pytest.mark.parametrize(
    ("function", "deadline_ms", "is_hard", "status"),
    [
        ("double", 1_000.0, True, 200),
        ("double", None, True, 200),
        ("double", -1.0, True, 504),
        ("double", -1.0, False, 200),  # a soft deadline: late is better than never
        ("lazy", 15.0, True, 504),  # the deadline passed while the function was loading
    ],
)
def test_expired_request_is_not_run(
    handler: Handler, function: str, deadline_ms: float | None, is_hard: bool, status: int
) -> None:
    _, (result,) = ask(handler, function, task(1, 1.0), deadline_ms=deadline_ms, is_hard=is_hard)
    assert result.status == status


def test_ping_holds_its_instance(handler: Handler) -> None:
    answer = handler.handle(json.loads(encode_ping(5)), None)
    assert answer["cold"]
    assert cast(float, answer["took_ms"]) >= 5
    assert answer["results"] == []


def test_invalid_payload_is_an_error_of_the_function(handler: Handler) -> None:
    with pytest.raises(ConfigError, match="no such function"):
        ask(handler, "nobody", task(1, 1.0))
    with pytest.raises(ValueError, match="headgate"):
        handler.handle({"some": "event"}, None)
    with pytest.raises(ValueError, match="version 1"):
        handler.handle({"headgate": 1}, None)
    with pytest.raises(ConfigError, match="HEADGATE_APP"):
        Handler({}).warm_up()


def test_named_function_is_loaded_before_the_first_call(tmp_path: Path) -> None:
    (tmp_path / "numbers_of_a_function.py").write_text(CODE)
    (tmp_path / "app.yaml").write_text(APP)
    environment = {"LAMBDA_TASK_ROOT": str(tmp_path), "HEADGATE_APP": "app.yaml"}
    handler = Handler({**environment, "HEADGATE_FUNCTION": "lazy"})
    handler.warm_up()
    _, (result,) = ask(handler, "lazy", task(1, 1.0), deadline_ms=15.0)
    assert result.status == 200


tensors = st.builds(
    lambda name, data, ones: Tensor(name, "UINT8", (len(data), *ones), memoryview(data)),
    st.text(max_size=20),
    st.binary(max_size=100),
    st.lists(st.just(1), max_size=9),
)


@given(
    st.lists(st.builds(TaskInputs, st.integers(0, 1 << 62), st.integers(1, 9), st.lists(tensors)))
)
def test_payload_round_trip_and_size_bound(
    tasks: list[TaskInputs],
) -> None:
    trace, tenant = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "t" * 200
    body = encode_request("f" * 200, tasks, deadline_ms=1.5, traceparent=trace, tenant=tenant)
    assert len(body) <= body_bytes([task.inputs for task in tasks])
    call = parse_call(json.loads(body))
    assert call.tasks == tasks
    assert (call.deadline_ms, call.traceparent, call.tenant) == (1.5, trace, tenant)


results = st.builds(
    TaskResult, st.integers(0, 1 << 62), st.lists(tensors, max_size=3), st.text(max_size=20)
)


@given(st.lists(results, max_size=3))
def test_response_survives_any_json_encoder(
    reported: list[TaskResult],
) -> None:
    """Python's own encoder escapes non-ASCII characters and adds spaces."""
    answer = encode_response(reported, is_cold=False, took_ms=1.0)
    body = json.dumps(answer).encode()
    assert len(body) <= body_bytes([r.outputs for r in reported]) + sum(
        12 * len(r.error) for r in reported
    )
    assert decode_response(body).results == reported


def test_result_beyond_the_payload_limit_has_its_own_status() -> None:
    """Two of 3 MB are more than 6 MB in base64; the third is small."""
    large = [Tensor("y", "UINT8", (3 << 20,), memoryview(bytes(3 << 20)))]
    answer = encode_response(
        [TaskResult(1, large), TaskResult(2, large), TaskResult(3, [])],
        is_cold=False,
        took_ms=1.0,
    )
    body = json.dumps(answer).encode()
    assert len(body) <= LAMBDA_PAYLOAD_BYTES_MAX
    first, second, third = decode_response(body).results
    assert (first.status, len(first.outputs), third.status) == (200, 1, 200)
    assert (second.status, second.outputs) == (413, [])
    assert "more than the payload limit of a call" in second.error


def test_response_cannot_name_shared_memory() -> None:
    """Only a worker has shared memory; a platform that pretends to is not believed."""
    forged = TaskResult(1, [Tensor("y", "UINT8", (9,), Block(0, 9))])
    answer = {"headgate": 2, "cold": False, "took_ms": 1.0, "results": to_builtins([forged])}
    with pytest.raises(ValueError, match="'y'"):
        decode_response(json.dumps(answer).encode())
