"""Traces of requests, by OpenTelemetry if it is installed and enabled; otherwise none.

A request is one span, with child spans for queueing and execution. They are created when the
request has ended, from the timestamps of its call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headgate.live.telemetry.spans import SpanTracer

_LOG: Final = logging.getLogger(__name__)

# Any of these variables enables tracing. The specification would export to this machine by default,
# but a server that logs an error every few seconds because nothing listens there is worse.
_ENABLING_VARIABLES: Final = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)


def make_tracer(
    models: Sequence[str], environment: Mapping[str, str] = os.environ
) -> SpanTracer | None:
    """Return the tracer that the `OTEL_*` variables configure; None if they enable none.

    `models` are names by pipeline id. Raises `ConfigError` for an unknown exporter. Whole clusters
    set those variables, so a missing OpenTelemetry package is only a warning.
    """
    wanted = _exporters_wanted(environment)
    if not wanted:
        return None
    try:
        from headgate.live.telemetry.spans import export_spans  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as missing:
        _LOG.warning(
            "OTEL_* variables enable traces, which need headgate[otel]: %s is not installed",
            missing.name,
        )
        return None
    return export_spans(wanted, environment, models)


def _exporters_wanted(environment: Mapping[str, str]) -> list[str]:
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or not any(environment.get(name) for name in _ENABLING_VARIABLES):
        return []
    names = environment.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    return [
        name for name in (part.strip() for part in names.split(",")) if name not in ("", "none")
    ]
