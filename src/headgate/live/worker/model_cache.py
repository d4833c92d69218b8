"""The stock: models that are loaded and that no instance uses just now.

A gateway that comes back finds them as it left them, so it need not wait for weights. They leave
when their memory is needed. How much a model takes that does not say so is known once one of them
was loaded; until then it might take everything.
"""

from __future__ import annotations

import gc
from collections import Counter
from threading import Lock
from typing import final

from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.model import App, Pool, Variant
from headgate.live.worker.loading import Loader
from headgate.live.worker.runner import BatchRunner


@final
class ModelCache:
    """Has models loaded, and keeps those that are left over. Safe between threads."""

    def __init__(
        self,
        app: App,
        pool: Pool,
        loader: Loader,
        *,
        own_bytes: int = 0,  # what the process holds without any model
    ) -> None:
        self._loader = loader
        self._pool = pool
        self._own_bytes = own_bytes
        # By variant id; None: not known yet.
        self._sizes_bytes = [variant.profile.memory_bytes or None for variant in app.variants]
        self._in_use: Counter[int] = Counter()  # how many are in use, by variant id
        self._cached: list[tuple[Variant, BatchRunner]] = []  # longest unused first
        self._lock = Lock()

    def acquire(self, variant: Variant) -> BatchRunner:
        """Return a runner of its own for an instance. Raises `LoadError`."""
        with self._lock:
            cached = next((kept for kept in self._cached if kept[0] is variant), None)
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
        """Whether a model of it is there that needs no loading."""
        with self._lock:
            return any(kept[0] is variant for kept in self._cached)

    def release(self, variant: Variant, runner: BatchRunner, *, keep: bool) -> None:
        """Take a runner back: to keep it for the next, or to let its model go."""
        with self._lock:
            self._in_use[variant.id] -= 1
            if keep:
                self._cached.append((variant, runner))
        if keep:
            self._evict_excess()
        else:
            runner.unload()

    def evict_for(self, variant: Variant) -> None:
        """Let go of what may be in the way of a model whose size nobody knows."""
        if self._sizes_bytes[variant.id] is None and self._pool.memory_bytes < NEVER_NS:
            self.clear()

    def record_size(self, variant: Variant, size_bytes: int) -> int:
        """Learn the size of a model that did not say it. Return what of the pool that takes up.

        The process itself takes some: a model counts for so much more that those which fit the pool
        fit beside it, too. Raises `ConfigError` if this one never does.
        """
        limit_bytes = self._pool.memory_bytes
        if limit_bytes >= NEVER_NS:
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
        """Let go of everything that is kept; whether there was anything."""
        with self._lock:
            kept, self._cached = self._cached, []
        if not kept:
            return False
        while kept:
            kept.pop()[1].unload()
        gc.collect()  # whoever needs the memory needs it now
        return True

    def _evict_excess(self) -> None:
        """Let go of what does not fit beside the instances."""
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
