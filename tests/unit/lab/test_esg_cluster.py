"""The cluster of the ESG experiment: profile sets, objectives, load and the lower bound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.lab.experiments.esg_cluster.environment import (
    CELLS,
    Cell,
    ClusterScenario,
    Process,
    sized_cell,
)
from headgate.lab.experiments.esg_cluster.profiles import (
    IMAGE_APPLICATIONS,
    INFLESS,
    MEASURED,
    NODES,
    RECALLED,
    infless_table,
    profile_set,
)
from headgate.lab.experiments.esg_cluster.results import CellTable, condition_label
from headgate.lab.experiments.esg_cluster.runs import (
    EVENT_US,
    EXPANSION_US,
    ByCell,
    ClusterCase,
    ClusterRun,
    event_ns,
    expansion_ns,
    run_cell,
)
from headgate.lab.harness import PolicyCase
from headgate.lab.stage_configs import measured_configs
from headgate.planning.frontier.configs import COST_UNITS_PER_USD

REPOSITORY = Path(__file__).parents[3]
STRICT, MODERATE, RELAXED = CELLS
SHORT = ClusterScenario(RECALLED, MODERATE, duration_s=2.0, warm_up_s=1.0)


@pytest.mark.parametrize(("name", "configs"), [(MEASURED, 252), (RECALLED, 256)])
def test_sets_have_the_configurations_of_the_paper(name: str, configs: int) -> None:
    profiles = profile_set(name)
    assert {len(table.configs) for table in profiles.functions} == {configs}
    assert dict(profiles.applications) == IMAGE_APPLICATIONS


def test_times_are_those_of_the_tables_and_interpolated_between() -> None:
    app = sized_cell(MEASURED, None, STRICT).app
    variant = next(v for v in app.variants if v.name == "deblur")
    ids = {times.shape: number for number, times in enumerate(variant.shapes)}
    for config in measured_configs("deblur"):
        shape = next(s for s in ids if (s.cpu_milli, s.gpu_sevenths) == (
            config.cpu_milli, config.gpu_sevenths
        ))  # fmt: skip
        assert variant.exec_ns(config.batch, ids[shape]) == config.time_ns
    two, three, four = (variant.exec_ns(batch) for batch in (2, 3, 4))
    assert three == two + (four - two) // 2
    smallest = variant.shapes[0].shape
    assert (smallest.cpu_milli, smallest.gpu_sevenths) == (1000, 1)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", [MEASURED, RECALLED])
def test_objectives_can_be_met_and_are_not_trivial(name: str, cell: Cell) -> None:
    """The fastest path is in time, and the cheapest configurations of all are not."""
    sized = sized_cell(name, None, cell)
    for app, slo_ms in sized.slo_ms.items():
        assert sized.fastest_ms[app] < slo_ms
    profiles = profile_set(name)
    least = {table.name: min(c.cost for c in table.configs) for table in profiles.functions}
    costs = [sum(least[stage] for stage in stages) for _, stages in profiles.applications]
    assert sized.bound_usd > fmean(costs) / COST_UNITS_PER_USD


def test_strict_objectives_of_the_paper_cannot_be_met_on_the_measured_set() -> None:
    """0.8 L is below the fastest path of every application: hence the multiples of that path."""
    sized = sized_cell(MEASURED, None, STRICT)
    assert all(0.8 * sized.smallest_ms[app] < fast for app, fast in sized.fastest_ms.items())


def test_recalled_intervals_are_the_loads_of_the_cells() -> None:
    """Heavy is one request in 10 to 16.8 ms in the paper: 85 % of the vGPUs here."""
    heavy = sized_cell(RECALLED, None, RELAXED)
    assert heavy.rate_per_s == pytest.approx(1000 / 13.4, rel=0.01)
    assert heavy.binding == "vGPU"


def test_a_looser_objective_has_a_lower_bound() -> None:
    bounds = [sized_cell(RECALLED, None, cell).bound_usd for cell in CELLS]
    assert all(strict > loose for strict, loose in pairwise(bounds))


@pytest.mark.parametrize("process", ["band", "poisson", "bursty"])
def test_arrivals_have_the_rate_of_the_cell(process: Process) -> None:
    scenario = replace(SHORT, duration_s=400.0, process=process)
    environment = scenario.environment(1)
    assert environment.arrivals is not None
    times_ns = environment.arrivals.times_ns
    assert len(times_ns) / 401 == pytest.approx(scenario.rate_per_s, rel=0.1)
    gaps = np.diff(times_ns) / SECOND_NS * scenario.rate_per_s
    if process == "band":  # uniform in 10 to 16.8 over their mean
        assert gaps.min() >= 10 / 13.4 - 1e-6
        assert gaps.max() <= 16.8 / 13.4 + 1e-6
    counts = np.bincount(environment.arrivals.pipeline)
    assert counts.min() / counts.max() > 0.9, "applications are equally likely"


def test_all_functions_are_loaded_before_the_first_arrival() -> None:
    environment = SHORT.environment(0)
    columns = environment.simulate(PolicyCase("esg"), 0)
    assert not columns.requests.cold.any()
    assert sum(use.cold_starts for use in columns.resources) == 6 * NODES


def test_wrong_profiles_are_true_times_by_function() -> None:
    environment = replace(SHORT, profile_errors=(0.7, 1.3)).environment(0)
    assert environment.truth.scale == (0.7, 1.3, 0.7, 1.3, 0.7, 1.3)


def test_failing_nodes_come_back() -> None:
    environment = replace(SHORT, failed_nodes=2).environment(0)
    columns = environment.simulate(PolicyCase("esg"), 0)
    up_ns = [use.up_ns for use in columns.resources]
    assert up_ns[0] < columns.end_ns == up_ns[2]
    assert columns.end_ns - up_ns[0] == 2 * SECOND_NS // 3


def test_a_run_charges_the_work_of_policies() -> None:
    esg = run_cell(ClusterCase(PolicyCase("esg"), SHORT), 0)
    assert 0 < esg.overhead_ms < 10
    assert 0 < esg.busy < 1
    assert np.isnan(esg.misses), "it plans at dispatch"
    assert run_cell(ClusterCase(PolicyCase("esg"), SHORT), 0).hit_rate == esg.hit_rate


def test_charges_are_those_that_the_benchmark_measured() -> None:
    """The last table of `headgate bench planner` in docs/frontier.md has the same numbers."""
    text = (REPOSITORY / "docs" / "frontier.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^(\w+) +(measured|recalled), (\S+) +([\d.,]+) +[\d.,]+ +[\d.,]+ +(\S+)$",
        text,
        re.MULTILINE,
    )
    cells = [cell.name for cell in CELLS]
    events: dict[str, dict[str, list[float]]] = {}
    expansions: dict[str, dict[str, list[float]]] = {}
    for policy, profiles, _, us_per_event, us_per_expansion in sorted(
        rows, key=lambda row: cells.index(row[2])
    ):
        if policy in EVENT_US:
            of_set = events.setdefault(policy, {}).setdefault(profiles, [])
            of_set.append(float(us_per_event.replace(",", "")))
        if policy in EXPANSION_US:
            of_set = expansions.setdefault(policy, {}).setdefault(profiles, [])
            of_set.append(float(us_per_expansion))
    assert events == _lists(EVENT_US)
    assert expansions == _lists(EXPANSION_US)


def _lists(charges: Mapping[str, ByCell]) -> dict[str, dict[str, list[float]]]:
    return {
        policy: {profiles: list(each) for profiles, each in by_set.items()}
        for policy, by_set in charges.items()
    }


def test_each_policy_is_charged_its_own_price() -> None:
    """Searches by their expansions, policies that report none by their events."""
    assert expansion_ns("esg", SHORT) == round(1000 * EXPANSION_US["esg"][RECALLED][1])
    assert event_ns("esg", SHORT) == 0
    assert expansion_ns("headgate", SHORT) == 0
    strict = replace(SHORT, profiles=INFLESS, cell=STRICT)
    assert event_ns("headgate", strict) == round(1000 * EVENT_US["headgate"][MEASURED][0])
    assert (expansion_ns("aquatope", SHORT), event_ns("aquatope", SHORT)) == (0, 0)


def test_plans_of_orion_are_judged() -> None:
    orion = run_cell(ClusterCase(PolicyCase("orion"), SHORT), 0)
    assert 0 <= orion.misses <= 1


def _run(hit_rate: float, usd: float) -> ClusterRun:
    return ClusterRun(100, hit_rate, 0.0, usd, (0.5,) * 201, 0.1, 0.1, 1.0, 0.0)


def test_serving_less_closes_no_gap() -> None:
    """A policy that serves a tenth at a tenth of the cost per request gains nothing."""
    sized = sized_cell(RECALLED, None, MODERATE)
    dear = 2 * sized.bound_usd
    runs = {
        "esg": [_run(1.0, dear)],
        "headgate": [_run(0.1, 0.1 * dear)],
        "other": [_run(1.0, sized.bound_usd)],
    }
    table = CellTable(RECALLED, MODERATE, sized, runs)
    assert table.gap_closed("headgate") == pytest.approx(0.0)
    assert table.gap_closed("other") == pytest.approx(1.0)


def test_conditions_have_names() -> None:
    assert condition_label(replace(SHORT, failed_nodes=2)) == "2 nodes down"
    assert condition_label(replace(SHORT, load_factor=3.4)) == "170 %"


def test_infless_tables_are_where_they_are_or_an_error(tmp_path: Path) -> None:
    assert infless_table(None) is None
    assert infless_table(tmp_path) is None
    with pytest.raises(ConfigError, match="no table of INFless"):
        profile_set(INFLESS, tmp_path)
