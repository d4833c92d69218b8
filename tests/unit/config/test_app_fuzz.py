"""Whatever is written, loading it gives an application or one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.config import from_spec, load
from headgate.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples"

QUANTITIES = ("0s", "5ms", "-1s", "1e99d", "0B", "100MB", "9e9TB", "9/7", "$1/h", "$1", "100%")
WORDS = ("never", "unlimited", "gpu", "serverless", "lambda", "resnet", "small", "uniform")
TEXTS = st.sampled_from(QUANTITIES + WORDS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            TEXTS | st.text(max_size=5) | st.integers(-1, 9) | st.booleans(), inner, max_size=3
        )
    ),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        "exec_time",
        "variants",
        "pools",
        "stages",
        "after",
        "slo",
        "nodes",
        "memory",
        "x",
        "name",
        "price",
    ]
)


@st.composite
def mutated_specs(draw: st.DrawFn) -> dict[str, object]:
    """Draw an example with a few of its values replaced, removed or added to."""
    name = draw(st.sampled_from(["kaas", "ensemble", "burst"]))
    spec = json.loads(json.dumps(load(str(EXAMPLES / f"{name}.yaml")).spec))
    for _ in range(draw(st.integers(1, 3))):
        _mutate(draw, spec)
    assert isinstance(spec, dict)
    return spec


def _mutate(draw: st.DrawFn, spec: object) -> None:
    """Walk down to some value and change it."""
    while isinstance(spec, dict | list) and spec:
        keys = list(spec) if isinstance(spec, dict) else list(range(len(spec)))
        key = draw(st.sampled_from(keys))
        if not isinstance(spec[key], dict | list) or draw(st.integers(0, 4)) == 0:
            action = draw(st.sampled_from(["replace", "remove", "add"]))
            if action == "remove":
                del spec[key]
            elif action == "add" and isinstance(spec, dict):
                spec[draw(KEYS)] = draw(VALUES)
            else:
                spec[key] = draw(VALUES)
            return
        spec = spec[key]


@settings(deadline=None)  # an example is read from disk each time
@given(mutated_specs())
def test_a_mutated_spec_loads_or_gives_one_line(spec: dict[str, object]) -> None:
    try:
        config = from_spec(spec, "app.yaml")
    except ConfigError as error:
        line = str(error)
        assert line.startswith("app.yaml: ")
        assert "\n" not in line
        assert "$." not in line, "msgspec's own words: the explanation found nothing"
    else:
        again = from_spec(json.loads(json.dumps(config.spec)), "log")
        assert again == config


@given(VALUES)
def test_any_data_at_all_loads_or_gives_one_line(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        from_spec({"functions": value, "pools": value}, "app.yaml")
    assert "\n" not in str(caught.value)
