"""A function as it was created: each version of it is one record that never changes."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import os
import shutil
import stat
import tempfile
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from errno import EACCES, EDQUOT, EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EPERM, EROFS
from pathlib import Path, PurePosixPath
from typing import Final

from headgate.lambda_emulator.errors import ServiceError, invalid
from headgate.lambda_emulator.settings import PlatformSettings

# The code of functions: what was sent as a zip lies in a directory named after its digest.


_LOG: Final = logging.getLogger(__name__)
_NO_ZIP: Final = "Could not unzip uploaded file. Please check your file, then try to upload again"
_FILES_MAX: Final = 100_000
_ENCRYPTED: Final = 1  # of the flags of a file
_SHOWN_MAX: Final = 100  # characters of a name
_NOT_ITS_FAULT: Final = (EACCES, EDQUOT, EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EPERM, EROFS)


@dataclass(frozen=True, slots=True)
class Code:
    """A directory with a function's files, and how AWS would describe them."""

    directory: Path
    sha256: str  # in base64, as AWS writes it
    size_bytes: int


def unpack(zipped: bytes, below: Path, settings: PlatformSettings) -> Code:
    """Unpack what was sent, unless the same was sent before. Raises `ServiceError`.

    What is refused leaves nothing behind.
    """
    if len(zipped) > settings.zip_bytes:
        raise invalid(f"Zipped size must be smaller than {settings.zip_bytes} bytes")
    digest = hashlib.sha256(zipped)
    code = Code(below / digest.hexdigest(), base64.b64encode(digest.digest()).decode(), len(zipped))
    if code.directory.is_dir():
        return code
    below.mkdir(parents=True, exist_ok=True)
    # Nobody may find half of it under its name.
    unfinished = Path(tempfile.mkdtemp(dir=below, prefix=scratch_prefix()))
    try:
        _extract(zipped, unfinished, settings)
        unfinished.rename(code.directory)
    except OSError as error:
        if code.directory.is_dir():
            return code  # somebody was faster, with the same
        if error.errno in _NOT_ITS_FAULT:
            _LOG.error("a package cannot be stored: %s", error)
            raise ServiceError(500, "ServiceException", "the package cannot be stored") from error
        raise invalid(f"{_NO_ZIP}: {error.strerror}") from error  # a file where a directory is
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return code


def scratch_prefix() -> str:
    """How directories begin that hold what this process has not finished unpacking."""
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
            # What a file claims holds: no more than that is ever read of it.
            if sum(file.file_size for file in files) > settings.unzipped_bytes:
                raise invalid(f"Unzipped size must be smaller than {settings.unzipped_bytes} bytes")
            for file in files:
                _check_file(file)
            archive.extractall(target)
    except (ServiceError, OSError):
        raise
    except Exception as error:  # of any kind: a zip file can be wrong in all its parts
        raise invalid(f"{_NO_ZIP}.") from error


def _check_file(file: zipfile.ZipInfo) -> None:
    """Refuse what would be written elsewhere, or would not be what it was. Raises `ServiceError`.

    The kinds of compression are those whose output can be bounded while it is made.
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
    raise invalid(f"{_NO_ZIP}: {problem}: {file.filename[:_SHOWN_MAX]!r}")


def use_directory(directory: Path) -> Code:
    """Use files where they are; they are not looked at again when they change."""
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

    def describe(
        self, settings: PlatformSettings, qualifier: str | None = None
    ) -> dict[str, object]:
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
class EmulatedFunction:
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

    def describe(self, settings: PlatformSettings, function: str) -> dict[str, object]:
        """The alias, as AWS shows it."""
        return {
            "AliasArn": settings.arn(function, self.name),
            "Name": self.name,
            "FunctionVersion": self.version,
            "Description": self.description,
            "RevisionId": self.revision,
        }
