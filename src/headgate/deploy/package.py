"""A function's package: the application file, its models, and the user's Python beside it."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Final

from headgate.app import LoadedApp
from headgate.core.errors import ConfigError
from headgate.core.units import format_size
from headgate.serverless.settings import Settings

# The same bytes make the same package: AWS tells packages apart by their digest.
_ZIP_DATE: Final = (1980, 1, 1, 0, 0, 0)
_NOT_OURS: Final = frozenset(("__pycache__", "node_modules", "build", "dist", "out"))


@dataclass(frozen=True, slots=True)
class Package:
    """Files in a directory, from where they are zipped or put into an image."""

    directory: Path
    app_file: str  # in it

    def files(self) -> list[Path]:
        """Every file, in an order that does not depend on the disk."""
        found = (path for path in self.directory.rglob("*") if path.is_file())
        return sorted(path for path in found if "__pycache__" not in path.parts)

    @property
    def size_bytes(self) -> int:
        """How large it is when it is unpacked."""
        return sum(path.stat().st_size for path in self.files())

    def zip_to(self, target: Path) -> bytes:
        """Write the zip file and return it. Raises `ConfigError` if no platform would take it."""
        limits = Settings()
        _check_size(self.size_bytes, limits.unzipped_bytes, "unpacked")
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in self.files():
                name = path.relative_to(self.directory).as_posix()
                entry = zipfile.ZipInfo(name, _ZIP_DATE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16  # whoever runs it there is not who owns it
                archive.writestr(entry, path.read_bytes())
        _check_size(target.stat().st_size, limits.zip_bytes, "as a zip file")
        return target.read_bytes()


def pack(
    app: Path, loaded: LoadedApp, target: Path, *, include: Iterable[str], is_zipped: bool
) -> Package:
    """Copy what a function needs into an empty directory; `include` are more files, as patterns.

    Raises `ConfigError` if a file is missing, lies where it cannot be packed from, or if all of
    them are too much for a zip file.
    """
    base = app.resolve().parent
    wanted = {app.resolve()}
    wanted.update(_models(app, base, loaded))
    wanted.update(_python(base, target.resolve()))
    for pattern in include:
        parts = PurePosixPath(pattern).parts
        if not parts or "/" in parts or ".." in parts:
            problem = "is no pattern of files beside the application"
            raise ConfigError(problem, where="deploy", key="--include", value=pattern,
                              allowed="labels.txt, data/**/*.json")  # fmt: skip
        found = {path for path in base.glob(pattern) if path.is_file()}
        if not found:
            raise ConfigError("matches no file", where=str(base), key="--include", value=pattern)
        wanted.update(found)
    if is_zipped:
        size_bytes = sum(path.stat().st_size for path in wanted)
        _check_size(size_bytes, Settings().unzipped_bytes, "unpacked")
    for path in wanted:
        copy = target / path.relative_to(base)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        except OSError as error:
            raise ConfigError(f"cannot be packed: {error.strerror}", where=str(path)) from None
    return Package(target, app.name)


def rough_size(size_bytes: int) -> str:
    """A size in three digits.

    >>> rough_size(69_364_847), rough_size(244)
    ('69.4MB', '244B')
    """
    return format_size(round(size_bytes, 3 - len(str(size_bytes))))


def _models(app: Path, base: Path, loaded: LoadedApp) -> Iterator[Path]:
    """The files of models, with weights that ONNX keeps beside them."""
    for variant, source in zip(loaded.app.variants, loaded.sources, strict=True):
        if source is None or source.model is None or "://" in source.model:
            continue  # it is simulated only, or Python, or fetched when it starts
        key = f"functions.{variant.name}.model"
        path = PurePosixPath(source.model)
        if path.is_absolute() or ".." in path.parts:
            problem = "lies outside of the application's directory and cannot be packed"
            raise ConfigError(problem, where=str(app), key=key, value=source.model)
        if not (base / path).is_file():
            raise ConfigError("is not a file", where=str(app), key=key, value=source.model)
        yield from (base / path.parent).glob(f"{escape(path.name)}*")


def _python(base: Path, target: Path) -> Iterator[Path]:
    """The user's modules: not those of environments, nor what is hidden or made."""
    for path in base.iterdir():
        if path.name.startswith(".") or path.name in _NOT_OURS or path.resolve() == target:
            continue
        is_loop = path.is_symlink() and base.resolve().is_relative_to(path.resolve())
        if path.is_dir() and not is_loop and not (path / "pyvenv.cfg").exists():
            yield from _python(path, target)
        elif path.suffix == ".py" and path.is_file():
            yield path


def _check_size(size_bytes: int, limit_bytes: int, how: str) -> None:
    if size_bytes > limit_bytes:
        raise ConfigError(
            f"the package is {rough_size(size_bytes)} {how}",
            where="deploy",
            allowed=f"up to {format_size(limit_bytes)}; --directory makes a container image of it",
        )
