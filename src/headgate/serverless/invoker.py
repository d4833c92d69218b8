"""Runs calls: lets them in, finds or starts an instance for each, and writes the bill."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final, final

from headgate.serverless.admission import Admission
from headgate.serverless.bill import Bill, BillingRecord, billed_ms
from headgate.serverless.cpu import Shares
from headgate.serverless.errors import ServiceError
from headgate.serverless.fleet import Fleet
from headgate.serverless.function import Function, FunctionVersion
from headgate.serverless.instance import Instance
from headgate.serverless.invocation import Ended, Invocation
from headgate.serverless.janitor import Janitor
from headgate.serverless.settings import Settings

_LOG: Final = logging.getLogger(__name__)


@final
class Invoker:
    """All fleets of a platform. Fleets are told apart by the revision of their function."""

    def __init__(
        self,
        settings: Settings,
        functions: Mapping[str, Function],
        shares: Shares,
        janitor: Janitor,
        bill: Bill,
        logs: Path,
    ) -> None:
        self.admission = Admission(settings, functions)
        self.fleets: dict[str, Fleet] = {}
        self._settings = settings
        self._functions = functions
        self._shares = shares
        self._janitor = janitor
        self._bill = bill
        self._logs = logs
        self._provisioned_gb_s = 0.0  # of fleets that are gone
        self._log_files: dict[str, IO[bytes]] = {}

    async def run(self, function: Function, call: Invocation) -> tuple[Ended, BillingRecord]:
        """Run a call, on an instance of its own. Raises `Throttled`, and then nothing has run."""
        self.admission.enter(function)
        try:
            fleet = self.fleet(call.function)
            ended = Ended(has_run=False)
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

    def fleet(self, version: FunctionVersion) -> Fleet:
        """The fleet of a version, made when it is first asked for."""
        fleet = self.fleets.get(version.revision)
        if fleet is None:
            log = self._log_file(version.name)
            fleet = Fleet(version, self._settings, self._shares, self._janitor, log)
            self.fleets[version.revision] = fleet
        return fleet

    def current(self, function: Function, version: str) -> FunctionVersion | None:
        """What a version is by now; None if it is gone."""
        is_known = self._functions.get(function.name) is function
        return function.find(version) if is_known else None

    def settle(self, function: Function) -> None:
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

    async def _start(self, function: Function, fleet: Fleet) -> Instance:
        self.admission.grow(function)
        try:
            return await fleet.start()
        except (OSError, ValueError) as error:  # such as a directory that is gone
            _LOG.error("%s: no instance can be started: %s", function.name, error)
            problem = "no instance can be started: the log of the platform says why"
            raise ServiceError(500, "ServiceException", problem) from error

    def _record(self, call: Invocation, instance: Instance, ended: Ended) -> BillingRecord:
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
