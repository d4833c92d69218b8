"""The codec: long texts in another process, which may be slow, die, or be busy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import msgspec
import pytest
from gateway_rig import QUICK, Reply, Rig, body, infer, raw, request, rig, run, run_on_loop, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headgate.functions.tensor import TensorSpec
from headgate.live.gateway.codec.client import Codec, CodecProcess, Result, TextJob
from headgate.live.gateway.codec.process import ErrorResult, FailedResult, run_job
from headgate.live.gateway.codec.text import (
    OutputText,
    ParsedRequest,
    ReadText,
    WriteText,
    write_text,
)
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip.json import PIECE, from_json
from headgate.live.gateway.tenants import Budget, Hold

LIMITS = GatewayConfig()
# Low limits, so that small requests count as long.
EVERYTHING = replace(QUICK, inline_bytes_max=0, inline_elements_max=0)
NUMBER = ReadText("oip", "m")
TEXT = b'{"inputs":[{"name":"x","shape":[2],"datatype":"INT8","data":[1,2]}]}'
REFUSALS = [(413, "text_too_large"), (503, "codec_lost")]
NOTHING = """
import sys, time
time.sleep(600)
"""


def compact(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("BOOL", [True, False]),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", [-128, 127]),
        ("FP16", [0.5, -65504.0]),
        ("FP64", [0.1, 1e300]),
        ("BYTES", ["", "gr\u00fc\u00dfe \U0001f600"]),
    ],
)
def test_the_codec_process_reads_like_the_gateway(datatype: str, data: list[object]) -> None:
    async def scenario(rig: Rig) -> None:
        request_bytes = body(tensor(data, (1, 2), datatype), id="7")
        reply = await rig.infer(request_bytes, model="free")
        assert reply.json["outputs"][0]["data"] == data
        assert reply.json["id"] == "7"
        assert rig.server.context.codec.processes[0].starts == 1
        nested = tensor([data], (1, 2), datatype)
        reply = await rig.infer(body(nested, outputs=[{"name": "x"}]), model="free")
        assert reply.json["outputs"][0]["data"] == data
        wrong = await rig.infer(body(tensor([None], (1, 1), datatype)), model="free")
        assert (wrong.status, "Expected" in wrong.json["error"]) == (400, True)

    run(scenario, EVERYTHING)


def test_long_texts_go_to_the_codec_process() -> None:
    """Text of a request beyond 128 KiB, and of a response beyond 65,536 elements."""
    row = infer(body()).partition(b"\r\n\r\n")[2]

    def elements(count: int) -> bytes:
        described = {"name": "x", "shape": [1, count], "datatype": "UINT8"}
        sized = {**described, "parameters": {"binary_data_size": count}}
        expected_text = compact({"inputs": [sized]})
        length = f"Inference-Header-Content-Length: {len(expected_text)}"
        return infer(expected_text + bytes(count), length, model="free")

    for short, long in (
        (infer(row.ljust(128 << 10)), infer(row.ljust((128 << 10) + 1))),
        (elements(1 << 16), elements((1 << 16) + 1)),
    ):

        async def scenario(rig: Rig, short: bytes = short, long: bytes = long) -> None:
            assert (await rig.ask(short)).status == 200
            assert rig.server.context.codec.processes[0].starts == 0
            assert (await rig.ask(long)).status == 200
            assert rig.server.context.codec.processes[0].starts == 1

        run(scenario)


def test_only_the_text_of_binary_requests_goes_to_the_codec() -> None:
    async def scenario(rig: Rig) -> None:
        requested = [{"name": "x", "parameters": {"binary_data": True}}]
        reply = await rig.ask(raw(1000, outputs=requested))
        at = int(reply.headers["inference-header-content-length"])
        (output,) = json.loads(reply.body[:at])["outputs"]
        assert output["parameters"]["binary_data_size"] == len(reply.body) - at > 500

    run(scenario, EVERYTHING)


@pytest.mark.parametrize(
    ("sent", "kind", "expected"),
    [
        ({"instances": [[1, 2], [3, 4]]}, "application/json", {"predictions": [[1, 2], [3, 4]]}),
        ([[1, 2]], "application/json", [[1, 2]]),
        (b"1,2\r\n\r\n 3, 4.5\n", "text/csv", b"1.0,2.0\n3.0,4.5\n"),
    ],
)
def test_rows_of_sagemaker(sent: object, kind: str, expected: object) -> None:
    async def scenario(rig: Rig) -> None:
        lines = (f"Content-Type: {kind}", "X-Amzn-SageMaker-Target-Model: echo")
        data = sent if isinstance(sent, bytes) else compact(sent)
        reply = await rig.ask(request("POST", "/invocations", data, *lines))
        assert reply.status == 200
        found = reply.body if isinstance(expected, bytes) else json.loads(reply.body)
        assert found == expected
        wrong = await rig.ask(request("POST", "/invocations", b"[[1,2],[3]]", *lines))
        assert wrong.status == 400

    run(scenario, EVERYTHING)


def test_deadlines_expire_while_the_codec_reads() -> None:
    async def scenario(rig: Rig) -> None:
        rig.server.context.codec.processes[0].command = (sys.executable, "-c", NOTHING)
        client = await rig.connect()
        client.send(infer(body(), "X-Request-Timeout-Ms: 50"))
        reply = await client.reply()
        assert (reply.status, reply.json["reason"]) == (504, "deadline_exceeded")
        assert not rig.runtime.calls
        assert rig.server.context.keys.anonymous.in_flight == 0

    run(scenario, EVERYTHING)


def test_a_deadline_counts_from_the_arrival_of_the_request() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        sent_ns = time.monotonic_ns()
        client.send(infer(body(), "X-Request-Timeout-Ms: 5000"))
        await rig.until(lambda: bool(rig.runtime.calls))
        (call,) = rig.runtime.calls
        assert call.deadline_ns - call.arrived_ns == 5_000_000_000
        assert sent_ns < call.arrived_ns < time.monotonic_ns()
        client.reset()

    run(scenario, EVERYTHING)


def test_a_codec_process_that_dies_is_restarted() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.infer(body())).status == 200
        (lane, _) = rig.server.context.codec.processes
        assert lane.pid is not None
        os.kill(lane.pid, signal.SIGSTOP)
        client = await rig.connect()
        client.send(infer(body()))
        await rig.until(lambda: lane._job is not None)
        os.kill(lane.pid, signal.SIGKILL)
        reply = await client.reply()
        assert (reply.status, reply.json["reason"]) == (503, "codec_lost")
        assert "retry-after" in reply.headers
        assert (await rig.infer(body())).status == 200
        pid = lane.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # an idle process is replaced when it is needed
        await rig.until(lambda: lane.pid is None)
        assert (await rig.infer(body())).status == 200
        assert not rig.server.context.budget.used

    run(scenario, EVERYTHING)


def test_a_codec_process_that_takes_too_long_is_killed() -> None:
    async def scenario(rig: Rig) -> None:
        (lane, _) = rig.server.context.codec.processes
        working = lane.command
        lane.command = (sys.executable, "-c", NOTHING)
        client, second = await rig.connect(), await rig.connect()
        client.send(infer(body()))
        await rig.until(lambda: lane.pid is not None)
        pid = lane.pid
        second.send(infer(body()))
        lane.command = working
        reply = await client.reply()
        assert (reply.status, reply.json["reason"]) == (503, "codec_timeout")
        assert lane.pid != pid
        assert (await second.reply()).status in (200, 503)  # it has been queued nearly as long
        await rig.until(lambda: not lane._killed)

    run(scenario, replace(EVERYTHING, codec_timeout_s=1.0))


def test_a_text_that_is_queued_too_long_fails() -> None:
    async def scenario(rig: Rig) -> None:
        (lane, _) = rig.server.context.codec.processes
        lane.command = (sys.executable, "-c", NOTHING)
        clients = [await rig.connect() for _ in range(4)]
        for client in clients:
            client.send(infer(body()))
        reply = await clients[-1].reply()
        assert (reply.status, reply.json["reason"]) == (503, "codec_busy")
        replies: list[Reply] = [await client.reply() for client in clients[:-1]]
        assert {reply.status for reply in replies} == {503}
        assert not rig.server.context.budget.used

    run(scenario, replace(EVERYTHING, codec_timeout_s=1.0, codec_queue_max=2))


def test_a_text_that_takes_too_much_memory_fails_alone() -> None:
    """A million lists of one string: as objects they exceed the memory limit of the process."""

    async def scenario(rig: Rig) -> None:
        text = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"BYTES","data":['
        bomb = text + b'["ab"],' * 1_400_000 + b'[""]]}]}'
        first, second = await rig.connect(), await rig.connect()
        for client in (first, second):
            client.send(infer(bomb, model="free"))
        for client in (first, second):
            reply = await client.reply()
            # Not every library survives a lack of memory: the process may also just end.
            assert (reply.status, reply.json["reason"]) in REFUSALS
        assert (await rig.infer(body())).status == 200
        assert not rig.server.context.budget.used

    limits = replace(
        QUICK, json_bytes_max=10_000_000, response_bytes_max=1000, inline_bytes_max=1000
    )
    run(scenario, limits)


def test_a_response_in_the_codec_is_finished_during_shutdown() -> None:
    async def scenario(rig: Rig) -> None:
        (lane, _) = rig.server.context.codec.processes
        rig.runtime.mode = "never"
        client = await rig.connect()
        client.send(infer(body(outputs=[{"name": "x"}])))
        await rig.until(lambda: bool(rig.runtime.calls))
        assert lane.pid is not None
        os.kill(lane.pid, signal.SIGSTOP)
        rig.runtime.mode = "echo"
        rig.runtime.complete(rig.runtime.calls[0])
        await rig.until(lambda: lane._job is not None)
        rig.server.abort_all()
        os.kill(lane.pid, signal.SIGCONT)
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await client.is_closed()

    run(scenario, EVERYTHING)


def test_closing_the_codec_fails_its_queue_and_leaves_no_process() -> None:
    pids: list[int] = []

    async def scenario() -> None:
        async with rig(EVERYTHING) as made:
            (lane, _) = made.server.context.codec.processes
            lane.command = (sys.executable, "-c", NOTHING)
            clients = [await made.connect() for _ in range(3)]
            for client in clients:
                client.send(infer(body()) * 2)
            await made.until(lambda: len(lane._waiting.get(0, ())) == 2)
            assert lane.pid is not None
            pids.append(lane.pid)
            made.server.context.codec.close()
            for client in clients:
                assert (await client.reply()).json["reason"] == "draining"
            assert not made.server.context.budget.used

    run_on_loop(scenario())
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_codec_process_ends_with_the_gateway() -> None:
    """The only sign is that the other end of the socket is closed."""

    async def scenario(rig: Rig) -> None:
        await rig.infer(body())
        (lane, _) = rig.server.context.codec.processes
        process = lane._process
        assert process is not None and lane._socket is not None
        os.kill(process.pid, signal.SIGTERM)  # is ignored: it may be meant for all processes
        assert (await rig.infer(body())).status == 200
        rig.server.context.loop.remove_reader(lane._socket)
        lane._socket.close()
        lane._socket = None
        await rig.until(lambda: process.poll() is not None)
        assert process.returncode == 0

    run(scenario, EVERYTHING)


def test_the_codec_takes_tenants_round_robin() -> None:
    """Five texts of one tenant and one of another: the other's is second."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        lane = CodecProcess(loop, LIMITS)
        budget = Budget(1000, [1, 2], 100)
        order: list[str] = []
        done = asyncio.Event()

        def job(tenant: int, name: str) -> TextJob:
            def finished(result: Result) -> None:
                assert isinstance(result, ParsedRequest)
                order.append(name)
                if len(order) == 5:
                    done.set()

            return TextJob(NUMBER, [TEXT], Hold(budget, tenant), tenant, finished)

        forgotten = job(1, "forgotten")
        jobs = [*(job(1, str(number)) for number in range(4)), job(2, "other")]
        for each in (*jobs, forgotten):
            lane.submit(each)
        forgotten.cancel()
        await asyncio.wait_for(done.wait(), 30)
        assert order == ["0", "other", "1", "2", "3"]
        lane.close()

    run_on_loop(scenario())


def test_very_long_texts_have_a_process_of_their_own() -> None:
    async def scenario() -> None:
        codec = Codec(asyncio.get_running_loop(), LIMITS)
        budget = Budget(100_000_000, [0], 100)
        results: list[Result] = []
        for padding in (2 << 20, 0):
            codec.submit(TextJob(NUMBER, [TEXT.ljust(padding)], Hold(budget, 0), 0, results.append))
        for _ in range(2000):
            if len(results) == 2:
                break
            await asyncio.sleep(0.01)
        assert [lane.starts for lane in codec.processes] == [1, 1]
        assert all(isinstance(result, ParsedRequest) for result in results)
        codec.close()

    run_on_loop(scenario())


def test_responses_have_a_size_limit() -> None:
    """In JSON and in bytes; writing stops at the limit."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "large"
        reply = await rig.infer(body())
        assert (reply.status, reply.json["reason"]) == (500, "answer_too_large")
        assert "binary_data_output" in reply.json["error"]
        assert "retry-after" not in reply.headers
        reply = await rig.infer(body(parameters={"binary_data_output": True}))
        assert (reply.status, reply.json["reason"]) == (500, "answer_too_large")
        assert "binary_data_output" not in reply.json["error"]
        rig.runtime.mode = "echo"
        reply = await rig.infer(body(tensor([0.125] * 12_000, [1, 12_000])), model="free")
        assert reply.json["reason"] == "answer_too_large"  # the bytes fit, the text did not

    run(scenario, replace(QUICK, response_bytes_max=60_000, inline_elements_max=1000))


@pytest.mark.parametrize(
    ("message", "text", "status"),
    [
        (NUMBER, b"{", 400),
        (NUMBER, compact({"inputs": [], "id": "x" * 200_000}), 413),
        (NUMBER, compact({"inputs": [], "outputs": [{"name": str(n)} for n in range(65)]}), 400),
        (NUMBER, b'{"inputs":[],"parameters":{"a":' + b"[" * 100_000, 400),
        (ReadText("json", "m", TensorSpec("x", "FP32", (-1, 2))), b"[1[,2]]", 400),
        (ReadText("csv", "m", TensorSpec("x", "FP32", (-1, 2))), b"1,2]", 400),
        (ReadText("json", "m"), b"[[1]]", 400),
    ],
)
def test_errors_in_the_codec_process(message: ReadText, text: bytes, status: int) -> None:
    reply, parts = run_job(message, [memoryview(text)], LIMITS)
    assert isinstance(reply, ErrorResult)
    assert (reply.status, parts) == (status, [])


def test_a_defect_in_the_codec_process_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    reply, _ = run_job(WriteText("oip", "m", "", [OutputText("x", "FP32", (1,))]), [], LIMITS)
    assert isinstance(reply, FailedResult)
    assert "Traceback" in reply.trace


@pytest.mark.parametrize("form", ["oip", "rows", "predictions", "csv"])
@pytest.mark.parametrize("shape", [(2 * PIECE + 3,), (PIECE, 3), (3, PIECE), (5, 7, 4000)])
def test_long_responses_equal_short_ones(form: str, shape: tuple[int, ...]) -> None:
    """Long ones are written in pieces, short ones at once."""
    count = 1
    for size in shape:
        count *= size
    data = memoryview(bytes(number % 251 for number in range(count)))
    message = WriteText(form, "m", "7", [OutputText("y", "UINT8", shape)])
    text = write_text(message, [data], LIMITS)
    if form == "csv":
        width = count // shape[0]
        rows = [data[at : at + width].tolist() for at in range(0, count, width)]
        assert text == "".join(",".join(map(str, row)) + "\n" for row in rows).encode()
        return
    found = msgspec.json.decode(text)
    if form == "oip":
        assert found["outputs"][0]["data"] == data.tolist()
        return
    found = found["predictions"] if form == "predictions" else found
    assert found == memoryview(bytes(data)).cast("B", shape).tolist()


def test_rows_of_several_outputs() -> None:
    rows = PIECE + 5
    outputs = [OutputText("a", "UINT8", (rows,)), OutputText("b", "UINT8", (rows, 2))]
    message = WriteText("rows", "m", "", outputs)
    found = msgspec.json.decode(
        write_text(message, [memoryview(bytes(rows)), memoryview(bytes(2 * rows))], LIMITS)
    )
    assert found == [{"a": 0, "b": [0, 0]}] * rows


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-128, 127), min_size=1, max_size=6), st.integers(1, 3))
def test_a_list_read_in_pieces_is_the_whole_list(values: list[int], repeated: int) -> None:
    """However long it is, and wherever it is split."""
    many = values * (repeated * PIECE // 2 // len(values))
    text = compact(many)
    expected = bytes(value % 256 for value in many)
    assert bytes(from_json(text, "x", "INT8", (len(many),), len(many))) == expected
    if len(many) % 2 == 0:
        pairs = [many[at : at + 2] for at in range(0, len(many), 2)]
        shape = (len(pairs), 2)
        assert bytes(from_json(compact(pairs), "x", "INT8", shape, len(many))) == expected


@pytest.mark.parametrize(
    ("make", "expected_text"),
    [
        (lambda n: b"[" + b"1," * n + b'"2"]', "Expected `int`"),
        (lambda n: b"[" + b"1," * n + b"[2]]", "Expected `int`"),
        (lambda n: b'"[' + b"1," * n + b'1]"', "Expected `array`"),
        (lambda n: b"[" + b"1," * n + b"300]", "out of the range"),
        (lambda n: b"[" + b"1," * n + b"1,1]", "more than"),
        (lambda n: b"[" + b"1," * (n - 2) + b"1]", "its shape needs"),
    ],
)
def test_long_lists_are_checked_to_the_end(
    make: Callable[[int], bytes], expected_text: str
) -> None:
    count = 2 * PIECE
    with pytest.raises(RequestError, match=expected_text):
        from_json(make(count), "x", "INT8", (count + 1,), count + 1)
