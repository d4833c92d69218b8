"""Loads models, and caches those that are loaded and not used by any instance.

A function that cannot be loaded must not harm others on the same worker. It is loaded at most once
per back-off interval, however often a start is requested. If its load has killed a worker, or took
long to fail, it is first loaded in a separate process (`trial_load`), and in the worker only after
that has succeeded.

A gateway that restarts finds its models in the cache and need not wait for weights. Cached models
are evicted when their memory is needed. The size of a model that does not declare it is known only
after its first load; until then it is assumed to need all memory.

Where a shape is chosen at dispatch, a function is loaded for all its shapes at once: to load one of
them with the first batch that needs it would make that batch late. Where an instance starts with
its shape, it is loaded for that one.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic_ns
from typing import Final, final

from headgate.config.options import VariantSource
from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError, error_text
from headgate.core.model import UNLIMITED, App, Compute, Pool, Variant
from headgate.functions.loader import LoadedFunction, load_function
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
@dataclass(eq=False)
class Loader:
    """Loads the functions of one worker. Thread-safe."""

    app: App
    sources: Sequence[VariantSource | None]
    base: str
    node_id: int
    markers: CrashMarkers

    def __post_init__(self) -> None:
        self._failures: dict[int, _Failure] = {}  # by variant id
        self._trial_of: int | None = None  # the variant whose trial is running

    def load(
        self, variant: Variant, core_counts: Sequence[int], make_room: Callable[[], bool]
    ) -> LoadedFunction:
        """Load a function for batches on these numbers of cores. Raises `LoadError`.

        If memory runs out, `make_room` is called, and the load is repeated if it has freed any.
        """
        began_ns = monotonic_ns()
        app, sources, base = self.app, self.sources, self.base
        try:
            with self.markers.during(LOAD, self.node_id, variant.id):
                try:
                    loaded = load_function(app, sources, base, variant, core_counts)
                except MemoryError:
                    if not make_room():
                        raise
                    loaded = load_function(app, sources, base, variant, core_counts)
        except BaseException as error:  # a model may raise anything
            reason = self.record_failure(variant, error)
            if monotonic_ns() - began_ns > FAST_FAILURE_NS:
                self.markers.mark_suspect(LOAD, variant.id, reason)
            raise LoadError(reason) from None
        self._failures.pop(variant.id, None)
        return loaded

    def record_failure(self, variant: Variant, error: BaseException) -> str:
        """Record that a function cannot be loaded; return why."""
        reason = failure_reason(error, variant.name)
        if not log_once(self.markers, variant.name, reason, error):
            _LOG.warning("%s: still cannot be loaded: %s", variant.name, reason)
        self._back_off(variant, reason)
        return reason

    def suspect_reason(self, variant: Variant) -> str:
        """Return why a function must not be loaded in this process; empty if it may be."""
        return self.markers.suspect_reason(LOAD, variant.id)

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
            self.markers.mark_suspect(LOAD, variant.id, reason)
            self._back_off(variant, reason)
        else:
            _LOG.info("%s: can be loaded again", variant.name)
            self._failures.pop(variant.id, None)
            self.markers.clear_suspect(LOAD, variant.id)

    def _backoff_reason(self, variant: Variant) -> str:
        failure = self._failures.get(variant.id)
        return failure.reason if failure and monotonic_ns() < failure.retry_ns else ""

    def _back_off(self, variant: Variant, reason: str) -> None:
        before = self._failures.get(variant.id)
        count = 0 if before is None else before.count
        wait_ns = BACKOFF_NS[min(count, len(BACKOFF_NS) - 1)]
        self._failures[variant.id] = _Failure(count + 1, reason, monotonic_ns() + wait_ns)


def log_once(markers: CrashMarkers, name: str, reason: str, error: BaseException) -> bool:
    """Log a load failure with its traceback unless a worker has; return whether it was new."""
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


@final
class ModelCache:
    """Loads models and caches unused ones, evicting the least recently used. Thread-safe."""

    def __init__(
        self,
        app: App,
        pool: Pool,
        loader: Loader,
        *,
        own_bytes: int = 0,  # memory of the process without any model
        cores: int | None = None,  # that the process may use; by default all of its affinity
    ) -> None:
        self._loader = loader
        self._pool = pool
        self._cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._own_bytes = own_bytes
        # By variant id; None: unknown.
        self._sizes_bytes = [variant.profile.memory_bytes or None for variant in app.variants]
        self._in_use: Counter[int] = Counter()  # instances by variant id
        self._cached: list[tuple[Variant, LoadedFunction]] = []  # least recently used first
        self._lock = Lock()

    def cores_of(self, variant: Variant, shape_id: int) -> int:
        """Return the cores of a batch in a shape, and so its threads; 0: all of the process.

        At most those that the process may use: more threads would only wait for each other.
        """
        return min(variant.shapes[shape_id].shape.cores, self._cores)

    def acquire(self, variant: Variant, shape_id: int = 0) -> LoadedFunction:
        """Return a function for the exclusive use of an instance. Raises `LoadError`.

        `shape_id` is the shape of the instance, which counts where instances have one.
        """
        core_counts = self._core_counts(variant, shape_id)
        with self._lock:
            cached = self._find(variant, core_counts)
            if cached is not None:
                self._cached.remove(cached)
            self._in_use[variant.id] += 1
        if cached is not None:
            return cached[1]
        self.evict_for(variant)
        self._evict_excess()
        try:
            return self._loader.load(variant, core_counts, self.clear)
        except BaseException:
            with self._lock:
                self._in_use[variant.id] -= 1
            raise

    def size_bytes(self, variant: Variant) -> int:
        """Return the size of a model, declared or measured; 0 if it is unknown."""
        return self._sizes_bytes[variant.id] or 0

    def has(self, variant: Variant, shape_id: int = 0) -> bool:
        with self._lock:
            return self._find(variant, self._core_counts(variant, shape_id)) is not None

    def release(self, variant: Variant, loaded: LoadedFunction, *, keep: bool) -> None:
        """Return a function: to the cache with `keep`, else its models are unloaded."""
        with self._lock:
            self._in_use[variant.id] -= 1
            if keep:
                self._cached.append((variant, loaded))
        if keep:
            self._evict_excess()
        else:
            loaded.unload()

    def evict_for(self, variant: Variant) -> None:
        """Evict everything for a model of unknown size, if the pool limits memory."""
        if self._sizes_bytes[variant.id] is None and self._pool.memory_bytes < UNLIMITED:
            self.clear()

    def record_size(self, variant: Variant, size_bytes: int) -> int:
        """Record the measured size of a model that declares none; return its share of the pool's
        memory.

        The process itself needs memory too, so the size is scaled up: models that fit the pool also
        fit beside the process. Raises `ConfigError` if this model can never fit.
        """
        limit_bytes = self._pool.memory_bytes
        if limit_bytes >= UNLIMITED:
            return size_bytes
        room_bytes = limit_bytes - self._own_bytes
        if self._sizes_bytes[variant.id] is None:
            if size_bytes >= room_bytes:
                problem = f"takes {size_bytes} bytes of memory"
                allowed = f"{room_bytes} on {self._pool.name}, beside the worker itself"
                raise ConfigError(problem, where=variant.name, allowed=allowed)
            self._sizes_bytes[variant.id] = size_bytes
        return size_bytes * limit_bytes // max(1, room_bytes)

    def clear(self) -> bool:
        """Evict everything; return whether there was anything."""
        with self._lock:
            evicted, self._cached = self._cached, []
        if not evicted:
            return False
        while evicted:
            evicted.pop()[1].unload()
        gc.collect()  # the memory is needed now
        return True

    def _core_counts(self, variant: Variant, shape_id: int) -> tuple[int, ...]:
        """Return the cores that batches of an instance may have, those of its own shape first."""
        cores = [self.cores_of(variant, shape_id)]
        if self._pool.compute == Compute.PER_BATCH:
            cores += [
                self.cores_of(variant, id)
                for id, times in enumerate(variant.shapes)
                if self._pool.has_room_for(times.shape)
            ]
        return tuple(dict.fromkeys(cores))

    def _find(
        self, variant: Variant, core_counts: tuple[int, ...]
    ) -> tuple[Variant, LoadedFunction] | None:
        for entry in self._cached:
            if entry[0] is variant and entry[1].core_counts == core_counts:
                return entry
        return None

    def _evict_excess(self) -> None:
        """Evict cached models until the rest fits the memory of the pool."""
        evicted = []
        with self._lock:
            held = self._in_use + Counter(variant.id for variant, _ in self._cached)
            held_bytes = sum((self._sizes_bytes[id] or 0) * count for id, count in held.items())
            while self._cached and held_bytes + self._own_bytes > self._pool.memory_bytes:
                variant, loaded = self._cached.pop(0)
                held_bytes -= self._sizes_bytes[variant.id] or 0
                evicted.append(loaded)
        for loaded in evicted:
            loaded.unload()
