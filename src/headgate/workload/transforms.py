"""Transformations of arrivals. Each function returns a new `Arrivals`; inputs are not modified."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Final

import numpy as np

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload.arrivals import (
    DEFAULT_NAME,
    Arrivals,
    Int32,
    Int64,
    RequestTerms,
    check_positive,
    check_total,
    constant_column,
    no_terms,
    take_rows,
)
from headgate.workload.generators import column_stream, fill

SUPERPOSE_SHIFT_NS: Final = 5 * SECOND_NS  # longer than a queue remembers, shorter than most bursts


def rescale_rate(arrivals: Arrivals, factor: float, *, seed: int) -> Arrivals:
    """Return `factor` times the arrivals (on average, at any time), over the same duration.

    A factor below 1 keeps each arrival with that probability, which is the thinning of a point
    process. A factor above 1 adds copies of each arrival, `factor` in all on average, at random
    times before the next arrival; so a burst keeps its place and its length and becomes `factor`
    times as dense. Relative variations are kept, hence the index of dispersion grows with the
    factor. To keep the statistics of the inter-arrival times, use `scale_time` or `superpose`.
    """
    check_positive("factor", factor)
    check_total(len(arrivals) * factor)
    rng = column_stream(seed, "rescale_rate")
    whole = math.floor(factor)
    copies = whole + (rng.random(len(arrivals)) < factor - whole)
    rows = np.repeat(np.arange(len(arrivals)), copies)
    times_ns = arrivals.times_ns[rows]
    if whole:
        is_first = np.diff(rows, prepend=-1) != 0
        edges_ns = np.append(arrivals.times_ns, arrivals.duration_ns)
        times_ns[~is_first] = fill(edges_ns, copies - 1, rng)
    return _with_rows(arrivals, rows, times_ns, arrivals.duration_ns)


def superpose(arrivals: Arrivals, factor: float, *, seed: int) -> Arrivals:
    """Return `factor` times the arrivals, over the same duration, as of more clients of the kind.

    Each whole copy beyond the first is all of the arrivals, moved by a random time of up to
    `SUPERPOSE_SHIFT_NS`, forth or back, and wrapped round at the first and last arrival. Bursts
    that last longer keep their place and get `factor` times as dense; within a shorter time the
    copies are independent, as clients are: the superposition of Poisson arrivals is Poisson,
    where the copies of `rescale_rate` come in clusters. The part of a copy that is left, and any
    factor below 1, is thinned: a random subset, with the same share of each pipeline.
    """
    check_positive("factor", factor)
    check_total(len(arrivals) * factor)
    rng = column_stream(seed, "superpose")
    whole = math.floor(factor)
    copies = [arrivals] * min(whole, 1)
    copies += [_moved(arrivals, rng) for _ in range(whole - 1)]
    if factor > whole:
        part = _thinned(arrivals, factor - whole, rng)
        copies.append(_moved(part, rng) if whole else part)
    return copies[0] if len(copies) == 1 else mix(copies)


def _moved(arrivals: Arrivals, rng: np.random.Generator) -> Arrivals:
    if not len(arrivals):
        return arrivals
    first_ns = int(arrivals.times_ns[0])
    span_ns = int(arrivals.times_ns[-1]) - first_ns + 1
    most_ns = min(SUPERPOSE_SHIFT_NS, span_ns // 2)
    shift_ns = int(rng.integers(-most_ns, most_ns, endpoint=True))
    times_ns = (arrivals.times_ns - first_ns + shift_ns) % span_ns + first_ns
    rows = np.argsort(times_ns, kind="stable")
    return _with_rows(arrivals, rows, times_ns[rows], arrivals.duration_ns)


def _thinned(arrivals: Arrivals, share: float, rng: np.random.Generator) -> Arrivals:
    chosen: list[Int64] = []
    for index in range(len(arrivals.pipelines)):
        rows = np.flatnonzero(arrivals.pipeline == index)
        # Rounded at random, so that the mean is exact for the rarest pipeline too.
        count = math.floor(share * len(rows) + rng.random())
        chosen.append(rng.permutation(rows)[:count])
    rows = np.sort(np.concatenate(chosen))
    return _with_rows(arrivals, rows, arrivals.times_ns[rows], arrivals.duration_ns)


def scale_time(arrivals: Arrivals, factor: float) -> Arrivals:
    """Multiply all times by `factor`: 0.5 gives the same arrivals in half the time.

    Times are rounded to whole nanoseconds.
    """
    check_positive("factor", factor)
    duration_ns = max(round(arrivals.duration_ns * factor), 1 if len(arrivals) else 0)
    times_ns = np.rint(arrivals.times_ns * factor).astype(np.int64)
    np.minimum(times_ns, duration_ns - 1, out=times_ns)
    return _with_rows(arrivals, slice(None), times_ns, duration_ns)


def shift(arrivals: Arrivals, delta_ns: int) -> Arrivals:
    """Move all arrivals, and the end of the window, by `delta_ns`, which may be negative."""
    if delta_ns < 0 and len(arrivals) and arrivals.times_ns[0] < -delta_ns:
        problem = f"moves the first arrival, at {arrivals.times_ns[0]} ns, before 0"
        raise ConfigError(problem, key="delta_ns", value=delta_ns)
    duration_ns = max(arrivals.duration_ns + delta_ns, 0)
    return _with_rows(arrivals, slice(None), arrivals.times_ns + delta_ns, duration_ns)


def window(arrivals: Arrivals, start_ns: int, end_ns: int) -> Arrivals:
    """Return the arrivals in `[start_ns, end_ns)`, with `start_ns` as the new 0."""
    if not 0 <= start_ns < end_ns <= arrivals.duration_ns:
        allowed = f"start before end, within 0 to {arrivals.duration_ns}"
        raise ConfigError("is not a valid window", value=(start_ns, end_ns), allowed=allowed)
    first, last = np.searchsorted(arrivals.times_ns, (start_ns, end_ns))
    rows = slice(int(first), int(last))
    return _with_rows(arrivals, rows, arrivals.times_ns[rows] - start_ns, end_ns - start_ns)


def mix(parts: Sequence[Arrivals]) -> Arrivals:
    """Merge arrivals; equal names are the same pipeline or client. Ties keep the order of parts."""
    if not parts:
        raise ConfigError("nothing to mix")
    check_total(sum(map(len, parts)))
    times_ns = np.concatenate([part.times_ns for part in parts])
    # Timsort detects the sorted parts and merges them in linear time.
    rows = np.argsort(times_ns, kind="stable")
    pipelines = tuple(dict.fromkeys(name for part in parts for name in part.pipelines))
    clients = tuple(dict.fromkeys(name for part in parts for name in part.clients))
    has_items = any(part.items is not None for part in parts)
    has_priorities = any(part.priority is not None for part in parts)
    return Arrivals(
        times_ns[rows],
        max(part.duration_ns for part in parts),
        take_rows(_merge([(part.pipeline, part.pipelines) for part in parts], pipelines), rows),
        take_rows(_merge([(part.client, part.clients) for part in parts], clients), rows),
        pipelines,
        clients,
        np.concatenate([part.sizes for part in parts])[rows] if has_items else None,
        np.concatenate([part.priorities for part in parts])[rows] if has_priorities else None,
        _mix_terms(parts, rows),
    )


def _mix_terms(parts: Sequence[Arrivals], rows: Int64) -> RequestTerms | None:
    if all(part.terms is None for part in parts):
        return None
    terms = [part.terms or no_terms(len(part)) for part in parts]
    return RequestTerms(
        *(
            np.concatenate([getattr(t, column.name) for t in terms])[rows]
            for column in fields(RequestTerms)
        )
    )


def named(arrivals: Arrivals, pipeline: str = DEFAULT_NAME, client: str = DEFAULT_NAME) -> Arrivals:
    """Assign one pipeline and one client to all arrivals.

    >>> from headgate.workload.generators import deterministic
    >>> named(deterministic(5.0, 10**9), "ocr").pipelines
    ('ocr',)
    """
    return assign(arrivals, {pipeline: 1.0}, {client: 1.0}, seed=0)


def assign(
    arrivals: Arrivals,
    pipelines: Mapping[str, float],
    clients: Mapping[str, float] | None = None,
    *,
    seed: int,
) -> Arrivals:
    """Assign each arrival a random pipeline and client, in proportion to the weights."""
    clients = {DEFAULT_NAME: 1.0} if clients is None else clients
    return replace(
        arrivals,
        pipeline=_draw("pipelines", pipelines, len(arrivals), column_stream(seed, "pipelines")),
        client=_draw("clients", clients, len(arrivals), column_stream(seed, "clients")),
        pipelines=tuple(pipelines),
        clients=tuple(clients),
    )


def _with_rows(
    arrivals: Arrivals, rows: slice | Int64, times_ns: Int64, duration_ns: int
) -> Arrivals:
    return replace(
        arrivals,
        times_ns=times_ns,
        duration_ns=duration_ns,
        pipeline=take_rows(arrivals.pipeline, rows),
        client=take_rows(arrivals.client, rows),
        items=None if arrivals.items is None else arrivals.items[rows],
        priority=None if arrivals.priority is None else arrivals.priority[rows],
        terms=None if arrivals.terms is None else arrivals.terms.rows(rows),
    )


def _merge(columns: Sequence[tuple[Int32, tuple[str, ...]]], names: tuple[str, ...]) -> Int32:
    """Return the concatenated columns, as indices into `names`."""
    length = sum(len(column) for column, _ in columns)
    if len(names) == 1:
        return constant_column(length)
    index = {name: number for number, name in enumerate(names)}
    maps = [np.array([index[name] for name in own], dtype=np.int32) for _, own in columns]
    merged: Int32 = np.concatenate(
        [new[column] for new, (column, _) in zip(maps, columns, strict=True)]
    )
    return merged


def _draw(key: str, weights: Mapping[str, float], length: int, rng: np.random.Generator) -> Int32:
    shares = np.array(list(weights.values()), dtype=np.float64)
    if not (len(shares) and np.isfinite(shares).all() and shares.min() >= 0 and shares.sum() > 0):
        problem = "needs weights that are not negative, and one that is positive"
        raise ConfigError(problem, key=key, value=dict(weights))
    if len(shares) == 1:
        return constant_column(length)
    bounds = np.cumsum(shares)
    # Without the last bound a draw can never fall beyond the last name.
    draws = rng.random(length) * float(bounds[-1])
    return np.searchsorted(bounds[:-1], draws, side="right").astype(np.int32)
