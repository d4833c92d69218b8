"""Components of a worker that need no process of their own."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy as np
import pytest

from headgate.config import AppConfig, declare
from headgate.core.errors import ConfigError
from headgate.functions import Model, TensorSpec, function
from headgate.functions.arrays import Array, to_array, to_tensor
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.tensor import TaskInputs, TaskResult, Tensor
from headgate.live.ipc.crash_markers import CrashMarkers
from headgate.live.ipc.messages import BatchRan, Frames, frame
from headgate.live.ipc.shared_memory import Arena
from headgate.live.worker.connection import GatewayConnection
from headgate.live.worker.executor import SLOW_LOAD_NS, Executor, Job, ran_message
from headgate.live.worker.model_cache import Loader, ModelCache
from headgate.live.worker.server import Watchdog
from headgate.live.worker.warmup import MeasuredSizes, batch_sizes, fill_sizes

COUNTED = """
from headgate.functions import Model
log = []
class Heavy(Model):
    def load(self): log.append("load")
    def unload(self): log.append("unload")
class Tight(Model):
    def load(self):
        log.append("try")
        if log.count("try") == 1:
            raise MemoryError
"""


def runner(model: type[Model], *, is_idempotent: bool = True) -> BatchRunner:
    config = model()
    config.load()
    return BatchRunner("it", config, is_idempotent=is_idempotent)


def task(*arrays: Array, items: int = 1, task_id: int = 0) -> TaskInputs:
    return TaskInputs(task_id, items, [to_tensor(f"x{i}", array) for i, array in enumerate(arrays)])


def only(results: list[TaskResult]) -> TaskResult:
    (result,) = results
    return result


def test_unbatched_model_runs_requests_one_by_one() -> None:
    """The first dimension has no meaning then, and a result need not have one."""
    calls = []

    @function(batches=False)
    def norm(x0):  # type: ignore[no-untyped-def]
        calls.append(x0.shape)
        return np.linalg.norm(x0)

    results = runner(norm).run([task(np.array([3.0, 4.0])), task(np.array([1.0]), task_id=1)])
    assert calls == [(2,), (1,)]
    assert [to_array(result.outputs[0]).tolist() for result in results] == [5.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            None,
            "ValueError: the result of predict is nothing, not an array, a list or a dict of them",
        ),
        ({"y": [1]}, "TypeError: output 'y' is a list, not an array"),
        ([1], "TypeError: encode returned a list, not a dict of arrays"),
        ({"y": np.array([1j])}, "ValueError: y: an array of complex128 cannot be sent"),
        ({3: np.array([1])}, "TypeError: output 3 is a ndarray, not an array"),
    ],
)
def test_invalid_result_is_named(
    answer: object, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Model):
        def predict(self, batch: object) -> object:
            return answer

    result = only(runner(Wrong).run([task(np.array([1]))]))
    assert (result.status, result.error) == (500, problem)
    assert "Traceback" in caplog.text


def test_outputs_have_the_declared_datatype(caplog: pytest.LogCaptureFixture) -> None:
    @function(inputs={"x0": "FP64[-1]"}, outputs={"y": "FP32[-1]"})
    def wide(x0):  # type: ignore[no-untyped-def]
        return x0

    result = only(runner(wide).run([task(np.array([1.0]))]))
    assert result.error == "TypeError: output 'y' is FP64[1], declared FP32[-1]"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, RecursionError])
def test_any_exception_of_a_model_is_contained(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Mean(Exception):
        def __str__(self) -> str:
            raise kind

    class Raises(Model):
        def predict(self, batch: object) -> object:
            raise kind("it")

    class RaisesWordless(Model):
        def decode(self, inputs: dict[str, Array]) -> object:
            raise Mean

    assert only(runner(Raises).run([task(np.array([1]))])).error == f"{kind.__name__}: it"
    assert only(runner(RaisesWordless).run([task(np.array([1]))])).error == "Mean"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (np.ones((1, 3), np.float32), "TypeError: output 'y' is FP32[1, 3], declared FP32[-1, 2]"),
        (np.ones(1, np.float32), "TypeError: output 'y' is FP32[1], declared FP32[-1, 2]"),
        (np.ones((2, 2), np.float32), "ValueError: output 'y' has 2 items for 1"),
    ],
)
def test_outputs_have_the_declared_shape(
    answer: Array, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Shaped(Model):
        outputs = (TensorSpec("y", "FP32", (-1, 2)),)

        def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
            return batch

        def encode(self, result: object) -> dict[str, Array]:
            return {"y": answer}

    result = only(runner(Shaped).run([task(np.array([1]))]))
    assert (result.status, result.error) == (500, problem)


def test_unencodable_text_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the message with all results could not be encoded."""
    # The log record contains the text unchanged, which no test report could encode.
    caplog.set_level(logging.CRITICAL, logger="headgate.functions.batch_runner")

    @function
    def odd(x0):  # type: ignore[no-untyped-def]
        if (x0 < 0).any():
            raise ValueError("half a\n\udcff")
        return {"y\udcff": x0}

    first, second = runner(odd).run([task(np.array([1])), task(np.array([-1]), task_id=1)])
    assert [tensor.name for tensor in first.outputs] == ["y?"]
    assert second.error == "ValueError: half a ?"
    assert frame(BatchRan(0, 0, 0, [first, second]))


class Hostile(dict[str, object]):
    """A batch that cannot be inspected."""

    def values(self):  # type: ignore[no-untyped-def]
        raise RuntimeError("do not look")


class Stubborn(np.ndarray[Any, Any]):
    """An array that cannot be concatenated with others."""

    def __array_function__(self, function, types, args, kwargs):  # type: ignore[no-untyped-def]
        if function is np.concatenate:
            raise RuntimeError("not with those")
        return super().__array_function__(function, types, args, kwargs)


class Name(str):
    """A subclass of `str` that breaks the encoder of messages."""


WRONG_COLUMNS: dict[str, object] = {
    "none": None,
    "number": 3.0,
    "scalar": np.float64(3),
    "no dimensions": np.array(3.0),
    "too many": np.zeros(7),
    "too few": np.zeros(0),
    "nothing": {},
    "uneven": {"x0": np.zeros(1), "x1": np.zeros(2)},
    "hostile": Hostile(x0=np.zeros(1)),
    "set": {1.0},
}


@pytest.mark.parametrize("is_idempotent", [True, False])
@pytest.mark.parametrize("wrong", list(WRONG_COLUMNS))
def test_invalid_decoded_value_fails_its_own_request(wrong: str, is_idempotent: bool) -> None:
    class Decodes(Model):
        def decode(self, inputs: dict[str, Array]) -> object:
            return WRONG_COLUMNS[wrong] if inputs["x0"][0] < 0 else inputs

        def predict(self, batch: dict[str, Array]) -> object:
            return {"y": batch["x0"] * 2}

    tasks = [task(np.array([float(n)]), task_id=i) for i, n in enumerate((1, -1, 2))]
    results = runner(Decodes, is_idempotent=is_idempotent).run(tasks)
    assert [result.status for result in results] == [200, 500, 200]
    assert [to_array(r.outputs[0]).tolist() for r in results if r.status == 200] == [[2.0], [4.0]]
    assert frame(BatchRan(0, 0, 0, results))


@pytest.mark.parametrize("is_idempotent", [True, False])
def test_values_that_cannot_be_concatenated_run_one_by_one(is_idempotent: bool) -> None:
    """Nothing has run at that point, so it is safe for any function."""
    calls = []

    class Decodes(Model):
        def decode(self, inputs: dict[str, Array]) -> object:
            return inputs["x0"].view(Stubborn)

        def predict(self, batch: Array) -> object:
            calls.append(len(batch))
            return {"y": np.asarray(batch)}

    tasks = [task(np.array([float(n)]), task_id=n) for n in range(3)]
    results = runner(Decodes, is_idempotent=is_idempotent).run(tasks)
    assert [result.status for result in results] == [200] * 3
    assert calls == [1, 1, 1]


WRONG_OUTPUTS: dict[str, object] = {
    "list": [1.0],
    "none": None,
    "python number": 1.0,
    "wrong type": np.array([1], np.int8),
    "wrong shape": np.array([[1.0]]),
    "wrong count": np.array([1.0, 2.0]),
    "objects": np.array([object()], object),
    "complex": np.array([1j]),
}


@pytest.mark.parametrize("is_idempotent", [True, False])
@pytest.mark.parametrize("wrong", [*WRONG_OUTPUTS, "wrong name", "no dict", "raises"])
def test_invalid_output_fails_its_own_request(wrong: str, is_idempotent: bool) -> None:
    calls = []

    class Encodes(Model):
        outputs = (TensorSpec("y", "FP64", (-1,)),)

        def predict(self, batch: dict[str, Array]) -> object:
            calls.append(len(batch["x0"]))
            return batch["x0"]

        def encode(self, result: Array) -> dict[str, Array]:
            if result[0] >= 0:
                return {"y": result, Name("more"): result[::2]}
            if wrong == "raises":
                raise SystemExit(3)
            answers = {"wrong name": {"z": result}, "no dict": [result]}
            return answers.get(wrong, {"y": WRONG_OUTPUTS.get(wrong)})  # type: ignore[return-value]

    tasks = [task(np.array([float(n)]), task_id=i) for i, n in enumerate((1, -1, 2))]
    results = runner(Encodes, is_idempotent=is_idempotent).run(tasks)
    assert [result.status for result in results] == [200, 500, 200]
    assert calls == [3]
    assert frame(BatchRan(0, 0, 0, results))


@pytest.mark.parametrize(
    ("is_idempotent", "statuses"), [(True, [200, 500, 200]), (False, [500, 500, 500])]
)
@pytest.mark.parametrize("wrong", [[1.0], {"y": np.zeros(3), "z": np.zeros(2)}, 3, None])
def test_result_that_cannot_be_split_is_run_one_by_one(
    wrong: object, is_idempotent: bool, statuses: list[int]
) -> None:
    """It is unknown whose result is missing; a function that is not idempotent has run already."""
    calls = []

    class Predicts(Model):
        def predict(self, batch: dict[str, Array]) -> object:
            calls.append(len(batch["x0"]))
            return wrong if (batch["x0"] < 0).any() else {"y": batch["x0"]}

        def encode(self, result: object) -> dict[str, Array]:
            return {"y": result["y"]}  # type: ignore[index]

    tasks = [task(np.array([float(n)]), task_id=i) for i, n in enumerate((1, -1, 2))]
    results = runner(Predicts, is_idempotent=is_idempotent).run(tasks)
    assert [result.status for result in results] == statuses
    assert calls == ([3, 1, 1, 1] if is_idempotent else [3])


def test_outputs_of_every_memory_layout() -> None:
    class Odd(Model):
        def predict(self, batch: dict[str, Array]) -> object:
            x = batch["x0"]
            return {
                "strided": np.repeat(x, 4)[::4],
                "reversed": x[::-1],
                "fortran": np.asfortranarray(np.stack([x, x], 1)),
                "big": x.astype(">f8"),
                "masked": np.ma.masked_array(x, mask=False),
            }

    results = runner(Odd).run([task(np.array([1.0, 2.0]), items=2), task(np.array([3.0]))])
    assert [result.error for result in results] == ["", ""]
    first = {tensor.name: to_array(tensor).tolist() for tensor in results[0].outputs}
    assert first["strided"] == first["big"] == first["masked"] == [1.0, 2.0]
    assert (first["reversed"], first["fortran"]) == ([3.0, 2.0], [[1.0, 1.0], [2.0, 2.0]])


def test_invalid_unsure_output_is_a_function_error() -> None:
    class Unsure(np.ndarray[Any, Any]):
        def any(self, *args: object, **options: object) -> Any:
            raise RuntimeError("do not ask")

    class Raises(Model):
        def predict(self, batch: dict[str, Array]) -> object:
            return {"unsure": np.array([True]).view(Unsure)}

    assert only(runner(Raises).run([task(np.array([1.0]))])).error == "RuntimeError: do not ask"


class FakeConnection:
    """The part of a connection that a job needs to encode its reply."""

    def __init__(self) -> None:
        self.own = Arena.create(1 << 20)

    def take_released(self) -> list[int]:
        return []


def framed(results: list[TaskResult]) -> list[TaskResult]:
    """Return what a gateway decodes of a batch with these results."""
    connection = cast(GatewayConnection, FakeConnection())
    (message,) = Frames().feed(ran_message(connection, 0, 0, 0, results))
    assert isinstance(message, BatchRan)
    return message.results


def test_unencodable_result_fails_by_itself() -> None:
    good = Tensor("y", "INT8", (1,), memoryview(b"1"))
    odd = Tensor(Name("y"), "INT8", (1,), memoryview(b"1"))
    results = framed([TaskResult(0, [good]), TaskResult(1, [odd]), TaskResult(2, [good])])
    assert [(result.task_id, result.status) for result in results] == [(0, 200), (1, 500), (2, 200)]
    assert results[1].error.startswith("TypeError: ")


def test_too_large_result_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("headgate.live.ipc.messages", "headgate.live.worker.executor"):
        monkeypatch.setattr(f"{module}.MESSAGE_BYTES_MAX", 100_000)
    batch_sizes = [10_000, 80_000, 30_000, 10_000]
    results = framed(
        [
            TaskResult(id, [Tensor("y", "INT8", (size,), memoryview(bytes(size)))])
            for id, size in enumerate(batch_sizes)
        ]
    )
    assert [result.status for result in results] == [200, 500, 200, 200]
    assert "80" in results[1].error and "size limit" in results[1].error


def test_tracebacks_are_rate_limited(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(Model):
        def predict(self, batch: object) -> object:
            raise ValueError

    broken = runner(Raises)
    began = time.monotonic()
    for _ in range(50):
        broken.run([task(np.array([1]))])
    allowed = 1 + (time.monotonic() - began) / 0.1
    assert 1 <= caplog.text.count("Traceback") <= allowed


def test_what_loads_slowly_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    executor = Executor(lambda job: None)
    watchdog = Watchdog("cpu-0", None, executor, Lock(), lambda: None)
    job = Job()
    job.description, job.slow_ns, job.began_ns = "loading 'f'", SLOW_LOAD_NS, time.monotonic_ns()
    executor.running.add(job)
    watchdog.log_slow_jobs()
    assert not caplog.records
    job.began_ns -= SLOW_LOAD_NS
    for _ in range(2):
        watchdog.log_slow_jobs()
    assert caplog.messages == ["worker cpu-0: loading 'f' takes 5 s so far"]
    job.description = "measuring 'f'"
    watchdog.log_slow_jobs()
    assert caplog.messages[1:] == ["worker cpu-0: measuring 'f' takes 5 s so far"]


def test_times_are_measured_by_batch_size() -> None:
    """5 ms plus 5 ms per item; sizes beyond the time budget are estimated."""

    @function(inputs={"x0": "FP32[-1]"})
    def slow(x0):  # type: ignore[no-untyped-def]
        time.sleep(0.005 + 0.005 * len(x0))
        return x0

    measured = MeasuredSizes(runner(slow), 8, 200_000_000)
    times = measured.exec_ns()
    assert len(times) == 8
    assert list(times) == sorted(times)
    assert times[0] >= 10e6
    assert times[7] >= 45e6
    assert str(measured).startswith("a batch of 1 takes ")
    assert len(MeasuredSizes(runner(slow), 1000, 1).exec_ns()) == 1000


def test_larger_batches_are_run_though_the_time_is_over() -> None:
    """In proportion they would take far longer than they do, and would be refused."""
    sizes: list[int] = []

    @function(inputs={"x0": "FP32[-1]"})
    def flat(x0):  # type: ignore[no-untyped-def]
        sizes.append(len(x0))
        time.sleep(0.005)  # 50 times as much would be within what is run once
        return x0

    measured = MeasuredSizes(runner(flat), 8, 1)
    assert set(sizes) == {1, 8}
    assert set(measured.by_size) == {1, 8}  # the time of eight is not that of one in proportion
    assert "extrapolated" not in str(measured)
    sizes.clear()
    MeasuredSizes(runner(flat), 1000, 1)
    once, twice = sorted({*sizes} - {1})
    assert once <= 400, "at most two seconds, if it did take longer in proportion"
    assert twice > once, "two sizes show that it does not"


def test_a_slow_function_gets_its_larger_batches() -> None:
    """Eight items take less than twice as long as one, and four times as long in proportion."""
    sizes: list[int] = []

    @function(inputs={"x0": "FP32[-1]"})
    def slow(x0):  # type: ignore[no-untyped-def]
        sizes.append(len(x0))
        time.sleep(0.3 + 0.03 * len(x0))
        return x0

    times = MeasuredSizes(runner(slow), 8, 400_000_000).exec_ns()
    assert max(sizes) == 8
    assert times[7] <= 3 * times[0]


def test_sizes_beyond_the_measured_are_on_a_line() -> None:
    assert fill_sizes({1: 330, 2: 360}, 8)[7] == 540
    assert fill_sizes({1: 100, 2: 90, 4: 80}, 8) == (80,) * 8, "never below the largest measured"
    assert fill_sizes({1: 100, 2: 110, 4: 150}, 6)[4:] == (170, 190)


def test_measuring_stops_at_the_first_failure(caplog: pytest.LogCaptureFixture) -> None:
    @function(inputs={"x0": "FP32[-1]"})
    def narrow(x0):  # type: ignore[no-untyped-def]
        if len(x0) > 3:
            raise MemoryError
        return x0

    assert len(MeasuredSizes(runner(narrow, is_idempotent=False), 8, 10**10).exec_ns()) == 2


def test_model_without_example_is_not_measured() -> None:
    @function
    def unknown(x):  # type: ignore[no-untyped-def]
        return x

    assert MeasuredSizes(runner(unknown), 8, 10**8).exec_ns() == ()


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 9])
def test_all_batch_sizes_get_a_time(batch: int) -> None:
    assert batch_sizes(batch)[0] == 1
    assert batch_sizes(batch)[-1] == batch
    assert len(fill_sizes({size: size * 10 for size in batch_sizes(batch)}, batch)) == batch
    assert fill_sizes({1: 10}, batch) == tuple(10 * size for size in range(1, batch + 1))


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "counted_code", raising=False)
    (tmp_path / "counted_code.py").write_text(COUNTED)
    return tmp_path


def loader_of(config: AppConfig, base: Path) -> Loader:
    return Loader(config.app, config.sources, str(base), 0, CrashMarkers(base))


def cache_of(base: Path, memory: str, **functions: str) -> ModelCache:
    config = declare(
        functions={
            name: {"code": f"counted_code:{cls}", "exec_time": "1ms", "memory": "3GB"}
            for name, cls in functions.items()
        },
        pools={"cpu": {"memory": memory}},
    )
    model_cache = ModelCache(config.app, config.app.pools[0], loader_of(config, base))
    model_cache.variants = config.app.variants  # type: ignore[attr-defined]
    return model_cache


def test_model_is_cached_until_its_memory_is_needed(base: Path) -> None:
    model_cache = cache_of(base, "7GB", a="Heavy", b="Heavy", c="Heavy")
    a, b, _ = model_cache.variants  # type: ignore[attr-defined]
    first = model_cache.acquire(a)
    model_cache.release(a, first, keep=True)
    assert model_cache.acquire(a) is first
    assert model_cache.acquire(a) is not first  # each instance has a model of its own
    assert not model_cache.has(a)
    model_cache.release(a, first, keep=True)
    assert model_cache.has(a)
    log = sys.modules["counted_code"].log
    assert log == ["load", "load"]
    model_cache.acquire(b)
    assert log == ["load", "load", "unload", "load"]


def test_memory_error_evicts_cached_models(base: Path) -> None:
    model_cache = cache_of(base, "unlimited", a="Heavy", b="Tight")
    a, b = model_cache.variants  # type: ignore[attr-defined]
    model_cache.release(a, model_cache.acquire(a), keep=True)
    model_cache.acquire(b)
    assert sys.modules["counted_code"].log == ["load", "try", "unload", "try"]


def test_model_of_unknown_size_evicts_all_until_measured(base: Path) -> None:
    """It might need all memory. Afterwards as many are cached as fit beside the worker itself."""
    config = declare(
        functions={n: {"code": "counted_code:Heavy", "exec_time": "1ms"} for n in ("a", "b", "c")},
        pools={"cpu": {"memory": "300MB"}},
    )
    pool = config.app.pools[0]
    model_cache = ModelCache(config.app, pool, loader_of(config, base), own_bytes=50_000_000)
    for variant in config.app.variants:
        runner = model_cache.acquire(variant)
        assert (
            model_cache.record_size(variant, 100_000_000) == 120_000_000
        )  # so that exactly two fit into 300 MB
        model_cache.release(variant, runner, keep=True)
    log = sys.modules["counted_code"].log
    assert log == ["load", "unload", "load", "unload", "load"]
    a, b, _ = config.app.variants
    del log[:]
    model_cache.acquire(a)
    assert log == ["load"]  # c is cached
    model_cache.acquire(b)
    assert log == ["load", "unload", "load"]


def test_model_larger_than_its_pool_is_an_error(base: Path) -> None:
    config = declare(
        functions={"a": {"code": "counted_code:Heavy", "exec_time": "1ms"}},
        pools={"cpu": {"memory": "300MB"}},
    )
    pool = config.app.pools[0]
    model_cache = ModelCache(config.app, pool, loader_of(config, base), own_bytes=50_000_000)
    with pytest.raises(ConfigError, match=r"^a: takes 250000000 bytes .* 250000000 on cpu, beside"):
        model_cache.record_size(config.app.variants[0], 250_000_000)
