"""The requests of a run as a Parquet file, for notebooks and SQL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.outcome import OUTCOME_NAMES
from headgate.metrics.columns import Int8, Int32, Int64, RunColumns

if TYPE_CHECKING:
    import pyarrow

_ROW_GROUP: Final = 1 << 20  # rows written at a time: bounds the memory


def write_parquet(path: Path, run: RunColumns) -> Path:
    """Write one row per request, named columns, `NEVER_NS` as null. Needs pyarrow."""
    try:
        import pyarrow.parquet  # noqa: PLC0415 - an extra, imported when it is asked for
    except ImportError:
        raise ConfigError("needs pyarrow: pip install headgate[parquet]", where=str(path)) from None
    schema = request_batch(run, slice(0, 0)).schema
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(0, len(run.requests), _ROW_GROUP):
            writer.write_batch(request_batch(run, slice(first, first + _ROW_GROUP)))
    return path


def request_batch(run: RunColumns, rows: slice) -> pyarrow.RecordBatch:
    """Return some of the requests as an Arrow record batch."""
    import pyarrow as pa  # noqa: PLC0415 - see write_parquet

    def instants(times_ns: Int64) -> pyarrow.Array:
        return pa.array(times_ns[rows], mask=times_ns[rows] == NEVER_NS)

    def names(index: Int8 | Int32, labels: tuple[str, ...]) -> pyarrow.Array:
        return pa.DictionaryArray.from_arrays(index[rows], pa.array(labels, pa.string()))

    requests = run.requests
    columns = {
        "request": pa.array(np.arange(*rows.indices(len(requests)), dtype=np.int64)),
        "arrival_ns": instants(requests.arrival_ns),
        "started_ns": instants(requests.started_ns),
        "finished_ns": instants(requests.finished_ns),
        "deadline_ns": instants(requests.deadline_ns),
        "outcome": names(requests.outcome, OUTCOME_NAMES),
        "pipeline": names(requests.pipeline, run.pipelines),
        "client": names(requests.client, run.clients),
        "attempts": pa.array(requests.attempts[rows]),
        "cold": pa.array(requests.cold[rows].astype(np.bool_)),
    }
    return pa.RecordBatch.from_pydict(columns)
