"""The code of functions: what was sent as a zip lies in a directory named after its digest."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import os
import shutil
import stat
import tempfile
import zipfile
from dataclasses import dataclass
from errno import EACCES, EDQUOT, EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EPERM, EROFS
from pathlib import Path, PurePosixPath
from typing import Final

from headgate.serverless.errors import ServiceError, invalid
from headgate.serverless.settings import Settings

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


def unpack(zipped: bytes, below: Path, settings: Settings) -> Code:
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


def _extract(zipped: bytes, target: Path, settings: Settings) -> None:
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
