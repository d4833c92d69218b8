"""The capacity calendar of a pool: what capacity is promised to whom until when.

*Supply* is the time of the pool's lanes (a lane is one batch at a time): each is free from the
predicted end of what it runs. *Demand* is the work of every admitted task that is not running yet,
by its deadline. Two questions decide whether a newcomer fits (`fits`), each in O(log buckets +
lanes examined):

- Can a newcomer start in time? Starts are counted, not seconds (list scheduling, Graham 1966): of
  the batches that are due before it, fewer must be waiting than the lanes can start by then. A test
  in seconds of work is wrong where a batch takes about as long as its slack.
- Does it push out what is promised for later? The processor-demand test of EDF (Baruah 1990): at
  every later deadline, the work that is due by then fits into the time of the lanes.

Deadlines are rounded down to buckets of a fixed width, counted from the first question: counted
from time 0, the same requests would be decided otherwise at another time of day. The buckets are
the leaves of a tree of sums and least prefix sums of (capacity - work), so the least slack at or
after a deadline is one walk from a leaf to the root. Most of what is booked is sent before anybody
asks, so the tree follows what is booked only when somebody does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final, final

from headgate.planning.constants import (
    BEYOND,
    BUCKETS_PER_WINDOW,
    INFLATION_MAX,
    INFLATION_MAX_SCARCE,
    INFLATION_TOLERANCE,
    LANES_EXAMINED,
    LATE_START_STEP,
    LATE_STARTS,
)

BUCKETS_MAX: Final = 1 << 14  # deadlines beyond them count as due in the last
# Compiled code reads a Final directly, and what is imported from a dictionary.
_bisect_left: Final = bisect_left
_bisect_right: Final = bisect_right
_NOTHING: Final = 1 << 62  # least slack where nothing is promised


class Lanes:
    """Lanes, each of which runs one batch at a time, and when those that run will be free."""

    def __init__(self) -> None:
        self.lanes = 0
        self.part = 1.0  # of the lanes' time, for the gateway whose calendar it is
        self._ends_ns: list[int] = []  # predicted ends of what runs, ascending
        self._spreads_ns: list[int] = []  # of each: what it may take longer
        self._end_sum_ns = 0

    def resize(self, lanes: int) -> None:
        """Set the number of lanes."""
        self.lanes = lanes

    @property
    def supply(self) -> float:
        """Lanes that this gateway can count on: a part of them where other gateways use some."""
        return self.lanes * self.part

    def occupy(self, end_ns: int, lanes: int = 1, spread_ns: int = 0) -> None:
        """Some lanes run until `end_ns`, as predicted, or longer by about `spread_ns`."""
        ends_ns = self._ends_ns
        is_last = not ends_ns or end_ns > ends_ns[-1]  # as most are
        index = len(ends_ns) if is_last else _bisect_left(ends_ns, end_ns)
        for _ in range(lanes):
            ends_ns.insert(index, end_ns)
            self._spreads_ns.insert(index, spread_ns)
            self._end_sum_ns += end_ns

    def release(self, end_ns: int, lanes: int = 1) -> None:
        """The lanes that were predicted to run until `end_ns` are free."""
        index = _bisect_left(self._ends_ns, end_ns)
        for _ in range(lanes):
            self._ends_ns.pop(index)
            self._spreads_ns.pop(index)
            self._end_sum_ns -= end_ns

    def busy_ns(self, now_ns: int) -> int:
        """Time of all lanes that is taken by what runs now."""
        busy_ns = self._end_sum_ns - len(self._ends_ns) * now_ns
        for end_ns in self._ends_ns:
            if end_ns >= now_ns:
                break
            busy_ns += 2 * (now_ns - end_ns)  # overdue: it takes as long again
        return busy_ns

    def last_end_ns(self) -> int:
        """When the last of what runs is predicted to end; 0 if nothing runs."""
        return self._ends_ns[-1] if self._ends_ns else 0

    def free_in_ns(self, now_ns: int) -> int:
        """Time until a lane is free."""
        ends_ns = self._ends_ns
        if len(ends_ns) < self.lanes:
            return 0
        if self.lanes == 0:
            return 0
        first = len(ends_ns) - self.lanes
        overdue = _bisect_right(ends_ns, now_ns)
        if first >= overdue:
            return ends_ns[first] - now_ns
        # The last that fell due is the least overdue; or something that is not is done first.
        soonest_ns = now_ns - ends_ns[overdue - 1 - first]
        if overdue < len(ends_ns):
            soonest_ns = min(soonest_ns, ends_ns[overdue] - now_ns)
        return soonest_ns

    def has_free_lane(self, now_ns: int) -> bool:
        """Whether a lane is free now, of those that this gateway can count on."""
        if self.part == 1.0:
            return len(self._ends_ns) < self.lanes or self.free_in_ns(now_ns) == 0
        return len(self._ends_ns) + 1 <= self.supply

    def lanes_free_by(self, now_ns: int, at_ns: int) -> int:
        """Number of lanes that are free at `at_ns` if nothing more is sent."""
        ends_ns = self._ends_ns
        overdue = _bisect_left(ends_ns, 2 * now_ns - at_ns)  # for longer than is left until then
        return self.lanes - len(ends_ns) + _bisect_right(ends_ns, at_ns) - overdue

    def can_start(
        self, now_ns: int, at_ns: int, batch_ns: float, needed: float, lanes: int | None = None
    ) -> bool:
        """Whether the lanes, or so many lanes, can start `needed` batches of a length by `at_ns`.

        A lane counts if it is free by then even if it takes longer than predicted by its spread.
        Lanes that are free first are looked at first, and no more of them than it takes.
        """
        if needed <= 0.0:
            return True
        if at_ns < now_ns:
            return False
        if self.part < 1.0:
            return self._can_start_on_part(now_ns, at_ns, batch_ns, needed)
        ends_ns = self._ends_ns
        idle = (self.lanes if lanes is None else lanes) - len(ends_ns)
        starts = idle * (1 + int((at_ns - now_ns) / batch_ns)) if idle > 0 else 0
        if starts >= needed:
            return True
        ended = _bisect_right(ends_ns, at_ns)
        step = 1 + ended // LANES_EXAMINED
        # With more runs than lanes (a node was lost), the first to end free no lane.
        index = -idle if idle < 0 else 0
        while index < ended:  # a range with a step would be a generic one in a compiled build
            end_ns = ends_ns[index]
            if end_ns < now_ns:
                end_ns = _overdue_end_ns(now_ns, end_ns)
            if end_ns + self._spreads_ns[index] <= at_ns:
                each = 1 + int((at_ns - end_ns) / batch_ns)
                following = ended - index
                starts += each * (step if step < following else following)
                if starts >= needed:
                    return True
            index += step
        return False

    def _can_start_on_part(self, now_ns: int, at_ns: int, batch_ns: float, needed: float) -> bool:
        """The same where other gateways use some of the lanes.

        What is left of a lane is waited for: of half a lane, one batch starts within the time of
        two. If more of our batches run than we can count on, each end frees a part of a lane.
        """
        ends_ns, supply = self._ends_ns, self.supply
        starts = max(0.0, supply - len(ends_ns)) * (1.0 + (at_ns - now_ns) / batch_ns)
        if starts >= needed:
            return True
        ended = _bisect_right(ends_ns, at_ns)
        step = 1 + ended // LANES_EXAMINED
        each_lane = min(1.0, supply / max(1, len(ends_ns)))
        for index in range(0, ended, step):
            end_ns = ends_ns[index]
            if end_ns < now_ns:
                end_ns = _overdue_end_ns(now_ns, end_ns)
            if end_ns + self._spreads_ns[index] <= at_ns:
                each = each_lane * (1.0 + (at_ns - end_ns) / batch_ns)
                starts += each * min(step, ended - index)
                if starts >= needed:
                    return True
        return False


def _overdue_end_ns(now_ns: int, end_ns: int) -> int:
    """When what should have ended will end: it takes as long again as it is overdue.

    The longer it is overdue, the less is known of it but that it takes long.
    """
    return 2 * now_ns - end_ns


@final
class Calendar(Lanes):
    """Supply and demand of one pool, in time of its lanes."""

    def __init__(self, shortest_ns: float, longest_ns: float) -> None:
        """Cover deadlines up to twice `longest_ns` ahead at first; `shortest_ns` is resolved."""
        super().__init__()
        width_ns = max(1_000.0, shortest_ns / BUCKETS_PER_WINDOW)
        size = 64
        while size < min(BUCKETS_MAX, 2.0 * longest_ns / width_ns):
            size *= 2
        self._width_ns = max(int(width_ns), int(2.0 * longest_ns / size) + 1)
        self._size = self._size_min = size
        self._origin_ns: int | None = None  # where bucket 0 begins
        self._base = 0  # bucket number of the first leaf
        self._works = [0] * size
        self._sums = [0] * (2 * size)
        self._least = [0] * (2 * size)
        self._changed: set[int] = set()  # leaves that the tree does not follow yet
        self.inflation = 1.0  # factor on booked work, learnt from starts that were late
        self._tree_inflation = 1.0  # the same, as the tree knows it
        self._inflation_max = INFLATION_MAX
        self.work_ns = 0  # of everything booked
        self.batches = 0.0  # lanes that the booked work starts on, one per batch or a little more
        self._capacity_ns = 0  # time of the lanes in a bucket, as the tree knows it
        self._is_stale = True  # the tree does not know the number of lanes yet

    def expect_switches(self) -> None:
        """The nodes cannot hold all functions at once: starts take some of the lanes' time."""
        self._inflation_max = INFLATION_MAX_SCARCE

    def resize(self, lanes: int) -> None:
        """Set the number of lanes; the tree follows when it is used next, in O(buckets)."""
        if lanes != self.lanes:
            self.lanes = lanes
            self._is_stale = True

    def share(self, part: float) -> None:
        """Set the part of the lanes' time that is for this gateway."""
        if part != self.part:
            self.part = part
            self._is_stale = True

    def on_sent(self, slip_ns: int) -> None:
        """A promised batch was sent, or a task given up, so much after its latest start.

        Negative: before it. Batches that are smaller than planned, lanes that stand idle between
        batches, batches that cannot be preempted: whatever makes starts late in spite of the test
        makes it stricter.
        """
        if slip_ns > 0:
            self.inflation = min(self._inflation_max, self.inflation + LATE_START_STEP)
        elif self.inflation > 1.0:
            self.inflation = max(1.0, self.inflation - LATE_START_STEP * LATE_STARTS)

    def bucket(self, now_ns: int, deadline_ns: int) -> int:
        """The number of the bucket of a deadline."""
        if self._origin_ns is None:
            self._origin_ns = now_ns
        number = (deadline_ns - self._origin_ns) // self._width_ns
        if number >= self._base + self._size:
            self._reach(now_ns, number)
            number = min(number, self._base + self._size - 1)
        return number if number > self._base else self._base

    def covered_ns(self, bucket: int) -> int:
        """The end of a bucket: a deadline beyond the last one counts as due then."""
        return self._begins_ns(bucket + 1)

    def mean_batch_ns(self, default_ns: float) -> float:
        """Mean lane time of the batches that are booked; the default if none is."""
        if self.batches <= 0.5:
            return default_ns
        mean_ns = self.work_ns / self.batches
        return mean_ns if mean_ns > 1.0 else 1.0

    def add(self, bucket: int, work_ns: int, batches: float) -> None:
        """Book work that is due in a bucket; a negative amount takes it back. O(1)."""
        self.work_ns += work_ns
        self.batches += batches
        leaf = bucket - self._base if bucket > self._base else 0
        works = self._works
        works[leaf] = works[leaf] + work_ns  # compiled, `+=` would be a generic call
        self._changed.add(leaf)

    def _update(self) -> None:
        """Have the tree follow what was booked: for each bucket, up to where nothing changes."""
        if self._is_stale or abs(self.inflation - self._tree_inflation) > INFLATION_TOLERANCE:
            self._rebuild()
            return
        sums, least, capacity_ns = self._sums, self._least, self._capacity_ns
        for leaf in self._changed:
            node, work_ns = leaf + self._size, self._works[leaf]
            total = capacity_ns - work_ns
            lowest = total if work_ns else _NOTHING
            while node and (sums[node] != total or least[node] != lowest):
                sums[node], least[node] = total, lowest
                node >>= 1
                left = 2 * node
                sum_left = sums[left]
                total = sum_left + sums[left + 1]
                on_left, on_right = least[left], sum_left + least[left + 1]
                lowest = on_left if on_left < on_right else on_right
        self._changed.clear()

    def slack(self, now_ns: int, bucket: int) -> tuple[int, int, int]:
        """Return the work that is due by a bucket, the slack there, and the least slack from there.

        The slack at a deadline is the time of the lanes until then, less what runs and the work
        that is due by then, inflated. Only that: what is due later takes no time from it.
        """
        if self._is_stale or self._changed:
            self._update()
        leaf = max(0, bucket - self._base)
        sums, least = self._sums, self._least
        node = leaf + self._size
        before, inside, lowest = 0, sums[node], least[node]
        own = inside
        while node > 1:
            if node & 1:
                before += sums[node - 1]
            else:
                through = inside + least[node + 1]
                lowest = lowest if lowest < through else through
                inside += sums[node + 1]
            node >>= 1
        work_ns = self._capacity_ns * (leaf + 1) - before - own
        start_ns = self._origin(now_ns) + (self._base - 1) * self._width_ns
        offset_ns = self._of_lanes(start_ns - now_ns) - self.busy_ns(now_ns)
        slack_ns, least_ns = before + own, before + lowest
        if self._tree_inflation > 1.0:
            slack_ns = int(self._tree_inflation * slack_ns)
            least_ns = int(self._tree_inflation * least_ns)
        return work_ns, slack_ns + offset_ns, least_ns + offset_ns

    def fits(
        self,
        now_ns: int,
        latest_ns: int,
        bucket: int,
        work_ns: float,
        batches: float,
        lanes: float,
        default_ns: float,
    ) -> bool:
        """Whether a newcomer fits at a bucket.

        It fits if it can start by `latest_ns` on so many lanes, and if everything that is promised
        for later still can. `batches` is the part of a batch that it adds; a batch takes
        `default_ns` if none is booked.
        """
        mean_ns, inflation, booked_ns = self.mean_batch_ns(default_ns), self.inflation, self.work_ns
        # What starts by its latest start may end after it: on average half a batch per lane.
        beyond = BEYOND * self.lanes
        beyond_ns = mean_ns * (beyond if beyond > 1.0 else 1.0) * self.part
        # Until all that runs now has ended, only starts count: a lane that is busy for long is no
        # reason to refuse what others have time for.
        last_ns = self._ends_ns[-1] if self._ends_ns else 0
        if latest_ns >= last_ns and self.part == 1.0:
            # Where time is plenty, it fits even behind all that is booked: the tree is not asked.
            least_ns = self.lanes * (self._begins_ns(bucket) - now_ns) - self.busy_ns(now_ns)
            needed = inflation * booked_ns / mean_ns + batches
            if least_ns - inflation * booked_ns + beyond_ns >= work_ns and self.can_start(
                now_ns, latest_ns, mean_ns, needed if needed > lanes else lanes
            ):
                return True
        ahead_ns, _, least_ns = self.slack(now_ns, bucket)
        # A batch that it joins may be due later: one must start by then in any case.
        needed = max(lanes, inflation * ahead_ns / mean_ns + batches)
        if not self.can_start(now_ns, latest_ns, mean_ns, needed):
            return False
        if latest_ns < last_ns and ahead_ns < booked_ns:
            least_ns = self.slack(now_ns, self.bucket(now_ns, last_ns))[2]
        return least_ns + beyond_ns >= work_ns

    def _of_lanes(self, time_ns: int) -> int:
        """The time of all lanes within a time, as far as it is for this gateway."""
        total_ns = self.lanes * time_ns
        return total_ns if self.part == 1.0 else int(self.part * total_ns)

    def _origin(self, now_ns: int) -> int:
        if self._origin_ns is None:
            self._origin_ns = now_ns
        return self._origin_ns

    def _begins_ns(self, bucket: int) -> int:
        assert self._origin_ns is not None, "a bucket comes from `bucket`"
        return self._origin_ns + bucket * self._width_ns

    def _reach(self, now_ns: int, number: int) -> None:
        """Move the first bucket to the present, and have buckets up to twice as far as this one.

        Clients may claim deadlines beyond every objective. Work that is due later than the last
        bucket counts as due in it, so with too few buckets it would push out what is urgent. O(n),
        but only after half the buckets have passed, or when there must be more of them. There are
        fewer then if few deadlines are so far: this bucket is later than all that were used before.
        """
        base = (now_ns - self._origin(now_ns)) // self._width_ns
        size = self._size_min
        while size < BUCKETS_MAX and size < 2 * (number - base):
            size *= 2
        shift = max(0, base - self._base)
        if size <= self._size and 2 * shift < self._size:
            return
        overdue = sum(self._works[:shift])
        works = self._works[shift : shift + size]
        self._works = works + [0] * (size - len(works))
        self._works[0] += overdue
        self._base += shift
        self._size = size
        self._sums = [0] * (2 * size)
        self._least = [0] * (2 * size)
        self._rebuild()

    def _rebuild(self) -> None:
        """Make the tree anew: as if nothing were booked, and then what is above the rest."""
        self._is_stale = False
        self._changed.clear()
        # Capacity less inflated work is the inflation times (capacity / inflation - work).
        self._tree_inflation = self.inflation
        size, capacity_ns = self._size, int(self._of_lanes(self._width_ns) / self.inflation)
        self._capacity_ns = capacity_ns
        sums, least = self._sums, self._least
        # Most buckets are empty where some deadlines are far: those are filled in by the level.
        count, total = size, capacity_ns
        while count:
            sums[count : 2 * count] = [total] * count
            least[count : 2 * count] = [_NOTHING] * count
            count //= 2
            total *= 2
        booked: list[int] = []
        for leaf, work_ns in enumerate(self._works):
            if work_ns:
                sums[size + leaf] = least[size + leaf] = capacity_ns - work_ns
                booked.append(size + leaf)
        while booked and booked[0] > 1:
            above: list[int] = []
            node = 0
            for child in booked:
                if child >> 1 != node:  # not also above the one before
                    node = child >> 1
                    left = 2 * node
                    sum_left = sums[left]
                    sums[node] = sum_left + sums[left + 1]
                    on_left, on_right = least[left], sum_left + least[left + 1]
                    least[node] = on_left if on_left < on_right else on_right
                    above.append(node)
            booked = above
