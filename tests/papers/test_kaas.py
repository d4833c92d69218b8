"""Chapter 6 of the thesis: the failing claims are those that the page documents."""

from __future__ import annotations

from math import nan
from pathlib import Path

import pytest
from paper_page import quick_result

from headgate.core.errors import ConfigError
from headgate.lab.experiments import (
    Check,
    Result,
    experiment_names,
    find_experiment,
)
from headgate.lab.experiments._kaas import (
    BALANCE,
    EXCLUSIVE,
    FITTED,
    MIXES,
    MLFQ_PRINTED,
    ROUND_ROBIN,
    SRTF,
    SRTF_PRINTED,
    STATED,
    GpuCase,
    GpuScenario,
)
from headgate.lab.experiments.kaas_traces import trace_of
from headgate.lab.harness import PolicyCase, over_seeds, run_case

FIGURES = {"kaas-traces": 0, "kaas-poisson": 3, "kaas-sweeps": 5, "kaas-fairness": 2}
MLFQ_SEED = 25  # the smallest that draws ResNet, ResNet, ResNet, BERT

_SUMMARY = """\
Total time taken is: {}
Total cold starts is: {}
Total cache hits is: {}
Cache hit percentage is: {}
Average time waiting is: {}
Client(name=Client1, model_type=ModelType.RESNET):
Average time on queue is {}
Client(name=Client2, model_type=ModelType.BERT):
Average time on queue is {}"""
_IN_ORDER = ("RESNET 0 0 GPU1", "BERT 1 1 GPU2", "RESNET 2 6 GPU1", "RESNET 3 8 GPU1")
_FORESEEN = ("RESNET 0 0 GPU1", "RESNET 2 2 GPU2", "RESNET 3 6 GPU1", "BERT 1 8 GPU2")


@pytest.mark.parametrize(
    ("policy", "starts", "numbers"),
    [
        (
            ROUND_ROBIN,
            (*_IN_ORDER[:3], "RESNET 3 19 GPU2"),
            # Client1's line is missing in the text; the overall average of 5.0 implies its value.
            (25, 3, 1, 0.25, 5.0, 5.0 * 4 / 3, 0.0),
        ),
        (BALANCE, _IN_ORDER, (19, 2, 2, 0.5, 2.25, 3.0, 0.0)),
        (SRTF_PRINTED, _FORESEEN, (26, 3, 1, 0.25, 2.5, 1.0, 7.0)),
        (MLFQ_PRINTED, _FORESEEN, (26, 3, 1, 0.25, 2.5, 1.0, 7.0)),
        (EXCLUSIVE, _IN_ORDER, (19, 2, 2, 0.5, 2.25, 3.0, 0.0)),
    ],
    ids=lambda value: value.label if isinstance(value, PolicyCase) else "",
)
def test_printed_schedules_line_for_line(
    policy: PolicyCase, starts: tuple[str, ...], numbers: tuple[float, ...]
) -> None:
    lines = []
    for start in starts:
        model, arrival, at, gpu = start.split()
        lines.append(
            f"Request(arrival_time={arrival}, model_type=ModelType.{model}) is being scheduled "
            f"at timestep {at} on resource {gpu}"
        )
    lines += _SUMMARY.format(*numbers).splitlines()
    assert trace_of(policy, FITTED, MLFQ_SEED).lines() == lines


def test_causal_scheduler_starts_bert_immediately() -> None:
    assert trace_of(SRTF, FITTED, 0) == trace_of(BALANCE, FITTED, 0)
    assert trace_of(SRTF_PRINTED, FITTED, 0) != trace_of(BALANCE, FITTED, 0)


def test_mlfq_seed_is_the_smallest_that_matches() -> None:
    wanted = trace_of(SRTF_PRINTED, FITTED, 0)
    results = [
        seed for seed in range(MLFQ_SEED + 1) if trace_of(MLFQ_PRINTED, FITTED, seed) == wanted
    ]
    assert results == [MLFQ_SEED]


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "kaas-sweeps" else [])
        for name in FIGURES
    ],
)
def test_failing_claims_are_those_known(name: str, tmp_path: Path) -> None:
    result = quick_result(name, tmp_path)
    assert (result.failing, result.outdated) == ([], [])
    assert len(result.figures) == FIGURES[name]


def test_results_do_not_depend_on_the_number_of_processes() -> None:
    cases = [
        GpuCase(BALANCE, GpuScenario()),
        GpuCase(SRTF, GpuScenario(mix="equal rates")),
    ]
    one, two = (over_seeds(run_case, cases, 2, is_parallel=each) for each in (False, True))
    assert one == two


def test_both_mixes_offer_the_configured_load() -> None:
    """In a long run the offered evaluation time is the load, and both models are equal."""
    for mix in MIXES:
        scenario = GpuScenario(mix=mix, duration_ms=200_000)
        arrivals = scenario.environment(0).arrivals
        assert arrivals is not None
        resnet, bert = (int((arrivals.pipeline == index).sum()) for index in (0, 1))
        work = [resnet * STATED[0].exec_ms, bert * STATED[1].exec_ms]
        assert sum(work) / (scenario.gpus * scenario.duration_ms) == pytest.approx(
            scenario.load, rel=0.03
        )
        equal = work if mix == "equal work" else [resnet, bert]
        assert equal[0] == pytest.approx(equal[1], rel=0.05)


def test_result_to_json() -> None:
    check = Check("water is wet", "everyday life", 1, nan, holds=False)
    result = Result("toy", [{"x": nan, "y": 2}], [check])
    assert result.failing == [check]
    assert result.to_json() == {
        "name": "toy",
        "rows": [{"x": None, "y": 2}],
        "checks": [
            {
                "claim": "water is wet",
                "source": "everyday life",
                "expected": 1,
                "measured": None,
                "holds": False,
                "known": None,
            }
        ],
    }


def test_find_experiment_by_name() -> None:
    assert set(FIGURES) <= set(experiment_names())
    assert "experiment" not in experiment_names()
    with pytest.raises(ConfigError, match=r"kaas_traces.*unknown experiment.*kaas-traces"):
        find_experiment("kaas_traces")
