"""Threads for blocking calls: a call that raises costs neither its thread nor its slot."""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from weakref import finalize

from headgate.system.threads import BlockingCalls, DaemonThreads


def test_thread_survives_a_call_that_raises() -> None:
    threads, names = DaemonThreads("test-survivor"), SimpleQueue[str]()

    def call(*, raises: bool) -> None:
        names.put(threading.current_thread().name)
        if raises:
            raise SystemExit

    for raises in (True, True, False):
        threads.run(lambda raises=raises: call(raises=raises), 1)  # type: ignore[misc]
    assert [names.get(timeout=60) for _ in range(3)] == ["test-survivor-1"] * 3
    threads.stop()


def test_idle_thread_holds_nothing_of_its_last_call() -> None:
    """It may be a model of gigabytes."""

    class Held:
        def __call__(self) -> None:
            pass

    threads, held = DaemonThreads("test-idle"), Held()
    freed = threading.Event()
    finalize(held, freed.set)
    threads.run(held, 1)
    del held
    assert freed.wait(60)
    threads.stop()


def test_call_that_raises_is_done_once_and_frees_its_thread() -> None:
    async def scenario() -> tuple[list[str], int]:
        calls = BlockingCalls(1, asyncio.get_running_loop())
        done: asyncio.Queue[str] = asyncio.Queue()

        def raises() -> str:
            raise KeyError("a defect")

        results = []
        for function in (raises, lambda: "fine", raises, lambda: "still fine"):
            calls.submit(function, done.put_nowait, repr)
            results.append(await asyncio.wait_for(done.get(), 60))
        calls.stop()
        return results, calls.free

    results, free = asyncio.run(scenario())
    assert results == ["KeyError('a defect')", "fine", "KeyError('a defect')", "still fine"]
    assert free == 1
