"""A remote pool, and a listener that records the results of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headgate.core.clock import NEVER_NS
from headgate.core.events import Event
from headgate.core.model import FaasPlatform, Pool, Tier
from headgate.functions.tensor import TaskInputs, Tensor
from headgate.live.ipc.messages import BatchRan
from headgate.live.pools.remote_pool import CallResult, RemoteCall, RemotePool, Shares
from headgate.system.threads import BlockingCalls

PLATFORM = FaasPlatform(1 << 30, keep_alive_ns=200_000_000, usd_per_gb_s=1.0, usd_per_request=0.5)
CLOUD = Pool(0, "cloud", Tier.SERVERLESS, nodes=0, faas=PLATFORM)


def task(task_id: int = 0, data: bytes = b"\x01") -> TaskInputs:
    return TaskInputs(task_id, len(data), [Tensor("x", "UINT8", (len(data),), memoryview(data))])


def remote_call(
    batch_id: int = 0,
    tasks: list[TaskInputs] | None = None,
    *,
    deadline_ns: int = NEVER_NS,
    is_hard: bool = False,
    function: str = "f",
) -> RemoteCall:
    asked = [task()] if tasks is None else tasks
    shares = tuple((0, 0, w.items) for w in asked)
    return RemoteCall(
        batch_id, 0, function, 0, None, asked, deadline_ns, is_hard, None, None, shares
    )


class Rig:
    """Records everything that a remote pool reports."""

    def __init__(
        self, call: Callable[[RemoteCall], CallResult], *, threads: int = 4, hang_ns: int = 10**10
    ) -> None:
        self.ran: list[BatchRan] = []
        self.events: list[Event] = []
        self.billed_ns: list[int] = []
        self.warm_usd: list[float] = []
        self.starts: list[tuple[str, int]] = []
        self.pool = RemotePool(
            CLOUD,
            call,
            self,
            self,
            lambda function, start_ns: self.starts.append((function, start_ns)),
            BlockingCalls(threads, asyncio.get_running_loop()),
            hang_ns=hang_ns,
        )

    def on_batch_ran(self, pool_id: int, message: BatchRan) -> None:
        self.ran.append(message)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_call_billed(self, pool_id: int, shares: Shares, took_ns: int) -> None:
        self.billed_ns.append(took_ns)

    def on_keep_warm_billed(self, pool_id: int, function: str, usd: float) -> None:
        self.warm_usd.append(usd)

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_true():
                await asyncio.sleep(0.002)
