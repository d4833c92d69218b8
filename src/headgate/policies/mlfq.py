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
from headgate.core.policy import Capabilities, Context, PolicyKind, bounded
from headgate.core.records import Task
from headgate.policies._clairvoyant import ClairvoyantConfig, ClairvoyantQueue


@dataclass(frozen=True)
class Config(ClairvoyantConfig):
    """Settings of `mlfq`."""

    # A bucket holds expected times within this ratio.
    bucket_ratio: float = field(default=2.0, metadata=bounded(gt=1))


@final
class Mlfq(ClairvoyantQueue):
    """FIFO queues of task ids by bucket; the drawn bucket is kept until it can be served."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._ratio = config.bucket_ratio
        self._buckets: dict[int, deque[int]] = {}
        self._drawn: int | None = None

    def enqueue(self, function: Function, arrival_ns: int, task_id: int) -> None:
        self._bucket_of(function).append(task_id)

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self.waiting[task.id] = task
        self._bucket_of(task.function).appendleft(task.id)
        self.serve()

    def queue_length(self) -> int:
        return sum(map(len, self._buckets.values()))

    def sweep(self) -> None:
        for key, bucket in self._buckets.items():
            self._buckets[key] = deque(id for id in bucket if self.is_known(id))

    def serve(self) -> None:
        while self.view.free_nodes:
            bucket = self._draw()
            if bucket is None:
                return
            task = self.waiting.get(bucket[0])
            if task is None:
                return  # its head was announced and has not arrived
            node = self.view.first_free(task.function.id)
            if node is None:
                return
            self._drawn = None
            bucket.popleft()
            self.send(task, node)

    def _draw(self) -> deque[int] | None:
        """The drawn bucket; a new one is drawn once the last one has been served."""
        for bucket in self._buckets.values():
            while bucket and not self.is_known(bucket[0]):
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
