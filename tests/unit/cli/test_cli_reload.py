"""What `headgate serve` makes of its options, and what a reload leaves as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_rig import headgate

from headgate.cli.app_loading import base_directory, load_app
from headgate.cli.commands.serve import (
    _deployment,
    _warn_of_clients_without_keys,
    _warn_of_fixed_settings,
    _warn_of_shared_cores,
)
from headgate.config import ServeSpec, declare
from headgate.live.deployment import NodeSpec


@pytest.fixture
def app(tmp_path: Path) -> str:
    path = tmp_path / "app.yaml"
    text = "functions: {f: {exec_time: 5ms}}\nserve: {port: 81, grpc_port: 82, drain: 1s, log: b}\n"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_settings_that_need_a_new_start_are_named(
    app: str, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_fixed_settings(app, ServeSpec(port=80, grpc_port=79), {"log"})
    assert caplog.messages == [
        f"{app}: serve.{name}: {value}: needs a new start of the server; it stays {running}"
        for name, value, running in (("port", 81, 80), ("grpc_port", 82, 79))
    ]


def test_what_the_command_gives_or_a_reload_changes_is_not(
    app: str, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_fixed_settings(app, ServeSpec(), {"port", "log"})
    assert not caplog.messages, "gRPC is served from now on, and the rest is in force"


def test_a_model_may_be_named_in_capitals(tmp_path: Path) -> None:
    model = tmp_path / "RESNET.ONNX"
    model.touch()
    (function,) = load_app(str(model)).app.functions
    assert (function.name, base_directory(str(model))) == ("RESNET", tmp_path)
    checked = headgate("check", model)
    assert "not found" not in checked.out and checked.out.endswith("RESNET.ONNX is valid\n")


def test_workers_that_share_cores_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    nodes = [NodeSpec(number, 0, f"cpu{number}", [core]) for number, core in enumerate(cores)]
    _warn_of_shared_cores(nodes, "app.yaml")
    assert capsys.readouterr().err == ""
    _warn_of_shared_cores([*nodes, nodes[0]], "app.yaml")
    count = len(cores)
    problem = f"{count + 1} workers want {count + 1} cores and share {count}"
    assert capsys.readouterr().err == f"headgate: warning: app.yaml: pools: {problem}\n"


KEY = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("clients", "warning"),
    [
        ({}, ""),
        ({"a": {}}, ""),
        ({"a": {"key": KEY}}, ""),
        ({"a": {}, "b": {}, "c": {}}, "b, c: {}; all requests count as those of a"),
        ({"a": {}, "b": {"key": KEY}}, "a: {}; requests need the key of another client"),
    ],
)
def test_clients_that_no_request_can_be_from_are_warned_of(
    clients: object, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = declare(functions={"f": {"exec_time": "1ms"}}, pools={"cpu": {}}, clients=clients)
    _warn_of_clients_without_keys(config, "app.yaml")
    line = warning.format("without a key no request is theirs")
    expected = f"headgate: warning: app.yaml: clients: {line}\n" if warning else ""
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(("policy", "batch_max"), [(None, 4), ("balance", 4), ("srtf", None)])
def test_policy_of_the_file_keeps_its_settings(
    tmp_path: Path, policy: str | None, batch_max: int | None
) -> None:
    path = tmp_path / "app.yaml"
    text = "functions: {f: {code: 'm:f'}}\npolicy: {name: balance, batch_max: 4}\n"
    path.write_text(text, encoding="utf-8")
    made = _deployment(str(path), {}, policy=policy, slo=None, workers=None, admission=None)
    assert made.load().policy.settings.get("batch_max") == batch_max
