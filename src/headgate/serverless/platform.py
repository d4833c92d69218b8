"""The platform: functions, the instances that run them, and the API in front, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, final

from headgate.core.errors import ConfigError
from headgate.serverless.access import Access
from headgate.serverless.api import Api
from headgate.serverless.bill import Bill
from headgate.serverless.calling import Calling
from headgate.serverless.code import scratch_prefix
from headgate.serverless.cpu import Shares, make_shares
from headgate.serverless.errors import ServiceError
from headgate.serverless.event_queue import EventQueue
from headgate.serverless.function import Function
from headgate.serverless.http import Address, HttpServer, Limits, Reply, Request
from headgate.serverless.invoker import Invoker
from headgate.serverless.janitor import Janitor
from headgate.serverless.management import Management
from headgate.serverless.peer import SOCKETS
from headgate.serverless.requests import CodeSent, CreateFunction, Variables
from headgate.serverless.settings import Settings

_LOG: Final = logging.getLogger(__name__)
_HEAD_BYTES_MAX: Final = 2**16
_IDLE_CONNECTIONS_MAX: Final = 256  # beside those of as many calls as may run at once
_SWEEPS: Final = 20  # per keep-alive time
_REQUEST_SLACK_BYTES: Final = 2**20  # what a request to create a function says besides its code


@dataclass(frozen=True, slots=True)
class InstanceState:
    """An instance as it is seen from outside."""

    pid: int
    function: str
    version: str
    is_ready: bool
    is_provisioned: bool


@final
class Platform:
    """A Lambda-compatible platform in `directory`, which keeps code, logs and the bill.

    It is made and used on one event loop. `EmbeddedPlatform` is the one to use from elsewhere.
    """

    def __init__(self, directory: Path, settings: Settings, access: Access) -> None:
        _check_runtime()
        self.settings = settings
        self.functions: dict[str, Function] = {}
        directory = directory.resolve()  # instances have a working directory of their own
        codes = directory / "code"
        self.bill = _open_bill(directory, settings.records_max)
        self.janitor = Janitor()
        try:
            self.shares: Shares = make_shares(settings.cpu, settings.cpus)
        except ConfigError:
            self.bill.close()
            self.janitor.close()
            raise
        if self.shares.group is not None:
            self.janitor.tell("control_group", self.shares.group)
        self.janitor.tell("scratch", codes / scratch_prefix())
        self.invoker = Invoker(
            settings, self.functions, self.shares, self.janitor, self.bill, directory / "logs"
        )
        self.events = EventQueue(settings, self.invoker)
        self.management = Management(settings, self.functions, self.invoker, codes)
        calling = Calling(settings, self.functions, self.invoker, self.events)
        self._api = Api(settings, access, self.management, calling)
        # A zip travels as base64, which is longer by a third.
        largest_bytes = max(settings.zip_bytes * 4 // 3, settings.sync_payload_bytes)
        limits = Limits(
            head_bytes=_HEAD_BYTES_MAX,
            body_bytes=largest_bytes + _REQUEST_SLACK_BYTES,
            connections=settings.concurrency + _IDLE_CONNECTIONS_MAX,
        )
        self._server = HttpServer(self._serve, access.screen, limits)
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> list[Address]:
        """Listen, and return where. Raises `OSError`."""
        addresses = await self._server.open(host, port)
        self._begin(self._sweep())
        return addresses

    async def close(self) -> None:
        """End all instances and give back whatever was taken."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await self.events.close()
        await self.invoker.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.shares.close()
        self.bill.close()
        self.janitor.close()

    async def register(
        self,
        name: str,
        directory: Path,
        handler: str,
        *,
        memory_mb: int,
        timeout_s: int,
        environment: dict[str, str],
    ) -> None:
        """Create a function of the files in a directory, which stay where they are."""
        asked = CreateFunction(
            function_name=name,
            code=CodeSent(image_uri=directory.resolve().as_uri()),
            handler=handler,
            memory_size=memory_mb,
            timeout=timeout_s,
            environment=Variables(environment),
            package_type="Image",
        )
        try:
            await self.management.create(asked)
        except ServiceError as error:
            raise ConfigError(error.message, where="platform", key=name) from error

    def instances(self) -> list[InstanceState]:
        """All instances there are."""
        return [
            InstanceState(
                each.pid,
                each.function.name,
                each.function.version,
                each.is_ready,
                each.is_provisioned,
            )
            for fleet in self.invoker.fleets.values()
            for each in fleet.instances
        ]

    def _serve(self, request: Request, reply: Reply) -> None:
        self._begin(self._answer(request, reply))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request, reply: Reply) -> None:
        try:
            reply.send(await self._api.answer(request))
        except Exception:  # a defect of ours must not leave a client without an answer
            _LOG.exception("a request failed: %s %s", request.method, request.path)
            reply.send(ServiceError(500, "ServiceException", "internal error").response())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.settings.keep_alive_s / _SWEEPS)
            self.invoker.sweep()


def _open_bill(directory: Path, records_max: int) -> Bill:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return Bill(directory / "bill.jsonl", records_max)
    except OSError as error:
        raise ConfigError(f"cannot be used: {error.strerror}", where=str(directory)) from None


def _check_runtime() -> None:
    """Say what is missing now, and not when the first function dies of it."""
    if find_spec("awslambdaric") is None:
        problem = "awslambdaric is not installed: pip install awslambdaric"
        raise ConfigError(problem, where="platform")
    if not os.access(SOCKETS, os.R_OK):
        problem = f"{SOCKETS} cannot be read: instances could not be told from strangers"
        raise ConfigError(problem, where="platform")
