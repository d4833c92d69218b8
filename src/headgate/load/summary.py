"""A load run in numbers: those of every run, and what only a client can know."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import nan
from typing import Final

import numpy as np

from headgate.core.clock import MICROSECOND_NS, MILLISECOND_NS, NEVER_NS
from headgate.core.outcome import Outcome
from headgate.load.result import LoadResult
from headgate.load.rows import TROUBLE_NAMES, Trouble
from headgate.metrics.columns import Int64
from headgate.metrics.percentile import nearest_rank
from headgate.metrics.summary import Summary, summarise

# The sender's own lateness is part of every latency. Below these it is lost in them.
_LAG_SHARE_MAX: Final = 0.25
_LAG_MS_MAX: Final = 1.0
_TOOK_NO_TIME_NS: Final = 100 * MICROSECOND_NS


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """What is not a number had nothing to count."""

    run: Summary
    offered_rps: float
    answers: dict[str, int]  # by status, or by why there was none
    rejected_p50_ms: float  # how soon a rejected request was told so
    rejected_p99_ms: float
    connections: int
    waited_for_connection: int  # requests that found no free connection
    connection_wait_p99_ms: float  # of all requests that were sent
    lag_p50_ms: float  # how far the sender was behind its own schedule
    lag_p99_ms: float
    lag_max_ms: float
    is_doubtful: bool  # the sender was so late that it measured itself
    timings_p50_ms: dict[str, float]  # the parts that the server names

    def to_json(self) -> dict[str, object]:
        """Return plain dicts, lists and numbers; the summary's own come first."""
        rest = asdict(self)
        del rest["run"]
        return {**self.run.to_json(), "load": rest}


def summarise_load(result: LoadResult) -> LoadSummary:
    """Condense a run."""
    run = summarise(result.to_run())
    rejected_ns = result.latency_ns[result.outcome == Outcome.REJECTED]
    rejected_p50_ms, rejected_p99_ms, _ = _spread_ms(rejected_ns)
    lag_p50_ms, lag_p99_ms, lag_max_ms = _spread_ms(result.lag_ns)
    waits_ns = result.connection_wait_ns
    return LoadSummary(
        run=run,
        offered_rps=len(result) * 1e9 / result.window_ns if result.window_ns else 0.0,
        answers=_answers(result),
        rejected_p50_ms=rejected_p50_ms,
        rejected_p99_ms=rejected_p99_ms,
        connections=result.connections,
        waited_for_connection=int(np.count_nonzero(waits_ns > _TOOK_NO_TIME_NS)),
        connection_wait_p99_ms=_spread_ms(waits_ns)[1],
        lag_p50_ms=lag_p50_ms,
        lag_p99_ms=lag_p99_ms,
        lag_max_ms=lag_max_ms,
        is_doubtful=lag_p99_ms > max(_LAG_MS_MAX, _LAG_SHARE_MAX * run.p99_ms),
        timings_p50_ms={
            name: _spread_ms(column[column != NEVER_NS])[0]
            for name, column in result.timings_ns.items()
        },
    )


def _answers(result: LoadResult) -> dict[str, int]:
    """Count answers by status, the most frequent first."""
    counts = Counter(result.status[result.trouble == Trouble.NONE].tolist())
    answers = {str(status): count for status, count in counts.most_common()}
    for trouble, count in Counter(result.trouble.tolist()).most_common():
        if trouble != Trouble.NONE:
            answers[TROUBLE_NAMES[trouble]] = count
    return answers


def _spread_ms(values_ns: Int64) -> tuple[float, float, float]:
    """Return median, 99th percentile and maximum."""
    if not len(values_ns):
        return nan, nan, nan
    p50_ns, p99_ns, most_ns = nearest_rank(values_ns, (500, 990, 1000))
    return p50_ns / MILLISECOND_NS, p99_ns / MILLISECOND_NS, most_ns / MILLISECOND_NS
