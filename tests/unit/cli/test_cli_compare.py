"""`headgate compare`: the same requests under several policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_rig import KAAS, headgate, write

from headgate.policies import find_policy, policy_names


def test_all_six_policies_get_the_same_requests() -> None:
    found = headgate("compare", KAAS, "--duration", "1", "--json").json
    able = [n for n in policy_names() if not find_policy(n).capabilities.needs_serverless]
    assert found["policies"] == able
    assert len(found["policies"]) >= 6
    assert len({run["requests"] for run in found["runs"]}) == 1
    waits = {run["policy"]: run["mean_wait_ms"] for run in found["runs"]}
    assert waits["srtf"] < waits["balance"] < waits["round_robin"]


def test_the_table_has_a_row_for_each() -> None:
    ended = headgate("compare", KAAS, "--duration", "1", "--policies", "srtf, balance")
    rows = [line.split()[0] for line in ended.out.splitlines() if line.strip()]
    assert [name for name in rows if name in policy_names()] == ["srtf", "balance"]


def test_settings_of_one_of_them() -> None:
    options = ("--policies", "balance,mlfq", "--duration", "1", "--json")
    plain = headgate("compare", KAAS, *options).json["runs"]
    changed = headgate("compare", KAAS, *options, "--set", "mlfq.bucket_ratio=100").json["runs"]
    assert changed[0]["mean_wait_ms"] == plain[0]["mean_wait_ms"]
    assert changed[1]["mean_wait_ms"] != plain[1]["mean_wait_ms"]


def test_several_gateways() -> None:
    """Each policy is simulated as by `simulate`; by default those that support several gateways."""
    options = ("--duration", "1", "--gateways", "2", "--json")
    found = headgate("compare", KAAS, *options).json
    assert found["policies"] == [
        "balance",
        "headgate",
        "round_robin",
        "static_partition",
        "swayam",
    ]
    for run in found["runs"]:
        alone = headgate("simulate", KAAS, *options, "--policy", run["policy"]).json
        assert run["mean_wait_ms"] == alone["mean_wait_ms"]
    refused = headgate("compare", KAAS, *options, "--policies", "balance,srtf")
    assert refused.code == 2
    assert "policy srtf does not support several gateways" in refused.err


def test_several_seeds() -> None:
    options = ("--policies", "balance,srtf", "--duration", "1", "--seeds", "3", "--seed", "5")
    found = headgate("compare", KAAS, *options, "--json").json
    assert [run["seed"] for run in found["runs"]] == [5, 6, 7, 5, 6, 7]
    waits = [run["mean_wait_ms"] for run in found["runs"][:3]]
    assert found["means"]["balance"]["mean_wait_ms"]["mean"] == pytest.approx(sum(waits) / 3)
    assert found["means"]["balance"]["mean_wait_ms"]["half_interval"] > 0
    assert " ±" in headgate("compare", KAAS, *options).out


RENTED = """
functions: {m: {exec_time: 10ms, cold_start: 1s}}
pools: {gpu: {nodes: 3, elastic: true, boot_time: 5s}}
slo: {latency: 100ms}
workload: {arrivals: [{pipeline: m, process: "poisson:rate=20/s"}], duration: 20s}
"""


def test_policies_that_begin_with_rented_nodes_are_named(tmp_path: Path) -> None:
    """Otherwise it looks as if the others served worse, when they only boot."""
    policies = ("--policies", "dedicated_only,headgate,balance")
    ended = headgate("compare", write(tmp_path / "app.yaml", RENTED), *policies)
    assert (
        "nodes rented at time 0, which need no boot: dedicated_only 1; every node boots under "
        "balance, headgate (at time 0 it rents what prewarm_nodes says)\n"
    ) in ended.out


@pytest.mark.parametrize("change", [("5s}", "0s}"), ("1s}", "1s, prewarm_nodes: 1}")])
def test_policies_that_begin_alike_are_not(tmp_path: Path, change: tuple[str, str]) -> None:
    app = write(tmp_path / "app.yaml", RENTED.replace(*change))
    ended = headgate("compare", app, "--policies", "dedicated_only,headgate")
    assert ended.code == 0
    assert "at time 0" not in ended.out


def test_the_report(tmp_path: Path) -> None:
    options = ("--policies", "balance,srtf", "--duration", "1", "--report", tmp_path)
    ended = headgate("compare", KAAS, *options)
    assert f"report: {tmp_path / 'report.html'}" in ended.out
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"report.html", "comparison.png", "comparison.json"}
    assert json.loads((tmp_path / "comparison.json").read_text())["policies"] == ["balance", "srtf"]
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert "met by srtf" in page
