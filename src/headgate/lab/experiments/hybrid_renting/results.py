"""Results of every policy on every trace, and the checks of the goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, final

from headgate.lab.experiments import Check, Row, none_check
from headgate.lab.experiments.hybrid_renting.environment import TraceScenario
from headgate.lab.experiments.hybrid_renting.offline_optimum import Clairvoyant
from headgate.lab.experiments.hybrid_renting.sweep import ATTAINED
from headgate.lab.harness import Case, PolicyCase, RunResult

OURS: Final = PolicyCase("headgate")
CLAIRVOYANT: Final = PolicyCase("clairvoyant")  # not a policy: a placeholder in cases and rows

_SOURCE: Final = "a goal of this project"
_NOISE: Final = 1.02
_GAP_SHARE: Final = 0.40
_GAP_SHARE_GENERATED: Final = 0.25

Runs = Mapping[Case[TraceScenario], Sequence[RunResult]]
Limits = Mapping[str, Sequence[Clairvoyant]]  # by trace, seed by seed


@dataclass(frozen=True, slots=True)
class TraceMeans:
    """Means over the seeds of one policy on one trace."""

    requests: int
    attainment: float
    dedicated_usd: float
    functions_usd: float
    cold_starts: int = 0  # of functions
    cold_violations: int = 0

    @property
    def cost_usd(self) -> float:
        return self.dedicated_usd + self.functions_usd


@final
class ResultTable:
    """Means over the seeds, by trace and policy."""

    def __init__(
        self, runs: Runs, limits: Limits, baselines: Sequence[PolicyCase], *, is_generated: bool
    ) -> None:
        self.limits = limits
        self._gap_share = _GAP_SHARE_GENERATED if is_generated else _GAP_SHARE
        self.limits_usd = {
            trace: fmean(optimum.cost_usd for optimum in optima) for trace, optima in limits.items()
        }
        self.of: dict[str, dict[PolicyCase, TraceMeans]] = {trace: {} for trace in limits}
        for case, results in runs.items():
            self.of[case.scenario.trace.name][case.policy] = _mean(results)
        self._baselines = baselines

    def rows(self) -> list[Row]:
        """Return rows per trace and policy, the clairvoyant included; then settings per policy."""
        rows: list[Row] = []
        for trace, of_trace in self.of.items():
            requests = of_trace[OURS].requests
            rows += [self._row(trace, policy, one) for policy, one in of_trace.items()]
            rows.append(self._row(trace, CLAIRVOYANT, _optimum_means(requests, self.limits[trace])))
        policies = (*self._baselines, OURS)
        return rows + [
            {"policy": policy.name, "settings": policy.settings_text or "the defaults"}
            for policy in policies
        ]

    def _row(self, trace: str, policy: PolicyCase, one: TraceMeans) -> Row:
        return {
            "trace": trace,
            "policy": policy.name,
            "requests": one.requests,
            "attained %": 100 * one.attainment,
            "cost $": one.cost_usd,
            "instances $": one.dedicated_usd,
            "functions $": one.functions_usd,
            "cost / clairvoyant": one.cost_usd / self.limits_usd[trace],
            "cold starts": one.cold_starts,
            "cold violations": one.cold_violations,
        }

    def checks(self) -> list[Check]:
        """Return the checks of the three goals, and of the clairvoyant as a lower bound."""
        return [
            self._attainment_check(),
            self._cost_check(),
            self._gap_check(),
            self._bound_check(),
        ]

    def _attainment_check(self) -> Check:
        missed = [
            f"{trace} ({100 * self.of[trace][OURS].attainment:.2f} %)"
            for trace in self._cheapest()
            if self.of[trace][OURS].attainment < ATTAINED
        ]
        return none_check(
            "traces on which a baseline attains 99 % and headgate does not", _SOURCE, missed
        )

    def _cost_check(self) -> Check:
        more_expensive = [
            f"{trace} ({100 * (ours / theirs - 1):+.1f} % of {policy.name})"
            for trace, policy in self._cheapest().items()
            if (ours := self.of[trace][OURS].cost_usd)
            > _NOISE * (theirs := self.of[trace][policy].cost_usd)
        ]
        claim = "traces on which headgate costs over 2 % more than the cheapest baseline at 99 %"
        return none_check(claim, _SOURCE, more_expensive)

    def _gap_check(self) -> Check:
        closed = self.closed()
        mean = fmean(closed.values()) if closed else 0.0
        parts = ", ".join(f"{trace} {share:.2f}" for trace, share in closed.items())
        return Check(
            "mean share that headgate closes of the gap from that baseline to the clairvoyant",
            _SOURCE,
            f"at least {self._gap_share:.2f}",
            f"{mean:.2f} ({parts})",
            mean >= self._gap_share,
        )

    def _bound_check(self) -> Check:
        below = [
            f"{policy.name} on {trace}"
            for trace, of_trace in self.of.items()
            for policy, one in of_trace.items()
            if one.attainment >= ATTAINED and one.cost_usd < self.limits_usd[trace]
        ]
        return none_check("policies that attain 99 % for less than the clairvoyant", _SOURCE, below)

    def closed(self) -> dict[str, float]:
        """Return, by trace, the share of the gap to the clairvoyant that is closed.

        The share is negative where headgate costs more than the cheapest baseline.
        """
        shares: dict[str, float] = {}
        for trace, policy in self._cheapest().items():
            theirs, limit_usd = self.of[trace][policy].cost_usd, self.limits_usd[trace]
            shares[trace] = (theirs - self.of[trace][OURS].cost_usd) / (theirs - limit_usd)
        return shares

    def _cheapest(self) -> dict[str, PolicyCase]:
        """Return, by trace, the cheapest baseline that attains 99 %, if any does."""
        results: dict[str, PolicyCase] = {}
        for trace, of_trace in self.of.items():
            good = [policy for policy in self._baselines if of_trace[policy].attainment >= ATTAINED]
            if good:
                results[trace] = min(good, key=lambda policy: of_trace[policy].cost_usd)
        return results


def tuned_rows(
    tuned: Mapping[str, tuple[PolicyCase, float]],
    ours_usd: Mapping[str, float],
    limits_usd: Mapping[str, float],
) -> list[Row]:
    """Return rows of headgate beside the cheapest baseline with settings chosen on that trace."""
    return [
        {
            "tuned on": trace,
            "cheapest": policy.name,
            "settings": policy.settings_text,
            "cost $": theirs,
            "headgate $": ours_usd[trace],
            "headgate / it": ours_usd[trace] / theirs,
            "gap closed": (theirs - ours_usd[trace]) / (theirs - limits_usd[trace]),
        }
        for trace, (policy, theirs) in tuned.items()
    ]


def tuned_check(
    tuned: Mapping[str, tuple[PolicyCase, float]], ours_usd: Mapping[str, float]
) -> Check:
    """Return the check of the cost beside baselines whose settings were chosen on that trace."""
    more_expensive = [
        f"{trace} ({100 * (ours_usd[trace] / theirs - 1):+.1f} % of {policy.name})"
        for trace, (policy, theirs) in tuned.items()
        if ours_usd[trace] > _NOISE * theirs
    ]
    claim = "traces on which headgate costs over 2 % more than any baseline tuned on that trace"
    return none_check(claim, _SOURCE, more_expensive)


def _mean(results: Sequence[RunResult]) -> TraceMeans:
    return TraceMeans(
        requests=round(fmean(one.requests for one in results)),
        attainment=fmean(one.attainment for one in results),
        dedicated_usd=fmean(one.machines.usd for one in results),
        functions_usd=fmean(one.functions.usd for one in results),
        cold_starts=round(fmean(one.functions.cold_starts for one in results)),
        cold_violations=round(fmean(one.cold_violations for one in results)),
    )


def _optimum_means(requests: int, optima: Sequence[Clairvoyant]) -> TraceMeans:
    return TraceMeans(
        requests,
        attainment=1.0,
        dedicated_usd=fmean(optimum.dedicated_usd for optimum in optima),
        functions_usd=fmean(optimum.functions_usd for optimum in optima),
    )
