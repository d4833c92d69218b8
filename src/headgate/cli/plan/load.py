"""The load that a plan is made for, from the requests that a command would send."""

from __future__ import annotations

import numpy as np

from headgate.cli.workload import Workload
from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import App, Function
from headgate.planning.load_levels import Ints, Level, Load, closed_load, open_load
from headgate.workload import Arrivals, ClosedLoop


def load_of(
    workload: Workload, app: App, function: Function, slo_ms: float, lone_ms: float
) -> Load:
    """Return the levels of the requests that need the function.

    Clients that think between an answer and their next request are taken for requests that come
    by themselves, as fast as they would if every answer took `lone_ms`.
    """
    others = {
        pipeline.name
        for pipeline in app.pipelines
        if all(stage.function is not function for stage in pipeline.stages)
    }
    loops = [loop for loop in workload.loops if loop.pipeline not in others]
    times_ns = _times_ns(workload.arrivals, others)
    if (len(times_ns) and loops) or len({loop.think_ns for loop in loops}) > 1:
        problem = "clients that wait for answers come together with other requests"
        raise ConfigError(problem, where="the workload", allowed="one kind at a time")
    clients = (
        step.clients for loop in loops for step in loop.steps if step.at_ns < loop.duration_ns
    )
    if not len(times_ns) and not any(clients):
        problem = f"there are no requests for {function.name} to plan for"
        raise ConfigError(problem, where="the workload", allowed="--arrivals SPEC, --trace FILE")
    return _closed(loops, lone_ms) if loops else open_load(times_ns, workload.window_ns, slo_ms)


def _times_ns(arrivals: Arrivals | None, others: set[str]) -> Ints:
    if arrivals is None:
        return np.zeros(0, dtype=np.int64)
    left = [index for index, name in enumerate(arrivals.pipelines) if name in others]
    times_ns = arrivals.times_ns
    return times_ns[~np.isin(arrivals.pipeline, left)] if left else times_ns


def _closed(loops: list[ClosedLoop], lone_ms: float) -> Load:
    duration_ns = max(loop.duration_ns for loop in loops)
    instants = {0, *(step.at_ns for loop in loops for step in loop.steps)}
    starts_ns = sorted(instant for instant in instants if instant < duration_ns)
    clients = [(start, sum(loop.clients_at(start) for loop in loops)) for start in starts_ns]
    load = closed_load(clients, duration_ns)
    think_s = loops[0].think_ns / SECOND_NS
    if think_s == 0.0:
        return load
    cycle_s = think_s + lone_ms / 1e3
    return Load(
        tuple(Level(level.share, rate_per_s=level.clients / cycle_s) for level in load.levels),
        load.duration_s,
        load.rises,
    )
