"""A platform inside of this process, on a thread of its own: for tests, demos and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, final

from headgate.app.endpoints import NO_KEYS, PlatformKeys
from headgate.core.errors import ConfigError
from headgate.serverless.access import Access
from headgate.serverless.bill import Bill
from headgate.serverless.http import Address
from headgate.serverless.janitor import remove_keys
from headgate.serverless.keys import KeysPlace, make_keys
from headgate.serverless.platform import InstanceState, Platform
from headgate.serverless.settings import Settings

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
        settings: Settings | None = None,
        has_auth: bool = True,
        allow_hosts: Iterable[str] = (),
        keys_file: Path | str | None = None,
        **changes: Any,
    ) -> None:
        """`changes` are fields of `Settings`, such as `concurrency=4`.

        Without `has_auth`, requests need no signature; the host must be a loopback address then.
        `allow_hosts` are names by which clients may call the platform, beside those of this
        machine. `keys_file` is where the keys are written, instead of the usual place.
        """
        self.directory = Path(directory)
        self.settings = replace(settings or Settings(), **changes)
        self.port = port
        self.keys: PlatformKeys | None = make_keys() if has_auth else None
        self.keys_file: Path | None = None  # once it is there
        self._host = host
        self._allow_hosts = tuple(allow_hosts)
        self._keys_file = Path(keys_file) if keys_file is not None else None
        self._platform: Platform
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
    def bill(self) -> Bill:
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

    def instances(self) -> list[InstanceState]:
        """All instances there are, with their processes."""

        async def ask() -> list[InstanceState]:
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
        access = Access(self.keys, self._host, self._allow_hosts)
        self._platform = Platform(self.directory, self.settings, access)
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

    def _leave_keys(self, keys: PlatformKeys, access: Access) -> KeysPlace:
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
