"""A function whose duration is set, not computed, and a tenant that floods a server.

`Paced` sleeps, so the capacity of a server is known beforehand and does not depend on the machine.
A file beside the application may slow it down while it is served.

`flooding` sends in a process of its own, over HTTP or over gRPC, at a rate that does not depend on
the responses, with the longest deadline and the highest priority that a client can claim:

    python -m headgate.lab.bench._paced_server SETTINGS
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.functions import Model
from headgate.functions.arrays import Array
from headgate.loadgen.loops import run_open_loop
from headgate.loadgen.requests import JSON_HEADERS, Body, LoadOptions
from headgate.workload import poisson

CODE: Final = "headgate.lab.bench._paced_server:Paced"
DEADLINE_MAX_S: Final = 60  # `deadline_max` of a server, unless its operator chooses another
_CONNECTIONS_MAX: Final = 3_500  # below `connections_max`: others must be able to connect
_GRPC_TICK_S: Final = 0.01
# A server lets a channel have a few hundred requests open; further ones would wait in the client.
_GRPC_CHANNELS: Final = 12
_OWN_CONNECTION: Final = (("grpc.use_local_subchannel_pool", 1),)
_END_S: Final = 10.0
_TENSOR: Final = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}


class Paced(Model):
    """Takes `base_ms` and `item_ms` per item, multiplied by the number in `factor_file`.

    Its inputs and outputs have names, so that it can be any stage of a pipeline.
    """

    def __init__(
        self,
        base_ms: float = 0.0,
        item_ms: float = 0.0,
        takes: str = "x",
        gives: str = "y",
        factor_file: str = "",
    ) -> None:
        self._base_s = base_ms / 1e3
        self._item_s = item_ms / 1e3
        self._gives = gives
        self._factor_file = Path(factor_file) if factor_file else None
        self.inputs = dict.fromkeys(takes.split("+"), "FP32[-1]")
        self.outputs = {gives: "FP32[-1]"}

    def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Sleep, then return the first input."""
        first = next(iter(batch.values()))
        factor = 1.0
        if self._factor_file is not None:
            with suppress(OSError, ValueError):  # missing, or being written
                factor = float(self._factor_file.read_text())
        time.sleep((self._base_s + self._item_s * len(first)) * factor)
        return {self._gives: first}


def hashed_key(key: str) -> str:
    """Return an API key as the application file has it."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def one_item(key: str, **headers: str) -> LoadOptions:
    """Return options of requests of one item that carry an API key."""
    body = Body(json.dumps({"inputs": [_TENSOR]}).encode(), JSON_HEADERS)
    return LoadOptions(body=body, headers={"Authorization": f"Bearer {key}", **headers})


def free_port() -> int:
    """Return a port of this machine that is free at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Flood:
    """A flood of requests of one item."""

    protocol: str  # "http" or "grpc"
    address: str  # a URL, or HOST:PORT for gRPC
    model: str
    key: str
    rate_per_s: float
    seconds: float


@dataclass(slots=True)
class FloodCount:
    """What a flood has sent, known once it has ended."""

    sent: int = 0
    seconds: float = 0.0

    @property
    def rate_per_s(self) -> float:
        return self.sent / self.seconds if self.seconds else 0.0


@contextmanager
def flooding(flood: Flood) -> Iterator[FloodCount]:
    """Flood inside the block, from a process of its own."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(flood))]
    count = FloodCount()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():  # printed once the flood has begun
                raise RuntimeError(f"the flood over {flood.protocol} did not begin")
            yield count
        finally:
            process.terminate()
            try:
                output, _ = process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            for line in output.splitlines():
                sent, seconds = line.split()
                count.sent, count.seconds = int(sent), float(seconds)


def _print_sent(sent: int, seconds: float) -> None:
    print(f"{sent} {seconds:.3f}", flush=True)


def _flood_http(flood: Flood) -> None:
    arrivals = poisson(flood.rate_per_s, round(flood.seconds * SECOND_NS), seed=1)
    claims = {"X-Request-Timeout-Ms": str(1000 * DEADLINE_MAX_S), "Priority": "u=0"}
    own = one_item(flood.key, **claims)
    options = LoadOptions(
        model=flood.model,
        body=own.body,
        headers=own.headers,
        connections_max=_CONNECTIONS_MAX,
        timeout_ns=2 * DEADLINE_MAX_S * SECOND_NS,
    )
    run_open_loop(
        flood.address,
        arrivals,
        options,
        on_progress=lambda p: _print_sent(p.sent, p.elapsed_ns / SECOND_NS),
    )


async def _flood_grpc(flood: Flood) -> None:
    # gRPC is an extra, and only this function needs it.
    from grpc.aio import (  # noqa: PLC0415
        AioRpcError,
        UnaryUnaryMultiCallable,
        insecure_channel,
    )

    from headgate.live.gateway.grpc.server import SERVICE, Messages  # noqa: PLC0415

    request = Messages()["ModelInferRequest"](model_name=flood.model)
    request.parameters["priority"].int64_param = 1
    tensor = request.inputs.add(name="x", datatype="FP32", shape=(1,))
    tensor.contents.fp32_contents.append(1.0)
    message = request.SerializeToString()
    metadata = (("authorization", f"Bearer {flood.key}"),)
    async with AsyncExitStack() as stack:
        calls: list[UnaryUnaryMultiCallable[bytes, bytes]] = []
        for _ in range(_GRPC_CHANNELS):
            channel = insecure_channel(flood.address, options=_OWN_CONNECTION)
            await stack.enter_async_context(channel)
            calls.append(channel.unary_unary(f"/{SERVICE}/ModelInfer"))

        async def send(infer: UnaryUnaryMultiCallable[bytes, bytes]) -> None:
            with suppress(AioRpcError):  # rejected
                await infer(message, timeout=DEADLINE_MAX_S, metadata=metadata)

        began_s = time.monotonic()
        sent, tasks = 0, set[asyncio.Task[None]]()
        while (now_s := time.monotonic() - began_s) < flood.seconds:
            for _ in range(int(now_s * flood.rate_per_s) - sent):
                task = asyncio.create_task(send(calls[sent % _GRPC_CHANNELS]))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                sent += 1
            _print_sent(sent, now_s)
            await asyncio.sleep(_GRPC_TICK_S)


if __name__ == "__main__":
    settings = Flood(**json.loads(sys.argv[1]))
    if settings.protocol == "grpc":
        asyncio.run(_flood_grpc(settings))
    else:
        _flood_http(settings)
