"""A promise: what is booked for one task of an admitted request, until the task is sent."""

from __future__ import annotations

from typing import final

from headgate.planning.pools.build import Build


@final
class Promise:
    """What is booked for one task: on which build, until when, and how much work."""

    __slots__ = (
        "base_ns",
        "batches",
        "begin_ns",
        "bucket",
        "build",
        "due_ns",
        "input_node_id",
        "is_booked",
        "is_given_up",
        "items",
        "order_ns",
        "own_bucket",
        "probability",
        "size",
        "start_ns",
        "usd",
        "work_ns",
    )

    def __init__(
        self,
        build: Build,
        due_ns: int,
        start_ns: int,
        begin_ns: int,
        bucket: int,
        work_ns: int,
        batches: float,
        items: int,
        size: int,
        base_ns: int,
    ) -> None:
        self.base_ns = base_ns
        self.build = build
        self.due_ns = due_ns  # the stage's deadline, less the margin
        self.start_ns = start_ns  # the latest start with which it is done by then
        self.order_ns = start_ns  # by which tasks queue
        # When its work is due: with those that it joins, who may have to start sooner.
        self.begin_ns = begin_ns
        self.bucket = bucket  # of that
        self.own_bucket = 0  # in the build's own calendar, if it has one
        self.work_ns = work_ns
        self.batches = batches
        self.items = items
        self.size = size  # of the batches that the promise reckons with
        self.probability = 1.0  # that the task runs, as long as that is not known
        # Where the task waits because its input is there; None: nothing would have to be moved.
        self.input_node_id: int | None = None
        self.usd = 0.0  # what the task costs at most, if its request has a cost objective
        self.is_booked = False  # it is in the calendars: its task is not sent yet
        self.is_given_up = False  # its task is best effort now

    def expect(self, probability: float) -> None:
        """Its task is a stage of a cascade: until it is known to run, so much of it is booked."""
        self.work_ns = int(probability * self.work_ns)
        self.batches *= probability
        self.probability = probability

    def confirm(self, now_ns: int) -> None:
        """Its task runs: book all of it."""
        self.release()
        self.work_ns = int(self.work_ns / self.probability)
        self.batches /= self.probability
        self.probability = 1.0
        self.book(now_ns)

    def book(self, now_ns: int) -> None:
        """Enter it into the calendars of its build."""
        self.is_booked = True
        build, work_ns, batches = self.build, self.work_ns, self.batches
        build.pending_items += self.items
        build.pending_ns += work_ns
        build.pending_batches += batches
        build.calendar.add(self.bucket, work_ns, batches)
        own = build.own
        if own is not None:
            self.own_bucket = own.bucket(now_ns, self.begin_ns)
            own.add(self.own_bucket, int(work_ns / build.weight), batches / build.weight)

    def release(self) -> None:
        """Take it out of them: its task is sent, or its request is settled."""
        self.is_booked = False
        build, work_ns, batches = self.build, self.work_ns, self.batches
        build.pending_items -= self.items
        build.pending_ns -= work_ns
        build.pending_batches -= batches
        build.calendar.add(self.bucket, -work_ns, -batches)
        own = build.own
        if own is not None:
            own.add(self.own_bucket, -int(work_ns / build.weight), -batches / build.weight)
