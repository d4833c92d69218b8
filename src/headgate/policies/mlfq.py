"""Multi-level queues by expected time, served in random order: MLFQ without the feedback.

What the field calls a multi-level *feedback* queue moves a task between levels by what it has used.
This policy does not: a task is assigned once, by its expected time. It has the name of the *MLFQ*
policy of "Making the Most of Serverless Accelerators" (Berkeley thesis, 2022, chapter 6): a request
goes to the bucket of its expected time, and the next request to run is the oldest of a bucket drawn
at random, so that each bucket is served equally often. Short requests no longer starve long ones;
but a client that is alone in its bucket is served far faster than the many that share another.

Buckets are powers of `bucket_ratio` of the expected time. Only non-empty buckets are drawn. The
thesis's printed trace again needs knowledge of the future (see `srtf`): with `clairvoyant=True`
announced requests count as being in their bucket, and a drawn bucket whose head has not arrived yet
blocks until it arrives. Cost per decision: O(buckets).

>>> from headgate.policies import find_policy
>>> find_policy("mlfq").config().bucket_ratio
2.0
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import floor, log
from typing import final

from headgate.core.model import Function
from headgate.core.policy import (
    Capabilities,
    Context,
    LazyDeletions,
    Policy,
    PolicyConfig,
    PolicyKind,
    bounded,
)
from headgate.core.records import STAGES_MAX, Node, Task
from headgate.core.states import TaskState


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `mlfq`."""

    # A bucket holds expected times within this ratio.
    bucket_ratio: float = field(default=2.0, metadata=bounded(gt=1))
    clairvoyant: bool = False  # consider announced requests, and wait for them


@final
class Mlfq(Policy):
    """FIFO queues of task ids by bucket; the drawn bucket is kept until it can be served."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._ratio = config.bucket_ratio
        self._is_clairvoyant = config.clairvoyant
        self._buckets: dict[int, deque[int]] = {}
        self._withdrawals = LazyDeletions()
        self._ready: dict[int, Task] = {}
        self._expected: set[int] = set()
        self._drawn: int | None = None

    def on_announced(self, request_id: int, pipeline_id: int, arrival_ns: int) -> None:
        if not self._is_clairvoyant:
            return
        stages = self.view.app.pipelines[pipeline_id].stages
        for index, stage in enumerate(stages):
            if not stage.after:
                task_id = request_id * STAGES_MAX + index
                self._expected.add(task_id)
                self._bucket_of(stage.function).append(task_id)

    def on_task_ready(self, task: Task) -> None:
        self._ready[task.id] = task
        if task.id in self._expected:
            self._expected.discard(task.id)
        else:
            self._bucket_of(task.function).append(task.id)
        self._serve()

    def on_task_returned(self, task: Task) -> None:
        self._ready[task.id] = task
        self._bucket_of(task.function).appendleft(task.id)
        self._serve()

    def on_rejected_early(self, request_id: int, pipeline_id: int) -> None:
        for index in range(len(self.view.app.pipelines[pipeline_id].stages)):
            self._expected.discard(request_id * STAGES_MAX + index)
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        self._ready.pop(task.id, None)  # `_serve` may have removed it already
        if self._withdrawals.add(sum(map(len, self._buckets.values()))):
            for key, bucket in self._buckets.items():
                known = (id for id in bucket if id in self._ready or id in self._expected)
                self._buckets[key] = deque(known)
        self._serve()

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def _serve(self) -> None:
        while self.view.free_nodes:
            bucket = self._draw()
            if bucket is None:
                return
            task = self._ready.get(bucket[0])
            if task is None:
                return  # its head was announced and has not arrived
            node = self.view.first_free(task.function.id)
            if node is None:
                return
            self._drawn = None
            bucket.popleft()
            del self._ready[task.id]
            if task.state == TaskState.READY:
                self.orders.dispatch([task], node)

    def _draw(self) -> deque[int] | None:
        """The drawn bucket; a new one is drawn once the last one has been served."""
        for bucket in self._buckets.values():
            while bucket and bucket[0] not in self._ready and bucket[0] not in self._expected:
                bucket.popleft()  # withdrawn
        if self._drawn is None or not self._buckets[self._drawn]:
            keys = [key for key in sorted(self._buckets) if self._buckets[key]]
            if not keys:
                self._drawn = None
                return None
            self._drawn = keys[0] if len(keys) == 1 else self.rng.choice(keys)
        return self._buckets[self._drawn]

    def _bucket_of(self, function: Function) -> deque[int]:
        key = floor(log(max(function.reference_exec_ns, 1), self._ratio))
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = deque()
        return bucket


POLICY = PolicyKind(Mlfq, Config, Capabilities(clairvoyance=True))
