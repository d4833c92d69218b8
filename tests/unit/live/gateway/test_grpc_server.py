"""Health, metadata and reflection over gRPC, with real clients."""

from __future__ import annotations

import asyncio
import runpy
import shutil
import socket
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fake_runtime import FakeRuntime
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto
from grpc import StatusCode
from grpc.aio import AioRpcError, secure_channel
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from grpc_rig import Rig, context_of, run

from headgate.core.errors import ConfigError
from headgate.live.call import GatewayPhase
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.grpc.server import COMPILED, GrpcServer, Messages


def test_health_methods_of_the_protocol() -> None:
    async def scenario(rig: Rig) -> None:
        async def is_ready() -> tuple[bool, bool, bool]:
            live = await rig.ask("ServerLive", rig.messages["ServerLiveRequest"]())
            ready = await rig.ask("ServerReady", rig.messages["ServerReadyRequest"]())
            model = await rig.ask("ModelReady", rig.messages["ModelReadyRequest"](name="echo"))
            return live.live, ready.ready, model.ready

        assert await is_ready() == (True, True, True)
        rig.runtime.problems["echo"] = "cannot be loaded: OSError: no secret/weights"
        assert await is_ready() == (True, False, False)
        rig.runtime.problems.clear()
        rig.runtime.phase = GatewayPhase.LAME_DUCK
        assert await is_ready() == (True, False, False)

    run(scenario)


@pytest.mark.parametrize(
    ("exposes", "reason"),
    [
        (False, "cannot be loaded: OSError"),
        (True, "cannot be loaded: OSError: no secret/weights"),
    ],
)
def test_why_a_model_is_not_ready_is_in_the_metadata(exposes: bool, reason: str) -> None:
    """For the server as a whole, only the names of models: that method is public."""

    async def scenario(rig: Rig) -> None:
        async def reason_of(method: str, **fields: str) -> str:
            await rig.ask(method, rig.messages[f"{method}Request"](**fields))
            return str(rig.trailers.get("headgate-reason", ""))

        assert await reason_of("ModelReady", name="echo") == await reason_of("ServerReady") == ""
        rig.runtime.problems["echo"] = "cannot be loaded: OSError: no secret/weights"
        assert await reason_of("ModelReady", name="echo") == reason
        assert await reason_of("ServerReady") == "not ready: echo"
        health: Any = HealthStub(rig.channel)
        checked = await health.Check(HealthCheckRequest())
        assert checked.status == HealthCheckResponse.NOT_SERVING

    run(scenario, GatewayConfig(expose_errors=exposes))


def test_metadata() -> None:
    async def scenario(rig: Rig) -> None:
        server = await rig.ask("ServerMetadata", rig.messages["ServerMetadataRequest"]())
        assert server.name == "headgate" and "schedule_policy" in server.extensions
        model = await rig.ask("ModelMetadata", rig.messages["ModelMetadataRequest"](name="two"))
        assert (model.name, list(model.versions), model.platform) == ("two", ["1"], "python")
        described = [(i.name, i.datatype, list(i.shape)) for i in model.inputs]
        assert described == [("a", "INT64", [-1]), ("b", "FP32", [-1, 3])]
        with pytest.raises(AioRpcError) as error:
            await rig.ask("ModelMetadata", rig.messages["ModelMetadataRequest"](name="none"))
        assert error.value.code() is StatusCode.NOT_FOUND

    run(scenario)


def test_standard_health() -> None:
    """`Check` once, and `Watch` while the gateway shuts down."""

    async def scenario(rig: Rig) -> None:
        stub: Any = HealthStub(rig.channel)
        serving, not_serving = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
        assert (await stub.Check(HealthCheckRequest())).status == serving
        with pytest.raises(AioRpcError) as error:
            await stub.Check(HealthCheckRequest(service="other"))
        assert error.value.code() is StatusCode.NOT_FOUND
        watch = stub.Watch(HealthCheckRequest(service="inference.GRPCInferenceService"))
        assert (await watch.read()).status == serving
        rig.runtime.phase = GatewayPhase.LAME_DUCK
        assert (await watch.read()).status == not_serving
        watch.cancel()

    run(scenario)


def test_reflection_lists_every_service() -> None:
    async def scenario(rig: Rig) -> None:
        requests = [
            ServerReflectionRequest(list_services=""),
            ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
            ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
        ]
        channel: Any = rig.channel
        stub: Any = ServerReflectionStub(channel)
        listed, ours, health = [a async for a in stub.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
        assert b"ModelInferRequest" in ours.file_descriptor_response.file_descriptor_proto[0]
        assert b"HealthCheck" in health.file_descriptor_response.file_descriptor_proto[0]

    run(scenario)


def test_a_reserved_port_can_be_used() -> None:
    """The supervisor binds the port first, to know its number and to keep it over restarts."""

    async def scenario(_: Rig) -> None:
        server = GrpcServer(context_of(FakeRuntime()))
        with socket.socket() as kept:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            kept.bind(("127.0.0.1", 0))
            port = kept.getsockname()[1]
            assert await server.start("127.0.0.1", port) == port
            await server.stop()

    run(scenario)


def test_a_port_in_use_is_a_config_error() -> None:
    async def scenario(_: Rig) -> None:
        server = GrpcServer(context_of(FakeRuntime()))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(ConfigError, match="cannot listen"):
                await server.start("127.0.0.1", taken.getsockname()[1])
        await server.stop()

    run(scenario)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="a certificate has to be made")
def test_a_certificate_enables_tls(tmp_path: Path) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", tmp_path / "key.pem", "-out", tmp_path / "certificate.pem"),
        ],
        check=True,
        capture_output=True,
    )
    certificate = tmp_path / "certificate.pem"

    async def scenario(plain: Rig) -> None:
        server = GrpcServer(context_of(plain.runtime))
        port = await server.start("127.0.0.1", 0, certificate, tmp_path / "key.pem")
        trusting = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with secure_channel(f"127.0.0.1:{port}", trusting) as channel:
            rig = Rig(plain.runtime, channel, port, plain.context, server)
            assert (await rig.infer()).outputs[0].name == "x"
        await server.stop()
        unreadable = GrpcServer(context_of(plain.runtime))
        with pytest.raises(ConfigError, match="No such file"):
            await unreadable.start("127.0.0.1", 0, tmp_path / "none.pem")
        await unreadable.stop()

    run(scenario)


def test_messages_are_those_of_the_protocol() -> None:
    """Compared with the messages of a client library, field by field, in one process."""
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2")
    ours = Messages().pool.FindFileByName("open_inference.proto").message_types_by_name
    assert len(ours) == 14
    for name, message in ours.items():
        assert fields(message) == fields(getattr(theirs, name).DESCRIPTOR), name


def fields(message: Descriptor) -> dict[str, list[tuple[str, int, int, int]]]:
    """The fields of a message and of those nested in it, by name."""
    described = DescriptorProto()
    message.CopyToProto(described)
    return {
        each.name: sorted((f.name, f.number, f.type, f.label) for f in each.field)
        for each in (described, *described.nested_type)
    }


def test_the_descriptor_set_is_compiled_from_the_present_source() -> None:
    pytest.importorskip("grpc_tools")
    tool = Path(__file__).parents[4] / "tools" / "grpc_messages.py"
    compiled = runpy.run_path(str(tool))["compiled"]()
    assert compiled == files("headgate.live.gateway.grpc").joinpath(COMPILED).read_bytes()


def test_the_triton_client_over_grpc() -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    aio = pytest.importorskip("tritonclient.grpc.aio")

    async def scenario(rig: Rig) -> None:
        client = aio.InferenceServerClient(f"127.0.0.1:{rig.port}")
        assert await client.is_server_live() and await client.is_server_ready()
        assert await client.is_model_ready("echo")
        assert (await client.get_model_metadata("echo")).inputs[0].name == "x"
        for model, datatype, array in (
            ("echo", "FP32", np.array([[1, 2], [3, 4]], np.float32)),
            ("bytes", "BYTES", np.array([["hé".encode()]], np.object_)),
            ("free", "FP16", np.array([[1, 2]], np.float16)),
            ("free", "BOOL", np.array([[True], [False]])),
        ):
            given = triton.InferInput("x", array.shape, datatype)
            given.set_data_from_numpy(array)
            answer = await client.infer(
                model, [given], request_id="r", priority=1, timeout=60_000_000, client_timeout=None
            )
            assert (answer.as_numpy("x") == array).all() and answer.get_response().id == "r"
            call = rig.runtime.calls[-1]
            assert call.priority < 0 and call.deadline_ns - call.arrived_ns == 60_000_000_000
        await client.close()
        await asyncio.sleep(0)

    run(scenario)
