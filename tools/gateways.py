"""Writes the table of the default policy on several gateways in the documents.

    python tools/gateways.py

simulates `examples/kaas.yaml` with 1 to 8 gateways, at half to three times the load that its nodes
can serve, and rewrites in `docs/frontends.md` what stands between `<!-- gateways -->` and
`<!-- end -->`. Takes about two minutes.
"""

from __future__ import annotations

import re
from pathlib import Path

from headgate.config import load
from headgate.core.clock import SECOND_NS
from headgate.metrics.summary import Summary, summarise
from headgate.policies import find_policy
from headgate.sim.run import Setup, simulate
from headgate.workload import mix, named, poisson

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "frontends.md"
GATEWAYS = (1, 2, 4, 8)
LOADS = (0.5, 1.0, 2.0, 3.0)
SECONDS = 10
# By pipeline and client: requests/s that keep two of the four nodes busy, with 5 ms and 20 ms each.
CAPACITY_PER_S = {("resnet", "vision"): 400.0, ("bert", "language"): 100.0}


def found(load_factor: float, gateways: int) -> Summary:
    """Simulate one cell of the table."""
    app = load(str(ROOT / "examples" / "kaas.yaml")).app
    streams = [
        named(poisson(load_factor * per_s, SECONDS * SECOND_NS, seed=seed), *names)
        for seed, (names, per_s) in enumerate(CAPACITY_PER_S.items())
    ]
    setup = Setup(app, find_policy("headgate"), schedulers=gateways)
    return summarise(simulate(setup, mix(streams)))


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| load | gateways | in time | kept of admitted | refused | in time, requests/s | cost |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for load_factor in LOADS:
        for gateways in GATEWAYS:
            each = found(load_factor, gateways)
            lines.append(
                f"| {load_factor:g}x | {gateways} | {each.slo_attainment:.1%} "
                f"| {each.admitted_kept:.1%} | {each.rejected / each.requests:.1%} "
                f"| {each.met / SECONDS:.0f} | ${each.cost_usd:.4f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Rewrite the table."""
    text = DOCUMENT.read_text(encoding="utf-8")
    marked = f"<!-- gateways -->\n\n{table()}\n\n<!-- end -->"
    text, count = re.subn("<!-- gateways -->.*?<!-- end -->", lambda _: marked, text, flags=re.S)
    if count != 1:
        raise SystemExit(f"{DOCUMENT.name}: {count} places for the table of gateways")
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
