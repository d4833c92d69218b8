"""Loading from files, modules and plain data, and the normalised spec."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from headgate.config import declare, from_spec, load
from headgate.config.reference import json_schema, schema_text
from headgate.config.source import read_yaml
from headgate.core.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))

SMALL = """\
functions: {f: {exec_time: {1: 5ms, 8: 20ms}}}
pools: {gpu: {}}
"""


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "app.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def line_of(tmp_path: Path, text: str | bytes) -> str:
    """Return the error line about a file, without its directory."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix(f"{tmp_path}/")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads_and_survives_a_log(path: Path) -> None:
    config = load(str(path))
    assert config.workload.streams
    assert from_spec(json.loads(json.dumps(config.spec)), "log") == config


def test_there_are_examples() -> None:
    assert {"kaas.yaml", "ensemble.yaml", "burst.yaml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_schema_accepts_what_loads(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(json.dumps(read_yaml(str(path)))), json_schema())
    jsonschema.validate(load(str(path)).spec, json_schema())


def test_the_schema_refuses_a_bare_number_for_a_duration() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    spec = {"functions": {"f": {"exec_time": 5}}, "pools": {"gpu": {}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spec, json_schema())


def test_the_schema_file_is_up_to_date() -> None:
    """If this fails: `headgate schema > src/headgate/config/schema.json`."""
    written = files("headgate.config").joinpath("schema.json").read_text(encoding="utf-8")
    assert written == schema_text()
    assert json.loads(schema_text()) == json_schema()


def test_the_spec_has_every_default_filled_in(tmp_path: Path) -> None:
    """So that a log means the same after a default has changed."""
    spec = load(write(tmp_path, SMALL)).spec
    assert spec["policy"] == "headgate"
    assert isinstance(spec["pools"], dict)
    assert spec["pools"]["gpu"]["slots"] == 1
    assert from_spec(spec, "again").spec == spec


def test_python_and_yaml_declare_the_same(tmp_path: Path) -> None:
    declared = declare(functions={"f": {"exec_time": {1: "5ms", 8: "20ms"}}}, pools={"gpu": {}})
    assert declared == load(write(tmp_path, SMALL))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("functions: {a: {exec_time: 5ms}\npools: 3", "app.yaml:2:1: expected ',' or '}', but got"),
        ("pools:\n  gpu: {}\n  gpu: {}\n", "app.yaml:3:3: 'gpu' is a duplicate key"),
        ("pools:\n\tgpu: {}\n", "app.yaml:2:1: found character '\\t' that cannot start any token"),
        (
            "a: 1\n---\nb: 2\n",
            "app.yaml:2:1: expected a single document in the stream, but found another document",
        ),
        ("a: !!python/name:os.system\n", "app.yaml:1:4: could not determine a constructor for the"),
        ("a: 2024-13-45\n", "app.yaml: month must be in 1..12"),
        (b"\xff\xfe\xff", "app.yaml: "),
        ("[" * 5_000, "app.yaml: is nested too deeply"),
        ("", "app.yaml: is empty (allowed: a map with the keys functions, pools,"),
        ("- 1\n", "app.yaml: is a list (allowed: a map with the keys functions,"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str | bytes, line: str) -> None:
    assert line_of(tmp_path, text).startswith(line)


def test_merging_may_override_a_key(tmp_path: Path) -> None:
    """`<<` brings keys in; giving one of them again is what it is for, not a duplicate."""
    text = """\
functions:
  a: &a {exec_time: 5ms, cold_start: 1s}
  b: &b {<<: *a, exec_time: 6ms}
  c: {<<: *b, exec_time: 7ms}
pools: {gpu: {}}
"""
    functions = load(write(tmp_path, text)).app.functions
    assert [f.reference_exec_ns // 1_000_000 for f in functions] == [5, 6, 7]
    assert {f.variants[0].profile.cold_start_ns for f in functions} == {1_000_000_000}


def test_a_missing_file_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere\.yaml: cannot be read: No such file"):
        load("nowhere.yaml")


def test_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may hold a mapping or a finished application; anything else is refused."""
    (tmp_path / "shop_app.py").write_text(
        "from headgate.config import declare\n"
        "spec = {'functions': {'f': {'exec_time': '5ms'}}, 'pools': {'gpu': {}}}\n"
        "app = declare(**spec)\n"
        "number = 3\n"
    )
    (tmp_path / "broken_app.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert load("shop_app:spec") == load("shop_app:app")
        for reference, problem in [
            ("shop_app:number", "3: is a number (allowed: a map"),
            ("shop_app:ap", "has no attribute 'ap'"),
            ("shop_app:", "has no attribute ''"),
            (".shop:app", "is not a module name"),
            ("no_such_app:app", "cannot be imported: No module named 'no_such_app'"),
            ("broken_app:app", "cannot be imported: No module named 'no_such_module_anywhere'"),
        ]:
            with pytest.raises(ConfigError) as caught:
                load(reference)
            assert str(caught.value).startswith(f"{reference}: {problem}")
    finally:
        sys.modules.pop("shop_app", None)
