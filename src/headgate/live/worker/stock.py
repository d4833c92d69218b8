"""The stock: models that are loaded and that no instance uses just now.

A gateway that comes back finds them as it left them, so it need not wait for weights. They leave
when their memory is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import final

from headgate.app.loaded import Source
from headgate.core.errors import ConfigError
from headgate.core.model import App, Pool, Variant
from headgate.functions.source import build_model
from headgate.live.worker.runner import Runner


@final
class Stock:
    """Loads models, and keeps those that are left over. Safe between threads."""

    def __init__(self, app: App, sources: Sequence[Source | None], pool: Pool, base: str) -> None:
        self._app = app
        self._sources = sources
        self._pool = pool
        self._base = base
        self._used_bytes = 0
        self._kept: list[tuple[Variant, Runner]] = []  # longest unused first
        self._lock = Lock()

    def take(self, variant: Variant) -> Runner:
        """Return a runner of its own for an instance. Raises whatever the model does."""
        room_bytes = variant.profile.memory_bytes
        with self._lock:
            found = next((kept for kept in self._kept if kept[0] is variant), None)
            if found is not None:
                self._kept.remove(found)
            self._used_bytes += room_bytes
        self._make_room()
        if found is not None:
            return found[1]
        try:
            return self._load(variant)
        except BaseException:
            with self._lock:
                self._used_bytes -= room_bytes
            raise

    def give(self, variant: Variant, runner: Runner, *, keep: bool) -> None:
        """Take a runner back: to keep it for the next, or to let its model go."""
        with self._lock:
            self._used_bytes -= variant.profile.memory_bytes
            if keep:
                self._kept.append((variant, runner))
        if keep:
            self._make_room()
        else:
            runner.unload()

    def clear(self) -> None:
        """Let go of everything that is kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for _, runner in kept:
            runner.unload()

    def _load(self, variant: Variant) -> Runner:
        source = self._sources[variant.id]
        if source is None:
            raise ConfigError("has neither model nor code", where=variant.name)
        try:
            return self._loaded(source, variant)
        except MemoryError:  # what is kept may be all that is in the way
            self.clear()
            return self._loaded(source, variant)

    def _loaded(self, source: Source, variant: Variant) -> Runner:
        model = build_model(source, self._base, variant.name)
        model.load()
        is_idempotent = self._app.functions[variant.function_id].is_idempotent
        return Runner(variant.name, model, is_idempotent=is_idempotent)

    def _make_room(self) -> None:
        """Let go of what does not fit beside the instances."""
        left = []
        with self._lock:
            kept_bytes = sum(variant.profile.memory_bytes for variant, _ in self._kept)
            while self._kept and self._used_bytes + kept_bytes > self._pool.memory_bytes:
                variant, runner = self._kept.pop(0)
                kept_bytes -= variant.profile.memory_bytes
                left.append(runner)
        for runner in left:
            runner.unload()
