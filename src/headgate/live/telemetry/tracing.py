"""Traces of requests, for OpenTelemetry where it is installed and asked for; else nothing at all.

A request is one span, with what it waited and what it ran as spans within it. They are made when
the request has ended, from the times that its call holds anyway.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Final, Protocol, final

from headgate.live.call import Call

_LOG: Final = logging.getLogger(__name__)

# Any of these says that somebody wants traces. The specification would export to this machine
# without being asked; a server that complains every few seconds that nobody listens is worse.
_ENABLING_VARIABLES: Final = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)


class Tracer(Protocol):
    """What is told of every request."""

    @property
    def is_enabled(self) -> bool:
        """Whether there is any use in telling it."""

    def begin(self, call: Call, traceparent: str | None = None) -> None:
        """A call has come, perhaps from within somebody's trace: `traceparent`, or `call.trace`."""

    def end(self, call: Call, model: str) -> None:
        """It has ended, in whatever way; after this, `call.trace` is spent."""

    def close(self) -> None:
        """Send what is left."""


def make_tracer(environment: Mapping[str, str] = os.environ) -> Tracer:
    """What the `OTEL_*` variables ask for. Raises `ConfigError` for an exporter nobody knows.

    Whole clusters set those variables, so not having OpenTelemetry is worth a word and no more.
    """
    wanted = _exporters_wanted(environment)
    if not wanted:
        return NoTracer()
    try:
        from headgate.live.telemetry.spans import export_spans  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as missing:
        _LOG.warning(
            "OTEL_* asks for traces, which takes headgate[otel]: there is no %s", missing.name
        )
        return NoTracer()
    return export_spans(wanted, environment)


@final
class NoTracer:
    """Nobody wants to know."""

    is_enabled: Final = False

    def begin(self, call: Call, traceparent: str | None = None) -> None:
        """Nothing."""

    def end(self, call: Call, model: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _exporters_wanted(environment: Mapping[str, str]) -> list[str]:
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or not any(environment.get(name) for name in _ENABLING_VARIABLES):
        return []
    names = environment.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    return [
        name for name in (part.strip() for part in names.split(",")) if name not in ("", "none")
    ]
