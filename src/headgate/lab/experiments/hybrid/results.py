"""What every policy came to on every trace, and what is claimed of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final, final

from headgate.lab.experiments.experiment import Check, Row
from headgate.lab.experiments.hybrid.offline_optimum import Clairvoyant
from headgate.lab.experiments.hybrid.run import HybridCase, HybridPolicyCase, HybridResult
from headgate.lab.experiments.hybrid.sweep import ATTAINED

OURS: Final = HybridPolicyCase("headgate")
CLAIRVOYANT: Final = HybridPolicyCase("clairvoyant")  # no policy: it stands where one would

_SOURCE: Final = "a goal of this project"
_NOISE: Final = 1.02
_GAP_SHARE: Final = 0.25

Runs = Mapping[HybridCase, Sequence[HybridResult]]
Limits = Mapping[str, Sequence[Clairvoyant]]  # by trace, seed by seed


@final
class ResultTable:
    """Means over the seeds, by trace and policy."""

    def __init__(self, runs: Runs, limits: Limits, rivals: Sequence[HybridPolicyCase]) -> None:
        self.limits = limits
        self.limits_usd = {
            trace: fmean(way.cost_usd for way in ways) for trace, ways in limits.items()
        }
        self.of: dict[str, dict[HybridPolicyCase, HybridResult]] = {trace: {} for trace in limits}
        for case, found in runs.items():
            self.of[case.trace.name][case.form] = _mean(found)
        self._rivals = rivals

    def rows(self) -> list[Row]:
        """One per trace and policy, one for the clairvoyant; then one per policy: its settings."""
        rows: list[Row] = []
        for trace, of_trace in self.of.items():
            requests = of_trace[OURS].requests
            rows += [self._row(trace, form, one) for form, one in of_trace.items()]
            rows.append(self._row(trace, CLAIRVOYANT, _known(requests, self.limits[trace])))
        forms = (*self._rivals, OURS)
        return rows + [
            {"policy": form.policy, "settings": form.settings or "the defaults"} for form in forms
        ]

    def _row(self, trace: str, form: HybridPolicyCase, one: HybridResult) -> Row:
        return {
            "trace": trace,
            "policy": form.policy,
            "requests": one.requests,
            "attained %": 100 * one.attainment,
            "cost $": one.cost_usd,
            "instances $": one.dedicated_usd,
            "functions $": one.functions_usd,
            "cost / clairvoyant": one.cost_usd / self.limits_usd[trace],
            "cold starts": one.cold_starts,
            "missed for them": one.cold_misses,
        }

    def checks(self) -> list[Check]:
        """The three goals, and that the bound is one."""
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
        return _none_check("traces on which a rival attains 99 % and headgate does not", missed)

    def _cost_check(self) -> Check:
        dearer = [
            f"{trace} ({100 * (ours / theirs - 1):+.1f} % of {form.policy})"
            for trace, form in self._cheapest().items()
            if (ours := self.of[trace][OURS].cost_usd)
            > _NOISE * (theirs := self.of[trace][form].cost_usd)
        ]
        claim = "traces on which headgate costs over 2 % more than the cheapest rival at 99 %"
        return _none_check(claim, dearer)

    def _gap_check(self) -> Check:
        closed = self.closed()
        mean = fmean(closed.values()) if closed else 0.0
        parts = ", ".join(f"{trace} {share:.2f}" for trace, share in closed.items())
        return Check(
            "mean share that headgate closes of the gap from that rival to the clairvoyant",
            _SOURCE,
            f"at least {_GAP_SHARE}",
            f"{mean:.2f} ({parts})",
            mean >= _GAP_SHARE,
        )

    def _bound_check(self) -> Check:
        below = [
            f"{form.policy} on {trace}"
            for trace, of_trace in self.of.items()
            for form, one in of_trace.items()
            if one.attainment >= ATTAINED and one.cost_usd < self.limits_usd[trace]
        ]
        return _none_check("policies that attain 99 % for less than the clairvoyant", below)

    def closed(self) -> dict[str, float]:
        """By trace, how much of the gap to the clairvoyant is closed; negative where it widens."""
        shares: dict[str, float] = {}
        for trace, form in self._cheapest().items():
            theirs, limit_usd = self.of[trace][form].cost_usd, self.limits_usd[trace]
            shares[trace] = (theirs - self.of[trace][OURS].cost_usd) / (theirs - limit_usd)
        return shares

    def _cheapest(self) -> dict[str, HybridPolicyCase]:
        """By trace, the cheapest rival that attains 99 % there, if one does."""
        found: dict[str, HybridPolicyCase] = {}
        for trace, of_trace in self.of.items():
            good = [form for form in self._rivals if of_trace[form].attainment >= ATTAINED]
            if good:
                found[trace] = min(good, key=lambda form: of_trace[form].cost_usd)
        return found


def _mean(found: Sequence[HybridResult]) -> HybridResult:
    return HybridResult(
        requests=round(fmean(one.requests for one in found)),
        attainment=fmean(one.attainment for one in found),
        dedicated_usd=fmean(one.dedicated_usd for one in found),
        functions_usd=fmean(one.functions_usd for one in found),
        cold_starts=round(fmean(one.cold_starts for one in found)),
        cold_misses=round(fmean(one.cold_misses for one in found)),
        function_share=fmean(one.function_share for one in found),
    )


def _known(requests: int, ways: Sequence[Clairvoyant]) -> HybridResult:
    return HybridResult(
        requests=requests,
        attainment=1.0,
        dedicated_usd=fmean(way.dedicated_usd for way in ways),
        functions_usd=fmean(way.functions_usd for way in ways),
        cold_starts=0,
        cold_misses=0,
        function_share=0.0,
    )


def _none_check(claim: str, exceptions: Sequence[str]) -> Check:
    return Check(claim, _SOURCE, "none", "; ".join(exceptions) or "none", not exceptions)
