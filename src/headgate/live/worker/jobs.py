"""What a worker does in its threads: run a batch, make an instance ready, let a model go."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import final

from headgate.core.actions import Dispatch, LoadWeights, StartInstance
from headgate.core.model import Variant
from headgate.functions.tensor import Block
from headgate.functions.words import words
from headgate.live.framing import frame
from headgate.live.messages import Ran, Result, Work
from headgate.live.worker.connection import Connection
from headgate.live.worker.job import Job
from headgate.live.worker.runner import Runner
from headgate.live.worker.stock import Stock


@final
class BatchJob(Job):
    """Runs one batch; afterwards `answer` is what the gateway is told."""

    def __init__(
        self,
        order: Dispatch,
        works: list[Work],
        runner: Runner,
        connection: Connection,
        on_over: Callable[[BatchJob], None],
        limit_ns: int,
    ) -> None:
        self.order = order
        self.limit_ns = limit_ns
        self.answer = b""
        self._works = works
        self._runner = runner
        self._connection = connection
        self._on_over = on_over

    def run(self) -> None:
        """Run it, and frame the answer."""
        own = self._connection.own
        runner = self._runner
        results = runner.run(self._works, own)
        ended_ns = monotonic_ns()
        runner.usual_ns += (ended_ns - self.began_ns - runner.usual_ns) / 8
        ran = Ran(self.order.batch_id % Connection.IDS, self.began_ns, ended_ns, results)
        try:
            self.answer = frame(ran)
        except ValueError as error:  # larger than any message may be
            for result in results:
                for tensor in result.outputs:
                    if isinstance(tensor.data, Block):
                        own.free(tensor.data.offset)
            ran.results = [Result(work.task_id, [], str(error), 500) for work in self._works]
            self.answer = frame(ran)

    def over(self) -> None:
        """Tell who waits for it."""
        self._on_over(self)


@final
class PrepareJob(Job):
    """Makes an instance ready; afterwards it has a `runner` or an `error`."""

    def __init__(
        self,
        order: StartInstance | LoadWeights,
        variant: Variant,
        stock: Stock | None,
        on_over: Callable[[PrepareJob], None],
        limit_ns: int,
    ) -> None:
        self.order = order
        self.variant = variant
        self.limit_ns = limit_ns
        self.runner: Runner | None = None
        self.error = ""
        self._stock = stock
        self._on_over = on_over

    def run(self) -> None:
        """Take a model from the stock. Weights are in host memory always: they need no loading."""
        if self._stock is None:
            return
        try:
            self.runner = self._stock.take(self.variant)
        except BaseException as error:  # whatever a model does
            self.error = words(error)

    def over(self) -> None:
        """Tell who waits for it."""
        self._on_over(self)


@final
class UnloadJob(Job):
    """Lets a model go."""

    def __init__(self, variant: Variant, runner: Runner, stock: Stock, limit_ns: int) -> None:
        self.limit_ns = limit_ns
        self._variant = variant
        self._runner = runner
        self._stock = stock

    def run(self) -> None:
        """Have it unloaded."""
        self._stock.give(self._variant, self._runner, keep=False)
