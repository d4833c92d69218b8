"""Which stage of a pipeline goes where, so that all of them together are in time.

By the waits that are found, a pipeline's time is divided as if each stage ran where it ends first.
Where two stages want the same fast pool, and it is full, such a division leaves neither of them the
time of a slow build, whose pool may be idle. Here the builds come first: each stage has the one
that costs others least, and while some path is late, the stage goes to a faster one that saves the
most time, on all late paths, for what it costs. What time is left is for waiting.

A stage that is due later costs others less: before then its pool has more time that is not booked.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, final

from headgate.core.records import Request, Task
from headgate.planning.admission.feasibility import Feasibility
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds

_ROUNDING: Final = 1.001  # of a length, so that it is enough after it was rounded down

_Choice = tuple[float, Build]  # the time that a stage takes on a build


@final
class StageBuilds:
    """Chooses builds for the stages of a request together."""

    def __init__(self, builds: Builds, feasibility: Feasibility) -> None:
        self._builds = builds
        self._feasibility = feasibility

    def lengths_ns(self, request: Request, allowed_ns: float, z: float) -> list[float] | None:
        """Lengths of the stages on the cheapest builds of nodes that are in time together.

        None if there are none, or if no stage has a choice.
        """
        functions = [self._builds.of_function[task.function.id] for task in request.tasks]
        if all(len(builds) == 1 for builds in functions):
            return None
        rows = [self._choices(task, allowed_ns, z) for task in request.tasks]
        if not all(rows) or max(map(len, rows)) == 1:
            return None
        pipeline = request.pipeline
        while True:
            lengths_ns = [row[-1][0] for row in rows]
            left_ns = allowed_ns - max(pipeline.longest_to(lengths_ns))
            if left_ns >= 0.0:
                break
            stage = self._to_hasten(request, rows, lengths_ns, allowed_ns)
            if stage is None:
                return None
            rows[stage].pop()
        each_ns = left_ns / max(pipeline.longest_to([1.0] * len(rows)))
        return [own_ns + each_ns for own_ns in lengths_ns]

    def _to_hasten(
        self,
        request: Request,
        rows: Sequence[Sequence[_Choice]],
        lengths_ns: Sequence[float],
        allowed_ns: float,
    ) -> int | None:
        """The late stage for which the next faster build saves most for what it costs more.

        None if each has its fastest. What runs seldom costs others little.
        """
        pipeline, items, cost = request.pipeline, request.items, self._feasibility.cost
        to_ns, from_ns = pipeline.longest_to(lengths_ns), pipeline.longest_from(lengths_ns)
        late_ends = [0] * len(rows)  # by stage: late ends of the pipeline that are due to it
        best: int | None = None
        most = -inf
        for stage in reversed(range(len(rows))):
            after = pipeline.successors[stage]
            is_late = to_ns[stage] > allowed_ns
            late_ends[stage] = sum([late_ends[i] for i in after]) if after else int(is_late)
            rest_ns = from_ns[stage] - lengths_ns[stage]  # what follows it
            if len(rows[stage]) == 1 or to_ns[stage] + rest_ns <= allowed_ns:
                continue
            (faster_ns, faster), (slower_ns, slower) = rows[stage][-2:]
            until_ns = int(allowed_ns - rest_ns)
            more = cost(faster, items, until_ns) - cost(slower, items, until_ns)
            more *= self._feasibility.visits(request, stage)
            saved_ns = late_ends[stage] * (slower_ns - faster_ns)
            gain = saved_ns / more if more > 0.0 else inf
            if gain > most:
                best, most = stage, gain
        return best

    def _choices(self, task: Task, window_ns: float, z: float) -> list[_Choice]:
        """The builds of nodes for a task, the fastest first, and each cheaper than all before."""
        items = task.request.items
        found: list[tuple[float, float, Build]] = []
        for build in self._builds.of_function[task.function.id]:
            is_node = build.warm_pool is None
            if is_node and items <= build.items_max and self._builds.is_usable(build):
                time_ns = _ROUNDING * build.cautious_ns(items, z)
                if build.cold_start_ns > 0:
                    time_ns += self._builds.ready_in_ns(build)
                found.append((time_ns, self._feasibility.cost(build, items, int(window_ns)), build))
        choices: list[_Choice] = []
        least = inf
        for time_ns, costs, build in sorted(found, key=_by_time):
            if costs < least:
                choices.append((time_ns, build))
                least = costs
        return choices


def _by_time(found: tuple[float, float, Build]) -> tuple[float, float]:
    return found[:2]
