"""The measuring loop: its clients, its stopping rule, and the interval of the median."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from headgate.functions import measure as measure_module
from headgate.functions.measure import SAMPLES_MAX, MeasureRequest, measure, median_interval


def request(concurrency: int, length_s: float = 0.2, precision: float = 1e-9) -> MeasureRequest:
    return MeasureRequest(concurrency, 1, length_s, 10, precision)


class Clock:
    """Fake clock of the measuring clients, on which only calls take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        monkeypatch.setattr(measure_module, "monotonic_ns", lambda: self.now_ns)

    def pass_ms(self, time_ms: int) -> None:
        self.now_ns += time_ms * 1_000_000


def test_concurrent_clients_of_one_core_queue() -> None:
    """One call at a time in FIFO order: with four clients each response takes 4 * 10 ms."""
    with ThreadPoolExecutor(1) as core:

        def call() -> None:
            core.submit(time.sleep, 0.01).result()

        single, concurrent = measure(call, request(1)), measure(call, request(4, 0.8))
    assert single.mean_ms >= 10
    assert concurrent.mean_ms > 30
    assert single.p50_low_ms is not None and single.p50_high_ms is not None
    assert single.p50_low_ms <= single.p50_ms <= single.p50_high_ms <= single.p99_ms


def test_first_call_is_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(monkeypatch), iter([1_000] + [1] * 10_000)
    assert measure(lambda: clock.pass_ms(next(calls)), request(1, length_s=2.0)).p99_ms == 1.0


def test_measurement_ends_at_target_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(measure_module, "_WARM_UP", 0.0)
    result = measure(lambda: clock.pass_ms(1), request(1, length_s=1e6, precision=0.5))
    assert result.samples == 10


def test_measurement_continues_while_the_interval_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is ten times slower at first: more samples are needed than of a steady one."""
    clock, calls = Clock(monkeypatch), iter([10] * 8 + [1] * 10_000)
    monkeypatch.setattr(measure_module, "_WARM_UP", 0.0)
    result = measure(lambda: clock.pass_ms(next(calls)), request(1, length_s=1e6, precision=0.2))
    assert 50 < result.samples < 10_000
    assert result.p50_low_ms is not None and result.p50_high_ms is not None
    assert result.p50_high_ms - result.p50_low_ms <= 2 * 0.2 * 1.5
    assert result.p50_ms == 1.0


def test_measurement_ends_at_maximum_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "_WARM_UP", 0.0)
    monkeypatch.setattr("os.sched_yield", lambda: None)  # other processes may take long
    result = measure(lambda: None, request(2, length_s=1e6, precision=-1.0))
    assert SAMPLES_MAX <= result.samples <= SAMPLES_MAX + 2


def test_call_longer_than_time_limit_is_measured_once_per_client() -> None:
    result = measure(lambda: time.sleep(0.06), request(3, length_s=0.02))
    assert result.samples >= 3
    assert result.p50_ms > 55


def test_model_exceptions_propagate() -> None:
    def call() -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError):
        measure(call, request(2))


def test_correlated_times_widen_the_interval() -> None:
    """The same values, once mixed and once with all slow ones in a row."""
    mixed, in_a_row = [1.0, 2.0] * 50, [1.0] * 50 + [2.0] * 50
    assert median_interval(mixed).high - median_interval(mixed).low < 1e-9
    assert median_interval(in_a_row).high - median_interval(in_a_row).low > 0.5
