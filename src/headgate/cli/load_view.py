"""How a load run is shown: a line while it goes, tables when it is over."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from headgate.core.outcome import OUTCOME_NAMES
from headgate.load import LoadResult, LoadSummary, Standing
from headgate.metrics.sheet import Sheet, format_column, format_value
from headgate.metrics.tables import SheetTable


def standing_line(standing: Standing) -> str:
    """Return what the progress bar says.

    >>> standing_line(Standing(10**9, 200, 190, 195.0, (188, 2, 0, 0, 0, 0), 1.5, 3.25))
    '195/s  met 188  late 2  p50 1.50 ms  p99 3.25 ms'
    """
    counts = [
        f"{name} {count:,}"
        for name, count in zip(OUTCOME_NAMES, standing.outcomes, strict=True)
        if count
    ]
    times = [
        f"{name} {format_value('time_ms', value)}"
        for name, value in (("p50", standing.p50_ms), ("p99", standing.p99_ms))
    ]
    return "  ".join((f"{standing.rate_per_s:,.0f}/s", *counts, *times))


def load_lines(summary: LoadSummary, result: LoadResult) -> Iterator[RenderableType]:
    """Yield the outcomes, the latencies, and then whatever is out of the ordinary."""
    yield SheetTable(_outcomes(summary))
    yield SheetTable(_latencies(summary))
    answers = ", ".join(f"{name}: {count:,}" for name, count in summary.answers.items())
    yield Text(f"answers       {answers or 'none'}")
    run = summary.run
    rates = f"{_rate(run.goodput_rps)} in time, {_rate(run.throughput_rps)} in all"
    yield Text(f"answered      {rates}, of {_rate(summary.offered_rps)} sent")
    if run.rejected:
        yield Text(
            f"rejected      after {_ms(summary.rejected_p50_ms)} (p50),"
            f" {_ms(summary.rejected_p99_ms)} (p99)"
        )
    if summary.timings_p50_ms:
        parts = (f"{name} {_ms(value)}" for name, value in summary.timings_p50_ms.items())
        yield Text(f"in the server {', '.join(parts)} (p50)")
    waited = f", {summary.waited_for_connection:,} requests waited for one"
    waited += f" (p99 of all {_ms(summary.connection_wait_p99_ms)})"
    yield Text(
        f"connections   {summary.connections:,}{waited if summary.waited_for_connection else ''}"
    )
    if result.is_closed_loop:
        yield Text(
            "A closed loop hides queueing: users would wait longer than this says.", "yellow"
        )
        return
    lag = f"{_ms(summary.lag_p50_ms)} (p50), {_ms(summary.lag_p99_ms)} (p99)"
    yield Text(f"sender late   {lag}, {_ms(summary.lag_max_ms)} at most")
    if summary.is_doubtful:
        yield Text(
            "Doubtful: this process could not keep to its schedule, and its lateness is part of"
            " these latencies. Send less, or from a machine with an idle core.",
            "bold yellow",
        )


def _outcomes(summary: LoadSummary) -> Sheet:
    run = summary.run
    counts = (run.met, run.late, run.rejected, run.expired, run.failed, run.cancelled)
    rows = [
        (name, count)
        for name, count in zip(OUTCOME_NAMES, counts, strict=True)
        if count or name == "met"
    ]
    total = max(run.requests, 1)
    return Sheet(
        "Outcomes",
        (
            format_column("outcome", "text", [name for name, _ in rows]),
            format_column("requests", "count", [count for _, count in rows]),
            format_column("share", "share", [count / total for _, count in rows]),
        ),
    )


def _latencies(summary: LoadSummary) -> Sheet:
    run = summary.run
    values = (run.mean_ms, run.p50_ms, run.p90_ms, run.p99_ms, run.p999_ms)
    names = ("mean", "p50", "p90", "p99", "p99.9")
    label = format_column("", "text", ["latency"])
    columns = (
        format_column(name, "time_ms", [value]) for name, value in zip(names, values, strict=True)
    )
    return Sheet("Latency", (label, *columns))


def _ms(value_ms: float) -> str:
    return format_value("time_ms", value_ms)


def _rate(rate_per_s: float) -> str:
    return format_value("rate", rate_per_s)
