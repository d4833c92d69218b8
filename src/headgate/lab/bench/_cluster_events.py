"""What the events of a policy take in the cells of `headgate reproduce esg`, which charges for it.

All times are CPU time of the thread, the least of several repetitions, event by event and search by
search: what others do on the machine makes a repetition longer, never shorter.

- *us per event*: all that a Scheduler does for an event, its own records included.
- *us per expansion*: the searches of `esg` and `orion` for requests that come alone, at every stage
  of `esg`, with a part of the objective left that is in proportion to the fastest times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import nan
from time import thread_time_ns
from typing import Final, final

from headgate.core.actions import Action
from headgate.core.events import Event
from headgate.core.model import Pipeline
from headgate.lab.experiments import Row
from headgate.lab.experiments.esg_cluster.environment import ClusterScenario
from headgate.lab.harness import PolicyCase
from headgate.planning.frontier.candidates import node_candidates, pipeline_graph, priced
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.frontier.graph import StageGraph
from headgate.planning.frontier.slo_split import shares_of_rest
from headgate.planning.rivals.esg_search import EsgSearch
from headgate.planning.rivals.orion_search import OrionSearch
from headgate.policies import esg, orion
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, build_scheduler

_REPETITIONS: Final = 5

Candidates = list[list[StageConfig]]
Search = Callable[[], int]  # returns its expansions


def measure_policy(name: str, scenario: ClusterScenario) -> Row:
    """Return the row of a policy in a cell."""
    environment, policy = scenario.environment(0), PolicyCase(name)
    timers, requests, work = [], 1, 0
    for _ in range(_REPETITIONS):
        timer = _EventTimer(Setup(environment.app, *policy.build()))
        columns = environment.simulate(policy, 0, observer=timer)
        requests, work = len(columns.requests), columns.work
        timers.append(timer.times_ns)
    least_ns = [min(each) for each in zip(*timers, strict=True)]
    return {
        "policy": name,
        "cell": f"{scenario.profiles}, {scenario.cell.name}",
        "us_per_event": round(sum(least_ns) / 1e3 / len(least_ns), 1),
        "us_per_request": round(sum(least_ns) / 1e3 / requests, 1),
        "work_per_request": round(work / requests, 1),
        "us_per_expansion": _us_per_expansion(name, scenario),
    }


def _us_per_expansion(name: str, scenario: ClusterScenario) -> float:
    """Return the price of an expansion, all searches together; NaN if the policy has none."""
    searches = _SEARCHES.get(name)
    if searches is None:
        return nan
    took_ns = expansions = 0
    app = priced(scenario.environment(0).app)
    for pipeline in app.pipelines:
        candidates = [_alone(configs) for configs in node_candidates(app, pipeline)]
        for search in searches(pipeline, pipeline_graph(pipeline), candidates):
            expansions += search()
            took_ns += min(_timed_ns(search) for _ in range(_REPETITIONS))
    return round(took_ns / 1e3 / expansions, 1)


def _alone(configs: list[StageConfig]) -> list[StageConfig]:
    """The candidates for a request that waits alone."""
    return [config for config in configs if config.batch == 1] or configs


def _esg_searches(
    pipeline: Pipeline, graph: StageGraph, candidates: Candidates
) -> Iterator[Search]:
    config = esg.Config()
    fastest_ns = [min(config.time_ns for config in configs) for configs in candidates]
    for index, share in enumerate(shares_of_rest(graph, candidates, group_max=config.group_max)):
        left = sum(fastest_ns[index:]) / sum(fastest_ns)
        part = left * share.part * (1 - config.margin)
        budget_ns = int(pipeline.slo.latency_ns * part)
        group = EsgSearch([candidates[stage] for stage in share.stages])
        if group.fastest.time_ns <= budget_ns:
            yield lambda group=group, budget_ns=budget_ns: (  # type: ignore[misc]
                group.search(
                    budget_ns, config.paths_max, expansions_max=config.expansions_max
                ).expansions
            )


def _orion_searches(
    pipeline: Pipeline, graph: StageGraph, candidates: Candidates
) -> Iterator[Search]:
    config = orion.Config()
    search = OrionSearch(graph, candidates)
    budget_ns = int(pipeline.slo.latency_ns * (1 - config.margin))
    yield (
        lambda: (
            search.search(
                budget_ns, expansions_max=config.expansions_max, goes_on=config.goes_on
            ).expansions
        )
    )


_SEARCHES: Final = {"esg": _esg_searches, "orion": _orion_searches}


def _timed_ns(search: Search) -> int:
    started = thread_time_ns()
    search()
    return thread_time_ns() - started


@final
class _EventTimer(Observer):
    """Measures what a policy's events take, in CPU time, by a second Scheduler."""

    def __init__(self, setup: Setup) -> None:
        self.times_ns: list[int] = []
        self._scheduler = build_scheduler(setup, 0)

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        started = thread_time_ns()
        self._scheduler.handle(now_ns, event)
        self.times_ns.append(thread_time_ns() - started)
