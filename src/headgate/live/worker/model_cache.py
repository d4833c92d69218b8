"""Model cache: models that are loaded and not used by any instance.

A gateway that restarts finds its models loaded and need not wait for weights. Cached models are
evicted when their memory is needed. The size of a model that does not declare it is known only
after its first load; until then it is assumed to need all memory.
"""

from __future__ import annotations

import gc
from collections import Counter
from threading import Lock
from typing import final

from headgate.core.errors import ConfigError
from headgate.core.model import UNLIMITED, App, Pool, Variant
from headgate.functions.batch_runner import BatchRunner
from headgate.live.worker.loading import Loader


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
    ) -> None:
        self._loader = loader
        self._pool = pool
        self._own_bytes = own_bytes
        # By variant id; None: unknown.
        self._sizes_bytes = [variant.profile.memory_bytes or None for variant in app.variants]
        self._in_use: Counter[int] = Counter()  # instances by variant id
        self._cached: list[tuple[Variant, BatchRunner]] = []  # least recently used first
        self._lock = Lock()

    def acquire(self, variant: Variant) -> BatchRunner:
        """Return a runner for the exclusive use of an instance. Raises `LoadError`."""
        with self._lock:
            cached = next((entry for entry in self._cached if entry[0] is variant), None)
            if cached is not None:
                self._cached.remove(cached)
            self._in_use[variant.id] += 1
        if cached is not None:
            return cached[1]
        self.evict_for(variant)
        self._evict_excess()
        try:
            return self._loader.load(variant, self.clear)
        except BaseException:
            with self._lock:
                self._in_use[variant.id] -= 1
            raise

    def has(self, variant: Variant) -> bool:
        """Whether an unused model of the variant is cached."""
        with self._lock:
            return any(entry[0] is variant for entry in self._cached)

    def release(self, variant: Variant, runner: BatchRunner, *, keep: bool) -> None:
        """Return a runner: to the cache with `keep`, else its model is unloaded."""
        with self._lock:
            self._in_use[variant.id] -= 1
            if keep:
                self._cached.append((variant, runner))
        if keep:
            self._evict_excess()
        else:
            runner.unload()

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

    def _evict_excess(self) -> None:
        """Evict cached models until the rest fits the memory of the pool."""
        evicted = []
        with self._lock:
            held = self._in_use + Counter(variant.id for variant, _ in self._cached)
            held_bytes = sum((self._sizes_bytes[id] or 0) * count for id, count in held.items())
            while self._cached and held_bytes + self._own_bytes > self._pool.memory_bytes:
                variant, runner = self._cached.pop(0)
                held_bytes -= self._sizes_bytes[variant.id] or 0
                evicted.append(runner)
        for runner in evicted:
            runner.unload()
