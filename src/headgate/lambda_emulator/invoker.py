"""Runs calls: lets them in, finds or starts an instance for each, and writes the bill."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Final, final

from headgate.lambda_emulator.billing import BillingLog, BillingRecord, billed_ms
from headgate.lambda_emulator.cleanup_process import CleanupProcess
from headgate.lambda_emulator.cpu_limits import CpuLimiter
from headgate.lambda_emulator.errors import ServiceError, Throttled, invalid
from headgate.lambda_emulator.functions import EmulatedFunction, FunctionVersion
from headgate.lambda_emulator.instance import FunctionInstance, Invocation, InvocationResult
from headgate.lambda_emulator.settings import PlatformSettings

# A bucket of tokens: so many at once, and so many per second after that.


@final
class TokenBucket:
    """Holds at most `burst` tokens and gets `per_s` of them every second.

    >>> bucket = TokenBucket(burst=2, per_s=10, now_s=0.0)
    >>> [bucket.take(0.0) for _ in range(3)]
    [0.0, 0.0, 0.1]
    >>> bucket.take(0.1)
    0.0
    """

    def __init__(self, *, burst: float, per_s: float, now_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._tokens = burst
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take a token and return 0, or return how long it will be until there is one."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._tokens >= 1 - 1e-9:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_s


# Who may run now: concurrency of the account and of functions, and how fast both may grow.


@final
class Admission:
    """Counts what runs, and refuses what is too much.

    A function with reserved concurrency has that much to itself and no more; all others share
    what reservations leave. Provisioned instances count whether they run or not.
    """

    def __init__(
        self,
        settings: PlatformSettings,
        functions: Mapping[str, EmulatedFunction],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._functions = functions
        self._clock_s = clock_s
        self._running: Counter[str] = Counter()
        self._growth: dict[str, TokenBucket] = {}
        self._rates: dict[str, tuple[int, TokenBucket]] = {}

    def running(self, name: str) -> int:
        """How many calls of a function are under way."""
        return self._running[name]

    def enter(self, function: EmulatedFunction) -> None:
        """Let a call in; `leave` must follow. Raises `Throttled`."""
        name, reserved = function.name, function.reserved
        if reserved is not None:
            if self._running[name] >= reserved:
                raise Throttled("ReservedFunctionConcurrentInvocationLimitExceeded")
        elif self._is_account_full(name):
            raise Throttled("ConcurrentInvocationLimitExceeded")
        self._check_rate(name, reserved)
        self._running[name] += 1

    def leave(self, name: str) -> None:
        """A call has ended."""
        self._running[name] -= 1

    def grow(self, function: EmulatedFunction) -> None:
        """Let a function have one more instance. Raises `Throttled`."""
        now_s = self._clock_s()
        bucket = self._growth.get(function.name)
        if bucket is None:
            burst, per_s = self._settings.scaling_burst, self._settings.scaling_per_s
            bucket = self._growth[function.name] = TokenBucket(
                burst=burst, per_s=per_s, now_s=now_s
            )
        self._refuse_for(bucket.take(now_s), is_reserved=function.reserved is not None)

    def check_reservation(self, function: EmulatedFunction, count: int) -> None:
        """Refuse a reservation that leaves too little to all others."""
        others = sum(f.reserved or 0 for f in self._functions.values() if f is not function)
        least = int(self._settings.concurrency * self._settings.unreserved_share_min)
        if others + count > self._settings.concurrency - least:
            raise invalid(
                "Specified ReservedConcurrentExecutions for function decreases account's "
                f"UnreservedConcurrentExecution below its minimum value of [{least}]."
            )

    def unreserved(self) -> int:
        """What reservations leave."""
        reserved = sum(f.reserved or 0 for f in self._functions.values())
        return self._settings.concurrency - reserved

    def forget(self, name: str) -> None:
        """A function is gone; what still runs of it goes on and is counted."""
        self._growth.pop(name, None)
        self._rates.pop(name, None)

    def _is_account_full(self, name: str) -> bool:
        """Whether one more call of an unreserved function is too much."""
        used = 0
        for each, function in self._functions.items():
            if function.reserved is None:
                running = self._running[each] + (each == name)
                used += max(running, sum(function.provisioned.values()))
        return used > self.unreserved()

    def _check_rate(self, name: str, reserved: int | None) -> None:
        per_concurrency = self._settings.requests_per_concurrency
        if not per_concurrency:
            return
        # Those that share their concurrency share its rate as well, under a name nobody can have.
        key = "" if reserved is None else name
        concurrency = self._settings.concurrency if reserved is None else reserved
        now_s = self._clock_s()
        known = self._rates.get(key)
        if known is None or known[0] != concurrency:
            per_s = max(1.0, per_concurrency * concurrency)
            known = (concurrency, TokenBucket(burst=per_s, per_s=per_s, now_s=now_s))
            self._rates[key] = known
        self._refuse_for(known[1].take(now_s), is_reserved=reserved is not None)

    def _refuse_for(self, wait_s: float, *, is_reserved: bool) -> None:
        if wait_s > 0 and is_reserved:
            raise Throttled("ReservedFunctionInvocationRateLimitExceeded", wait_s=wait_s)
        if wait_s > 0:
            raise Throttled("FunctionInvocationRateLimitExceeded", wait_s=wait_s)


# The instances of one version of a function: who is idle, who is kept, who has to go.


@final
class InstancePool:
    """Instances of one version. The one that was used last is used next, so that others age."""

    def __init__(
        self,
        function: FunctionVersion,
        settings: PlatformSettings,
        shares: CpuLimiter,
        janitor: CleanupProcess,
        log: IO[bytes],
    ) -> None:
        self.function = function
        self.provisioned_wanted = 0
        self.provisioning_failed = False
        self.instances: set[FunctionInstance] = set()
        self._settings = settings
        self._shares = shares
        self._janitor = janitor
        self._log = log
        self._idle: list[FunctionInstance] = []  # a stack
        self._provisioned_s = 0.0  # of all instances together, up to the last change
        self._changed_s = time.monotonic()
        self._is_retired = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def provisioned_ready(self) -> int:
        """How many provisioned instances have started."""
        return sum(each.is_provisioned and each.is_ready for each in self.instances)

    @property
    def provisioned_gb_s(self) -> float:
        """What has been provisioned so far: it has a price whether it runs or not."""
        since_s = time.monotonic() - self._changed_s
        held_s = self._provisioned_s + self.provisioned_wanted * since_s
        return self.function.memory_mb / 1024 * held_s

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it, and nothing will come."""
        return self._is_retired and not self.instances

    def take(self) -> FunctionInstance | None:
        """Take an idle instance, a provisioned one if there is any."""
        usable = [each for each in self._idle if each.is_usable]
        self._idle = usable
        for position in range(len(usable) - 1, -1, -1):
            if usable[position].is_provisioned:
                return usable.pop(position)
        return usable.pop() if usable else None

    async def start(self) -> FunctionInstance:
        """Start an instance, which is the caller's until it gives it back. Raises `OSError`."""
        instance = self._make(is_provisioned=False)
        await self._launch(instance)
        return instance

    def give_back(self, instance: FunctionInstance) -> None:
        """The caller is done with it. It is kept, unless it is too old or of no use any more."""
        if not instance.is_usable or instance.has_ended:
            return
        if self._is_retired or self._is_over(instance):
            instance.kill()
        else:
            self._idle.append(instance)

    def sweep(self) -> None:
        """End instances that have been idle for too long, or are too old."""
        horizon_s = time.monotonic() - self._settings.keep_alive_s
        for instance in list(self._idle):
            is_stale = not instance.is_provisioned and instance.idle_since_s < horizon_s
            if is_stale or self._is_over(instance):
                self._idle.remove(instance)
                instance.kill()

    def provision(self, count: int) -> None:
        """Keep so many instances ready, whatever else there is."""
        self._want(count)
        self.provisioning_failed = False
        surplus = self._provisioned() - count
        for instance in [each for each in self._idle if each.is_provisioned][: max(0, surplus)]:
            self._idle.remove(instance)
            instance.is_provisioned = False  # of those that are wanted; it ends at once
            instance.kill()
        self._fill_up()

    def retire(self) -> None:
        """Let what runs come to its end, and start nothing more."""
        self._is_retired = True
        self._want(0)
        for instance in self._idle:
            instance.kill()
        self._idle.clear()

    async def close(self) -> None:
        """End all instances now."""
        self.retire()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(instance.close() for instance in list(self.instances)))

    def _want(self, count: int) -> None:
        now_s = time.monotonic()
        self._provisioned_s += self.provisioned_wanted * (now_s - self._changed_s)
        self.provisioned_wanted, self._changed_s = count, now_s

    def _provisioned(self) -> int:
        return sum(each.is_provisioned for each in self.instances)

    def _is_over(self, instance: FunctionInstance) -> bool:
        """Whether it must not be used again, though it works."""
        if instance.is_provisioned:
            return self._provisioned() > self.provisioned_wanted
        return time.monotonic() - instance.started_s > self._settings.age_max_s

    def _make(self, *, is_provisioned: bool) -> FunctionInstance:
        instance = FunctionInstance(
            self.function,
            self._settings,
            self._shares,
            self._log,
            self._forget,
            self._janitor,
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

    def _fill_up(self) -> None:
        for _ in range(self.provisioned_wanted - self._provisioned()):
            task = asyncio.create_task(self._provide(self._make(is_provisioned=True)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _provide(self, instance: FunctionInstance) -> None:
        """Get a provisioned instance ready."""
        try:
            await self._launch(instance)
            is_ready = await instance.get_ready(self._settings.provisioned_init_timeout_s)
        except OSError:
            is_ready = False
        if is_ready:
            self.give_back(instance)
        else:
            self.provisioning_failed = True  # it would fail again: only a new wish tries again
            instance.kill()

    def _forget(self, instance: FunctionInstance) -> None:
        """An instance has ended."""
        self.instances.discard(instance)
        if instance in self._idle:
            self._idle.remove(instance)
        if instance.is_provisioned and not self._is_retired and not self.provisioning_failed:
            asyncio.get_running_loop().call_soon(self._fill_up)


_LOG: Final = logging.getLogger(__name__)


@final
class Invoker:
    """All fleets of a platform. Fleets are told apart by the revision of their function."""

    def __init__(
        self,
        settings: PlatformSettings,
        functions: Mapping[str, EmulatedFunction],
        shares: CpuLimiter,
        janitor: CleanupProcess,
        bill: BillingLog,
        logs: Path,
    ) -> None:
        self.admission = Admission(settings, functions)
        self.fleets: dict[str, InstancePool] = {}
        self._settings = settings
        self._functions = functions
        self._shares = shares
        self._janitor = janitor
        self._bill = bill
        self._logs = logs
        self._provisioned_gb_s = 0.0  # of fleets that are gone
        self._log_files: dict[str, IO[bytes]] = {}

    async def run(
        self, function: EmulatedFunction, call: Invocation
    ) -> tuple[InvocationResult, BillingRecord]:
        """Run a call, on an instance of its own. Raises `Throttled`, and then nothing has run."""
        self.admission.enter(function)
        try:
            fleet = self.fleet(call.function)
            ended = InvocationResult(has_run=False)
            # An instance may have died unnoticed. The call goes to another: it has not run.
            while not ended.has_run:
                instance = fleet.take() or await self._start(function, fleet)
                ended = await instance.run(call)
                fleet.give_back(instance)
        finally:
            self.admission.leave(function.name)
        record = self._record(call, instance, ended)
        self._bill.add(record)
        return ended, record

    def fleet(self, version: FunctionVersion) -> InstancePool:
        """The fleet of a version, made when it is first asked for."""
        fleet = self.fleets.get(version.revision)
        if fleet is None:
            log = self._log_file(version.name)
            fleet = InstancePool(version, self._settings, self._shares, self._janitor, log)
            self.fleets[version.revision] = fleet
        return fleet

    def current(self, function: EmulatedFunction, version: str) -> FunctionVersion | None:
        """What a version is by now; None if it is gone."""
        is_known = self._functions.get(function.name) is function
        return function.find(version) if is_known else None

    def settle(self, function: EmulatedFunction) -> None:
        """After a change: end what is out of date, and keep ready what is provisioned now."""
        wanted: dict[str, int] = {}
        for qualifier, count in function.provisioned.items():
            version = function.find(qualifier)
            if version is not None:
                wanted[version.revision] = wanted.get(version.revision, 0) + count
        known = {version.revision: version for version in function.every()}
        if self._functions.get(function.name) is not function:
            known = {}  # it has been deleted
        for revision, fleet in self.fleets.items():
            if fleet.function.name == function.name and revision not in known:
                fleet.retire()
        for revision, version in known.items():
            count = wanted.get(revision, 0)
            if count or (revision in self.fleets and self.fleets[revision].provisioned_wanted):
                self.fleet(version).provision(count)

    def provisioned_gb_s(self) -> float:
        """What has been provisioned so far, of all functions."""
        held_gb_s = sum(fleet.provisioned_gb_s for fleet in self.fleets.values())
        return self._provisioned_gb_s + held_gb_s

    def sweep(self) -> None:
        """End what has been idle for too long."""
        for revision, fleet in list(self.fleets.items()):
            fleet.sweep()
            if fleet.is_over:
                self._provisioned_gb_s += fleet.provisioned_gb_s
                del self.fleets[revision]

    async def close(self) -> None:
        """End everything."""
        for fleet in list(self.fleets.values()):
            await fleet.close()
        for file in self._log_files.values():
            file.close()

    async def _start(self, function: EmulatedFunction, fleet: InstancePool) -> FunctionInstance:
        self.admission.grow(function)
        try:
            return await fleet.start()
        except (OSError, ValueError) as error:  # such as a directory that is gone
            _LOG.error("%s: no instance can be started: %s", function.name, error)
            problem = "no instance can be started: the log of the platform says why"
            raise ServiceError(500, "ServiceException", problem) from error

    def _record(
        self, call: Invocation, instance: FunctionInstance, ended: InvocationResult
    ) -> BillingRecord:
        init_ms = ended.init_ms if self._settings.bills_init else 0.0
        return BillingRecord(
            request_id=call.id,
            function=call.function.name,
            version=call.function.version,
            memory_mb=call.function.memory_mb,
            started_s=ended.started_s or time.time(),
            init_ms=round(ended.init_ms, 3),
            duration_ms=round(ended.duration_ms, 3),
            billed_ms=billed_ms(round(init_ms, 3), round(ended.duration_ms, 3)),
            is_cold=ended.is_cold,
            is_provisioned=instance.is_provisioned,
            error=ended.error_type,
            instance=instance.pid,
        )

    def _log_file(self, name: str) -> IO[bytes]:
        file = self._log_files.get(name)
        if file is None:
            self._logs.mkdir(parents=True, exist_ok=True)
            file = self._log_files[name] = (self._logs / f"{name}.log").open("ab", buffering=0)
        return file


# Calls that nobody waits for: queued, tried again after an error, and dropped in the end.


@final
class AsyncEventQueue:
    """Events on their way. `dropped` counts those that were given up."""

    def __init__(self, settings: PlatformSettings, invoker: Invoker) -> None:
        self.dropped = 0
        self._settings = settings
        self._invoker = invoker
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, function: EmulatedFunction, call: Invocation) -> None:
        """Take a call to be run at some time. Raises `Throttled` if too many wait already."""
        if len(self._tasks) >= self._settings.events_max:
            raise Throttled("CallerRateLimitExceeded")
        task = asyncio.create_task(self._see_through(function, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drop what still waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _see_through(self, function: EmulatedFunction, call: Invocation) -> None:
        """Run it until it succeeds, has failed too often, or is too old."""
        settings, errors = self._settings, 0
        oldest_s = time.monotonic() + settings.event_age_max_s
        throttled_s, longest_s = settings.event_throttled_s
        while time.monotonic() < oldest_s:
            # What it is now counts, and not what it was when the event came.
            current = self._invoker.current(function, call.function.version)
            if current is None:
                break
            try:
                ended, _ = await self._invoker.run(function, replace(call, function=current))
            except ServiceError:  # it has not run: that does not count as a try
                await asyncio.sleep(throttled_s)
                throttled_s = min(2 * throttled_s, longest_s)
                continue
            if not ended.error_type:
                return
            if errors == len(settings.event_retry_s):
                break
            await asyncio.sleep(settings.event_retry_s[errors])
            errors += 1
        self.dropped += 1
