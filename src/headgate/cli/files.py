"""Files that a command writes: what prevents it is the user's to mend, so it is one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headgate.core.errors import ConfigError


@contextmanager
def writing(path: Path | None, option: str) -> Iterator[None]:
    """Turn a failure to write at `path` into a `ConfigError` that names the option."""
    try:
        yield
    except OSError as error:
        if path is None or isinstance(error, BrokenPipeError):
            raise  # not the doing of this option
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError(problem, where=option, value=str(error.filename or path)) from None


def check_not_read(path: Path | None, option: str, read: Iterable[Path]) -> None:
    """Refuse to write over a file that the command reads."""
    for other in read:
        if path is not None and path.exists() and other.exists() and path.samefile(other):
            problem = "would be written over, and it is read"
            raise ConfigError(problem, where=option, value=str(path), allowed="another file")


def make_directory(path: Path, option: str) -> None:
    """Make a directory, now rather than after a long run."""
    with writing(path, option):
        path.mkdir(parents=True, exist_ok=True)
