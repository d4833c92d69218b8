"""A bar on stderr for whatever takes longer than a second. Nothing where there is no terminal."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    import rich.progress

_PATIENCE_S: Final = 1.0


class Progress:
    """Use it as a context, and call `update` as work gets done.

    The bar comes up from a thread of its own, so work that reports nothing still shows that time
    passes. It leaves no trace behind.
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        self._bar: rich.progress.Progress | None = None
        if sys.stderr.isatty():
            self._bar = _new_bar()
            self._task = self._bar.add_task(title, total=total)
            self._timer = threading.Timer(_PATIENCE_S, self._bar.start)
            self._timer.daemon = True

    def update(self, done: int) -> None:
        """So much of the total is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def say(self, title: str, done: int | None = None, total: int | None = None) -> None:
        """Change what it says is being done."""
        if self._bar is not None:
            self._bar.update(self._task, description=title, completed=done, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._timer.cancel()
            self._timer.join()  # from here on the bar is up, or never will be
            if self._bar.live.is_started:
                self._bar.stop()


def _new_bar() -> rich.progress.Progress:
    from rich import progress  # noqa: PLC0415  # costs a tenth of a second
    from rich.console import Console  # noqa: PLC0415

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=30),
        progress.TaskProgressColumn(show_speed=False),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=5,
        transient=True,
    )
