"""The platform: functions, the instances that run them, and the API in front, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, final

from headgate.config.providers import NO_KEYS, PlatformKeys
from headgate.core.errors import ConfigError
from headgate.lambda_emulator.api import Api, InvokeService
from headgate.lambda_emulator.api_models import CodeSent, CreateFunction, Variables
from headgate.lambda_emulator.auth import KeysPlace, RequestAuth, make_keys
from headgate.lambda_emulator.billing import BillingLog
from headgate.lambda_emulator.cleanup_process import CleanupProcess, remove_keys
from headgate.lambda_emulator.control_plane import ControlPlane
from headgate.lambda_emulator.cpu_limits import CpuLimiter, make_cpu_limiter
from headgate.lambda_emulator.errors import ServiceError
from headgate.lambda_emulator.functions import EmulatedFunction, scratch_prefix
from headgate.lambda_emulator.http import (
    Address,
    EmulatorHttpServer,
    EmulatorRequest,
    HttpLimits,
    Reply,
)
from headgate.lambda_emulator.instance import SOCKETS
from headgate.lambda_emulator.invoker import AsyncEventQueue, Invoker
from headgate.lambda_emulator.settings import PlatformSettings

_LOG: Final = logging.getLogger(__name__)
_HEAD_BYTES_MAX: Final = 2**16
_IDLE_CONNECTIONS_MAX: Final = 256  # beside those of as many calls as may run at once
_SWEEPS: Final = 20  # per keep-alive time
_REQUEST_SLACK_BYTES: Final = 2**20  # what a request to create a function says besides its code


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """An instance as it is seen from outside."""

    pid: int
    function: str
    version: str
    is_ready: bool
    is_provisioned: bool


@final
class LambdaPlatform:
    """A Lambda-compatible platform in `directory`, which keeps code, logs and the bill.

    It is made and used on one event loop. `EmbeddedPlatform` is the one to use from elsewhere.
    """

    def __init__(self, directory: Path, settings: PlatformSettings, access: RequestAuth) -> None:
        _check_runtime()
        self.settings = settings
        self.functions: dict[str, EmulatedFunction] = {}
        directory = directory.resolve()  # instances have a working directory of their own
        codes = directory / "code"
        self.bill = _open_bill(directory, settings.records_max)
        self.janitor = CleanupProcess()
        try:
            self.shares: CpuLimiter = make_cpu_limiter(settings.cpu, settings.cpus)
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
        self.events = AsyncEventQueue(settings, self.invoker)
        self.management = ControlPlane(settings, self.functions, self.invoker, codes)
        calling = InvokeService(settings, self.functions, self.invoker, self.events)
        self._api = Api(settings, access, self.management, calling)
        # A zip travels as base64, which is longer by a third.
        largest_bytes = max(settings.zip_bytes * 4 // 3, settings.sync_payload_bytes)
        limits = HttpLimits(
            head_bytes=_HEAD_BYTES_MAX,
            body_bytes=largest_bytes + _REQUEST_SLACK_BYTES,
            connections=settings.concurrency + _IDLE_CONNECTIONS_MAX,
        )
        self._server = EmulatorHttpServer(self._serve, access.screen, limits)
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

    def instances(self) -> list[InstanceSnapshot]:
        """All instances there are."""
        return [
            InstanceSnapshot(
                each.pid,
                each.function.name,
                each.function.version,
                each.is_ready,
                each.is_provisioned,
            )
            for fleet in self.invoker.fleets.values()
            for each in fleet.instances
        ]

    def _serve(self, request: EmulatorRequest, reply: Reply) -> None:
        self._begin(self._answer(request, reply))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: EmulatorRequest, reply: Reply) -> None:
        try:
            reply.send(await self._api.answer(request))
        except Exception:  # a defect of ours must not leave a client without an answer
            _LOG.exception("a request failed: %s %s", request.method, request.path)
            reply.send(ServiceError(500, "ServiceException", "internal error").response())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.settings.keep_alive_s / _SWEEPS)
            self.invoker.sweep()


def _open_bill(directory: Path, records_max: int) -> BillingLog:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return BillingLog(directory / "bill.jsonl", records_max)
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


# A platform inside of this process, on a thread of its own: for tests, demos and notebooks.


T = TypeVar("T")


@final
class EmbeddedPlatform:
    """Runs while it is entered; all instances end with it.

    `boto3.client("lambda", **platform.client_options)` is a client of it.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: PlatformSettings | None = None,
        has_auth: bool = True,
        allow_hosts: Iterable[str] = (),
        keys_file: Path | str | None = None,
        **changes: Any,
    ) -> None:
        """`changes` are fields of `PlatformSettings`, such as `concurrency=4`.

        Without `has_auth`, requests need no signature; the host must be a loopback address then.
        `allow_hosts` are names by which clients may call the platform, beside those of this
        machine. `keys_file` is where the keys are written, instead of the usual place.
        """
        self.directory = Path(directory)
        self.settings = replace(settings or PlatformSettings(), **changes)
        self.port = port
        self.keys: PlatformKeys | None = make_keys() if has_auth else None
        self.keys_file: Path | None = None  # once it is there
        self._host = host
        self._allow_hosts = tuple(allow_hosts)
        self._keys_file = Path(keys_file) if keys_file is not None else None
        self._platform: LambdaPlatform
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self._is_open = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="headgate-platform", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_open.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    @property
    def url(self) -> str:
        """What boto3 calls `endpoint_url`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    @property
    def client_options(self) -> dict[str, str]:
        """What `boto3.client` and `boto3.session.Session.client` need, the keys included."""
        keys = self.keys or NO_KEYS
        return {
            "endpoint_url": self.url,
            "region_name": self.settings.region,
            "aws_access_key_id": keys.access_key_id,
            "aws_secret_access_key": keys.secret_access_key,
        }

    @property
    def bill(self) -> BillingLog:
        """What has run so far."""
        return self._platform.bill

    @property
    def cpu(self) -> str:
        """How instances are kept to their share of the CPUs, in words."""
        return self._platform.shares.words

    @property
    def events_waiting(self) -> int:
        """How many events are queued or under way."""
        return len(self._platform.events)

    @property
    def provisioned_gb_s(self) -> float:
        """What provisioned concurrency has held so far; it is billed besides what has run."""

        async def ask() -> float:
            return self._platform.invoker.provisioned_gb_s()

        return self._run(ask())

    def register(
        self,
        name: str,
        directory: Path | str,
        handler: str,
        *,
        memory_mb: int = 1_769,
        timeout_s: int = 30,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Create a function from a directory, without zip and boto3. Raises `ConfigError`."""
        self._run(
            self._platform.register(
                name,
                Path(directory),
                handler,
                memory_mb=memory_mb,
                timeout_s=timeout_s,
                environment=dict(environment or {}),
            )
        )

    def instances(self) -> list[InstanceSnapshot]:
        """All instances there are, with their processes."""

        async def ask() -> list[InstanceSnapshot]:
            return self._platform.instances()

        return self._run(ask())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._is_open.set()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        access = RequestAuth(self.keys, self._host, self._allow_hosts)
        self._platform = LambdaPlatform(self.directory, self.settings, access)
        place: KeysPlace | None = None
        try:
            addresses = await self._open()
            self.port = addresses[0][1]
            if self.keys is not None:
                place = self._leave_keys(self.keys, access)
            else:
                _check_loopback(addresses)
            self._is_open.set()
            await self._end.wait()
        finally:
            if place is not None:
                remove_keys(place.path, place.platform)
            await self._platform.close()

    async def _open(self) -> list[Address]:
        try:
            return await self._platform.open(self._host, self.port)
        except OSError as error:
            where = f"{self._host}:{self.port}"
            raise ConfigError(f"cannot listen: {error.strerror}", where=where) from None

    def _leave_keys(self, keys: PlatformKeys, access: RequestAuth) -> KeysPlace:
        """Write the keys to a file, and have the janitor remove it if nobody else does."""
        place = KeysPlace.choose(self._keys_file, self.port)
        access.keys_are = place.words
        self._platform.janitor.tell("platform", place.platform)
        self._platform.janitor.tell("keys", place.path)
        place.write(keys, self.url, self.settings.region)
        self.keys_file = place.path
        return place


def _check_loopback(addresses: list[Address]) -> None:
    """Refuse to be open to others than this machine's users without asking who they are."""
    for host, _ in addresses:
        if not ip_address(host.partition("%")[0]).is_loopback:
            problem = "--no-auth would let everybody on the network run code here"
            raise ConfigError(problem, where=f"--host {host}", allowed="127.0.0.1, ::1")
