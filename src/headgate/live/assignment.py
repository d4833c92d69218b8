"""The assignment: what the supervisor tells its gateway and its workers, as a file.

They all read the same one, so that an application file edited meanwhile cannot make them disagree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, final

import msgspec
from msgspec import Struct

from headgate.app import LoadedApp, from_spec

_FILE: Final = "assignment.json"


@final
class Place(Struct, frozen=True):
    """One node, and the cores that its worker is pinned to."""

    id: int
    pool_id: int
    name: str
    cores: list[int]


@final
class Assignment(Struct, frozen=True):
    """An application, where its files are, and the nodes that serve it."""

    spec: dict[str, Any]  # the application as plain data, every default filled in
    base: str  # directory that `model` and `code` are relative to
    nodes: list[Place]

    def load(self) -> LoadedApp:
        """Return the application."""
        return from_spec(self.spec, _FILE)


def write(run_dir: Path, assignment: Assignment) -> None:
    """Leave it where `read` finds it."""
    (run_dir / _FILE).write_bytes(msgspec.json.encode(assignment))


def read(run_dir: Path) -> Assignment:
    """Return what the supervisor left there."""
    return msgspec.json.decode((run_dir / _FILE).read_bytes(), type=Assignment)


def socket_path(run_dir: Path, node_id: int) -> Path:
    """Where the worker of a node listens."""
    return run_dir / f"node-{node_id}.sock"
