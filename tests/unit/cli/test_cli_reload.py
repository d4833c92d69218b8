"""What a reload of `headgate serve` leaves as it is, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_rig import headgate

from headgate.cli.app_loading import base_directory, load_app
from headgate.cli.commands.serve import _warn_of_fixed_settings
from headgate.config import ServeSpec


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
