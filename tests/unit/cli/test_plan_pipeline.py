"""`headgate plan` for pipelines: the stages it chooses, the frontier it draws, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_rig import headgate, write

APP = """
functions:
  resize: {exec_time: {1: 1ms, 4: 2ms}, output: 1MB}
  classify:
    variants:
      small: {pools: [cpu], exec_time: 40ms, cold_start: 1s}
      large: {pools: [gpu], exec_time: {1: 5ms, 4: 8ms}, gpu_share: 2/7, cold_start: 2s}
pipelines:
  images:
    stages:
      resize: {function: resize}
      classify: {function: classify, after: [resize]}
    slo: {latency: 30ms}
pools:
  cpu: {tier: dedicated, nodes: 2, price: $0.36/h}
  gpu: {tier: gpu, nodes: 1, gpu_share: 7/7, price: $3.60/h, bandwidth: 1GB/s}
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    return write(tmp_path / "app.yaml", APP)


def planned(app: str, *arguments: object) -> Any:
    ended = headgate("plan", app, *arguments, "--json")
    assert (ended.code, ended.err) == (0, "")
    (pipeline,) = ended.json["pipelines"]
    return pipeline


def test_the_cheapest_configurations_within_the_objective(app: str) -> None:
    """Both stages in full batches; the image moves from the CPU pool to the GPU in 1 ms."""
    plan = planned(app)
    assert [(s["stage"], s["pool"], s["batch"], s["gpu_sevenths"]) for s in plan["stages"]] == [
        ("resize", "cpu", 4, 0),
        ("classify", "gpu", 4, 2),
    ]
    assert plan["time_ms"] == pytest.approx(2 + 1 + 8)
    assert [s["ends_ms"] for s in plan["stages"]] == pytest.approx([2, 11])
    # After the resize 6 ms are the least that is left: the transfer, and a batch of one.
    assert [s["slack_ms"] for s in plan["stages"]] == pytest.approx([30 - 6 - 2, 30 - 11])
    resize_usd = 0.36 * 2e-3 / 3600 / 4 * 1e6
    classify_usd = 3.6 * 8e-3 / 3600 / 4 * 1e6
    assert plan["usd_per_million"] == pytest.approx(resize_usd + classify_usd)
    assert plan["is_exact"] is True


def test_a_shape_is_chosen_by_what_it_costs(tmp_path: Path) -> None:
    """Three times the share halves the time: only a tight objective is worth it."""
    shapes = "shapes: [{gpu_share: 6/7, exec_time: {1: 3ms, 4: 4ms}}], cold_start: 2s"
    text = APP.replace("cold_start: 2s", shapes).replace("price: $3.60/h", "gpu_price: $7/h")
    shares = []
    for latency in ("30ms", "5ms"):
        app = write(tmp_path / "shapes.yaml", text.replace("30ms", latency))
        shares.append([stage["gpu_sevenths"] for stage in planned(app)["stages"]])
    assert shares == [[0, 2], [0, 6]]


def test_the_frontier_falls_and_has_the_plan_on_it(app: str) -> None:
    plan = planned(app, "--pipeline", "images")
    times = [point["time_ms"] for point in plan["frontier"]]
    costs = [point["usd_per_million"] for point in plan["frontier"]]
    assert times == sorted(times)
    assert costs == sorted(costs, reverse=True)
    assert {"time_ms": plan["time_ms"], "usd_per_million": plan["usd_per_million"]} in plan[
        "frontier"
    ]


def test_batches_can_be_capped_and_stages_cold(app: str, tmp_path: Path) -> None:
    single = planned(app, "--batch-max", 1)
    assert [stage["batch"] for stage in single["stages"]] == [1, 1]
    slow = write(tmp_path / "slow.yaml", APP.replace("30ms", "3s"))
    cold = planned(slow, "--cold")
    assert cold["stages"][1]["start_ms"] in (1000, 2000)
    assert cold["time_ms"] > 1000


def test_a_cascade_pays_by_probability(tmp_path: Path) -> None:
    text = APP.replace("after: [resize]}", "after: [resize], only_if_unsure: true, "
                       "unsure_probability: 25%}")  # fmt: skip
    plan = planned(write(tmp_path / "cascade.yaml", text))
    classify = plan["stages"][1]
    assert classify["usd_per_million"] == pytest.approx(0.25 * 3.6 * 8e-3 / 3600 / 4 * 1e6)


def test_the_plan_for_people(app: str) -> None:
    ended = headgate("plan", app)
    assert (ended.code, ended.err) == (0, "")
    for text in (
        "app.yaml: images within 30 ms at 99 %",
        "slack",
        "2/7",
        "The cheapest plan within 30 ms: a request takes 11 ms",
        "The fastest plan takes",
        "│ 30 ms",
        "●",
        "with the objective still in reach",
        "Costs count on full batches",
    ):
        assert text in ended.out, text
    rows = [line for line in ended.out.splitlines() if "┤" in line]
    assert len(rows) == 12
    assert sum("│" in row.partition("┤")[2] for row in rows) == 12, "the objective is drawn"


def test_the_figure(app: str, tmp_path: Path) -> None:
    figure = tmp_path / "frontier.png"
    ended = headgate("plan", app, "--figure", figure)
    assert f"written: {figure}" in ended.out
    assert figure.read_bytes().startswith(b"\x89PNG")


def with_cost(tmp_path: Path, latency: str, cost: str, text: str = APP) -> str:
    slo = f"slo: {{latency: {latency}, cost: {cost}}}"
    return write(tmp_path / "cost.yaml", text.replace("slo: {latency: 30ms}", slo))


def test_a_cost_objective_that_the_plan_is_within_is_named(tmp_path: Path) -> None:
    app = with_cost(tmp_path, "30ms", "$2.1/1M")
    plan = planned(app)
    assert plan["usd_per_million"] <= plan["slo_usd_per_million"] == pytest.approx(2.1)
    ended = headgate("plan", app)
    assert "cost.yaml: images within 30 ms at 99 % and $2.10 per million" in ended.out
    assert "The cheapest plan within 30 ms and $2.10 per million: a request takes" in ended.out
    assert planned(with_cost(tmp_path, "30ms", "unlimited"))["slo_usd_per_million"] is None


CLOSE = APP.replace("{pools: [cpu], exec_time: 40ms", "{pools: [cpu], exec_time: 4ms")


@pytest.mark.parametrize(
    ("cost", "problem"),
    [
        ("$0.45/1M", "no plan meets both (allowed: 5ms with $0.5/1M, or $0.45/1M with 6ms)"),
        (
            "$0.4/1M",
            "no plan meets both, and the cheapest costs $0.45/1M (allowed: 5ms with $0.5/1M)",
        ),
    ],
)
def test_objectives_that_no_plan_meets_together_are_one_line(
    tmp_path: Path, cost: str, problem: str
) -> None:
    """A millisecond of a CPU node costs $0.1/1M.

    Both stages on it take 1 + 4 ms for $0.5/1M, or 2 + 4 ms for $0.45/1M with four to a resize.
    """
    ended = headgate("plan", with_cost(tmp_path, "5ms", cost, CLOSE))
    assert (ended.code, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert line.endswith(f"pipelines.images.slo: '5ms and {cost}': {problem}")


def test_each_pair_that_the_error_names_can_be_planned(tmp_path: Path) -> None:
    for latency, cost in (("5ms", "$0.5/1M"), ("6ms", "$0.45/1M")):
        assert planned(with_cost(tmp_path, latency, cost, CLOSE))["stages"]


def test_a_cost_objective_counts_every_stage_of_a_cascade(tmp_path: Path) -> None:
    """The objective is for each request, and some need the second stage."""
    text = APP.replace("after: [resize]}", "after: [resize], only_if_unsure: true, "
                       "unsure_probability: 25%}")  # fmt: skip
    expected_usd = planned(with_cost(tmp_path, "30ms", "unlimited", text))["usd_per_million"]
    app = with_cost(tmp_path, "30ms", "$3/1M", text)
    assert planned(app)["usd_per_million"] > 2 * expected_usd
    assert "Costs are those of a request that needs every stage" in headgate("plan", app).out
    ended = headgate("plan", with_cost(tmp_path, "30ms", "$1/1M", text))
    assert (ended.code, "no plan meets both" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("30ms", "5ms"),
            "pipelines.images.slo: the objective is 5ms, and the fastest path takes 6ms: "
            "resize > classify",
        ),
        (("slo: {latency: 30ms}", ""), "pipelines.images.slo: has no latency"),
        (("2/7", "8/7"), "functions.classify.variants.large.gpu_share: '8/7'"),
        (("function: resize}", "function: resize, after: [classify]}"), "form a cycle"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    ended = headgate("plan", write(tmp_path / "bad.yaml", APP.replace(*change)))
    assert ended.code == 2
    assert problem in ended.err
    assert len(ended.err.splitlines()) == 1


def test_options_of_the_other_plan_are_refused(app: str) -> None:
    ended = headgate("plan", app, "--instance", "ml.c5.large")
    assert (ended.code, "--instance plans capacity" in ended.err) == (2, True)
    ended = headgate("plan", app, "--pipeline", "image")
    assert "unknown pipeline, did you mean images?" in ended.err
