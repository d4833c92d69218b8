"""Valid and invalid requests generated from the published OpenAPI document get the promised
responses. One real server, one served ONNX file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from onnx_file import write_linear
from schemathesis import APIOperation, BaseSchema, Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from served import Served

from headgate.live.gateway.http.openapi import document

LEFT_OUT: list[Any] = [
    # JSON Schema cannot say that `data` has as many elements as `shape` asks for and that both
    # fit the model, so most requests that are right by the document are wrong by the model.
    positive_data_acceptance,
]
OPERATIONS = [
    pytest.param(method, path, mode, id=f"{method} {path} {mode.value}")
    for path, methods in document(["linear"])["paths"].items()  # type: ignore[attr-defined]
    for method in methods
    for mode in GenerationMode
    # A path without parameters has no invalid requests.
    if method != "parameters" and (method == "post" or "{" in path or mode.is_positive)
]
ROW: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseSchema]:
    directory = tmp_path_factory.mktemp("schema")
    write_linear(directory / "linear.onnx")
    with Served(directory, "--slo", "60s", app="linear.onnx") as served:
        yield schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        assert "Traceback" not in served.errors()


def ask(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, examples: int) -> None:
    """Send this many requests, and check every response against the document."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def asked(case: Case[Any]) -> None:
        case.call_and_validate(excluded_checks=LEFT_OUT)

    asked()


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_few_requests(published: BaseSchema, method: str, path: str, mode: GenerationMode) -> None:
    ask(published[path][method], mode, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_many_requests(published: BaseSchema, method: str, path: str, mode: GenerationMode) -> None:
    ask(published[path][method], mode, 100)


def test_valid_request(published: BaseSchema) -> None:
    """Generated requests are hardly ever valid, so this one is written by hand: its outputs are
    checked as well.
    """
    for path in published:
        if path.endswith(("/infer", "/invocations")):
            parameters = {"model": "linear", "version": "1"}
            case = published[path]["post"].Case(
                path_parameters={k: v for k, v in parameters.items() if f"{{{k}}}" in path},
                body={"inputs": [ROW]},
                media_type="application/json",
            )
            assert case.call_and_validate(excluded_checks=LEFT_OUT).status_code == 200
