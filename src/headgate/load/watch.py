"""The run as a whole: its event loop, its timeouts, and the word on how it goes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any, Final, TypeVar

import uvloop

from headgate.load.pool import Pool
from headgate.load.tally import Standing, Tally

R = TypeVar("R")
OnStanding = Callable[[Standing], None]
_SWEEP_S: Final = 0.02  # how exactly timeouts are kept
_STANDING_TURNS: Final = 12  # of sweeps, between two words on how it goes


async def watch(
    done: asyncio.Event, pool: Pool, tally: Tally, on_standing: OnStanding | None
) -> None:
    """Give up what takes too long, and tell how it goes, until all is done."""
    start_ns = monotonic_ns()
    turn = 0
    while not done.is_set():
        turn += 1
        try:
            await asyncio.wait_for(done.wait(), _SWEEP_S)
        except TimeoutError:
            pool.sweep()
        if on_standing is not None and turn % _STANDING_TURNS == 0:
            on_standing(tally.update(monotonic_ns() - start_ns))


def run_in_loop(main: Coroutine[Any, Any, R]) -> R:
    """Run it to its end in a fast event loop, undisturbed by the garbage collector."""
    with _no_collections(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@contextmanager
def _no_collections() -> Iterator[None]:
    """A collection may stop the sender for longer than an answer takes."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
