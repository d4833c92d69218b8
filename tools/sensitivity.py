"""How much each constant of the default policy matters: each halved and doubled, in random worlds.

    python tools/sensitivity.py [--seed N] [--count K] [--jobs J] [NAME...]

draws worlds of the regret search (docs/regret.md) and runs the default policy in each, once as it
is and once with every constant of `headgate.planning.constants` halved and doubled, one at a time.
It prints a Markdown table: in how many worlds another value changes anything, and by how many
points the share of the fluid bound and the part of the promises that is kept, and by how many per
cent the cost, change on average over all worlds. Of a constant that is a factor or a share near
one, the distance from one is halved and doubled.

A world in which no code that names a constant runs is not run with its other values: nothing could
change. Interpreted only: a compiled build has the constants in its machine code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import isnan
from types import FrameType
from typing import Any, Final

from headgate.core import build_kind
from headgate.lab.harness import in_processes
from headgate.lab.regret.scores import Judge, Score
from headgate.lab.regret.worlds import REQUESTS_MIN, draw_world
from headgate.planning import constants
from headgate.policies import find_policy

POLICY: Final = "headgate"
FACTORS: Final = (0.5, 2.0)
# Shares and factors whose distance from one is what was chosen.
NEAR_ONE: Final = frozenset(
    (
        "BATCH_GROWTH",
        "BATCH_TOLERANCE",
        "KNEE_THROUGHPUT",
        "LATENCY_SHARE",
        "RUNNING_SHARE",
        "SCALE_IN_BELOW",
        "SURPLUS",
        "WARM_HEADROOM",
    )
)


@dataclass(frozen=True, slots=True)
class Change:
    """What another value of a constant changed in one world."""

    seed: int
    name: str
    factor: float
    share: float  # of the fluid bound, in points
    kept: float  # of what was admitted, in points
    cost: float  # in per cent

    @property
    def is_any(self) -> bool:
        return bool(self.share or self.kept or self.cost)


def values() -> dict[str, float]:
    """Return the constants by name, in the order of their module."""
    return {name: value for name, value in vars(constants).items() if _is_choice(name, value)}


def _is_choice(name: str, value: object) -> bool:
    own = name.isupper() and name not in ("HOUR_NS", "MINUTE_NS", "SECOND_NS")
    return own and isinstance(value, int | float)


def scaled(name: str, factor: float) -> float:
    """Return the value of a constant times a factor, as a whole number if it is one.

    >>> scaled("BATCH_SHARE", 0.5), scaled("SURPRISE", 2.0), scaled("HEADS_EXAMINED", 0.5)
    (0.25, 8.0, 4)
    >>> round(scaled("KNEE_THROUGHPUT", 2.0), 3)
    0.94
    """
    value = values()[name]
    if name in NEAR_ONE:
        return 1.0 + factor * (value - 1.0)
    return max(1, round(factor * value)) if isinstance(value, int) else factor * value


def put(name: str, value: float) -> None:
    """Give a constant another value, in every module that has imported it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("headgate.") and name in vars(module):
            setattr(module, name, value)


def changes(seed: int, names: Iterable[str]) -> list[Change] | None:
    """Return what other values of the constants change in the world of a seed.

    None if the regret search would leave the world out.
    """
    judge = Judge(draw_world(seed, "scattered").load())
    if judge.requests < REQUESTS_MIN:
        return None
    reached = _names_reached(judge)
    usual = judge.run(find_policy(POLICY))
    found = []
    for name in names:
        if name not in reached:
            continue
        for factor in FACTORS:
            value = values()[name]
            put(name, scaled(name, factor))
            try:
                other = judge.run(find_policy(POLICY))
            finally:
                put(name, value)
            found.append(_change(seed, name, factor, usual, other))
    return found


def _change(seed: int, name: str, factor: float, usual: Score, other: Score) -> Change:
    kept = other.kept_overall - usual.kept_overall
    return Change(
        seed,
        name,
        factor,
        share=100 * (other.share - usual.share),
        kept=0.0 if isnan(kept) else 100 * kept,
        cost=100 * (other.cost_usd / usual.cost_usd - 1.0) if usual.cost_usd else 0.0,
    )


def _names_reached(judge: Judge) -> set[str]:
    """Return the global names of all functions that run in a world."""
    codes = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        # Code of a module that is imported meanwhile names whatever the module imports.
        if event == "call" and frame.f_code.co_name != "<module>":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        judge.run(find_policy(POLICY))
    finally:
        sys.setprofile(None)
    return {name for code in codes for name in code.co_names}


def table(found: Iterable[Change], names: Iterable[str], worlds: int) -> list[str]:
    """Return a Markdown table with a row for each constant that changes anything."""
    by_name: Mapping[str, list[Change]] = {
        name: list(group)
        for name, group in groupby(sorted(found, key=lambda c: c.name), key=lambda c: c.name)
    }
    lines = [
        "| constant | value | worlds | share: half | double | kept: half | double | cost: half | "
        "double |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        mine = by_name.get(name, [])
        changed = {change.seed for change in mine if change.is_any}
        means = [
            sum(getattr(change, what) for change in mine if change.factor == factor) / worlds
            for what in ("share", "kept", "cost")
            for factor in FACTORS
        ]
        if changed:
            cells = " | ".join(f"{mean:+.2f}" for mean in means)
            lines.append(f"| `{name}` | {values()[name]:g} | {len(changed)} | {cells} |")
    return lines


def main() -> None:
    """Run the worlds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="constants; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if build_kind() != "interpreted":
        parser.error("a compiled build has the constants in its machine code: run it interpreted")
    names = options.names or list(values())
    if unknown := sorted(set(names) - set(values())):
        parser.error(f"{unknown[0]}: no such constant; one of {', '.join(values())}")
    seeds = range(options.seed, options.seed + options.count)
    found: list[Change] = []
    judged = 0
    results = in_processes(partial(changes, names=names), seeds, options.jobs)
    for seed, one in zip(seeds, results, strict=True):
        print(f"{seed}: {'left out' if one is None else len(one)}", file=sys.stderr, flush=True)
        judged += one is not None
        found += one or []
    print(f"{judged} worlds, seeds {seeds[0]} to {seeds[-1]}\n")
    print("\n".join(table(found, names, judged)))
    unchanged = [name for name in names if not any(c.is_any for c in found if c.name == name)]
    print(f"\nNothing changed with another value of: {', '.join(unchanged)}.")


if __name__ == "__main__":
    main()
