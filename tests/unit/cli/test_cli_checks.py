"""`reproduce`, `bench` and `fuzz`: exit status 1 if a check does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import nan
from pathlib import Path

import pytest
from cli_rig import headgate

from headgate.cli import regret
from headgate.cli.commands import bench as bench_command
from headgate.cli.commands import fuzz as fuzz_command
from headgate.cli.commands import reproduce as reproduce_command
from headgate.lab.bench import bench_names
from headgate.lab.experiments import Check, Known, Progress, Result, experiment_names
from headgate.lab.regret.scores import Kept, Score
from headgate.lab.regret.search import Rival, WorldResult
from headgate.sim.fuzz import FuzzReport

GOOD = Check("two and two", "arithmetic", 4, 4, holds=True)
BAD = Check("three and three", "a misprint", 7, 6, holds=False)
PAGE = "docs/sums.md"


class Toy:
    """An experiment, or a benchmark, with the given results."""

    TITLE = "sums"

    def __init__(self, name: str, *checks: Check, known: Check | None = None) -> None:
        self.NAME = name
        self.checks = list(checks)
        self.KNOWN = () if known is None else (Known(known.claim, PAGE),)

    def run(self, *, progress: Progress, quick: bool = False, out: Path | None = None) -> Result:
        progress("adding")
        rows: list[dict[str, str | int | float | bool | None]] = [{"a": 2, "sum": float("nan")}]
        figures = () if out is None else (out / "sums.png",)
        return Result(self.NAME, [*rows, {"quick": quick}], self.checks, figures)


@pytest.fixture(name="toy_experiments")
def have_toy_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    toys = {
        "good": Toy("good", GOOD),
        "bad": Toy("bad", GOOD, BAD),
        "known": Toy("known", GOOD, BAD, known=BAD),
        "outdated": Toy("outdated", GOOD, BAD, known=GOOD),
    }
    monkeypatch.setattr(reproduce_command, "experiment_names", lambda: list(toys))
    monkeypatch.setattr(reproduce_command, "find_experiment", toys.__getitem__)
    monkeypatch.setattr(bench_command, "bench_names", lambda: list(toys))
    monkeypatch.setattr(bench_command, "find_bench", toys.__getitem__)


@pytest.mark.usefixtures("toy_experiments")
@pytest.mark.parametrize("command", ["reproduce", "bench"])
def test_a_check_that_does_not_hold_is_exit_code_1(command: str) -> None:
    assert headgate(command, "good").code == 0
    ended = headgate(command, "bad", "--json")
    assert (ended.code, ended.err) == (1, "")
    assert set(ended.json) == {"name", "rows", "checks"}
    assert ended.json["rows"][0] == {"a": 2, "sum": None}
    assert ended.json["checks"][1] == {
        "claim": "three and three",
        "source": "a misprint",
        "expected": 7,
        "measured": 6,
        "holds": False,
        "known": None,
    }


@pytest.mark.usefixtures("toy_experiments")
def test_checks_as_text(tmp_path: Path) -> None:
    ended = headgate("reproduce", "bad", "--out", tmp_path / "figures")
    assert "✓ two and two: 4, as expected  (arithmetic)" in ended.out
    assert "✗ three and three  (a misprint)\n  expected 7, measured 6" in ended.out
    assert f"written: {tmp_path / 'figures' / 'sums.png'}" in ended.out
    assert ended.out.rstrip().endswith("1 of 2 checks do not hold: docs/papers says why")
    assert "all 1 checks hold" in headgate("reproduce", "good").out


@pytest.mark.usefixtures("toy_experiments")
def test_a_known_claim_that_does_not_hold_is_no_failure() -> None:
    ended = headgate("reproduce", "known")
    assert ended.code == 0
    assert "≠ three and three  (a misprint)\n  expected 7, measured 6\n  known: docs/s" in ended.out
    assert "1 of 2 checks are of claims that are known not to hold: docs/sums.md" in ended.out
    assert ended.out.rstrip().endswith("all 1 other checks hold")
    checks = headgate("reproduce", "known", "--json").json["checks"]
    assert [(check["holds"], check["known"]) for check in checks] == [(True, None), (False, PAGE)]


@pytest.mark.usefixtures("toy_experiments")
def test_a_known_claim_that_holds_is_a_failure() -> None:
    ended = headgate("reproduce", "outdated")
    assert ended.code == 1
    assert "4, as expected  (arithmetic)\n  known not to hold, and holds: docs/sums" in ended.out
    assert "1 of 2 checks are known not to hold, and do" in ended.out
    assert "1 of 2 checks do not hold: docs/papers says why" in ended.out


@pytest.mark.usefixtures("toy_experiments")
def test_all_experiments() -> None:
    ended = headgate("reproduce", "--all", "--quick", "--json")
    assert ended.code == 1
    assert [each["name"] for each in ended.json] == ["good", "bad", "known", "outdated"]
    assert ended.json[0]["rows"][1] == {"quick": True}


def test_the_lists() -> None:
    for command, names in (("reproduce", experiment_names()), ("bench", bench_names())):
        ended = headgate(command)
        assert ended.code == 0
        assert names
        assert all(name in ended.out for name in names)
        assert [each["name"] for each in headgate(command, "--json").json] == names


def test_a_real_experiment() -> None:
    """The claims are tested elsewhere; here, that the exit status says whether all hold."""
    ended = headgate("reproduce", "kaas-traces", "--quick", "--json")
    assert ended.json["name"] == "kaas-traces"
    as_expected = [check["holds"] == (check["known"] is None) for check in ended.json["checks"]]
    assert ended.code == (0 if all(as_expected) else 1)


def test_options_of_a_benchmark() -> None:
    """A benchmark takes only the options that it declares."""
    refused = headgate("bench", "sim", "--policy", "balance")
    assert refused.code == 2
    assert "The benchmark sim does not take --policy." in refused.err
    unknown = headgate("bench", "decisions", "--policy", "nosuch")
    assert unknown.code == 2
    assert "'nosuch': unknown policy" in unknown.err


def fake_fuzz(policy: str, seed: int) -> FuzzReport:
    failures = ("Conservation: request 5 was lost",) if seed == 8 else ()
    return FuzzReport(policy, seed, ("Conservation",), failures, {"NodeLost": 2}, {"met": 3})


def test_fuzzing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_command, "fuzz", fake_fuzz)
    fine = headgate("fuzz", "--policy", "balance", "--seed", 7)
    assert fine.code == 0
    assert "✓ balance passes 1 case" in fine.out
    broken = headgate("fuzz", "--policy", "balance", "--seed", 7, "--count", 3)
    assert broken.code == 1
    assert "headgate fuzz --policy balance --seed 8\n✗ Conservation: request 5 " in broken.out
    assert "balance fails in 1 of 3 cases" in broken.out


def test_fuzzing_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_command, "fuzz", fake_fuzz)
    ended = headgate("fuzz", "--policy", "balance", "--seed", 7, "--count", 3, "--json")
    assert ended.code == 1
    assert (ended.json["events"], ended.json["outcomes"]) == ({"NodeLost": 6}, {"met": 9})
    (failure,) = ended.json["failures"]
    assert failure["repeat"] == "headgate fuzz --policy balance --seed 8"


KEPT = (Kept("p0", 0.99, 1_000, 1_000),)


def fake_search(
    policy: str, seeds: Iterable[int], *, truth: str, kind: str, jobs: int
) -> Iterator[WorldResult]:
    """Seed 8 is lost by its share of the bound and seed 9 has too few requests."""
    for seed in seeds:
        share = 0.3 if seed == 8 else 0.9
        own = Score(share, share, share, True, (), KEPT, 1_000, 1.0, nan)
        rivals = {"edf": Rival(0.3, counts=True, cost_usd=1.0)}
        yield WorldResult(seed, "d", 1.5, 10 if seed == 9 else 2_000, ("faas",), own, rivals)


def test_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "search", fake_search)
    fine = headgate("fuzz", "--regret", "--seed", 7)
    assert fine.code == 0
    assert "✓ headgate loses none of 1 world" in fine.out
    lost = headgate("fuzz", "--regret", "--policy", "balance", "--seed", 7, "--count", 3)
    assert lost.code == 1
    assert "2 with scattered service times; 1 left out" in lost.out
    assert "mean 0.600, worst 0.300 (seed 8) of the fluid bound" in lost.out
    assert "balance loses 1 of 2 worlds" in lost.out
    assert "headgate fuzz --regret --policy balance --seed 8" in lost.out
    shaped = headgate("fuzz", "--regret", "--worlds", "shapes", "--seed", 8)
    assert "1 with shapes and scattered service times" in shaped.out
    assert "headgate fuzz --regret --worlds shapes --policy headgate --seed 8" in shaped.out


def test_regret_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "search", fake_search)
    ended = headgate("fuzz", "--regret", "--seed", 7, "--count", 3, "--truth", "wrong", "--json")
    assert ended.code == 1
    found = ended.json
    assert (found["policy"], found["truth"], found["count"]) == ("headgate", "wrong", 3)
    assert (found["lost"], found["left_out"]) == (1, 1)
    assert found["share"]["seed"] == 8
    assert [world["losses"] for world in found["worlds"]] == [[], ["share"], []]


def test_a_lost_world_becomes_a_file_that_runs(tmp_path: Path) -> None:
    """`balance` admits everything, so under overload it answers nothing in time."""
    output = tmp_path / "lost"
    arguments = ("fuzz", "--regret", "--policy", "balance", "--seed", 41, "--shrink", output)
    ended = headgate(*arguments)
    assert ended.code == 1
    (path,) = output.glob("balance-*-41.yaml")
    assert f"written: {path}" in ended.out
    text = path.read_text(encoding="utf-8")
    assert "headgate fuzz --regret --policy balance --seed 41" in text
    assert len(text.splitlines()) < 40
    assert headgate("simulate", path, "--policy", "balance", "--seed", 41).code == 0


def test_options_of_the_regret_search_alone() -> None:
    for option, value in (("--truth", "exact"), ("--jobs", 2), ("--shrink", "lost")):
        ended = headgate("fuzz", "--policy", "balance", option, value)
        assert ended.code == 2
        assert f"{option} is for --regret only" in ended.err
    ended = headgate("fuzz", "--policy", "balance", "--worlds", "single")
    assert ended.code == 2
    assert "--worlds is for --regret only" in ended.err
    unknown = headgate("fuzz", "--regret", "--policy", "nosuch")
    assert unknown.code == 2
    assert "unknown policy" in unknown.err
