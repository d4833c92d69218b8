"""The code of functions: what was sent as a zip lies in a directory named after its digest."""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from headgate.serverless.errors import invalid
from headgate.serverless.settings import Settings


@dataclass(frozen=True, slots=True)
class Code:
    """A directory with a function's files, and how AWS would describe them."""

    directory: Path
    sha256: str  # in base64, as AWS writes it
    size_bytes: int


def unpack(zipped: bytes, below: Path, settings: Settings) -> Code:
    """Unpack what was sent, unless the same was sent before. Raises `ServiceError`."""
    if len(zipped) > settings.zip_bytes:
        raise invalid(f"Zipped size must be smaller than {settings.zip_bytes} bytes")
    digest = hashlib.sha256(zipped)
    code = Code(below / digest.hexdigest(), base64.b64encode(digest.digest()).decode(), len(zipped))
    if code.directory.is_dir():
        return code
    below.mkdir(parents=True, exist_ok=True)
    # Nobody may find half of it under its name.
    unfinished = Path(tempfile.mkdtemp(dir=below))
    try:
        with zipfile.ZipFile(io.BytesIO(zipped)) as archive:
            if sum(file.file_size for file in archive.infolist()) > settings.unzipped_bytes:
                raise invalid(f"Unzipped size must be smaller than {settings.unzipped_bytes} bytes")
            archive.extractall(unfinished)
        unfinished.rename(code.directory)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise invalid("Could not unzip uploaded file. Please check your file.") from error
    except (OSError, ValueError) as error:  # such as a file where a directory should be
        if not code.directory.is_dir():  # else somebody was faster, with the same
            raise invalid(f"Could not unzip uploaded file: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return code


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
