"""From an application to cores, served models and measured profiles."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.config import declare, from_spec
from headgate.config.build import UNKNOWN_EXEC_NS
from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.functions.tensor import Signature, TensorSpec
from headgate.live.deployment import Deployment, NodeSpec, assign_cores
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.model_registry import served_models, with_measured_profiles
from headgate.policies import find_policy
from headgate.sim.run import Setup, simulate
from headgate.workload.arrivals import arrivals_at

X = TensorSpec("x", "FP32", (-1, 3))
Y = TensorSpec("y", "FP32", (-1, 10))
Z = TensorSpec("z", "INT64", (-1,))


def measured(name: str, inputs: TensorSpec, outputs: TensorSpec) -> MeasuredFunction:
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
MEASURED = {"a": measured("a", X, Y), "b": measured("b", Y, Z)}


def test_measured_values_fill_undeclared_ones() -> None:
    config = with_measured_profiles(from_spec(SPEC, "here"), MEASURED, "there")
    a, b = (variant.profile for variant in config.app.variants)
    assert (a.exec_ns, a.cold_start_ns, a.memory_bytes) == ((100, 150), 5_000, 4_096)
    assert b.exec_ns == (2_000_000,)  # declared
    assert with_measured_profiles(config, MEASURED, "again").spec == config.spec


def test_only_measured_times_are_estimates() -> None:
    config = with_measured_profiles(from_spec(SPEC, "here"), MEASURED, "there")
    assert [variant.profile.is_estimate for variant in config.app.variants] == [True, False]


@pytest.mark.parametrize("larger_us", [85, 88, 92])
def test_batches_of_a_short_function_do_not_depend_on_noise(larger_us: int) -> None:
    """An echo takes 5.5 µs, and 16 of them 16 times as long, give or take a few per cent.

    What a batch costs besides, on its way to the worker and back, is far more than that. By the
    measured times alone every request would be a batch in some starts, and 16 be one in others.
    """
    spec = {"functions": {"echo": {"code": "a:b", "batch_max": 16}}}
    times_ns = tuple(5_500 + (1_000 * larger_us - 5_500) * n // 15 for n in range(16))
    found = MeasuredFunction("echo", Signature(), times_ns, 0, 0)
    config = with_measured_profiles(from_spec(spec, "here"), {"echo": found}, "there")
    burst = arrivals_at(np.zeros(33, dtype=np.int64), SECOND_NS)
    columns = simulate(Setup(config.app, find_policy("headgate"), seed=1), burst)
    ends_ns = set(columns.requests.finished_ns.tolist())
    assert len(ends_ns) <= 5, "of 33 requests, all but the first go in batches of 16, or nearly"


def test_declared_network_delay_stays() -> None:
    spec = {**SPEC, "pools": {"p": {"tier": "dedicated", "network_delay": "2ms"}}}
    config = with_measured_profiles(from_spec(spec, "here"), MEASURED, "there")
    assert config.app.pools[0].network_ns == 2_000_000


def test_assumed_profile_is_written_if_unmeasured() -> None:
    """So the event log has the profile that the Scheduler used, and its calibration can be
    simulated.
    """
    unknown = MEASURED | {"a": MeasuredFunction("a", Signature(), (), 0, 0)}
    config = with_measured_profiles(from_spec(SPEC, "here"), unknown, "there")
    assert config.unmeasured == ()
    assert config.app.variants[0].profile.exec_ns == (UNKNOWN_EXEC_NS,) * 2


def test_slo_below_measured_time_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = MEASURED | {
        "a": MeasuredFunction("a", MEASURED["a"].signature, (9_000_000, 9_000_000), 0, 0)
    }
    spec = {**SPEC, "slo": {"latency": "5ms"}}
    assert (
        with_measured_profiles(from_spec(spec, "here"), slow, "there")
        .app.pipelines[0]
        .slo.latency_ns
    )
    (record,) = caplog.records
    assert (
        "'5ms': is below the critical path of pipeline both, 11.2ms: a 9.1ms -> b 2.1ms"
        in record.message
    )


def test_pipeline_signature() -> None:
    model = served_models(
        with_measured_profiles(from_spec(SPEC, "here"), MEASURED, "there").app, MEASURED
    )["both"]
    assert (model.inputs, model.outputs) == ((X,), (Z,))
    assert (model.platform, model.batches, model.items_max) == ("headgate_pipeline", True, 1)


def test_function_without_inputs_makes_its_pipeline_unchecked() -> None:
    unknown = MEASURED | {"a": MeasuredFunction("a", Signature(), (), 0, 0)}
    assert served_models(from_spec(SPEC, "here").app, unknown)["both"].inputs == ()


@pytest.mark.parametrize(
    ("pools", "cores", "expected"),
    [
        ({"p": {"tier": "dedicated"}}, 4, [[1, 2, 3]]),  # all but that of the gateway
        ({"p": {"tier": "dedicated"}}, 1, [[0]]),
        ({"p": {"tier": "dedicated", "nodes": 2}}, 8, [[5, 6, 7], [2, 3, 4]]),
        ({"p": {"tier": "dedicated", "nodes": 2, "cpus": 1}}, 2, [[1], [0]]),
        ({"p": {"tier": "dedicated", "nodes": 3, "cpus": 1}}, 2, [[1], [0], [1]]),
        ({"p": {"tier": "dedicated", "cpus": 0.5}, "q": {"tier": "dedicated"}}, 4, [[3], [1, 2]]),
    ],
)
def test_core_assignment(pools: dict[str, object], cores: int, expected: list[list[int]]) -> None:
    app = from_spec({"functions": {"a": {"exec_time": "1ms"}}, "pools": pools}, "here").app
    assert [node.cores for node in assign_cores(app, range(cores), "here")] == expected


def test_each_gateway_has_a_core_of_its_own() -> None:
    app = declare(
        functions={"f": {"exec_time": "1ms"}}, pools={"cpu": {"tier": "dedicated", "nodes": 2}}
    ).app
    nodes = assign_cores(app, range(8), "here", gateways=4)
    assert [node.cores for node in nodes] == [[6, 7], [4, 5]]


@pytest.mark.parametrize(
    ("workers", "gateways", "cores", "expected"),
    [
        ([[1]], 1, 2, True),  # one core each
        ([[1], [0]], 1, 2, False),  # the gateway would spin on the core of a worker
        ([[1]], 2, 2, False),
        ([[0]], 1, 1, False),
        ([[6, 7], [4, 5]], 4, 8, True),
    ],
)
def test_processes_spin_only_on_cores_of_their_own(
    workers: list[list[int]],
    gateways: int,
    cores: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    nodes = [NodeSpec(number, 0, f"w{number}", own) for number, own in enumerate(workers)]
    assert Deployment({}, "", nodes).may_spin(gateways) is expected


def test_gpu_pools_are_not_served_yet() -> None:
    """Processes on CPUs must not pose as GPUs."""
    spec = {"functions": {"a": {"exec_time": "1ms"}}, "pools": {"big": {"tier": "gpu"}}}
    with pytest.raises(ConfigError) as caught:
        assign_cores(from_spec(spec, "app.yaml").app, range(2), "app.yaml")
    assert str(caught.value) == (
        "app.yaml: pools.big: live GPU pools are not available yet "
        "(allowed: provider: ray, tier: dedicated, or headgate simulate)"
    )


def test_faas_pool_has_no_local_nodes() -> None:
    spec = {
        "functions": {"a": {"exec_time": "1ms"}},
        "pools": {"l": {"tier": "serverless", "memory": "1GB"}},
    }
    with pytest.raises(ConfigError, match=r"pools\.l: cannot be served from here yet"):
        assign_cores(from_spec(spec, "here").app, range(2), "here")
