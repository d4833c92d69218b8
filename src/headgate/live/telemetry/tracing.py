"""Traces of requests, by OpenTelemetry if it is installed and enabled; otherwise none.

A request is one span, with child spans for queueing and execution. They are created when the
request has ended, from the timestamps of its call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Final, Protocol, final

from headgate.live.call import Call

_LOG: Final = logging.getLogger(__name__)

# Any of these variables enables tracing. The specification would export to this machine by default,
# but a server that logs an error every few seconds because nothing listens there is worse.
_ENABLING_VARIABLES: Final = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)


class Tracer(Protocol):
    """Receives the start and end of every call."""

    @property
    def is_enabled(self) -> bool:
        """Whether calls are traced."""

    def begin(self, call: Call, traceparent: str | None = None) -> None:
        """Start the span of a call, within the trace of `traceparent` or `call.trace`, if any."""

    def end(self, call: Call, model: str) -> None:
        """End the span of a call; `call.trace` is unset afterwards."""

    def close(self) -> None:
        """Export the remaining spans."""


def make_tracer(environment: Mapping[str, str] = os.environ) -> Tracer:
    """Return the tracer that the `OTEL_*` variables configure. Raises `ConfigError` for an unknown
    exporter.

    Whole clusters set those variables, so a missing OpenTelemetry package is only a warning.
    """
    wanted = _exporters_wanted(environment)
    if not wanted:
        return NoTracer()
    try:
        from headgate.live.telemetry.spans import export_spans  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as missing:
        _LOG.warning(
            "OTEL_* variables enable traces, which need headgate[otel]: %s is not installed",
            missing.name,
        )
        return NoTracer()
    return export_spans(wanted, environment)


@final
class NoTracer:
    """Traces nothing."""

    is_enabled: Final = False

    def begin(self, call: Call, traceparent: str | None = None) -> None: ...

    def end(self, call: Call, model: str) -> None: ...

    def close(self) -> None: ...


def _exporters_wanted(environment: Mapping[str, str]) -> list[str]:
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or not any(environment.get(name) for name in _ENABLING_VARIABLES):
        return []
    names = environment.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    return [
        name for name in (part.strip() for part in names.split(",")) if name not in ("", "none")
    ]
