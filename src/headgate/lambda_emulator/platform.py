"""The platform: functions, their instances and the HTTP API, on one event loop.

`EmbeddedPlatform` runs a `LambdaPlatform` on a thread of its own, for tests, demos and notebooks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Self, TypeVar, final

from headgate.config.providers import NO_KEYS, PlatformKeys
from headgate.core.errors import ConfigError
from headgate.lambda_emulator.api import Api
from headgate.lambda_emulator.api_models import CreateFunction, EnvironmentVariables, FunctionCode
from headgate.lambda_emulator.auth import KeysLocation, RequestAuth, client_options, make_keys
from headgate.lambda_emulator.cleanup_process import CleanupProcess, remove_keys
from headgate.lambda_emulator.control_plane import ControlPlane
from headgate.lambda_emulator.cpu_limits import CpuLimiter, make_cpu_limiter
from headgate.lambda_emulator.functions import EmulatedFunction, scratch_prefix
from headgate.lambda_emulator.http import (
    Address,
    EmulatorRequest,
    EmulatorServer,
    Reply,
    ServiceError,
)
from headgate.lambda_emulator.instance import TCP_SOCKETS, InstanceHost
from headgate.lambda_emulator.invoker import AsyncEventQueue, BackgroundTasks, BillingLog, Invoker
from headgate.lambda_emulator.settings import PlatformSettings

_LOG: Final = logging.getLogger(__name__)
_IDLE_CONNECTIONS_MAX: Final = 256  # in addition to one per concurrent invocation
_SWEEPS: Final = 20  # per keep-alive time
_REQUEST_SLACK_BYTES: Final = 2**20  # of `CreateFunction`, in addition to the code

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """State of an instance at one moment."""

    pid: int
    function: str
    version: str
    is_ready: bool
    is_provisioned: bool


@final
class LambdaPlatform:
    """A Lambda-compatible platform that stores code, logs and billing records in `directory`.

    It must be created and used on one event loop; from other threads use `EmbeddedPlatform`.
    """

    def __init__(self, directory: Path, settings: PlatformSettings, auth: RequestAuth) -> None:
        _check_runtime()
        self.settings = settings
        self.functions: dict[str, EmulatedFunction] = {}
        directory = directory.resolve()  # instances have another working directory
        code_directory = directory / "code"
        self.billing_log = _open_billing_log(directory, settings.records_max)
        self.cleanup = CleanupProcess()
        try:
            self.cpu_limiter: CpuLimiter = make_cpu_limiter(settings.cpu, settings.cpus)
        except ConfigError:
            self.billing_log.close()
            self.cleanup.close()
            raise
        if self.cpu_limiter.group is not None:
            self.cleanup.notify("control_group", self.cpu_limiter.group)
        self.cleanup.notify("scratch", code_directory / scratch_prefix())
        host = InstanceHost(settings, self.cpu_limiter, self.cleanup)
        self.invoker = Invoker(host, self.functions, self.billing_log, directory / "logs")
        self.events = AsyncEventQueue(settings, self.invoker)
        self.control_plane = ControlPlane(settings, self.functions, self.invoker, code_directory)
        self._api = Api(
            settings, auth, self.functions, self.control_plane, self.invoker, self.events
        )
        # A zip package is sent as base64, which is longer by a third.
        largest_bytes = max(settings.zip_bytes * 4 // 3, settings.sync_payload_bytes)
        limits = replace(
            settings.http,
            body_bytes_max=largest_bytes + _REQUEST_SLACK_BYTES,
            connections_max=settings.concurrency + _IDLE_CONNECTIONS_MAX,
        )
        self._server = EmulatorServer(self._serve, lambda head, _: auth.check_head(head), limits)
        self._tasks = BackgroundTasks()

    async def open(self, host: str, port: int) -> list[Address]:
        """Listen, and return the bound addresses. Raises `OSError`."""
        addresses = await self._server.open(host, port)
        self._tasks.start(self._sweep())
        return addresses

    async def close(self) -> None:
        """Kill all instances and release all resources."""
        self._server.close()
        self._tasks.cancel()
        await self.events.close()
        await self.invoker.close()
        await self._tasks.close()
        self.cpu_limiter.close()
        self.billing_log.close()
        self.cleanup.close()

    def instances(self) -> list[InstanceSnapshot]:
        """Return all instances."""
        instances = [each for pool in self.invoker.pools.values() for each in pool.instances]
        return [
            InstanceSnapshot(
                i.pid, i.function.name, i.function.version, i.is_ready, i.is_provisioned
            )
            for i in instances
        ]

    def _serve(self, request: EmulatorRequest, reply: Reply) -> None:
        self._tasks.start(self._answer(request, reply))

    async def _answer(self, request: EmulatorRequest, reply: Reply) -> None:
        try:
            reply.send(await self._api.handle(request))
        except Exception:  # a bug of the platform must not leave a client without a response
            _LOG.exception("a request failed: %s %s", request.method, request.path)
            reply.send(ServiceError(500, "ServiceException", "internal error").response())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.settings.keep_alive_s / _SWEEPS)
            self.invoker.sweep()


def _open_billing_log(directory: Path, records_max: int) -> BillingLog:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return BillingLog(directory / "billing.jsonl", records_max)
    except OSError as error:
        raise ConfigError(f"cannot be used: {error.strerror}", where=str(directory)) from None


def _check_runtime() -> None:
    """Raise `ConfigError` now, not when the first instance fails."""
    if find_spec("awslambdaric") is None:
        problem = "awslambdaric is not installed: pip install awslambdaric"
    elif not os.access(TCP_SOCKETS, os.R_OK):
        problem = f"{TCP_SOCKETS} cannot be read: needed to authenticate instances"
    else:
        return
    raise ConfigError(problem, where="platform")


@final
class EmbeddedPlatform:
    """A platform on a thread of its own, which runs as long as this context manager is entered.

    `boto3.client("lambda", **platform.client_options)` returns a client. On exit all instances
    are killed.
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

        Without `has_auth`, requests need no signature, and the host must be a loopback address.
        `allow_hosts` are host names by which clients may call the platform, in addition to those
        of this machine. `keys_file` is the file for the keys, instead of the default.
        """
        self.directory = Path(directory)
        self.settings = replace(settings or PlatformSettings(), **changes)
        self.port = port
        self.keys: PlatformKeys | None = make_keys() if has_auth else None
        self.keys_file: Path | None = None  # set when it has been written
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

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    @property
    def url(self) -> str:
        """URL of the platform: `endpoint_url` of boto3."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    @property
    def client_options(self) -> dict[str, str]:
        """Arguments of `boto3.client`, including the keys."""
        return client_options(self.url, self.settings.region, self.keys or NO_KEYS)

    @property
    def billing_log(self) -> BillingLog:
        """Billing records of all runs so far."""
        return self._platform.billing_log

    @property
    def cpu(self) -> str:
        """How the CPU time of instances is limited, as text."""
        return self._platform.cpu_limiter.description

    @property
    def events_waiting(self) -> int:
        """Number of events that are queued or running."""
        return len(self._platform.events)

    @property
    def provisioned_gb_s(self) -> float:
        """Gigabyte-seconds of provisioned concurrency so far, billed in addition to the runs."""
        return self._read(self._platform.invoker.provisioned_gb_s)

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
        """Create a function from a directory, used in place. Raises `ConfigError`."""
        params = CreateFunction(
            function_name=name,
            code=FunctionCode(image_uri=Path(directory).resolve().as_uri()),
            handler=handler,
            memory_size=memory_mb,
            timeout=timeout_s,
            environment=EnvironmentVariables(dict(environment or {})),
            package_type="Image",
        )
        try:
            self._run(self._platform.control_plane.create(params))
        except ServiceError as error:
            raise ConfigError(error.message, where="platform", key=name) from error

    def instances(self) -> list[InstanceSnapshot]:
        """Return all instances, with their process IDs."""
        return self._read(self._platform.instances)

    def _read(self, read: Callable[[], T]) -> T:
        async def call() -> T:
            return read()

        return self._run(call())

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
        auth = RequestAuth(self.keys, self._host, self._allow_hosts)
        self._platform = LambdaPlatform(self.directory, self.settings, auth)
        location: KeysLocation | None = None
        try:
            addresses = await self._open()
            self.port = addresses[0][1]
            if self.keys is not None:
                location = self._write_keys(self.keys, auth)
            else:
                _check_loopback(addresses)
            self._is_open.set()
            await self._end.wait()
        finally:
            if location is not None:
                remove_keys(location.path, location.platform)
            await self._platform.close()

    async def _open(self) -> list[Address]:
        try:
            return await self._platform.open(self._host, self.port)
        except OSError as error:
            where = f"{self._host}:{self.port}"
            raise ConfigError(f"cannot listen: {error.strerror}", where=where) from None

    def _write_keys(self, keys: PlatformKeys, auth: RequestAuth) -> KeysLocation:
        """Write the keys to a file, and have the cleanup process remove it after a crash."""
        location = KeysLocation.select(self._keys_file, self.port)
        auth.keys_location = location.description
        self._platform.cleanup.notify("platform", location.platform)
        self._platform.cleanup.notify("keys", location.path)
        location.write(keys, self.url, self.settings.region)
        self.keys_file = location.path
        return location


def _check_loopback(addresses: list[Address]) -> None:
    """Raise `ConfigError` for addresses that other machines can reach: there is no auth."""
    for host, _ in addresses:
        if not ip_address(host.partition("%")[0]).is_loopback:
            problem = "--no-auth would let anyone on the network run code here"
            raise ConfigError(problem, where=f"--host {host}", allowed="127.0.0.1, ::1")
