"""Calling functions: what a client gets back of a call, besides what the function returned."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from headgate.serverless.bill import BillingRecord
from headgate.serverless.event_queue import EventQueue
from headgate.serverless.function import Function
from headgate.serverless.invocation import Ended, Invocation
from headgate.serverless.invoker import Invoker
from headgate.serverless.settings import Settings

_LOG_BYTES_MAX: Final = 4_096


@dataclass(frozen=True, slots=True)
class Answer:
    """The body and the headers of an answer; its status is 200, whatever the function did."""

    body: bytes
    headers: Mapping[str, str]


@final
class Calling:
    """Runs calls and queues events for the API."""

    def __init__(
        self,
        settings: Settings,
        functions: Mapping[str, Function],
        invoker: Invoker,
        events: EventQueue,
    ) -> None:
        self._settings = settings
        self._functions = functions
        self._invoker = invoker
        self._events = events

    def names(self) -> list[str]:
        """All functions there are, sorted."""
        return sorted(self._functions)

    def queue(self, function: Function, call: Invocation) -> None:
        """Take a call that nobody waits for. Raises `Throttled`."""
        self._events.put(function, call)

    async def run(self, function: Function, call: Invocation, *, wants_log: bool) -> Answer:
        """Run a call and say how it went. Raises `Throttled`."""
        ended, record = await self._invoker.run(function, call)
        headers = {}
        if ended.error_type:
            headers["X-Amz-Function-Error"] = "Unhandled"
        if wants_log:
            log = _log(call, ended, record)[-_LOG_BYTES_MAX:]
            headers["X-Amz-Log-Result"] = base64.b64encode(log).decode()
        return Answer(ended.payload, headers)

    def describe_account(self) -> dict[str, object]:
        """`GetAccountSettings`."""
        settings = self._settings
        sizes = [version.code.size_bytes for f in self._functions.values() for version in f.every()]
        return {
            "AccountLimit": {
                "ConcurrentExecutions": settings.concurrency,
                "UnreservedConcurrentExecutions": self._invoker.admission.unreserved(),
                "CodeSizeZipped": settings.zip_bytes,
                "CodeSizeUnzipped": settings.unzipped_bytes,
            },
            "AccountUsage": {"FunctionCount": len(self._functions), "TotalCodeSize": sum(sizes)},
        }


def _log(call: Invocation, ended: Ended, record: BillingRecord) -> bytes:
    """What the function printed, between the lines that AWS prints."""
    start = f"START RequestId: {call.id} Version: {call.function.version}\n"
    report = [
        f"REPORT RequestId: {call.id}",
        f"Duration: {record.duration_ms:.2f} ms",
        f"Billed Duration: {record.billed_ms} ms",
        f"Memory Size: {record.memory_mb} MB",
        f"Max Memory Used: {_memory_mb(record.instance)} MB",
    ]
    if ended.is_cold:
        report.append(f"Init Duration: {record.init_ms:.2f} ms")
    end = f"END RequestId: {call.id}\n" + "\t".join((*report, "\n"))
    said = ended.log if ended.log.endswith(b"\n") or not ended.log else ended.log + b"\n"
    return start.encode() + said + end.encode()


def _memory_mb(pid: int) -> int:
    """The most memory a process has ever held; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines() if line.startswith("VmHWM:"))
    return next((int(words[1]) // 1024 for words in lines), 0)
