"""From an application to places, models and what workers found out."""

from __future__ import annotations

import pytest

from headgate.config import from_spec
from headgate.config.build import UNKNOWN_EXEC_NS
from headgate.core.errors import ConfigError
from headgate.functions.tensor import Signature, TensorSpec
from headgate.live.deployment import assign_cores
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.model_registry import catalogue, with_measured_profiles

X = TensorSpec("x", "FP32", (-1, 3))
Y = TensorSpec("y", "FP32", (-1, 10))
Z = TensorSpec("z", "INT64", (-1,))


def facts(name: str, inputs: TensorSpec, outputs: TensorSpec) -> MeasuredFunction:
    signature = Signature((inputs,), (outputs,), batches=True, platform="onnxruntime")
    return MeasuredFunction(name, signature, (100, 150), 5_000, 4_096)


SPEC = {
    "functions": {
        "a": {"model": "a.onnx", "batch_max": 2},
        "b": {"code": "b:B", "exec_time": "2ms"},
    },
    "pipelines": {
        "both": {"stages": {"a": {"function": "a"}, "b": {"function": "b", "after": ["a"]}}}
    },
}
FACTS = {"a": facts("a", X, Y), "b": facts("b", Y, Z)}


def test_what_was_not_declared_is_what_was_measured() -> None:
    loaded = with_measured_profiles(from_spec(SPEC, "here"), FACTS, "there")
    a, b = (variant.profile for variant in loaded.app.variants)
    assert (a.exec_ns, a.cold_start_ns, a.memory_bytes) == ((100, 150), 5_000, 4_096)
    assert b.exec_ns == (2_000_000,)  # declared
    assert with_measured_profiles(loaded, FACTS, "again").spec == loaded.spec


def test_what_could_not_be_measured_is_written_down_as_it_is_assumed() -> None:
    """So the log says what the Scheduler went by, and a calibration of it can be simulated."""
    unknown = FACTS | {"a": MeasuredFunction("a", Signature(), (), 0, 0)}
    loaded = with_measured_profiles(from_spec(SPEC, "here"), unknown, "there")
    assert loaded.unmeasured == ()
    assert loaded.app.variants[0].profile.exec_ns == (UNKNOWN_EXEC_NS,) * 2


def test_an_objective_that_measured_times_cannot_meet_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = FACTS | {"a": MeasuredFunction("a", FACTS["a"].signature, (9_000_000, 9_000_000), 0, 0)}
    spec = {**SPEC, "slo": {"latency": "5ms"}}
    assert (
        with_measured_profiles(from_spec(spec, "here"), slow, "there")
        .app.pipelines[0]
        .slo.latency_ns
    )
    (record,) = caplog.records
    assert (
        "'5ms': is below the critical path of pipeline both, 11ms: a 9ms -> b 2ms" in record.message
    )


def test_a_pipeline_takes_what_its_first_stages_take_and_gives_what_its_last_give() -> None:
    model = catalogue(with_measured_profiles(from_spec(SPEC, "here"), FACTS, "there").app, FACTS)[
        "both"
    ]
    assert (model.inputs, model.outputs) == ((X,), (Z,))
    assert (model.platform, model.batches, model.items_max) == ("headgate_pipeline", True, 1)


def test_a_function_that_looks_by_itself_makes_its_pipeline_do_so() -> None:
    unknown = FACTS | {"a": MeasuredFunction("a", Signature(), (), 0, 0)}
    assert catalogue(from_spec(SPEC, "here").app, unknown)["both"].inputs == ()


@pytest.mark.parametrize(
    ("pools", "cores", "expected"),
    [
        ({"p": {"tier": "dedicated"}}, 4, [[1, 2, 3]]),  # all but the gateway's
        ({"p": {"tier": "dedicated"}}, 1, [[0]]),
        ({"p": {"tier": "dedicated", "nodes": 2}}, 8, [[5, 6, 7], [2, 3, 4]]),
        ({"p": {"tier": "dedicated", "nodes": 2, "cpus": 1}}, 2, [[1], [0]]),
        ({"p": {"tier": "dedicated", "nodes": 3, "cpus": 1}}, 2, [[1], [0], [1]]),
        ({"p": {"tier": "dedicated", "cpus": 0.5}, "q": {"tier": "dedicated"}}, 4, [[3], [1, 2]]),
    ],
)
def test_who_gets_which_cores(
    pools: dict[str, object], cores: int, expected: list[list[int]]
) -> None:
    app = from_spec({"functions": {"a": {"exec_time": "1ms"}}, "pools": pools}, "here").app
    assert [place.cores for place in assign_cores(app, range(cores), "here")] == expected


def test_there_are_no_gpus_to_serve_from_yet() -> None:
    """Processes on CPUs that are called GPUs would be a lie."""
    spec = {"functions": {"a": {"exec_time": "1ms"}}, "pools": {"big": {"tier": "gpu"}}}
    with pytest.raises(ConfigError) as caught:
        assign_cores(from_spec(spec, "app.yaml").app, range(2), "app.yaml")
    assert str(caught.value) == (
        "app.yaml: pools.big: live GPU pools are not available yet "
        "(allowed: tier: dedicated, or headgate simulate)"
    )


def test_a_function_platform_is_not_served_from_here() -> None:
    spec = {
        "functions": {"a": {"exec_time": "1ms"}},
        "pools": {"l": {"tier": "serverless", "memory": "1GB"}},
    }
    with pytest.raises(ConfigError, match=r"pools\.l: cannot be served from here yet"):
        assign_cores(from_spec(spec, "here").app, range(2), "here")
