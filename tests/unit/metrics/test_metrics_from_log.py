"""Columns of an event log, and the calibration from them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.config import from_spec
from headgate.core.actions import Action, Dispatch, Settle, StartInstance
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogEntry
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    Event,
    InstanceStarted,
    NodeJoined,
    RequestArrived,
    RequestCancelled,
)
from headgate.core.model import (
    ONE_CPU_MILLI,
    App,
    Client,
    FaasPlatform,
    Function,
    Host,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.records import STAGES_MAX
from headgate.core.states import Outcome, Settlement
from headgate.metrics.from_log import (
    VALUES_MAX,
    CalibrationResult,
    LoggedColumns,
    calibrate,
    calibrated,
    factors_by_size,
    group_starts,
    quantile_bin_means,
    read_columns,
)

MS = 1_000_000
BEGINS_NS = 7_000 * MS  # on the monotonic clock of a machine
VARIANT = Variant(0, "f", 0, (0,), Profile(exec_ns=(10 * MS, 20 * MS)))
FUNCTION = Function(0, "f", (VARIANT,))
APP = App(
    functions=(FUNCTION,),
    pipelines=(Pipeline(0, "f", (Stage(FUNCTION),), Slo(latency_ns=100 * MS)),),
    pools=(Pool(0, "local"),),
    clients=(Client(0, "client", 1.0),),
)


def dispatch(batch_id: int, *requests: int, node: int = 0) -> Dispatch:
    tasks = [request * STAGES_MAX for request in requests]
    return Dispatch(batch_id, 0, tasks, len(tasks), 0, node, 0)


def read(*happened: tuple[int, Event, list[Action]]) -> LoggedColumns:
    """Read a log of these events, with their times in milliseconds."""
    entries = [
        LogEntry(seq, BEGINS_NS + at_ms * MS, event, actions)
        for seq, (at_ms, event, actions) in enumerate(happened)
    ]
    return read_columns(entries, APP)


def day() -> LoggedColumns:
    """An instance starts while a request waits; two more run in one batch; the last batch fails."""
    return read(
        (0, NodeJoined(0, 0, "local1"), [StartInstance(0, 0, 0, 0)]),
        (5, RequestArrived(0, 0), [dispatch(0, 0)]),
        (30, InstanceStarted(0, 0), []),
        (42, BatchFinished(0), [Settle(0, Settlement(Outcome.MET))]),
        (50, RequestArrived(1, 0), []),
        (
            50,
            RequestArrived(2, 0, deadline_ns=BEGINS_NS + 60 * MS, is_hard=True),
            [dispatch(1, 1, 2)],
        ),
        (
            80,
            BatchFinished(1),
            [Settle(1, Settlement(Outcome.MET)), Settle(2, Settlement(Outcome.LATE))],
        ),
        (90, RequestArrived(3, 0), [dispatch(2, 3)]),
        (95, BatchFailed(2, "broken"), [dispatch(3, 3)]),
    )


def test_request_columns_of_a_log() -> None:
    requests = day().requests
    assert (requests.arrival_ns // MS).tolist() == [5, 50, 50, 90]
    assert (requests.started_ns // MS).tolist() == [5, 50, 50, 90]
    assert requests.finished_ns.tolist() == [42 * MS, 80 * MS, 80 * MS, NEVER_NS]
    assert (requests.deadline_ns // MS).tolist() == [105, 150, 60, 190]
    assert requests.outcome.tolist() == [
        *(Outcome.MET, Outcome.MET, Outcome.LATE),
        Outcome.CANCELLED,  # still open when the log ends
    ]
    assert requests.attempts.tolist() == [1, 1, 1, 2]
    assert requests.cold.tolist() == [1, 0, 0, 0]
    assert (requests.pool.tolist(), requests.node.tolist()) == ([0] * 4, [0] * 4)
    assert day().timeout_ns.tolist() == [0, 0, 10 * MS, 0]


def test_batch_columns_of_a_log() -> None:
    batches = day().batches
    assert ((batches.ended_ns - batches.sent_ns) // MS).tolist() == [37, 30, 5]
    assert batches.items.tolist() == [1, 2, 1]
    assert batches.cold.tolist() == [1, 0, 0]
    assert batches.finished.tolist() == [1, 1, 0]


def test_starts_of_a_log() -> None:
    assert day().start_ns == {0: 30 * MS}
    unfinished = read((0, NodeJoined(0, 0, "local1"), [StartInstance(0, 0, 0, 0)]))
    assert unfinished.start_ns == {}


def test_calibration_uses_only_warm_finished_batches() -> None:
    (truth,) = calibrate(APP, day().batches)
    assert (truth.function, truth.batches, truth.sizes) == ("f", 1, (2,))
    # A batch of 2 takes 30 ms, 10 more than its profile, and so would a batch of 1.
    assert truth.factors == {1: (2.0,), 2: (1.5,)}


def test_an_empty_log_and_one_with_unknown_ids() -> None:
    assert len(read().requests) == len(read().batches) == 0
    assert calibrate(APP, read().batches) == []
    with pytest.raises(ConfigError, match="pipeline: 7: does not exist"):
        read((0, RequestArrived(0, 7), []))
    settled_twice = read((0, BatchFinished(9), [Settle(4, Settlement(Outcome.MET))]))
    assert len(settled_twice.requests) == 0


def test_calibrated_application_file() -> None:
    spec: dict[str, object] = {"functions": {"f": {"exec_time": "10ms"}}, "simulation": {}}
    changed = calibrated(spec, calibrate(APP, day().batches), client_overheads_ns=[400_000])
    assert changed["simulation"] == {
        "service_times": {"distribution": "observed", "observed": {"f": {1: [2.0], 2: [1.5]}}},
        "overheads": {"arrival": "0ns", "refusal": "0ns", "client_overhead": "400000ns"},
    }
    assert spec["simulation"] == {}


def test_calibration_tells_small_batches_from_large_ones() -> None:
    """What a batch costs besides its function is most of the time of a small one."""
    items = np.array([1] * 30 + [2] * 5 + [8] * 25 + [9], np.int32)
    took = np.where(items < 8, 3.0, 1.2)
    assert group_starts(items) == [1, 2]
    found = factors_by_size(items, took, [1] * 9)
    # Those of 8 are many; the rare ones of 2 and 9 share what their neighbours have.
    both = {3.0, 1.2}
    assert {size: set(factors) for size, factors in found.items()} == {
        1: {3.0}, 2: both, 8: {1.2}, 9: both
    }  # fmt: skip
    result = CalibrationResult("f", len(items), 2.0, 1.2, 3.0, found, (1, 2, 8, 9))
    spec = calibrated({"functions": {"f": {"exec_time": ["1ms"] * 9}}}, [result], [1_000, 2_000])
    options = from_spec(spec, "here").simulation
    assert options.client_overheads_ns == (1_000, 2_000)
    assert [size for size, _ in options.observed[0]] == [1, 2, 8, 9]


def test_a_size_that_was_never_seen_takes_as_much_besides_its_profile() -> None:
    """Batches of 1 take 35 ms instead of 10: one of 8 takes 61 ms then, and not 126."""
    exec_ns = [10, 14, 18, 21, 25, 29, 32, 36]
    found = factors_by_size(np.ones(30, np.int32), np.full(30, 3.5), exec_ns)
    times = [round(at(found, size) * exec_ns[size - 1]) for size in range(1, 9)]
    assert times == [exec + 25 for exec in exec_ns]
    faster = factors_by_size(np.ones(30, np.int32), np.full(30, 0.5), exec_ns)
    assert at(faster, 1) == at(faster, 8) == 0.5


def test_sizes_between_those_that_were_seen_are_interpolated() -> None:
    items = np.array([2] * 30 + [6] * 30, np.int32)
    found = factors_by_size(items, np.where(items == 2, 2.0, 1.2), [10] * 8)
    expected = [2.0, 2.0, 1.8, 1.6, 1.4, 1.2, 1.2, 1.2]
    assert [at(found, size) for size in range(1, 9)] == pytest.approx(expected)


def test_rare_sizes_share_a_time_and_not_a_ratio() -> None:
    """Batches of 1 and of 4 take 5 ms more than their profile, and those of 4 are rare."""
    items = np.array([1] * 30 + [4] * 5, np.int32)
    expected = np.where(items == 1, 10.0, 40.0)
    found = factors_by_size(items, (expected + 5) / expected, [10, 20, 30, 40])
    assert group_starts(items) == [1]
    assert [at(found, size) for size in (1, 2, 4)] == pytest.approx([1.5, 1.25, 1.125])


def at(found: dict[int, tuple[float, ...]], size: int) -> float:
    """The mean factor of a batch size."""
    return float(np.mean(found[max(start for start in found if start <= size)]))


def test_batches_that_shared_a_node_count_as_if_alone() -> None:
    """Two batches at once take twice as long, by the profile: one began when the other was half."""
    variant = Variant(0, "f", 0, (0,), Profile(exec_ns=(10 * MS,), slowdown=(1.0, 2.0)))
    function = Function(0, "f", (variant,))
    app = replace(
        APP,
        functions=(function,),
        pipelines=(Pipeline(0, "f", (Stage(function),)),),
        pools=(Pool(0, "local", slots=2),),
    )
    happened: list[tuple[int, Event, list[Action]]] = [
        (0, NodeJoined(0, 0, "local1"), []),
        (1, RequestArrived(0, 0), [dispatch(0, 0)]),
        (6, RequestArrived(1, 0), [dispatch(1, 1)]),
        (16, BatchFinished(0), []),
        (21, BatchFinished(1), []),
        (30, RequestArrived(2, 0), [dispatch(2, 2)]),
        (40, BatchFinished(2), []),
    ]
    entries = [
        LogEntry(n, ms * MS, event, actions) for n, (ms, event, actions) in enumerate(happened)
    ]
    batches = read_columns(entries, app).batches
    assert (batches.alone_ns // MS).tolist() == [10, 10, 10]
    assert batches.concurrency.tolist() == [2, 2, 1]
    (result,) = calibrate(app, batches)
    assert (result.mean, result.p99) == (1.0, 1.0)


def test_a_batch_that_failed_for_a_task_is_not_calibrated_with() -> None:
    """It ended after a millisecond, because the function raised an error."""
    happened: list[tuple[int, Event, list[Action]]] = [(0, NodeJoined(0, 0, "local1"), [])]
    for n, (took_ms, failed) in enumerate([(10, ()), (1, (STAGES_MAX,)), (10, ())]):
        happened.append((100 * n, RequestArrived(n, 0), [dispatch(n, n)]))
        happened.append((100 * n + took_ms, BatchFinished(n, failed_tasks=failed), []))
    entries = [
        LogEntry(n, ms * MS, event, actions) for n, (ms, event, actions) in enumerate(happened)
    ]
    assert read_columns(entries, APP).batches.finished.tolist() == [1, 0, 1]


def test_batches_that_shared_a_host_count_as_if_alone() -> None:
    """A simulation on one CPU that two nodes and calls share is calibrated as it was profiled."""
    host = Host(0, "laptop", ONE_CPU_MILLI)
    variant = Variant(0, "f", 0, (0, 1), Profile(exec_ns=(10 * MS,)))
    function = Function(0, "f", (variant,))
    cloud = Pool(1, "cloud", Tier.SERVERLESS, nodes=0, faas=FaasPlatform(1 << 30), host=host)
    app = replace(
        APP,
        functions=(function,),
        pipelines=(Pipeline(0, "f", (Stage(function),)),),
        pools=(Pool(0, "local", nodes=2, host=host), cloud),
    )
    happened: list[tuple[int, Event, list[Action]]] = [
        (0, NodeJoined(0, 0, "local1"), []),
        (0, NodeJoined(1, 0, "local2"), []),
        (0, RequestArrived(0, 0), [dispatch(0, 0)]),
        (4, RequestArrived(1, 0), [dispatch(1, 1, node=1)]),
        (8, RequestArrived(2, 0), [Dispatch(2, 0, [2 * STAGES_MAX], 1, 1, None, None)]),
        # The first has done 4, then half of 4, and then a third of 12: 10 ms.
        (20, BatchFinished(0), []),
        # The second: half of 4, a third of 12, half of 8: 10 ms.
        (28, BatchFinished(1), []),
        # The call: a third of 12, half of 8, and 2 alone. A call counts whole.
        (30, BatchFinished(2), []),
    ]
    entries = [
        LogEntry(n, ms * MS, event, actions) for n, (ms, event, actions) in enumerate(happened)
    ]
    assert (read_columns(entries, app).batches.alone_ns // MS).tolist() == [10, 10, 22]


def test_what_requests_asked_for_is_kept() -> None:
    columns = read(
        (0, NodeJoined(0, 0, "local1"), []),
        (5, RequestArrived(0, 0, priority=3, cost_usd=0.5, payload_bytes=77), []),
        (6, RequestArrived(1, 0, deadline_ns=BEGINS_NS + 50 * MS, is_hard=True), []),
        (9, RequestCancelled(0), [Settle(0, Settlement(Outcome.CANCELLED))]),
    )
    assert columns.priority.tolist() == [3, 0]
    assert columns.cost_usd.tolist() == [0.5, 0.0]
    assert columns.payload_bytes.tolist() == [77, 0]
    assert columns.timeout_ns.tolist() == [0, 44 * MS]
    assert columns.cancel_ns.tolist() == [4 * MS, 0]


@given(st.lists(st.integers(1, 32), min_size=1, max_size=200), st.integers(1, 40))
@example(sizes=[1, 1, 2], group_min=2)
def test_every_batch_is_in_one_group_of_sizes(sizes: list[int], group_min: int) -> None:
    """Each group has enough batches, unless there is one group only, and keeps its mean.

    A size with enough batches of its own keeps its own mean.
    """
    items = np.array(sizes, np.int32)
    starts = group_starts(items, group_min)
    found = factors_by_size(items, items.astype(np.float64), [1], group_min)
    assert starts[0] == min(sizes)
    for start, end in pairwise([*starts, 99]):
        group = [size for size in sizes if start <= size < end]
        assert len(group) >= group_min or len(starts) == 1
        alike = [start] if sizes.count(start) >= group_min else group
        assert at(found, start) == pytest.approx(np.mean(alike), rel=1e-3)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=1_000))
def test_quantile_bin_means_keep_mean_and_order(values: list[float]) -> None:
    likely = quantile_bin_means(np.sort(np.array(values)))
    assert len(likely) == min(len(values), VALUES_MAX)
    assert np.mean(likely) == pytest.approx(np.mean(values), rel=1e-3)
    assert all(a <= b * 1.001 for a, b in pairwise(likely))
    assert min(values) * 0.999 <= likely[0] and likely[-1] <= max(values) * 1.001
