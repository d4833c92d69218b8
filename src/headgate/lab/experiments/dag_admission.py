"""Admission control for DAGs under latency and cost objectives: table 4.1 of the thesis, redone.

The thesis (EECS-2022-88, chapter 4) measures goodput as hits over the time until *all* requests are
served, at 5 to 12 times the capacity, without rejecting any: at most 19 of 1200 requests were in
time. The first table has that definition, on the system that comes closest to the printed numbers
(`dag_cluster.environment`), beside goodput within the window. The second has the offered load from
half to twelve times the capacity, with profiles that are right, wrong by 20 %, and with one
function whose profile is ten times too optimistic. The third compares the ways to choose among
valid placements, which the thesis leaves open. The last has the distance from the optimum, on cases
small enough for an exhaustive search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Final

from headgate.core.model import ENFORCE, OBSERVE
from headgate.lab.experiments import Check, Progress, Result, Row, none_check
from headgate.lab.experiments.dag_cluster.environment import (
    LATENCIES_MS,
    OPTIMISTIC,
    REQUESTS,
    RIGHT,
    THUMBNAIL,
    WRONG,
    DagResult,
    LoadScenario,
    TableScenario,
    run_load,
    run_table,
)
from headgate.lab.experiments.dag_cluster.optimum import optimum, served_by, small_case
from headgate.lab.harness import Case, PolicyCase, over_seeds

NAME = "dag-admission"
TITLE = "Admission control for DAGs under latency and cost objectives"

_FIFO: Final = PolicyCase.of("balance", "fifo")
_NAIVE: Final = PolicyCase.of("clockwork", "clockwork (naive)", form="naive")
_CLOCKWORK: Final = PolicyCase.of("clockwork")
_DAG: Final = PolicyCase.of("dag_admission")
_ROOM: Final = PolicyCase.of("dag_admission", "dag_admission (room for 8)", batch_room=8)
_OURS: Final = PolicyCase.of("headgate")
_RIVALS: Final = (
    _FIFO,
    _NAIVE,
    _CLOCKWORK,
    PolicyCase.of("lambda_like"),
    PolicyCase.of("clipper"),
    _DAG,
    _ROOM,
)
_POLICIES: Final = (*_RIVALS, _OURS)
_ADMITTING: Final = (_DAG, _ROOM, _OURS)
_CHOICES: Final = tuple(
    PolicyCase.of("dag_admission", choice, choose=choice)
    for choice in ("random", "cheapest", "fastest", "least_loaded")
)
# As printed, for latency objectives of 20, 40, 60 and 80 ms; hits are decoded from the goodputs.
_PRINTED_HITS: Final = {_FIFO: (3, 7, 12, 16), _NAIVE: (1, 3, 5, 6), _DAG: (4, 8, 12, 19)}
_PRINTED_COST: Final = {
    _FIFO: (199.9,) * 4,
    _NAIVE: (83.3,) * 4,
    _DAG: (177.35, 205.8, 177.3, 178.7),
}
_PRINTED_LATENCY: Final = {
    _FIFO: (0.49, 1.17, 1.99, 2.66),
    _NAIVE: (0.069, 0.208, 0.34, 0.42),
    _DAG: (0.59, 1.37, 1.77, 2.82),
}
_LOADS: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 12.0)
_FEW_LOADS: Final = (0.5, 2.0, 12.0)
_SWEPT_MS: Final = (20, 40, 80)
_MIDDLE_MS: Final = 40  # of the runs in which something else than the load changes
_OVERLOAD: Final = 2.0
_SOURCE: Final = "thesis 4.3"
_GOAL: Final = "goal"

TableRuns = Mapping[Case[TableScenario], Sequence[DagResult]]
LoadRuns = Mapping[Case[LoadScenario], Sequence[DagResult]]
Gaps = Mapping[PolicyCase, Sequence[tuple[int, int]]]  # requests served, and the optimum


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run table 4.1, the sweep of load, the choices, and the small cases."""
    progress("table 4.1")
    table = over_seeds(run_table, list(_table_cases()), 1, is_parallel=not quick)
    progress("offered load")
    seeds = 1 if quick else 2
    sweep = over_seeds(run_load, list(_load_cases(quick)), seeds, is_parallel=not quick)
    progress("choices among valid placements")
    choices = over_seeds(run_load, list(_choice_cases(quick)), seeds, is_parallel=not quick)
    progress("optimality gap")
    gaps = _gaps(12 if quick else 150)
    return Result(
        NAME,
        [
            *_table_rows(table),
            *(_load_row(case, runs) for case, runs in sweep.items()),
            *(_choice_row(case, runs) for case, runs in choices.items()),
            *_gap_rows(gaps),
        ],
        [*_table_checks(table), *_load_checks(sweep), *_best_checks(sweep), *_gap_checks(gaps)],
    )


# Table 4.1


def _table_cases() -> Iterator[Case[TableScenario]]:
    for latency_ms in LATENCIES_MS:
        for policy in _POLICIES:
            yield Case(policy, TableScenario(latency_ms))
        yield Case(_DAG, TableScenario(latency_ms, OBSERVE))


def _table_rows(runs: TableRuns) -> Iterator[Row]:
    for case, (result,) in runs.items():
        policy, scenario = case.policy, case.scenario
        is_enforced = scenario.admission == ENFORCE
        index = LATENCIES_MS.index(scenario.latency_ms)
        printed = not is_enforced if policy == _DAG else policy in _PRINTED_HITS
        yield {
            "latency SLO [ms]": scenario.latency_ms,
            "policy": policy.label if is_enforced else f"{policy.label} (rejects nothing)",
            "hits": result.hits,
            "drained [s]": result.drain_s,
            "hits/drained": result.hits / result.drain_s,
            "printed": _PRINTED_LATENCY[policy][index] if printed else None,
            "within cost/drained": result.cheap / result.drain_s,
            "printed cost": _PRINTED_COST[policy][index] if printed else None,
            "goodput [1/s]": result.goodput,
            "admitted": result.admitted,
            "kept": result.kept_share,
        }


def _table_checks(runs: TableRuns) -> Iterator[Check]:
    def results(policy: PolicyCase) -> list[DagResult]:
        return [runs[Case(policy, TableScenario(latency_ms))][0] for latency_ms in LATENCIES_MS]

    for policy, expected_ms in ((_FIFO, 5), (_NAIVE, 12)):
        found_ms = fmean(1000 * each.drain_s / REQUESTS for each in results(policy))
        is_near = abs(found_ms / expected_ms - 1) < 0.01
        claim = f"{policy.label}: time per request until all are served, in ms"
        yield Check(claim, "table 4.1", expected_ms, found_ms, is_near)
    for policy in (_FIFO, _NAIVE):
        hits = [each.hits for each in results(policy)]
        errors = [abs(a - b) for a, b in zip(hits, _PRINTED_HITS[policy], strict=True)]
        claim = f"{policy.label}: requests within 20, 40, 60 and 80 ms, to one"
        yield Check(claim, "table 4.1", _text(_PRINTED_HITS[policy]), _text(hits), max(errors) <= 1)
    gains = [
        mine.hits / max(1, theirs.hits)
        for mine, theirs in zip(results(_DAG), results(_FIFO), strict=True)
    ]
    claim = "dag_admission with rejection: hits relative to fifo, the least of four rows"
    yield Check(claim, _SOURCE, "above 1", min(gains), min(gains) > 1)


def _text(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


# Offered load


def _load_cases(quick: bool) -> Iterator[Case[LoadScenario]]:
    """Every policy at every load with right profiles; then the wrong ones, at one objective."""
    for latency_ms in (_MIDDLE_MS,) if quick else _SWEPT_MS:
        for load in _FEW_LOADS if quick else _LOADS:
            for policy in _POLICIES:
                yield Case(policy, LoadScenario(latency_ms, load, RIGHT, 0.3 if quick else 1.0))
    # Longer runs: what was promised before the first batches have ended is promised in error.
    for profiles in (WRONG, OPTIMISTIC):
        for load in _FEW_LOADS[:2] if quick else _FEW_LOADS:
            for policy in _ADMITTING if quick else _POLICIES:
                scenario = LoadScenario(_MIDDLE_MS, load, profiles, 1.0 if quick else 2.0)
                yield Case(policy, scenario)


def _load_row(case: Case[LoadScenario], runs: Sequence[DagResult]) -> Row:
    scenario = case.scenario
    return {
        "profiles": scenario.profiles,
        "SLO [ms]": scenario.latency_ms,
        "load": scenario.load,
        "policy": case.policy.label,
        "goodput [1/s]": _mean(runs, "goodput"),
        "admitted": fmean(run.admitted / run.requests for run in runs),
        "kept": _mean(runs, "kept_share"),
        "kept, photo": fmean(run.kept_by_pipeline[0] for run in runs),
        f"kept, {THUMBNAIL}": fmean(run.kept_by_pipeline[1] for run in runs),
        "units per hit": _mean(runs, "units_per_hit"),
    }


def _mean(runs: Sequence[DagResult], name: str) -> float:
    return fmean(getattr(run, name) for run in runs)


def _load_checks(runs: LoadRuns) -> Iterator[Check]:
    for policy in (_FIFO, *_ADMITTING):
        least = min(_held(runs, policy))
        holds = least < 0.5 if policy == _FIFO else least >= 0.9
        claim = f"{policy.label}: goodput at 2x and more relative to its peak, the least"
        yield Check(claim, _GOAL, "below 0.5" if policy == _FIFO else "0.9 or more", least, holds)
    claims: tuple[tuple[str, float, Callable[[DagResult], float], str], ...] = (
        (RIGHT, 0.99, _kept, "right profiles: cells that keep less than 99 % of what is admitted"),
        (WRONG, 0.95, _kept, "profiles wrong by 20 %: cells that keep less than 95 %"),
        (
            OPTIMISTIC,
            0.95,
            _others_kept,
            f"{OPTIMISTIC}: cells that keep less than 95 % of the other DAG",
        ),
    )
    for policy in _ADMITTING:
        for profiles, least, share, claim in claims:
            exceptions = [
                f"{_cell(case.scenario)}: {fmean(map(share, results)):.3f}"
                for case, results in runs.items()
                if case.policy == policy
                and case.scenario.profiles == profiles
                and fmean(map(share, results)) < least
            ]
            yield none_check(f"{policy.label}, {claim}", _GOAL, exceptions)


def _kept(run: DagResult) -> float:
    return run.kept_share


def _others_kept(run: DagResult) -> float:
    """The share of `thumbnail`, which does not run `detect`."""
    return run.kept_by_pipeline[1]


def _held(runs: LoadRuns, policy: PolicyCase) -> Iterator[float]:
    """By objective and load from 2x on: goodput relative to the highest at any lower load."""
    for case, results in runs.items():
        scenario = case.scenario
        is_right = scenario.profiles == RIGHT and case.policy == policy
        if is_right and scenario.load >= _OVERLOAD:
            peak = max(
                _mean(other_results, "goodput")
                for other, other_results in runs.items()
                if other.policy == policy
                and other.scenario.profiles == RIGHT
                and other.scenario.latency_ms == scenario.latency_ms
                and other.scenario.load <= scenario.load
            )
            yield _mean(results, "goodput") / peak if peak else 0.0


def _best_checks(runs: LoadRuns) -> Iterator[Check]:
    """Compare the default policy with the best of the others, cell by cell."""
    cells: dict[LoadScenario, dict[PolicyCase, Sequence[DagResult]]] = {}
    for case, results in runs.items():
        cells.setdefault(case.scenario, {})[case.policy] = results
    below = []
    for scenario, cell in cells.items():
        ours = _mean(cell[_OURS], "goodput")
        best = max((p for p in cell if p != _OURS), key=lambda p: _mean(cell[p], "goodput"))
        theirs = _mean(cell[best], "goodput")
        if ours < 0.99 * theirs:
            below.append(f"{_cell(scenario)}: {ours:.0f} < {theirs:.0f} ({best.label})")
    claim = "headgate: cells with less goodput than 99 % of the best"
    yield none_check(claim, _GOAL, below)
    full = [cell for cell in cells.values() if len(cell) == len(_POLICIES)]
    costs = {p: fmean(_cost(cell[p]) for cell in full) for p in _POLICIES}
    best = min(costs, key=costs.__getitem__)
    claim = "lowest mean cost per hit, in units, over cells with all policies"
    yield Check(claim, _GOAL, _OURS.label, f"{best.label}: {costs[best]:.1f}", best == _OURS)


def _cost(runs: Sequence[DagResult]) -> float:
    """Units per hit; infinite if a run has no hit."""
    return fmean(run.units_per_hit if run.hits else inf for run in runs)


def _cell(scenario: LoadScenario) -> str:
    return f"{scenario.latency_ms} ms, {scenario.load:g}x, {scenario.profiles}"


# Choices among valid placements


def _choice_cases(quick: bool) -> Iterator[Case[LoadScenario]]:
    for load in (1.0,) if quick else (0.5, 1.0, 4.0):
        for policy in _CHOICES:
            yield Case(policy, LoadScenario(_MIDDLE_MS, load, seconds=0.3 if quick else 1.0))


def _choice_row(case: Case[LoadScenario], runs: Sequence[DagResult]) -> Row:
    return {
        "choice": case.policy.label,
        "load": case.scenario.load,
        "goodput [1/s]": _mean(runs, "goodput"),
        "kept": _mean(runs, "kept_share"),
        "units per hit": _mean(runs, "units_per_hit"),
    }


# Distance from the optimum


def _gaps(cases: int) -> dict[PolicyCase, list[tuple[int, int]]]:
    """By policy: for each small case that can serve anything, requests served and the optimum."""
    gaps: dict[PolicyCase, list[tuple[int, int]]] = {}
    for seed in range(cases):
        case = small_case(seed)
        best = optimum(case)
        for policy in (*_CHOICES, _CLOCKWORK, _FIFO, _OURS):
            if best:
                gaps.setdefault(policy, []).append((served_by(policy, case), best))
    return gaps


def _gap_rows(gaps: Gaps) -> Iterator[Row]:
    for policy, pairs in gaps.items():
        ratios = sorted(served / best for served, best in pairs)
        yield {
            "policy": policy.label if policy not in _CHOICES else f"dag_admission, {policy.label}",
            "cases": len(pairs),
            "served/optimum": sum(s for s, _ in pairs) / sum(b for _, b in pairs),
            "optimal in": sum(ratio >= 1 for ratio in ratios) / len(ratios),
            "10 %": ratios[len(ratios) // 10],
            "25 %": ratios[len(ratios) // 4],
            "median": ratios[len(ratios) // 2],
            "worst": ratios[0],
        }


def _gap_checks(gaps: Gaps) -> Iterator[Check]:
    above = [
        f"{policy.label}: {served} > {best}"
        for policy, pairs in gaps.items()
        for served, best in pairs
        if served > best
    ]
    yield none_check("small cases in which a policy serves more than the optimum", "search", above)
