"""Who takes part, as data: how it is started, where it listens, what it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headgate.app.yaml_file import read_yaml
from headgate.core.errors import ConfigError


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one model is asked."""

    path: str
    body: str
    command: tuple[str, ...] = ()


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    folder: str
    models: dict[str, Route]
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    peer: str | None = None
    is_ours: bool = False
    is_baseline: bool = False


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to serve the models. Ways of the same `peer` are its own to choose from."""

    name: str
    peer: str
    folder: Path
    command: tuple[str, ...]
    models: dict[str, Route]
    environment: dict[str, str] = field(default_factory=dict)
    is_ours: bool = False
    is_baseline: bool = False

    @property
    def requirements(self) -> Path | None:
        """What its own environment needs; None: it runs in ours."""
        path = self.folder / "requirements.txt"
        return path if path.exists() else None


def read_contestants(path: Path) -> list[Contestant]:
    """Read the list of who takes part."""
    try:
        entries = msgspec.convert(read_yaml(str(path)), dict[str, _Entry])
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=str(path)) from None
    return [
        Contestant(
            name=name,
            peer=entry.peer or name,
            folder=path.parent / entry.folder,
            command=entry.command,
            models=entry.models,
            environment=entry.environment,
            is_ours=entry.is_ours,
            is_baseline=entry.is_baseline,
        )
        for name, entry in entries.items()
    ]
