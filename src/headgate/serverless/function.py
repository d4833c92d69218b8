"""A function as it was created: each version of it is one record that never changes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from headgate.serverless.code import Code
from headgate.serverless.settings import Settings

LATEST: Final = "$LATEST"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "+0000"


@dataclass(frozen=True, slots=True)
class FunctionVersion:
    """What runs: code, handler and everything that instances depend on.

    `revision` differs whenever anything else does: instances of another revision are of no use.
    """

    name: str
    code: Code
    handler: str
    memory_mb: int = 128
    timeout_s: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = LATEST
    runtime: str = ""
    role: str = ""
    description: str = ""
    package_type: str = "Zip"
    architectures: tuple[str, ...] = ()
    modified: str = field(default_factory=_now)
    revision: str = field(default_factory=lambda: str(uuid.uuid4()))

    def changed(self, **changes: object) -> FunctionVersion:
        """Return the function with something else about it."""
        fresh: dict[str, object] = {"modified": _now(), "revision": str(uuid.uuid4())}
        return replace(self, **(fresh | changes))  # type: ignore[arg-type]  # fields by name

    def describe(self, settings: Settings, qualifier: str | None = None) -> dict[str, object]:
        """The configuration, as AWS shows it."""
        published = None if self.version == LATEST else self.version
        shown: dict[str, object] = {
            "FunctionName": self.name,
            "FunctionArn": settings.arn(self.name, qualifier or published),
            "Runtime": self.runtime,
            "Role": self.role,
            "Handler": self.handler,
            "CodeSize": self.code.size_bytes,
            "CodeSha256": self.code.sha256,
            "Description": self.description,
            "Timeout": self.timeout_s,
            "MemorySize": self.memory_mb,
            "LastModified": self.modified,
            "Version": self.version,
            "RevisionId": self.revision,
            "State": "Active",
            "LastUpdateStatus": "Successful",
            "PackageType": self.package_type,
            "Architectures": list(self.architectures),
            "EphemeralStorage": {"Size": 512},
            "SnapStart": {"ApplyOn": "None", "OptimizationStatus": "Off"},
            "TracingConfig": {"Mode": "PassThrough"},
        }
        if self.environment:
            shown["Environment"] = {"Variables": dict(self.environment)}
        return {key: value for key, value in shown.items() if value != ""}


@dataclass(slots=True)
class Function:
    """A function: its latest state, what was published of it, and how much of it may run."""

    latest: FunctionVersion
    versions: dict[str, FunctionVersion] = field(default_factory=dict)
    aliases: dict[str, Alias] = field(default_factory=dict)
    reserved: int | None = None
    provisioned: dict[str, int] = field(default_factory=dict)  # by version or alias
    published: int = 0  # how many versions there have ever been
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How it is called."""
        return self.latest.name

    def find(self, qualifier: str | None) -> FunctionVersion | None:
        """The version that a qualifier names: a number, an alias, or the latest."""
        name = qualifier or LATEST
        number = self.aliases[name].version if name in self.aliases else name
        return self.latest if number == LATEST else self.versions.get(number)

    def every(self) -> list[FunctionVersion]:
        """All versions, the latest first."""
        return [self.latest, *self.versions.values()]


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a version."""

    name: str
    version: str
    description: str = ""
    revision: str = field(default_factory=lambda: str(uuid.uuid4()))

    def describe(self, settings: Settings, function: str) -> dict[str, object]:
        """The alias, as AWS shows it."""
        return {
            "AliasArn": settings.arn(function, self.name),
            "Name": self.name,
            "FunctionVersion": self.version,
            "Description": self.description,
            "RevisionId": self.revision,
        }
