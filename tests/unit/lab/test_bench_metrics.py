"""The benchmark of metrics compares recorders that count the same."""

from __future__ import annotations

from headgate.lab.bench.metrics import PrometheusRecorder, make_app, make_calls
from headgate.live.telemetry.metrics import Metrics


def test_both_recorders_count_the_same_requests() -> None:
    app, calls = make_app(), make_calls(500)
    ours, peer = Metrics(app), PrometheusRecorder(app)
    for call in calls:
        ours.settled(call)
        peer.settled(call)
    ours.fold()
    assert sum(row[0] for row in ours.counted()) == peer.count() == 500
    assert sum(int(model.batch.counts.sum()) for model in ours.models) == sum(
        call.batch_items > 0 for call in calls
    )
