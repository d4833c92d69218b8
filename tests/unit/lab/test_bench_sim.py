"""`headgate bench sim`: what is compared is comparable, and the checks can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.lab.bench import sim


def test_the_default_policy_serves_what_balance_serves() -> None:
    """The same requests, each as soon: so the two rows differ in nothing but the decisions."""
    balance, default = sim.ours(500), sim.ours_default(500)
    assert (balance["requests"], balance["mean_wait_ms"]) == (
        default["requests"],
        default["mean_wait_ms"],
    )


@pytest.mark.parametrize(
    ("interpreted", "compiled", "holds"),
    [
        (600.0, 2_000.0, [True, True]),
        (599.0, 1_990.0, [True, False]),
        (500.0, 2_000.0, [False, True]),
    ],
)
def test_the_default_policy_is_compared_with_simpy(
    interpreted: float, compiled: float, holds: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios are rounded to two digits."""
    rates = {"ours-default": interpreted, "simpy": 1_000.0}

    def simulated(simulator: str, requests: int, tree: Path | None) -> sim.SimulatorRun:
        rate = rates.get(simulator, 1_000.0)
        if simulator == "ours-default" and tree is not None:
            rate = compiled
        build = "interpreted" if tree is None else "compiled"
        run: sim.SimulatorRun = {"build": build, "hash": "", "mean_wait_ms": 0.0, "peak_mib": 50.0}
        return run | {"requests": requests, "requests_per_s": rate}

    monkeypatch.setattr(sim, "_run_simulator", simulated)
    monkeypatch.setattr(sim, "COMPILED", Path(__file__).parent)
    result = sim.run(progress=lambda line: None)
    checks = {check.claim: check.holds for check in result.checks}
    assert [
        checks["interpreted, default policy is at least 0.6 times as fast as simpy"],
        checks["compiled, default policy is at least 2 times as fast as simpy"],
    ] == holds
    same = [claim for claim in checks if "identical action logs" in claim]
    assert len(same) == 2 and all(checks[claim] for claim in same)


def test_builds_that_decide_otherwise_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def log(simulator: str, requests: int, tree: Path | None) -> sim.SimulatorRun:
        build = "interpreted" if tree is None else "compiled"
        return {"build": build, "hash": build}

    monkeypatch.setattr(sim, "_run_simulator", log)
    check = sim._equality_check("balance", "ours-log", Path("compiled"))
    assert (check.measured, check.holds) == ("differ", False)
