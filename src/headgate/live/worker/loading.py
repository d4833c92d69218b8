"""Loads models, with back-off and isolation for functions that cannot be loaded.

Such a function must not harm others on the same worker. It is loaded at most once per back-off
interval, however often a start is requested. If its load has killed a worker, or took long to fail,
it is first loaded in a separate process (`trial_load`), and in the worker only after that has
succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Final, final

from headgate.config.options import VariantSource
from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import App, Variant
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.error_text import error_text
from headgate.functions.loader import load_runner
from headgate.live.ipc.crash_markers import LOAD, CrashMarkers

_LOG: Final = logging.getLogger(__name__)

# Back-off between two loads, by the number of consecutive failures.
BACKOFF_NS: Final = tuple(seconds * SECOND_NS for seconds in (1, 2, 4, 8, 16, 30))
# A load that fails within this time is harmless. A slower one occupies a slot, so it becomes a
# suspect.
FAST_FAILURE_NS: Final = 10_000_000
# Times the execution timeout: loading may take longer than any batch.
LOAD_TIMEOUT_FACTOR: Final = 10


class LoadError(Exception):
    """A function cannot be loaded. The text is exception type and message, in one line."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Consecutive load failures of a function, the last reason, and when it may be retried."""

    count: int
    reason: str
    retry_ns: int


@final
class Loader:
    """Loads the functions of one worker. Thread-safe."""

    def __init__(
        self,
        app: App,
        sources: Sequence[VariantSource | None],
        base: str,
        node_id: int,
        markers: CrashMarkers,
    ) -> None:
        self._app = app
        self._sources = sources
        self._base = base
        self._node_id = node_id
        self._markers = markers
        self._failures: dict[int, _Failure] = {}  # by variant id
        self._trial_of: int | None = None  # the variant whose trial is running

    def load(self, variant: Variant, make_room: Callable[[], bool]) -> BatchRunner:
        """Load a model and return its runner. Raises `LoadError`.

        If memory runs out, `make_room` is called, and the load is repeated if it has freed any.
        """
        began_ns = monotonic_ns()
        try:
            with self._markers.during(LOAD, self._node_id, variant.id):
                try:
                    runner = load_runner(self._app, self._sources, self._base, variant)
                except MemoryError:
                    if not make_room():
                        raise
                    runner = load_runner(self._app, self._sources, self._base, variant)
        except BaseException as error:  # a model may raise anything
            reason = self.record_failure(variant, error)
            if monotonic_ns() - began_ns > FAST_FAILURE_NS:
                self._markers.mark_suspect(LOAD, variant.id, reason)
            raise LoadError(reason) from None
        self._failures.pop(variant.id, None)
        return runner

    def record_failure(self, variant: Variant, error: BaseException) -> str:
        """Record that a function cannot be loaded; return why."""
        reason = failure_reason(error, variant.name)
        if not log_once(self._markers, variant.name, reason, error):
            _LOG.warning("%s: still cannot be loaded: %s", variant.name, reason)
        self._back_off(variant, reason)
        return reason

    def suspect_reason(self, variant: Variant) -> str:
        """Return why a function must not be loaded in this process; empty if it may be."""
        return self._markers.suspect_reason(LOAD, variant.id)

    def block_reason(self, variant: Variant) -> str:
        """Return why a function is not loaded now, its last failure; empty if it may be loaded.

        Cheap enough to be called for every requested start.
        """
        return self._backoff_reason(variant) or self.suspect_reason(variant)

    def try_begin_trial(self, variant: Variant) -> bool:
        """Whether to start a trial of a blocked function now; if so, it counts as running."""
        if self._trial_of is not None or self._backoff_reason(variant):
            return False
        self._trial_of = variant.id
        return True

    def end_trial(self, variant: Variant, reason: str) -> None:
        """Record the end of a trial. `reason` says why it failed; empty if it succeeded."""
        self._trial_of = None
        if reason:
            _LOG.warning("%s: still cannot be loaded: %s", variant.name, reason)
            self._markers.mark_suspect(LOAD, variant.id, reason)
            self._back_off(variant, reason)
        else:
            _LOG.info("%s: can be loaded again", variant.name)
            self._failures.pop(variant.id, None)
            self._markers.clear_suspect(LOAD, variant.id)

    def _backoff_reason(self, variant: Variant) -> str:
        failure = self._failures.get(variant.id)
        return failure.reason if failure and monotonic_ns() < failure.retry_ns else ""

    def _back_off(self, variant: Variant, reason: str) -> None:
        before = self._failures.get(variant.id)
        count = 0 if before is None else before.count
        wait_ns = BACKOFF_NS[min(count, len(BACKOFF_NS) - 1)]
        self._failures[variant.id] = _Failure(count + 1, reason, monotonic_ns() + wait_ns)


def log_once(markers: CrashMarkers, name: str, reason: str, error: BaseException) -> bool:
    """Log a load failure with its traceback, unless a worker has logged it before; return whether
    it was new.
    """
    # The text of a `ConfigError` is complete, but its cause may be in the code of the user.
    cause = error.__cause__ if isinstance(error, ConfigError) else error
    if not markers.is_new_failure(f"{name}: {_raise_site(cause) or reason}"):
        return False
    _LOG.error("%s: cannot be loaded: %s", name, reason, exc_info=cause)
    return True


def _raise_site(error: BaseException | None) -> str:
    """Return the identity of a failure: the exception type and the line that raised it.

    The message is left out, because it may contain a timestamp.
    """
    trace = None if error is None else error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f"{type(error).__name__}, {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def failure_reason(error: BaseException, name: str) -> str:
    """Return why a function cannot be loaded: exception type and message.

    >>> failure_reason(OSError("no weights"), "f")
    'OSError: no weights'
    """
    if not isinstance(error, ConfigError):
        return error_text(error)
    kind = type(error.__cause__ or error).__name__
    return f"{kind}: {error_text(error).removeprefix('ConfigError: ').removeprefix(f'{name}: ')}"
