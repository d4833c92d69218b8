"""Imports the modules of an application from their sources, never from Python's bytecode caches.

Python takes a cached module for current if its source still has the same size and the same second
of change. A file that is edited within a second of its first import, as with `serve --reload`, may
have both, and would go on running as it was.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from typing import NoReturn, final


def search_first(directory: str) -> None:
    """Search a directory before all others for modules, and import those below it from sources."""
    if directory not in sys.path:
        sys.path.insert(0, directory)
    hook = _SourcePathHook(Path(directory))
    if hook not in sys.path_hooks:
        sys.path_hooks.insert(0, hook)
        for entry in [entry for entry in sys.path_importer_cache if hook.owns(entry)]:
            del sys.path_importer_cache[entry]


@final
class _UncachedLoader(SourceFileLoader):
    """Compiles a module each time: without a time of change, nothing is read from caches."""

    def path_stats(self, path: object) -> NoReturn:
        raise OSError("not compared with caches")


@final
@dataclass(frozen=True)
class _SourcePathHook:
    """Returns what finds the modules in a directory of the path, if an application owns it."""

    base: Path  # the directory of the application

    def __call__(self, entry: str) -> FileFinder:
        if not Path(entry).is_dir() or not self.owns(entry):
            raise ImportError("not a directory of the application", path=entry)
        return FileFinder(
            entry,
            (ExtensionFileLoader, EXTENSION_SUFFIXES),
            (_UncachedLoader, SOURCE_SUFFIXES),
            (SourcelessFileLoader, BYTECODE_SUFFIXES),  # modules that came without their source
        )

    def owns(self, entry: str) -> bool:
        """Whether a directory is the application's or below it.

        A directory that is on the path itself, such as that of an environment's packages, is not
        the application's, even below its directory.
        """
        directories = (Path(entry), *Path(entry).parents)
        if self.base not in directories:
            return False
        on_path = {Path(other) for other in sys.path}
        return on_path.isdisjoint(directories[: directories.index(self.base)])
