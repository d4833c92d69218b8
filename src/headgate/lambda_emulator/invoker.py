"""Runs invocations: admission, the instances of each version, the event queue, and billing.

`Invoker` admits an invocation, finds an idle instance or starts one, and writes a billing record.
`AsyncEventQueue` runs events (asynchronous invocations) through it, with retries.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, final

import msgspec

from headgate.core.clock import SECOND_NS
from headgate.core.token_bucket import TokenBucket
from headgate.lambda_emulator.functions import EmulatedFunction, FunctionVersion
from headgate.lambda_emulator.http import ServiceError, Throttled, invalid
from headgate.lambda_emulator.instance import (
    FunctionInstance,
    InstanceHost,
    Invocation,
    InvocationResult,
)
from headgate.lambda_emulator.settings import PlatformSettings

_LOG: Final = logging.getLogger(__name__)


class BillingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a function, successful or failed.

    `init_ms` is the start time of the instance in its first (cold) run, and 0 in all later runs.
    Invocations that AWS would not charge for (those rejected before they run) leave no record.
    """

    request_id: str
    function: str
    version: str
    memory_mb: int
    started_s: float  # Unix time
    init_ms: float
    duration_ms: float
    billed_ms: int
    is_cold: bool
    is_provisioned: bool
    error: str = ""  # error type, as the client sees it
    instance: int = 0  # process ID of the instance

    @property
    def gb_s(self) -> float:
        """Gigabytes of memory times billed seconds, the unit that has a price."""
        return self.memory_mb / 1024 * self.billed_ms / 1000


def billed_ms(init_ms: float, duration_ms: float) -> int:
    """Return the billed duration: rounded up to a whole millisecond, at least 1.

    >>> billed_ms(0, 1.2), billed_ms(99.5, 0.5), billed_ms(0, 0)
    (2, 100, 1)
    """
    return max(1, math.ceil(round(init_ms + duration_ms, 6)))


@final
class BillingLog:
    """All billing records of a platform: in a JSON Lines file, and the latest in memory.

    Only the thread of the platform may add records; any thread may call `records`.
    """

    def __init__(self, path: Path, records_max: int) -> None:
        self.path = path
        self._records: deque[BillingRecord] = deque(maxlen=records_max)
        self._file: IO[bytes] = path.open("ab")

    def add(self, record: BillingRecord) -> None:
        """Append a record. It is in the file when this returns."""
        self._records.append(record)
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def records(self, function: str | None = None) -> list[BillingRecord]:
        """Return the latest records in the order in which the runs ended; the file has all."""
        # Copy in one atomic step first: the platform's thread may append meanwhile.
        return [each for each in list(self._records) if function in (None, each.function)]

    def close(self) -> None:
        self._file.close()


def read_billing_log(path: Path) -> list[BillingRecord]:
    """Read the records from a platform's billing file."""
    decoder = msgspec.json.Decoder(BillingRecord)
    return decoder.decode_lines(path.read_bytes())


def gb_s(records: Iterable[BillingRecord]) -> float:
    """Return the total gigabyte-seconds of billing records."""
    return sum(record.gb_s for record in records)


@final
class BackgroundTasks:
    """Tasks that are awaited only when they are closed."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks and wait for their ends."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@final
@dataclass(slots=True)
class Admission:
    """Admission control: concurrency of the account and of functions, and scaling rates.

    A function with reserved concurrency has exactly that much for itself; all other functions
    share the unreserved rest. Provisioned instances count whether they run or not.
    """

    settings: PlatformSettings
    functions: Mapping[str, EmulatedFunction]
    clock_ns: Callable[[], int] = time.monotonic_ns
    _running: Counter[str] = field(default_factory=Counter)
    _scaling_buckets: dict[str, TokenBucket] = field(default_factory=dict)
    _rate_buckets: dict[str, tuple[int, TokenBucket]] = field(default_factory=dict)

    def acquire(self, function: EmulatedFunction) -> None:
        """Admit an invocation, which `release` must follow. Raises `Throttled`."""
        name, reserved = function.name, function.reserved
        if reserved is not None:
            if self._running[name] >= reserved:
                raise Throttled("ReservedFunctionConcurrentInvocationLimitExceeded")
        elif self._is_account_full(name):
            raise Throttled("ConcurrentInvocationLimitExceeded")
        self._check_rate(name, reserved)
        self._running[name] += 1

    def release(self, name: str) -> None:
        self._running[name] -= 1

    def count_scale_up(self, function: EmulatedFunction) -> None:
        """Count one more instance. Raises `Throttled` if the function scales too fast."""
        bucket = self._scaling_buckets.get(function.name)
        if bucket is None:
            burst, per_s = self.settings.scaling_burst, self.settings.scaling_per_s
            bucket = self._scaling_buckets[function.name] = TokenBucket(float(burst), per_s)
        self._take(bucket, is_reserved=function.reserved is not None)

    def check_reservation(self, function: EmulatedFunction, count: int) -> None:
        """Raise `ServiceError` if a reservation leaves too little unreserved concurrency."""
        others = sum(f.reserved or 0 for f in self.functions.values() if f is not function)
        least = int(self.settings.concurrency * self.settings.unreserved_share_min)
        if others + count > self.settings.concurrency - least:
            raise invalid(
                "Specified ReservedConcurrentExecutions for function decreases account's "
                f"UnreservedConcurrentExecution below its minimum value of [{least}]."
            )

    def unreserved(self) -> int:
        """Return the concurrency of the account that no function has reserved."""
        reserved = sum(f.reserved or 0 for f in self.functions.values())
        return self.settings.concurrency - reserved

    def remove_function(self, name: str) -> None:
        """Drop the rate limits of a deleted function. Its running invocations stay counted."""
        self._scaling_buckets.pop(name, None)
        self._rate_buckets.pop(name, None)

    def _is_account_full(self, name: str) -> bool:
        """Whether one more invocation of an unreserved function exceeds the account's limit."""
        used = 0
        for each, function in self.functions.items():
            if function.reserved is None:
                running = self._running[each] + (each == name)
                used += max(running, sum(function.provisioned.values()))
        return used > self.unreserved()

    def _check_rate(self, name: str, reserved: int | None) -> None:
        per_concurrency = self.settings.requests_per_concurrency
        if not per_concurrency:
            return
        # Functions without a reservation share one rate limit. Its key is the empty string, which
        # no function can have as a name.
        key = "" if reserved is None else name
        concurrency = self.settings.concurrency if reserved is None else reserved
        limit = self._rate_buckets.get(key)
        if limit is None or limit[0] != concurrency:
            per_s = max(1.0, per_concurrency * concurrency)
            limit = self._rate_buckets[key] = (concurrency, TokenBucket(per_s, per_s))
        self._take(limit[1], is_reserved=reserved is not None)

    def _take(self, bucket: TokenBucket, *, is_reserved: bool) -> None:
        wait_s = bucket.take(self.clock_ns()) / SECOND_NS
        if wait_s and is_reserved:
            raise Throttled("ReservedFunctionInvocationRateLimitExceeded", wait_s=wait_s)
        if wait_s:
            raise Throttled("FunctionInvocationRateLimitExceeded", wait_s=wait_s)


@final
@dataclass(slots=True, eq=False)
class InstancePool:
    """Instances of one version of a function: idle, busy and provisioned.

    Idle instances are a stack: the one used last is used next, so that surplus instances reach
    their keep-alive limit.
    """

    function: FunctionVersion
    host: InstanceHost
    log: IO[bytes]
    provisioned_target: int = 0
    provisioning_failed: bool = False
    instances: set[FunctionInstance] = field(default_factory=set)
    _idle: list[FunctionInstance] = field(default_factory=list)  # a stack
    _provisioned_s: float = 0.0  # instance-seconds provisioned up to `_changed_s`
    _changed_s: float = field(default_factory=time.monotonic)
    _is_retired: bool = False
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)

    @property
    def provisioned_ready(self) -> int:
        """Number of provisioned instances that have started."""
        return sum(each.is_provisioned and each.is_ready for each in self.instances)

    @property
    def provisioned_gb_s(self) -> float:
        """Gigabyte-seconds provisioned so far. They are billed whether instances run or not."""
        since_s = time.monotonic() - self._changed_s
        held_s = self._provisioned_s + self.provisioned_target * since_s
        return self.function.memory_mb / 1024 * held_s

    @property
    def is_drained(self) -> bool:
        """Whether the pool is retired and its last instance has exited."""
        return self._is_retired and not self.instances

    def acquire(self) -> FunctionInstance | None:
        """Return an idle instance, preferably a provisioned one; None if all are busy."""
        usable = [each for each in self._idle if each.is_usable]
        self._idle = usable
        for position in range(len(usable) - 1, -1, -1):
            if usable[position].is_provisioned:
                return usable.pop(position)
        return usable.pop() if usable else None

    async def start(self) -> FunctionInstance:
        """Start an instance. It belongs to the caller until `release`. Raises `OSError`."""
        instance = self._new_instance(is_provisioned=False)
        await self._launch(instance)
        return instance

    def release(self, instance: FunctionInstance) -> None:
        """Return an instance to the pool; it is killed if it is expired or the pool retired."""
        if not instance.is_usable or instance.has_exited:
            return
        if self._is_retired or self._is_expired(instance):
            instance.kill()
        else:
            self._idle.append(instance)

    def sweep(self) -> None:
        """Kill idle instances beyond the keep-alive time or the maximum age."""
        horizon_s = time.monotonic() - self.host.settings.keep_alive_s
        for instance in list(self._idle):
            is_stale = not instance.is_provisioned and instance.idle_since_s < horizon_s
            if is_stale or self._is_expired(instance):
                self._idle.remove(instance)
                instance.kill()

    def provision(self, count: int) -> None:
        """Keep `count` provisioned instances ready, besides those started on demand."""
        self._set_provisioned_target(count)
        self.provisioning_failed = False
        surplus = self._provisioned() - count
        for instance in [each for each in self._idle if each.is_provisioned][: max(0, surplus)]:
            self._idle.remove(instance)
            instance.is_provisioned = False  # no longer counted: it is killed at once
            instance.kill()
        self._start_provisioned()

    def retire(self) -> None:
        """Kill idle instances, let busy ones finish, and start no more."""
        self._is_retired = True
        self._set_provisioned_target(0)
        for instance in self._idle:
            instance.kill()
        self._idle.clear()

    async def close(self) -> None:
        """Kill all instances and wait until they have exited."""
        self.retire()
        await self._tasks.close()
        await asyncio.gather(*(instance.close() for instance in list(self.instances)))

    def _set_provisioned_target(self, count: int) -> None:
        now_s = time.monotonic()
        self._provisioned_s += self.provisioned_target * (now_s - self._changed_s)
        self.provisioned_target, self._changed_s = count, now_s

    def _provisioned(self) -> int:
        return sum(each.is_provisioned for each in self.instances)

    def _is_expired(self, instance: FunctionInstance) -> bool:
        """Whether a working instance must not be reused: surplus provisioned, or too old."""
        if instance.is_provisioned:
            return self._provisioned() > self.provisioned_target
        return time.monotonic() - instance.started_s > self.host.settings.age_max_s

    def _new_instance(self, *, is_provisioned: bool) -> FunctionInstance:
        instance = FunctionInstance(
            self.function,
            self.host,
            self.log,
            self._on_instance_exit,
            is_provisioned=is_provisioned,
        )
        self.instances.add(instance)
        return instance

    async def _launch(self, instance: FunctionInstance) -> None:
        try:
            await instance.start()
        except BaseException:
            self.instances.discard(instance)
            raise

    def _start_provisioned(self) -> None:
        for _ in range(self.provisioned_target - self._provisioned()):
            instance = self._new_instance(is_provisioned=True)
            self._tasks.start(self._launch_provisioned(instance))

    async def _launch_provisioned(self, instance: FunctionInstance) -> None:
        try:
            await self._launch(instance)
            is_ready = await instance.wait_ready(self.host.settings.provisioned_init_timeout_s)
        except OSError:
            is_ready = False
        if is_ready:
            self.release(instance)
        else:
            # No retry: it would fail again. Only a new `provision` starts instances again.
            self.provisioning_failed = True
            instance.kill()

    def _on_instance_exit(self, instance: FunctionInstance) -> None:
        self.instances.discard(instance)
        if instance in self._idle:
            self._idle.remove(instance)
        if instance.is_provisioned and not self._is_retired and not self.provisioning_failed:
            asyncio.get_running_loop().call_soon(self._start_provisioned)


@final
class Invoker:
    """Runs invocations on the instance pools of a platform, one pool per function revision."""

    def __init__(
        self,
        host: InstanceHost,
        functions: Mapping[str, EmulatedFunction],
        billing_log: BillingLog,
        logs: Path,
    ) -> None:
        self.admission = Admission(host.settings, functions)
        self.pools: dict[str, InstancePool] = {}
        self._host = host
        self._functions = functions
        self._billing_log = billing_log
        self._logs = logs
        self._provisioned_gb_s = 0.0  # of pools that have been removed
        self._log_files: dict[str, IO[bytes]] = {}

    async def run(
        self, function: EmulatedFunction, call: Invocation
    ) -> tuple[InvocationResult, BillingRecord]:
        """Run an invocation on an instance of its own.

        Raises `Throttled` or `ServiceError`; then the function has not run and nothing is billed.
        """
        self.admission.acquire(function)
        try:
            pool = self.pool(call.function)
            result = InvocationResult(has_run=False)
            # An instance may have died unnoticed. The call has not run then: use another instance.
            while not result.has_run:
                instance = pool.acquire() or await self._start(function, pool)
                result = await instance.run(call)
                pool.release(instance)
        finally:
            self.admission.release(function.name)
        record = self._record(call, instance, result)
        self._billing_log.add(record)
        return result, record

    def pool(self, version: FunctionVersion) -> InstancePool:
        """Return the instance pool of a version, creating it on first use."""
        pool = self.pools.get(version.revision)
        if pool is None:
            pool = InstancePool(version, self._host, self._log_file(version.name))
            self.pools[version.revision] = pool
        return pool

    def current_version(self, function: EmulatedFunction, version: str) -> FunctionVersion | None:
        """Return the present state of a version; None if it has been deleted."""
        is_known = self._functions.get(function.name) is function
        return function.find(version) if is_known else None

    def reconcile(self, function: EmulatedFunction) -> None:
        """Apply a change of a function: retire outdated pools, adjust provisioned instances."""
        wanted: Counter[str] = Counter()
        for qualifier, count in function.provisioned.items():
            version = function.find(qualifier)
            if version is not None:
                wanted[version.revision] += count
        known = {version.revision: version for version in function.all_versions()}
        if self._functions.get(function.name) is not function:
            known = {}  # the function has been deleted
        for revision, pool in self.pools.items():
            if pool.function.name == function.name and revision not in known:
                pool.retire()
        for revision, version in known.items():
            count = wanted[revision]
            if count or (revision in self.pools and self.pools[revision].provisioned_target):
                self.pool(version).provision(count)

    def provisioned_gb_s(self) -> float:
        """Return the gigabyte-seconds provisioned so far, over all functions."""
        held_gb_s = sum(pool.provisioned_gb_s for pool in self.pools.values())
        return self._provisioned_gb_s + held_gb_s

    def sweep(self) -> None:
        """Sweep all pools and remove those that are drained."""
        for revision, pool in list(self.pools.items()):
            pool.sweep()
            if pool.is_drained:
                self._provisioned_gb_s += pool.provisioned_gb_s
                del self.pools[revision]

    async def close(self) -> None:
        """Kill all instances and close the log files."""
        for pool in list(self.pools.values()):
            await pool.close()
        for file in self._log_files.values():
            file.close()

    async def _start(self, function: EmulatedFunction, pool: InstancePool) -> FunctionInstance:
        self.admission.count_scale_up(function)
        try:
            return await pool.start()
        except (OSError, ValueError) as error:  # such as a code directory that was deleted
            _LOG.error("%s: no instance can be started: %s", function.name, error)
            problem = "no instance can be started: the log of the platform says why"
            raise ServiceError(500, "ServiceException", problem) from error

    def _record(
        self, call: Invocation, instance: FunctionInstance, result: InvocationResult
    ) -> BillingRecord:
        init_ms = result.init_ms if self._host.settings.is_init_billed else 0.0
        return BillingRecord(
            request_id=call.id,
            function=call.function.name,
            version=call.function.version,
            memory_mb=call.function.memory_mb,
            started_s=result.started_s or time.time(),
            init_ms=round(result.init_ms, 3),
            duration_ms=round(result.duration_ms, 3),
            billed_ms=billed_ms(round(init_ms, 3), round(result.duration_ms, 3)),
            is_cold=result.is_cold,
            is_provisioned=instance.is_provisioned,
            error=result.error_type,
            instance=instance.pid,
        )

    def _log_file(self, name: str) -> IO[bytes]:
        file = self._log_files.get(name)
        if file is None:
            self._logs.mkdir(parents=True, exist_ok=True)
            file = self._log_files[name] = (self._logs / f"{name}.log").open("ab", buffering=0)
        return file


@final
class AsyncEventQueue:
    """Events: asynchronous invocations, queued and retried.

    `dropped` counts events that failed too often, grew too old, or lost their function.
    """

    def __init__(self, settings: PlatformSettings, invoker: Invoker) -> None:
        self.dropped = 0
        self._settings = settings
        self._invoker = invoker
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, function: EmulatedFunction, call: Invocation) -> None:
        """Queue an invocation. Raises `Throttled` if `events_max` events are queued already."""
        if len(self._tasks) >= self._settings.events_max:
            raise Throttled("CallerRateLimitExceeded")
        self._tasks.start(self._run_with_retries(function, call))

    async def close(self) -> None:
        """Cancel all queued events."""
        await self._tasks.close()

    async def _run_with_retries(self, function: EmulatedFunction, call: Invocation) -> None:
        """Run an event until it succeeds, has failed too often, or is too old."""
        settings, errors = self._settings, 0
        expires_s = time.monotonic() + settings.event_age_max_s
        backoff_s, backoff_s_max = settings.event_throttled_s
        while time.monotonic() < expires_s:
            # An event runs the version as it is now, not as it was when the event was queued.
            current = self._invoker.current_version(function, call.function.version)
            if current is None:
                break
            try:
                result, _ = await self._invoker.run(function, replace(call, function=current))
            except ServiceError:  # the function has not run: this does not count as an attempt
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, backoff_s_max)
                continue
            if not result.error_type:
                return
            if errors == len(settings.event_retry_s):
                break
            await asyncio.sleep(settings.event_retry_s[errors])
            errors += 1
        self.dropped += 1
