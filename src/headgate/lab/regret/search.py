"""The regret search: a policy and its rivals in one random world after another.

The rivals are the other registered policies that support the world, and the references. The *ratio*
of a world is the policy's goodput over the best rival's, at most 1; only policies that count (see
`headgate.lab.regret.scores`) compete, so a policy that starves a class has the ratio 0. The *cost
ratio* compares with the cheapest rival that has at least 0.99 of the policy's goodput.

A world with fewer than 1,000 requests with objectives is left out. A world in which no policy
counts, or none serves anything in time, has no ratio, but a share of the fluid bound. Both are
counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import isnan, nan
from statistics import fmean
from typing import Any, Final

from headgate.core.errors import PolicyError
from headgate.core.model import App
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.lab.harness import in_processes
from headgate.lab.regret.references import REFERENCE, REFERENCES
from headgate.lab.regret.scores import BEST_EFFORT_SHARE, Judge, Kept, Score, features
from headgate.lab.regret.worlds import REQUESTS_MIN, Truth, World, WorldKind, draw_world
from headgate.policies import find_policy, policies_for

_LOG: Final = logging.getLogger(__name__)
RATIO_MIN: Final = 0.9  # of the best rival's goodput; a world below it is lost
SHARE_MIN: Final = 0.5  # of the fluid bound
COMPARABLE_GOODPUT: Final = 0.99  # of the policy's, for a rival's cost to compare with

Reason = str  # "ratio", "share", "kept" or "best effort": how a world is lost


@dataclass(frozen=True, slots=True)
class Rival:
    """What another policy, or a reference, reached in a world."""

    goodput: float
    counts: bool
    cost_usd: float


@dataclass(frozen=True, slots=True)
class WorldResult:
    """A policy and its rivals in one world."""

    seed: int
    digest: str  # of the application file: scores that were recorded for another do not compare
    load: float
    requests: int  # with an objective
    features: tuple[str, ...]
    own: Score
    rivals: Mapping[str, Rival]

    @property
    def is_left_out(self) -> bool:
        """Whether there are too few requests with objectives."""
        return self.requests < REQUESTS_MIN

    @property
    def best_rival(self) -> str | None:
        """The rival that counts and has the most goodput, if it has any."""
        names = [name for name, rival in self.rivals.items() if rival.counts and rival.goodput > 0]
        return max(names, key=lambda name: self.rivals[name].goodput, default=None)

    @property
    def ratio(self) -> float:
        """Goodput over the best rival's, at most 1; NaN if none that counts serves anything."""
        best, own = self.best_rival, self.own.goodput if self.own.counts else 0.0
        if best is None:
            return 1.0 if own > 0 else nan
        return min(1.0, own / self.rivals[best].goodput)

    @property
    def cost_ratio(self) -> float:
        """Cost over the cheapest comparable rival's; NaN if there is none."""
        costs = [
            rival.cost_usd
            for rival in self.rivals.values()
            if rival.counts and rival.goodput >= COMPARABLE_GOODPUT * self.own.goodput
        ]
        cheapest = min(costs, default=0.0)
        return self.own.cost_usd / cheapest if cheapest and self.own.goodput else nan

    @property
    def losses(self) -> tuple[Reason, ...]:
        """How the world is lost; empty if it is not."""
        if self.is_left_out:
            return ()
        found = {
            "ratio": self.ratio < RATIO_MIN,
            "share": self.own.share < SHARE_MIN,
            "kept": not self.own.keeps,
            "best effort": not self.own.serves_best_effort,
        }
        return tuple(reason for reason, is_lost in found.items() if is_lost)

    def to_json(self) -> dict[str, object]:
        """Return what `--json` prints about a world; `recorded_rivals` reads it."""
        own = self.own
        return {
            "seed": self.seed,
            "digest": self.digest,
            "load": self.load,
            "requests": self.requests,
            "features": list(self.features),
            "left_out": self.is_left_out,
            "share": own.share,
            "share_in_time": own.share_in_time,
            "ratio": self.ratio,
            "best_rival": self.best_rival,
            "cost_ratio": self.cost_ratio,
            "losses": list(self.losses),
            "goodput": own.goodput,
            "counts": own.counts,
            "starved": list(own.starved),
            "kept": [_kept_json(each) for each in own.kept],
            "admitted": own.admitted,
            "cost_usd": own.cost_usd,
            "best_effort": own.best_effort,
            # Rivals that do not count change no figure.
            "rivals": {
                name: {"goodput": rival.goodput, "cost_usd": rival.cost_usd}
                for name, rival in self.rivals.items()
                if rival.counts
            },
            "rivals_that_do_not_count": [n for n, rival in self.rivals.items() if not rival.counts],
        }


def _kept_json(kept: Kept) -> dict[str, object]:
    return {
        "pipeline": kept.pipeline,
        "target": kept.target,
        "admitted": kept.admitted,
        "share": kept.share,
        "fails": kept.fails,
    }


Recorded = Mapping[int, tuple[str, Mapping[str, Rival]]]  # by seed: digest of the world, rivals


def recorded_rivals(content: Mapping[str, Any]) -> Recorded:
    """Return the rivals that count in the output of `headgate fuzz --regret --json`."""
    return {
        world["seed"]: (
            world["digest"],
            {name: Rival(**reached, counts=True) for name, reached in world["rivals"].items()},
        )
        for world in content["worlds"]
    }


def digest(world: World) -> str:
    """Return a short digest of a world's application file."""
    return sha256(json.dumps(world.spec).encode()).hexdigest()[:16]


def judge_world(
    world: World, policy: str, rivals: Mapping[str, Rival] | None = None
) -> WorldResult:
    """Run a policy in a world, and its rivals unless their scores are given."""
    judge = Judge(world.load())
    app = judge.world.app
    return WorldResult(
        seed=world.seed,
        digest=digest(world),
        load=judge.world.load,
        requests=judge.requests,
        features=tuple(features(judge.world)),
        own=judge.run(find_policy(policy)),
        rivals=run_rivals(judge, rival_kinds(app, policy)) if rivals is None else rivals,
    )


def rival_kinds(app: App, policy: str) -> dict[str, tuple[PolicyKind, PolicyConfig | None]]:
    """Return the other policies that support an application, and the references."""
    kinds: dict[str, tuple[PolicyKind, PolicyConfig | None]] = {
        name: (find_policy(name), None) for name in policies_for(app) if name != policy
    }
    kinds.update((name, (REFERENCE, config)) for name, config in REFERENCES.items())
    return kinds


def run_rivals(
    judge: Judge, kinds: Mapping[str, tuple[PolicyKind, PolicyConfig | None]]
) -> dict[str, Rival]:
    """Return what each rival reaches in a world. One that raises is logged, and does not count."""
    reached: dict[str, Rival] = {}
    for name, (kind, config) in kinds.items():
        try:
            score = judge.run(kind, config)
        except PolicyError as error:
            _LOG.error("world %d: %s: %s", judge.world.seed, name, error)
            reached[name] = Rival(0.0, counts=False, cost_usd=0.0)
        else:
            reached[name] = Rival(score.goodput, score.counts, score.cost_usd)
    return reached


def judge_seed(
    seed: int,
    *,
    policy: str,
    truth: Truth,
    kind: WorldKind = "plain",
    recorded: Recorded | None = None,
) -> WorldResult:
    """Run a policy in the world of a seed. At the top level of a module, for worker processes.

    Raises `ValueError` if the recorded scores are of another world: then they must be made again.
    """
    world = draw_world(seed, truth, kind)
    if recorded is None:
        return judge_world(world, policy)
    known, rivals = recorded[seed]
    if known != digest(world):
        raise ValueError(f"the recorded scores of seed {seed} are of another world")
    return judge_world(world, policy, rivals)


def search(
    policy: str,
    seeds: Iterable[int],
    *,
    truth: Truth = "scattered",
    kind: WorldKind = "plain",
    jobs: int = 1,
    recorded: Recorded | None = None,
) -> Iterator[WorldResult]:
    """Return the results of the seeds, in order, as they come; from `jobs` processes."""
    one: Callable[[int], WorldResult] = partial(
        judge_seed, policy=policy, truth=truth, kind=kind, recorded=recorded
    )
    return in_processes(one, seeds, jobs)


@dataclass(frozen=True, slots=True)
class Extreme:
    """A mean over worlds, and the worst world. NaN if no world has a value."""

    mean: float
    worst: float
    seed: int | None  # of the worst world
    worlds: int  # that have a value


def extreme(
    results: Sequence[WorldResult],
    value: Callable[[WorldResult], float],
    *,
    is_high_worse: bool = False,
) -> Extreme:
    """Return the mean and the worst of a value over the worlds that have it."""
    found = [(value(result), result.seed) for result in results if not isnan(value(result))]
    if not found:
        return Extreme(nan, nan, None, 0)
    worst, seed = max(found) if is_high_worse else min(found)
    return Extreme(fmean(each for each, _ in found), worst, seed, len(found))


@dataclass(frozen=True, slots=True)
class RegretReport:
    """The aggregates of a search."""

    policy: str
    truth: Truth
    results: tuple[WorldResult, ...]  # in order of seed, those left out included
    kind: WorldKind = "plain"

    @property
    def judged(self) -> list[WorldResult]:
        """The worlds that are not left out."""
        return [result for result in self.results if not result.is_left_out]

    @property
    def share(self) -> Extreme:
        """Goodput over the fluid bound."""
        return extreme(self.judged, lambda result: result.own.share)

    @property
    def share_in_time(self) -> Extreme:
        """Goodput over the tighter fluid bound, with deadlines."""
        return extreme(self.judged, lambda result: result.own.share_in_time)

    @property
    def ratio(self) -> Extreme:
        """Goodput over the best rival's."""
        return extreme(self.judged, lambda result: result.ratio)

    @property
    def kept(self) -> Extreme:
        """Share of the admitted requests that were answered in time."""
        return extreme(self.judged, lambda result: result.own.kept_overall)

    @property
    def cost(self) -> Extreme:
        """Cost over that of the cheapest comparable rival."""
        return extreme(self.judged, lambda result: result.cost_ratio, is_high_worse=True)

    @property
    def best_effort(self) -> Extreme:
        """Share of the capacity that requests without an objective get while any waits."""
        return extreme(self.judged, lambda result: result.own.best_effort)

    @property
    def quantile_kept(self) -> float:
        """Share of the worlds in which every pipeline keeps its quantile."""
        return fmean(result.own.keeps for result in self.judged) if self.judged else nan

    @property
    def lost(self) -> list[WorldResult]:
        """The worlds that the policy loses, the worst share of the bound first."""
        return sorted(
            (result for result in self.judged if result.losses), key=lambda r: (r.own.share, r.seed)
        )

    def to_json(self) -> dict[str, object]:
        """Return what `--json` prints."""
        aggregates = {
            name: {"mean": e.mean, "worst": e.worst, "seed": e.seed, "worlds": e.worlds}
            for name, e in (
                ("share", self.share),
                ("share_in_time", self.share_in_time),
                ("ratio", self.ratio),
                ("kept", self.kept),
                ("cost", self.cost),
                ("best_effort", self.best_effort),
            )
        }
        return {
            "policy": self.policy,
            "truth": self.truth,
            "kind": self.kind,
            "seed": self.results[0].seed if self.results else None,
            "count": len(self.results),
            "left_out": len(self.results) - len(self.judged),
            "without_ratio": len(self.judged) - self.ratio.worlds,
            "lost": len(self.lost),
            "quantile_kept": self.quantile_kept,
            "limits": {
                "ratio": RATIO_MIN,
                "share": SHARE_MIN,
                "best_effort": BEST_EFFORT_SHARE,
            },
            **aggregates,
            "worlds": [result.to_json() for result in self.results],
        }
