"""All parts real: `headgate serve`, boto3, the embedded platform, and the Lambda runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from remote_app import reading, write_app
from served import Served, until, value

pytest.importorskip("boto3")
pytest.importorskip("awslambdaric")

from headgate.lambda_emulator import EmbeddedPlatform

HANDLER = "headgate.functions.lambda_handler.handle"


def test_burst_spills_to_cold_starting_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # both processes find the keys there
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    source = Path(sys.modules["headgate"].__file__ or "").parents[1]
    environment = {"HEADGATE_APP": "app.yaml", "PYTHONPATH": str(source)}
    code = write_app(tmp_path, "http://unused")
    with EmbeddedPlatform(tmp_path / "platform") as platform:
        platform.register("doubler", code, HANDLER, environment=environment)
        text = (tmp_path / "app.yaml").read_text().replace("doubler:live", "doubler")
        (tmp_path / "app.yaml").write_text(text.replace("http://unused", platform.url))
        with Served(tmp_path) as served:
            for _ in range(2):
                answers = served.ask_together("double", 5)
                assert [status for status, _ in answers] == [200] * 5
                assert [value(body) for _, body in answers] == [2.0 * n for n in range(5)]
            metrics = served.get("/metrics")[1]
            spilled = reading(metrics, "headgate_faas_calls_total", outcome="finished")
            assert spilled >= 4
            # The start of the worker itself is one of them.
            starts = reading(metrics, "headgate_cold_starts_total", function="double") - 1
            assert 1 <= starts <= spilled - 1  # the second burst reused some of them
            assert until(lambda: reading(served.get("/metrics")[1], "headgate_faas_inflight") == 0)
