"""Existing client libraries against the gateway: Triton's and SageMaker's (boto3)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from gateway_rig import Rig, body, run


@pytest.mark.parametrize("is_binary", [False, True])
def test_triton(is_binary: bool) -> None:
    http = pytest.importorskip("tritonclient.http")

    def ask(port: int) -> None:
        with http.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("echo")
            assert client.get_server_metadata()["name"] == "headgate"
            assert client.get_model_metadata("echo")["inputs"][0]["datatype"] == "FP32"
            array = np.array([[1.5, 2.5], [3.5, 4.5]], np.float32)
            given = http.InferInput("x", array.shape, "FP32")
            given.set_data_from_numpy(array, binary_data=is_binary)
            requested = http.InferRequestedOutput("x", binary_data=is_binary)
            answer = client.infer("echo", [given], outputs=[requested], request_id="7", priority=1)
            np.testing.assert_array_equal(answer.as_numpy("x"), array)
            assert answer.get_response()["id"] == "7"
            texts = np.array([["grüße".encode()]], np.object_)
            given = http.InferInput("x", texts.shape, "BYTES")
            given.set_data_from_numpy(texts, binary_data=is_binary)
            answer = client.infer("bytes", [given])
            assert answer.as_numpy("x").ravel()[0] == texts[0, 0]
            with pytest.raises(
                http.InferenceServerException, match="'nobody' does not exist; the "
            ):
                client.infer("nobody", [given])

    async def scenario(rig: Rig) -> None:
        await asyncio.to_thread(ask, rig.port)
        assert rig.runtime.calls[0].priority == -3

    run(scenario)


def test_sagemaker() -> None:
    boto3 = pytest.importorskip("boto3")
    config = pytest.importorskip("botocore.config").Config(retries={"total_max_attempts": 1})

    def client_for(rig: Rig) -> Any:
        return boto3.client(
            "sagemaker-runtime",
            endpoint_url=f"http://127.0.0.1:{rig.port}",
            region_name="eu-central-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=config,
        )

    async def scenario(rig: Rig) -> None:
        client = await asyncio.to_thread(client_for, rig)

        def ask(kind: str, data: bytes, model: str = "echo") -> Any:
            return client.invoke_endpoint(
                EndpointName=model,
                ContentType=kind,
                Body=data,
                CustomAttributes="timeout_ms=5000;priority=2",
            )

        text = json.dumps(body()).encode()
        answer = await asyncio.to_thread(ask, "application/json", text)
        assert answer["InvokedProductionVariant"] == "AllTraffic"
        assert json.loads(answer["Body"].read())["outputs"][0]["data"] == [1.0, 2.5]
        answer = await asyncio.to_thread(ask, "text/csv", b"1,2\n")
        assert answer["Body"].read() == b"1.0,2.0\n"
        assert rig.runtime.calls[0].priority == -2
        for mode, name in (
            ("fail", "ModelError"),
            ("overloaded", "ModelNotReadyException"),
            ("lost", "ServiceUnavailable"),
        ):
            rig.runtime.mode = mode
            with pytest.raises(getattr(client.exceptions, name)) as caught:
                await asyncio.to_thread(ask, "application/json", text)
            if mode == "fail":
                assert caught.value.response["OriginalStatusCode"] == 500
        rig.runtime.mode = "echo"
        with pytest.raises(client.exceptions.ValidationError):
            await asyncio.to_thread(ask, "application/json", text, "nobody")
        await asyncio.to_thread(client.close)

    run(scenario)
