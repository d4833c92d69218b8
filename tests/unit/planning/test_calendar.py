"""The capacity calendar, against a model that keeps a plain list of everything that is booked."""

from __future__ import annotations

from heapq import heapify, heapreplace
from random import Random

import pytest

from headgate.planning.pools.calendar import BUCKETS_MAX, Calendar, Lanes

WIDTH_NS = 1_000  # of a bucket: a sixteenth of the shortest objective
BUCKETS = 64  # at first
NOTHING_NS = 1 << 60  # more than any slack


def make_calendar(lanes: int = 0) -> Calendar:
    calendar = Calendar(16.0 * WIDTH_NS, 31.0 * WIDTH_NS)
    calendar.resize(lanes)
    return calendar


class Model:
    """The same calendar without a tree: bookings as (bucket, work) pairs."""

    def __init__(self) -> None:
        self.calendar = make_calendar()
        self.origin_ns = -1  # the time of the first question
        self.first = 0  # bucket
        self.size = BUCKETS
        self.lanes = 0
        self.ends_ns: list[int] = []
        self.bookings: list[tuple[int, int, float]] = []

    def bucket(self, now_ns: int, deadline_ns: int) -> int:
        if self.origin_ns < 0:
            self.origin_ns = now_ns
        number = (deadline_ns - self.origin_ns) // WIDTH_NS
        present = (now_ns - self.origin_ns) // WIDTH_NS
        if number >= self.first + self.size:
            size = BUCKETS
            while size < 2 * (number - present):
                size *= 2
            if size > self.size or 2 * (present - self.first) >= self.size:
                self.first, self.size = max(self.first, present), size
        number = max(number, self.first)
        assert self.calendar.bucket(now_ns, deadline_ns) == number
        return number

    def book(self, bucket: int, work_ns: int, batches: float) -> None:
        self.bookings.append((bucket, work_ns, batches))
        self.calendar.add(bucket, work_ns, batches)

    def take_back(self, index: int) -> None:
        bucket, work_ns, batches = self.bookings.pop(index)
        self.calendar.add(bucket, -work_ns, -batches)

    def busy_ns(self, now_ns: int) -> int:
        return sum(abs(end_ns - now_ns) for end_ns in self.ends_ns)  # overdue: as long again

    def slack(self, now_ns: int, bucket: int) -> tuple[int, int, int]:
        """Work that is due by a bucket, the slack there, and the least slack from there on."""
        bucket = max(bucket, self.first)
        due = [(max(number, self.first), work_ns) for number, work_ns, _ in self.bookings]

        def slack_at(at: int) -> int:
            booked_ns = sum(work_ns for number, work_ns in due if number <= at)
            lanes_ns = self.lanes * (self.origin_ns + at * WIDTH_NS - now_ns)
            return lanes_ns - self.busy_ns(now_ns) - booked_ns

        later = [slack_at(number) for number, _ in due if number >= bucket]
        work_ns = sum(work for number, work in due if number <= bucket)
        return work_ns, slack_at(bucket), min(later, default=NOTHING_NS)

    def check(self, now_ns: int, bucket: int) -> None:
        calendar = self.calendar
        work_ns, slack_ns, least_ns = calendar.slack(now_ns, bucket)
        expected = self.slack(now_ns, bucket)
        assert (work_ns, slack_ns) == expected[:2]
        assert least_ns == expected[2] or min(least_ns, expected[2]) >= NOTHING_NS
        assert calendar.work_ns == sum(work for _, work, _ in self.bookings)
        assert calendar.batches == pytest.approx(sum(count for _, _, count in self.bookings))
        assert calendar.busy_ns(now_ns) == self.busy_ns(now_ns)
        assert calendar.last_end_ns() == max(self.ends_ns, default=0)
        assert calendar._size == self.size


@pytest.mark.parametrize("seed", range(30))
def test_slack_is_what_a_list_of_bookings_says(seed: int) -> None:
    """Random bookings, lanes and runs, while time passes: the first bucket moves along.

    Some deadlines are beyond the last bucket: there are more buckets then, for a while.
    """
    rng, model, now_ns = Random(seed), Model(), 0
    steps_ns = (0, 0, 300, 2_500) if seed % 2 else (0, 4_000, 20_000)
    for _ in range(300):
        now_ns += rng.choice(steps_ns) if rng.random() < 0.99 else rng.choice((90_000, 900_000))
        choice = rng.random()
        if choice < 0.45:
            longest_ns = 61_000 if rng.random() < 0.95 else 400_000
            deadline_ns = now_ns + rng.randint(-2_000, longest_ns)
            bucket = model.bucket(now_ns, max(0, deadline_ns))
            model.book(bucket, rng.randint(1, 5_000), rng.choice((0.0, 1.0, 1.5)))
        elif choice < 0.7 and model.bookings:
            model.take_back(rng.randrange(len(model.bookings)))
        elif choice < 0.8:
            end_ns, lanes = now_ns + rng.randint(0, 9_000), rng.randint(1, 2)
            model.ends_ns += [end_ns] * lanes
            model.calendar.occupy(end_ns, lanes)
        elif choice < 0.9 and model.ends_ns:
            end_ns = rng.choice(model.ends_ns)
            model.ends_ns.remove(end_ns)
            model.calendar.release(end_ns)
        elif choice < 0.95:
            model.lanes = rng.randint(0, 5)
            model.calendar.resize(model.lanes)
        model.check(now_ns, model.bucket(now_ns, now_ns + rng.randint(0, 60_000)))
    while model.bookings:
        model.take_back(0)
    assert (model.calendar.work_ns, model.calendar.batches) == (0, 0.0)
    assert model.calendar.slack(now_ns, 0)[2] >= NOTHING_NS


def test_what_is_due_beyond_every_objective_takes_nothing_from_what_is_urgent() -> None:
    """A client may claim a deadline of 2,000 objectives. It is kept, but not before the others."""
    calendar = make_calendar(1)
    for at_ns in range(0, 30_000, 1_000):
        far = calendar.bucket(at_ns, at_ns + 2_000 * WIDTH_NS)
        calendar.add(far, 20 * WIDTH_NS, 1.0)
        work_ns, slack_ns, least_ns = calendar.slack(at_ns, calendar.bucket(at_ns, at_ns + 16_000))
        assert work_ns == 0 and slack_ns >= 15 * WIDTH_NS
        assert least_ns >= 1_000 * WIDTH_NS


def test_deadlines_that_are_too_far_count_as_due_in_the_last_bucket() -> None:
    """The first bucket stays until half of them have passed, or each arrival would cost O(n)."""
    calendar = make_calendar(1)
    numbers = [calendar.bucket(at_ns, 1 << 40) for at_ns in range(0, 10_000_000, 100_000)]
    assert set(numbers) == {BUCKETS_MAX - 1, BUCKETS_MAX - 1 + BUCKETS_MAX // 2 + 8}
    assert calendar.covered_ns(numbers[-1]) == (numbers[-1] + 1) * WIDTH_NS


def ask_for_near_deadlines(calendar: Calendar, buckets: int) -> None:
    for at in range(0, buckets, 10):
        calendar.bucket(at * WIDTH_NS, (at + 30) * WIDTH_NS)


def test_one_far_deadline_does_not_enlarge_the_calendar_for_good() -> None:
    """There are as many buckets as near deadlines need again, once it has passed."""
    calendar = make_calendar(1)
    far = calendar.bucket(0, 2_000 * WIDTH_NS)
    calendar.add(far, 20 * WIDTH_NS, 1.0)
    ask_for_near_deadlines(calendar, 2_000)
    now_ns = 1_990 * WIDTH_NS
    assert [calendar.slack(now_ns, at)[0] for at in (far - 1, far)] == [0, 20 * WIDTH_NS]
    assert calendar._size == 4_096
    ask_for_near_deadlines(calendar, 4_100)
    assert calendar._size == BUCKETS
    now_ns = 4_090 * WIDTH_NS
    assert calendar.slack(now_ns, calendar.bucket(now_ns, now_ns))[0] == 20 * WIDTH_NS


def test_where_deadlines_are_as_far_as_before_the_calendar_keeps_its_size() -> None:
    calendar = make_calendar(1)
    for at in range(0, 20_000, 10):
        calendar.bucket(at * WIDTH_NS, (at + 900) * WIDTH_NS)
        assert calendar._size == 2_048


def count_starts(now_ns: int, at_ns: int, batch_ns: int, ends_ns: list[int], lanes: int) -> int:
    """List scheduling: the lane that is free first takes the next batch."""
    # With more runs than lanes, the first runs to end free nothing.
    last_ns = sorted(ends_ns)[max(0, len(ends_ns) - lanes) :]
    free_ns = [now_ns + abs(end_ns - now_ns) for end_ns in last_ns]
    free_ns += [now_ns] * (lanes - len(free_ns))
    heapify(free_ns)
    starts = 0
    while free_ns and free_ns[0] <= at_ns:
        heapreplace(free_ns, free_ns[0] + batch_ns)
        starts += 1
    return starts


@pytest.mark.parametrize("seed", range(40))
def test_starts_are_those_of_list_scheduling(seed: int) -> None:
    rng = Random(seed)
    for _ in range(50):
        now_ns, batch_ns, lanes = rng.randint(0, 10_000), rng.randint(100, 5_000), rng.randint(0, 9)
        calendar = make_calendar(lanes)
        ends_ns = [now_ns + rng.randint(-3_000, 9_000) for _ in range(rng.randint(0, 12))]
        for end_ns in ends_ns:
            calendar.occupy(end_ns)
        at_ns = now_ns + rng.randint(-100, 20_000)
        starts = count_starts(now_ns, at_ns, batch_ns, ends_ns, lanes)
        assert calendar.can_start(now_ns, at_ns, batch_ns, starts)
        assert not calendar.can_start(now_ns, at_ns, batch_ns, starts + 0.5)
        more = count_starts(now_ns, at_ns, batch_ns, ends_ns, lanes + 3)
        assert calendar.can_start(now_ns, at_ns, batch_ns, more, lanes + 3)
        assert not calendar.can_start(now_ns, at_ns, batch_ns, more + 1, lanes + 3)


@pytest.mark.parametrize("seed", range(5))
def test_of_many_lanes_some_are_examined_and_none_is_forgotten(seed: int) -> None:
    """With 500 lanes every tenth or so stands for its neighbours: a few starts more, never less."""
    rng = Random(seed)
    calendar = make_calendar(500)
    ends_ns = [rng.randint(0, 10_000) for _ in range(500)]
    for end_ns in ends_ns:
        calendar.occupy(end_ns)
    for at_ns in (2_000, 5_000, 20_000):
        starts = count_starts(0, at_ns, 1_000, ends_ns, 500)
        assert calendar.can_start(0, at_ns, 1_000, starts)
        assert not calendar.can_start(0, at_ns, 1_000, 1.1 * starts + 20)


def test_a_lane_is_free_when_fewer_run_than_there_are_lanes() -> None:
    calendar = make_calendar(2)
    calendar.occupy(500)
    assert (calendar.free_in_ns(100), calendar.lanes_free_by(100, 100)) == (0, 1)
    calendar.occupy(900)
    assert (calendar.free_in_ns(100), calendar.lanes_free_by(100, 100)) == (400, 0)
    calendar.occupy(300)  # more than there are lanes: the first to end frees none
    assert calendar.free_in_ns(100) == 400
    calendar.release(900)
    assert (calendar.free_in_ns(100), calendar.lanes_free_by(100, 1_000)) == (200, 2)


def test_what_is_overdue_takes_as_long_again_as_it_is_overdue() -> None:
    calendar = make_calendar(2)
    calendar.occupy(1_000)
    calendar.occupy(5_000)
    assert calendar.free_in_ns(1_000) == 0
    assert calendar.free_in_ns(1_400) == 400
    assert calendar.free_in_ns(4_000) == 1_000  # the other one ends first
    assert [calendar.lanes_free_by(1_400, at_ns) for at_ns in (1_700, 1_800, 5_000)] == [0, 1, 2]
    assert not calendar.can_start(1_400, 1_700, 100.0, 1.0)
    assert calendar.can_start(1_400, 1_800, 100.0, 1.0)
    calendar.release(1_000)
    assert calendar.free_in_ns(1_400) == 0


def test_late_starts_inflate_what_is_booked_and_starts_in_time_slowly_deflate_it() -> None:
    calendar = make_calendar(1)
    for _ in range(1_000):
        calendar.on_sent(1)
    most = calendar.inflation
    assert most > 1.5
    calendar.on_sent(1)
    assert calendar.inflation == most
    calendar.on_sent(0)
    assert 1.5 < calendar.inflation < most
    for _ in range(100_000):
        calendar.on_sent(-1)
    assert calendar.inflation == 1.0


def test_what_is_due_later_is_inflated_later() -> None:
    """Of two works that take half as long again as booked, the second is due in 40 buckets.

    The first leaves a sixth of its time, and the second more than that.
    """
    calendar = make_calendar(1)
    sooner, later = calendar.bucket(0, 7 * WIDTH_NS), calendar.bucket(0, 40 * WIDTH_NS)
    calendar.add(sooner, 4 * WIDTH_NS, 4.0)
    calendar.add(later, 16 * WIDTH_NS, 16.0)
    while calendar.inflation < 1.5:
        calendar.on_sent(1)
    inflated_ns = calendar.inflation * 4 * WIDTH_NS
    assert calendar.slack(0, sooner)[2] == pytest.approx(7 * WIDTH_NS - inflated_ns, abs=100)
    assert calendar.slack(0, later)[2] == pytest.approx(40 * WIDTH_NS - 5.0 * inflated_ns, abs=100)
    bucket = calendar.bucket(0, 3 * WIDTH_NS)
    assert calendar.fits(0, 3 * WIDTH_NS, bucket, 1.0 * WIDTH_NS, 1.0, 1.0, WIDTH_NS)
    assert not calendar.fits(0, 3 * WIDTH_NS, bucket, 2.5 * WIDTH_NS, 1.0, 1.0, WIDTH_NS)


def test_a_lane_counts_only_if_it_is_free_in_time_even_when_it_takes_longer() -> None:
    lanes = Lanes()
    lanes.resize(1)
    lanes.occupy(100 * WIDTH_NS, spread_ns=10 * WIDTH_NS)
    assert not lanes.can_start(0, 109 * WIDTH_NS, 10.0 * WIDTH_NS, 1.0)
    assert lanes.can_start(0, 110 * WIDTH_NS, 10.0 * WIDTH_NS, 1.0)
    # It is overdue, takes as long again, and may take its spread longer.
    assert not lanes.can_start(150 * WIDTH_NS, 209 * WIDTH_NS, 10.0 * WIDTH_NS, 1.0)
    assert lanes.can_start(150 * WIDTH_NS, 210 * WIDTH_NS, 10.0 * WIDTH_NS, 1.0)
    lanes.release(100 * WIDTH_NS)
    assert lanes.can_start(150 * WIDTH_NS, 150 * WIDTH_NS, 10.0 * WIDTH_NS, 1.0)
