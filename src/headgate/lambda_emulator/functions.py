"""Functions, their immutable versions, and their code.

The code of a zip package is unpacked into a directory named after its digest.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import os
import platform
import shutil
import stat
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from errno import EACCES, EDQUOT, EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EPERM, EROFS
from pathlib import Path, PurePosixPath
from typing import Final

from headgate.lambda_emulator.http import ServiceError, invalid
from headgate.lambda_emulator.settings import PlatformSettings

LATEST: Final = "$LATEST"
RUNTIME: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"  # the only one
ARCHITECTURE: Final = "arm64" if platform.machine() in ("aarch64", "arm64") else "x86_64"
_LOG: Final = logging.getLogger(__name__)
_NO_ZIP: Final = "Could not unzip uploaded file. Please check your file, then try to upload again"
_FILES_MAX: Final = 100_000
_ENCRYPTED: Final = 1  # flag bit of a zip member
_QUOTED_MAX: Final = 100  # of a file name, in an error message
# Errors of this machine; any other error while unpacking is the fault of the package.
_LOCAL_ERRNOS: Final = (EACCES, EDQUOT, EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EPERM, EROFS)


@dataclass(frozen=True, slots=True)
class Code:
    """A directory with a function's files, with the digest and size that AWS would report."""

    directory: Path
    sha256: str  # base64, as AWS reports it
    size_bytes: int


def unpack(zipped: bytes, parent: Path, settings: PlatformSettings) -> Code:
    """Unpack a zip package below `parent`, unless the same package is there already.

    Raises `ServiceError`; a rejected package leaves no files behind.
    """
    if len(zipped) > settings.zip_bytes:
        raise invalid(f"Zipped size must be smaller than {settings.zip_bytes} bytes")
    digest = hashlib.sha256(zipped)
    code = Code(
        parent / digest.hexdigest(), base64.b64encode(digest.digest()).decode(), len(zipped)
    )
    if code.directory.is_dir():
        return code
    parent.mkdir(parents=True, exist_ok=True)
    # Unpack under a temporary name: a partial directory must never have the final name.
    unfinished = Path(tempfile.mkdtemp(dir=parent, prefix=scratch_prefix()))
    try:
        _extract(zipped, unfinished, settings)
        unfinished.rename(code.directory)
    except OSError as error:
        if code.directory.is_dir():
            return code  # a concurrent request has unpacked the same package
        if error.errno in _LOCAL_ERRNOS:
            _LOG.error("a package cannot be stored: %s", error)
            raise ServiceError(500, "ServiceException", "the package cannot be stored") from error
        # Such as a file and a directory of the same name.
        raise invalid(f"{_NO_ZIP}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return code


def scratch_prefix() -> str:
    """Return the name prefix of directories into which this process is still unpacking."""
    return f".unfinished-{os.getpid()}-"


def _extract(zipped: bytes, target: Path, settings: PlatformSettings) -> None:
    """Unpack into an empty directory. Raises `ServiceError` and `OSError`."""
    try:
        with zipfile.ZipFile(io.BytesIO(zipped)) as archive:
            files = archive.infolist()
            if not files:
                raise invalid("Uploaded file must be a non-empty zip")
            if len(files) > _FILES_MAX:
                raise invalid(f"{_NO_ZIP}: it has more than {_FILES_MAX} files")
            # The declared sizes can be trusted: zipfile never reads more than the declared size.
            if sum(file.file_size for file in files) > settings.unzipped_bytes:
                raise invalid(f"Unzipped size must be smaller than {settings.unzipped_bytes} bytes")
            for file in files:
                _check_file(file)
            archive.extractall(target)
    except (ServiceError, OSError):
        raise
    except Exception as error:  # any type: zipfile raises many for a malformed file
        raise invalid(f"{_NO_ZIP}.") from error


def _check_file(file: zipfile.ZipInfo) -> None:
    """Reject members that would be written elsewhere or are not plain files or directories.

    Raises `ServiceError`. Only compression methods whose output zipfile bounds while it
    decompresses are allowed.
    """
    path = PurePosixPath(file.filename)
    kind = stat.S_IFMT(file.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts:
        problem = "a name leads out of the package"
    elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        problem = "only files and directories can be in it, and no links"
    elif file.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        problem = "files must be stored or deflated"
    elif file.flag_bits & _ENCRYPTED:
        problem = "a file is encrypted"
    else:
        return
    raise invalid(f"{_NO_ZIP}: {problem}: {file.filename[:_QUOTED_MAX]!r}")


def use_directory(directory: Path) -> Code:
    """Use the files of a directory in place. Later changes are not detected."""
    if "\0" in str(directory) or not directory.is_dir():
        raise invalid(f"{directory} is not a directory")
    directory = directory.resolve()
    digest, size_bytes = hashlib.sha256(), 0
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            status = path.stat()
            size_bytes += status.st_size
            name = path.relative_to(directory).as_posix()
            digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return Code(directory, base64.b64encode(digest.digest()).decode(), size_bytes)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "+0000"


@dataclass(frozen=True, slots=True)
class FunctionVersion:
    """One version of a function: code, handler and all settings that instances depend on.

    `revision` changes whenever anything else does: instances of another revision are outdated.
    """

    name: str
    code: Code
    handler: str
    memory_mb: int = 128
    timeout_s: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = LATEST
    runtime: str = RUNTIME
    role: str = ""
    description: str = ""
    package_type: str = "Zip"
    architectures: tuple[str, ...] = (ARCHITECTURE,)
    modified: str = field(default_factory=_now)
    revision: str = field(default_factory=lambda: str(uuid.uuid4()))

    def with_changes(self, **changes: object) -> FunctionVersion:
        """Return a copy with other field values, a new revision and a new modification time."""
        fresh: dict[str, object] = {"modified": _now(), "revision": str(uuid.uuid4())}
        return replace(self, **(fresh | changes))  # type: ignore[arg-type]  # fields by name

    def describe(
        self, settings: PlatformSettings, qualifier: str | None = None
    ) -> dict[str, object]:
        """Return the `FunctionConfiguration` of AWS."""
        published = None if self.version == LATEST else self.version
        description: dict[str, object] = {
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
            description["Environment"] = {"Variables": dict(self.environment)}
        return {key: value for key, value in description.items() if value != ""}


@dataclass(slots=True)
class EmulatedFunction:
    """A function: its latest state, published versions, aliases and concurrency settings."""

    latest: FunctionVersion
    versions: dict[str, FunctionVersion] = field(default_factory=dict)
    aliases: dict[str, Alias] = field(default_factory=dict)
    reserved: int | None = None
    provisioned: dict[str, int] = field(default_factory=dict)  # by version or alias
    published: int = 0  # versions ever published: the number of the last one
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.latest.name

    def find(self, qualifier: str | None) -> FunctionVersion | None:
        """Return the version that a qualifier (version number, alias or none) names."""
        name = qualifier or LATEST
        number = self.aliases[name].version if name in self.aliases else name
        return self.latest if number == LATEST else self.versions.get(number)

    def all_versions(self) -> list[FunctionVersion]:
        """Return all versions, `$LATEST` first."""
        return [self.latest, *self.versions.values()]


@dataclass(frozen=True, slots=True)
class Alias:
    """A named pointer to a version."""

    function: str
    name: str
    version: str
    description: str = ""
    revision: str = field(default_factory=lambda: str(uuid.uuid4()))

    def describe(self, settings: PlatformSettings) -> dict[str, object]:
        """Return the `AliasConfiguration` of AWS."""
        return {
            "AliasArn": settings.arn(self.function, self.name),
            "Name": self.name,
            "FunctionVersion": self.version,
            "Description": self.description,
            "RevisionId": self.revision,
        }
