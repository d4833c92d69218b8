"""The parts of a worker that need no process of their own."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headgate.app import declare
from headgate.core.errors import ConfigError
from headgate.functions import Model, TensorSpec, function
from headgate.functions.arrays import Array, to_array, to_tensor
from headgate.live.framing import frame
from headgate.live.messages import Ran, Result, Work
from headgate.live.worker.runner import Runner
from headgate.live.worker.stock import Stock
from headgate.live.worker.survey import fill, measure, sizes

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


def runner(model: type[Model], *, is_idempotent: bool = True) -> Runner:
    loaded = model()
    loaded.load()
    return Runner("it", loaded, is_idempotent=is_idempotent)


def work(*arrays: Array, items: int = 1, task_id: int = 0) -> Work:
    return Work(task_id, items, [to_tensor(f"x{i}", array) for i, array in enumerate(arrays)])


def only(results: list[Result]) -> Result:
    (result,) = results
    return result


# --- the runner ----------------------------------------------------------------------------------


def test_without_batching_requests_go_one_by_one() -> None:
    """The first dimension means nothing then, and an answer need not have one."""
    calls = []

    @function(batches=False)
    def norm(x0):  # type: ignore[no-untyped-def]
        calls.append(x0.shape)
        return np.linalg.norm(x0)

    results = runner(norm).run([work(np.array([3.0, 4.0])), work(np.array([1.0]), task_id=1)])
    assert calls == [(2,), (1,)]
    assert [to_array(result.outputs[0]).tolist() for result in results] == [5.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "ValueError: what predict gave is nothing, not an array, a list or a dict of them"),
        ({"y": [1]}, "TypeError: output 'y' is a list, not an array"),
        ([1], "TypeError: encode gave a list, not a dict of arrays"),
        ({"y": np.array([1j])}, "ValueError: y: an array of complex128 cannot be sent"),
        ({3: np.array([1])}, "TypeError: output 3 is a ndarray, not an array"),
    ],
)
def test_a_wrong_answer_is_named(
    answer: object, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(Model):
        def predict(self, batch: object) -> object:
            return answer

    result = only(runner(Wrong).run([work(np.array([1]))]))
    assert (result.status, result.error) == (500, problem)
    assert "Traceback" in capsys.readouterr().err


def test_outputs_are_what_was_declared(capsys: pytest.CaptureFixture[str]) -> None:
    @function(inputs={"x0": "FP64[-1]"}, outputs={"y": "FP32[-1]"})
    def wide(x0):  # type: ignore[no-untyped-def]
        return x0

    result = only(runner(wide).run([work(np.array([1.0]))]))
    assert result.error == "TypeError: output 'y' is FP64[1], declared FP32[-1]"
    capsys.readouterr()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, RecursionError])
def test_nothing_a_model_raises_comes_through(
    kind: type[BaseException], capsys: pytest.CaptureFixture[str]
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

    assert only(runner(Raises).run([work(np.array([1]))])).error == f"{kind.__name__}: it"
    assert only(runner(RaisesWordless).run([work(np.array([1]))])).error == "Mean"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (np.ones((1, 3), np.float32), "TypeError: output 'y' is FP32[1, 3], declared FP32[-1, 2]"),
        (np.ones(1, np.float32), "TypeError: output 'y' is FP32[1], declared FP32[-1, 2]"),
        (np.ones((2, 2), np.float32), "ValueError: output 'y' has 2 items for 1"),
    ],
)
def test_outputs_have_the_shape_that_was_declared(
    answer: Array, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Shaped(Model):
        outputs = (TensorSpec("y", "FP32", (-1, 2)),)

        def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
            return batch

        def encode(self, result: object) -> dict[str, Array]:
            return {"y": answer}

    result = only(runner(Shaped).run([work(np.array([1]))]))
    assert (result.status, result.error) == (500, problem)
    capsys.readouterr()


def test_text_that_cannot_be_sent_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the message with everybody's answers could not be."""

    @function
    def odd(x0):  # type: ignore[no-untyped-def]
        if (x0 < 0).any():
            raise ValueError("half a\n\udcff")
        return {"y\udcff": x0}

    first, second = runner(odd).run([work(np.array([1])), work(np.array([-1]), task_id=1)])
    assert [tensor.name for tensor in first.outputs] == ["y?"]
    assert second.error == "ValueError: half a ?"
    assert frame(Ran(0, 0, 0, [first, second]))
    capsys.readouterr()


def test_a_flood_of_failures_does_not_flood_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    class Raises(Model):
        def predict(self, batch: object) -> object:
            raise ValueError

    broken = runner(Raises)
    began = time.monotonic()
    for _ in range(50):
        broken.run([work(np.array([1]))])
    allowed = 1 + (time.monotonic() - began) / 0.1
    assert 1 <= capsys.readouterr().err.count("Traceback") <= allowed


# --- the survey ----------------------------------------------------------------------------------


def test_times_are_measured_by_size() -> None:
    """It takes 5 ms and 5 ms more per item; what there is no time for is estimated."""

    @function(inputs={"x0": "FP32[-1]"})
    def slow(x0):  # type: ignore[no-untyped-def]
        time.sleep(0.005 + 0.005 * len(x0))
        return x0

    times = measure(runner(slow), 8, 200_000_000)
    assert len(times) == 8
    assert list(times) == sorted(times)
    assert times[0] >= 10e6
    assert times[7] >= 45e6
    assert len(measure(runner(slow), 1000, 1)) == 1000


def test_measuring_stops_where_it_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    @function(inputs={"x0": "FP32[-1]"})
    def narrow(x0):  # type: ignore[no-untyped-def]
        if len(x0) > 3:
            raise MemoryError
        return x0

    assert len(measure(runner(narrow, is_idempotent=False), 8, 10**8)) == 2
    capsys.readouterr()


def test_nothing_is_measured_on_nothing() -> None:
    @function
    def unknown(x):  # type: ignore[no-untyped-def]
        return x

    assert measure(runner(unknown), 8, 10**8) == ()


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 9])
def test_all_sizes_get_a_time(batch: int) -> None:
    assert sizes(batch)[0] == 1
    assert sizes(batch)[-1] == batch
    assert len(fill({size: size * 10 for size in sizes(batch)}, batch)) == batch
    assert fill({1: 10}, batch) == tuple(10 * size for size in range(1, batch + 1))


# --- the stock -----------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "counted_code", raising=False)
    (tmp_path / "counted_code.py").write_text(COUNTED)
    return tmp_path


def stock_of(base: Path, memory: str, **functions: str) -> Stock:
    loaded = declare(
        functions={
            name: {"code": f"counted_code:{cls}", "exec": "1ms", "memory": "3GB"}
            for name, cls in functions.items()
        },
        pools={"cpu": {"memory": memory}},
    )
    stock = Stock(loaded.app, loaded.sources, loaded.app.pools[0], str(base))
    stock.variants = loaded.app.variants  # type: ignore[attr-defined]
    return stock


def test_a_model_is_kept_until_its_memory_is_needed(base: Path) -> None:
    stock = stock_of(base, "7GB", a="Heavy", b="Heavy", c="Heavy")
    a, b, c = stock.variants  # type: ignore[attr-defined]
    first = stock.take(a)
    stock.give(a, first, keep=True)
    assert stock.take(a) is first
    assert stock.take(a) is not first  # each instance has one of its own
    stock.give(a, first, keep=True)
    log = sys.modules["counted_code"].log
    assert log == ["load", "load"]
    stock.take(b)
    assert log == ["load", "load", "unload", "load"]
    with pytest.raises(ConfigError):
        Stock(stock._app, (None,) * 3, stock._pool, str(base)).take(c)


def test_when_memory_runs_out_what_is_kept_makes_way(base: Path) -> None:
    stock = stock_of(base, "unlimited", a="Heavy", b="Tight")
    a, b = stock.variants  # type: ignore[attr-defined]
    stock.give(a, stock.take(a), keep=True)
    stock.take(b)
    assert sys.modules["counted_code"].log == ["load", "try", "unload", "try"]


def test_what_does_not_say_its_size_has_the_pool_to_itself_until_it_is_known(base: Path) -> None:
    """It might take everything. Afterwards as many are kept as fit beside the worker itself."""
    loaded = declare(
        functions={n: {"code": "counted_code:Heavy", "exec": "1ms"} for n in ("a", "b", "c")},
        pools={"cpu": {"memory": "300MB"}},
    )
    pool = loaded.app.pools[0]
    stock = Stock(loaded.app, loaded.sources, pool, str(base), own_bytes=50_000_000)
    for variant in loaded.app.variants:
        runner = stock.take(variant)
        assert stock.weigh(variant, 100_000_000) == 120_000_000  # so that just two fit 300 MB
        stock.give(variant, runner, keep=True)
    log = sys.modules["counted_code"].log
    assert log == ["load", "unload", "load", "unload", "load"]
    a, b, _ = loaded.app.variants
    del log[:]
    stock.take(a)
    assert log == ["load"]  # c is kept
    stock.take(b)
    assert log == ["load", "unload", "load"]


def test_what_is_larger_than_its_pool_is_named(base: Path) -> None:
    loaded = declare(
        functions={"a": {"code": "counted_code:Heavy", "exec": "1ms"}},
        pools={"cpu": {"memory": "300MB"}},
    )
    pool = loaded.app.pools[0]
    stock = Stock(loaded.app, loaded.sources, pool, str(base), own_bytes=50_000_000)
    with pytest.raises(ConfigError, match=r"^a: takes 250000000 bytes .* 250000000 on cpu, beside"):
        stock.weigh(loaded.app.variants[0], 250_000_000)
