"""From an application to places, models and what workers found out."""

from __future__ import annotations

import pytest

from headgate.app import from_spec
from headgate.core.errors import ConfigError
from headgate.functions.tensor import Signature, TensorSpec
from headgate.live.catalogue import catalogue
from headgate.live.facts import with_facts
from headgate.live.messages import FunctionFacts
from headgate.live.places import places

X = TensorSpec("x", "FP32", (-1, 3))
Y = TensorSpec("y", "FP32", (-1, 10))
Z = TensorSpec("z", "INT64", (-1,))


def facts(name: str, inputs: TensorSpec, outputs: TensorSpec) -> FunctionFacts:
    signature = Signature((inputs,), (outputs,), batches=True, platform="onnxruntime")
    return FunctionFacts(name, signature, (100, 150), 5_000, 4_096)


SPEC = {
    "functions": {"a": {"model": "a.onnx", "batch": 2}, "b": {"code": "b:B", "exec": "2ms"}},
    "pipelines": {
        "both": {"stages": {"a": {"function": "a"}, "b": {"function": "b", "after": ["a"]}}}
    },
}
FACTS = {"a": facts("a", X, Y), "b": facts("b", Y, Z)}


def test_what_was_not_declared_is_what_was_measured() -> None:
    loaded = with_facts(from_spec(SPEC, "here"), FACTS, "there")
    a, b = (variant.profile for variant in loaded.app.variants)
    assert (a.exec_ns, a.start_ns, a.memory_bytes) == ((100, 150), 5_000, 4_096)
    assert b.exec_ns == (2_000_000,)  # declared
    assert with_facts(loaded, FACTS, "again").spec == loaded.spec


def test_a_pipeline_takes_what_its_first_stages_take_and_gives_what_its_last_give() -> None:
    model = catalogue(with_facts(from_spec(SPEC, "here"), FACTS, "there").app, FACTS)["both"]
    assert (model.inputs, model.outputs) == ((X,), (Z,))
    assert (model.platform, model.batches, model.items_max) == ("headgate_pipeline", True, 1)


def test_a_function_that_looks_by_itself_makes_its_pipeline_do_so() -> None:
    unknown = FACTS | {"a": FunctionFacts("a", Signature(), (), 0, 0)}
    assert catalogue(from_spec(SPEC, "here").app, unknown)["both"].inputs == ()


@pytest.mark.parametrize(
    ("pools", "cores", "expected"),
    [
        ({"p": {"tier": "dedicated"}}, 4, [[1, 2, 3]]),  # all but the gateway's
        ({"p": {"tier": "dedicated"}}, 1, [[0]]),
        ({"p": {"tier": "dedicated", "nodes": 2}}, 8, [[5, 6, 7], [2, 3, 4]]),
        ({"p": {"tier": "dedicated", "nodes": 2, "cpus": 1}}, 2, [[1], [0]]),
        ({"p": {"tier": "dedicated", "nodes": 3, "cpus": 1}}, 2, [[1], [0], [1]]),
        ({"p": {"tier": "dedicated", "cpus": 0.5}, "q": {"tier": "gpu"}}, 4, [[3], [1, 2]]),
    ],
)
def test_who_gets_which_cores(
    pools: dict[str, object], cores: int, expected: list[list[int]]
) -> None:
    app = from_spec({"functions": {"a": {"exec": "1ms"}}, "pools": pools}, "here").app
    assert [place.cores for place in places(app, range(cores), "here")] == expected


def test_a_function_platform_is_not_served_from_here() -> None:
    spec = {
        "functions": {"a": {"exec": "1ms"}},
        "pools": {"l": {"tier": "serverless", "memory": "1GB"}},
    }
    with pytest.raises(ConfigError, match=r"pools\.l: cannot be served from here yet"):
        places(from_spec(spec, "here").app, range(2), "here")
