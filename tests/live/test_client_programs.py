"""Real client programs against a served ONNX file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import boto3
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from botocore.config import Config
from botocore.exceptions import ClientError
from onnx_file import BIAS, WEIGHTS, write_linear
from prometheus_client.parser import text_string_to_metric_families
from served import Served, until

X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.float32)
Y = X @ WEIGHTS + BIAS


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An ONNX file, served by one command."""
    directory = tmp_path_factory.mktemp("clients")
    write_linear(directory / "linear.onnx")
    arguments = ("--grpc-port", "0", "--slo", "60s")
    with Served(directory, *arguments, app="linear.onnx") as served:
        yield served


def test_suggested_command_works(served: Served) -> None:
    """The command that `headgate serve` prints under "try it" works as it is."""
    curl = served.banner.splitlines()[-1].strip()
    assert curl.startswith("curl http://127.0.0.1:")
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True)
    (output,) = json.loads(done.stdout)["outputs"]
    assert np.allclose(output["data"], np.ones(4) @ WEIGHTS + BIAS)


@pytest.mark.parametrize("binary", [False, True])
def test_tritonclient_over_http(served: Served, binary: bool) -> None:
    with triton_http.InferenceServerClient(served.url.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("linear")
        assert client.get_model_metadata("linear")["inputs"] == [
            {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
        ]
        tensor = triton_http.InferInput("x", list(X.shape), "FP32")
        tensor.set_data_from_numpy(X, binary_data=binary)
        wanted = triton_http.InferRequestedOutput("y", binary_data=binary)
        answer = client.infer("linear", [tensor], outputs=[wanted], request_id="seven", priority=1)
        assert np.allclose(answer.as_numpy("y"), Y)
        assert answer.get_response()["id"] == "seven"


def test_tritonclient_over_grpc(served: Served) -> None:
    with triton_grpc.InferenceServerClient(served.grpc_address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("linear")
        tensor = triton_grpc.InferInput("x", list(X.shape), "FP32")
        tensor.set_data_from_numpy(X)
        answer = client.infer("linear", [tensor], request_id="seven", client_timeout=60)
        assert np.allclose(answer.as_numpy("y"), Y)
        assert answer.get_response().id == "seven"


KSERVE = """
import asyncio, sys
import numpy as np
from kserve import InferInput, InferRequest, InferenceGRPCClient, InferenceRESTClient, RESTConfig

async def main(url, grpc_address):
    x = np.array([[1, 2, 3, 4]], np.float32)
    for binary in (False, True):
        tensor = InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(x, binary_data=binary)
        request = InferRequest(model_name="linear", infer_inputs=[tensor])
        rest = InferenceRESTClient(RESTConfig(protocol="v2"))
        assert await rest.is_server_ready(url)
        assert await rest.is_model_ready(url, "linear")
        answer = await rest.infer(url, request, model_name="linear")
        print(answer.outputs[0].as_numpy().tolist())
        await rest.close()
    grpc = InferenceGRPCClient(grpc_address)
    assert await grpc.is_server_ready()
    tensor = InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(x)
    answer = await grpc.infer(InferRequest(model_name="linear", infer_inputs=[tensor]))
    print(answer.outputs[0].as_numpy().tolist())
    await grpc.close()

asyncio.run(main(*sys.argv[1:]))
"""


def test_kserve_over_rest_and_grpc(served: Served) -> None:
    """In a process of its own: its messages have the names of those of other clients."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KSERVE, served.url, served.grpc_address],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 3
    for answer in answers:
        assert np.allclose(answer, Y[:1])


def test_boto3_sagemaker_runtime(served: Served) -> None:
    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=served.url,
        region_name="eu-central-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=Config(retries={"max_attempts": 0}),
    )
    tensor = {"name": "x", "datatype": "FP32", "shape": list(X.shape), "data": X.tolist()}
    answer = client.invoke_endpoint(
        EndpointName="linear",
        ContentType="application/json",
        Body=json.dumps({"inputs": [tensor]}),
    )
    (output,) = json.loads(answer["Body"].read())["outputs"]
    assert np.allclose(np.reshape(output["data"], Y.shape), Y)
    assert answer["InvokedProductionVariant"]
    with pytest.raises(ClientError) as caught:
        client.invoke_endpoint(EndpointName="nobody", ContentType="application/json", Body="{}")
    assert caught.value.response["Error"]["Code"] in ("ValidationError", "ValidationException")
    client.close()


def test_prometheus_parses_the_metrics(served: Served) -> None:
    def met() -> float:
        _, text = served.get("/metrics")
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "headgate_requests_total" and sample.labels["outcome"] == "met"
        )

    before = met()
    tensor = triton_http.InferInput("x", list(X.shape), "FP32")
    tensor.set_data_from_numpy(X)
    with triton_http.InferenceServerClient(served.url.removeprefix("http://")) as client:
        client.infer("linear", [tensor])
    assert until(lambda: met() == before + 1)
