"""The command that a server suggests when it is ready."""

from __future__ import annotations

import json
import shlex

import pytest

from headgate.config import from_spec
from headgate.functions.tensor import Signature, parse_specs
from headgate.live.gateway.process import ready_message
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.model_registry import served_models

URL = "http://127.0.0.1:8080"


def suggested(input_name: str, *, needs_key: bool) -> list[str]:
    """The words of the command, as a shell reads them."""
    signature = Signature(parse_specs({input_name: "FP32[-1]"}, "f"), ())
    app = from_spec({"functions": {"f": {"exec_time": "1ms"}}}, "here").app
    models = served_models(app, {"f": MeasuredFunction("f", signature, (), 0, 0)})
    message = ready_message(URL, "", "headgate", [*models.values()], {}, needs_key=needs_key)
    return shlex.split(json.loads(message)["curl"])


def test_the_command_has_a_place_for_the_key_where_one_is_required() -> None:
    key = ["-H", "X-API-Key: KEY"]
    assert suggested("x", needs_key=True)[:4] == ["curl", *key, f"{URL}/v2/models/f/infer"]
    assert suggested("x", needs_key=False)[:2] == ["curl", f"{URL}/v2/models/f/infer"]


@pytest.mark.parametrize("name", ["x", "it's", 'a "b"'])
def test_the_command_is_one_for_a_shell(name: str) -> None:
    *_, option, body = suggested(name, needs_key=False)
    assert option == "-d"
    assert json.loads(body)["inputs"][0]["name"] == name
