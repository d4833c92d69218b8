"""The instances of one version of a function: who is idle, who is kept, who has to go."""

from __future__ import annotations

import asyncio
import time
from typing import IO, final

from headgate.serverless.cpu import Shares
from headgate.serverless.function import FunctionVersion
from headgate.serverless.instance import Instance
from headgate.serverless.janitor import Janitor
from headgate.serverless.settings import Settings


@final
class Fleet:
    """Instances of one version. The one that was used last is used next, so that others age."""

    def __init__(
        self,
        function: FunctionVersion,
        settings: Settings,
        shares: Shares,
        janitor: Janitor,
        log: IO[bytes],
    ) -> None:
        self.function = function
        self.provisioned_wanted = 0
        self.provisioning_failed = False
        self.instances: set[Instance] = set()
        self._settings = settings
        self._shares = shares
        self._janitor = janitor
        self._log = log
        self._idle: list[Instance] = []  # a stack
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

    def take(self) -> Instance | None:
        """Take an idle instance, a provisioned one if there is any."""
        usable = [each for each in self._idle if each.is_usable]
        self._idle = usable
        for position in range(len(usable) - 1, -1, -1):
            if usable[position].is_provisioned:
                return usable.pop(position)
        return usable.pop() if usable else None

    async def start(self) -> Instance:
        """Start an instance, which is the caller's until it gives it back. Raises `OSError`."""
        instance = self._make(is_provisioned=False)
        await self._launch(instance)
        return instance

    def give_back(self, instance: Instance) -> None:
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

    def _is_over(self, instance: Instance) -> bool:
        """Whether it must not be used again, though it works."""
        if instance.is_provisioned:
            return self._provisioned() > self.provisioned_wanted
        return time.monotonic() - instance.started_s > self._settings.age_max_s

    def _make(self, *, is_provisioned: bool) -> Instance:
        instance = Instance(
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

    async def _launch(self, instance: Instance) -> None:
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

    async def _provide(self, instance: Instance) -> None:
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

    def _forget(self, instance: Instance) -> None:
        """An instance has ended."""
        self.instances.discard(instance)
        if instance in self._idle:
            self._idle.remove(instance)
        if instance.is_provisioned and not self._is_retired and not self.provisioning_failed:
            asyncio.get_running_loop().call_soon(self._fill_up)
