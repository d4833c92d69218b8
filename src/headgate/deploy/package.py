"""Packages a function: the application file, its models, and the user's Python beside it.

`pack` collects the files, `bundle` adds Headgate and its dependencies for platforms that lack them,
`try_import` imports the handler as a Lambda runtime would, before anybody pays for it, and the
result is a zip file or a directory that a container image is built from.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from importlib import metadata
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Final

import headgate
from headgate import __version__
from headgate.config import AppConfig
from headgate.core.errors import ConfigError
from headgate.core.units import format_size
from headgate.lambda_emulator.settings import PlatformSettings

# A fixed date, so that the same files make the same zip: AWS compares packages by digest.
_ZIP_DATE: Final = (1980, 1, 1, 0, 0, 0)
_EXCLUDED: Final = frozenset(("__pycache__", "node_modules", "build", "dist", "out"))

_DOCKERFILE: Final = """\
# Build with: docker build -t {name} .
FROM python:{python}-slim
RUN pip install --no-cache-dir {installed}
COPY . /var/task
WORKDIR /var/task
ENV LAMBDA_TASK_ROOT=/var/task
{variables}
ENTRYPOINT ["python", "-m", "awslambdaric"]
CMD ["{handler}"]
"""

# Imports the handler as the Lambda runtime does at start, and then the user's own modules.
_IMPORT_S: Final = 120.0  # for a handler to be imported
_IMPORTS: Final = """
import importlib, sys
module, _, name = sys.argv[1].rpartition(".")
imported = importlib.import_module(module.replace("/", "."))
if not callable(getattr(imported, name, None)):
    raise ImportError(f"module {module!r} has no function {name!r}")
for code in sys.argv[2:]:
    importlib.import_module(code.partition(":")[0])
print("\\nimported")
"""


@dataclass(frozen=True, slots=True)
class Package:
    """A directory of files to be zipped or put into an image."""

    directory: Path

    def files(self) -> list[Path]:
        """Return all files, sorted, so that the order does not depend on the disk."""
        paths = (path for path in self.directory.rglob("*") if path.is_file())
        return sorted(path for path in paths if "__pycache__" not in path.parts)

    @property
    def size_bytes(self) -> int:
        """The size of the unpacked files."""
        return sum(path.stat().st_size for path in self.files())

    def zip_to(self, target: Path) -> bytes:
        """Write the zip file and return its bytes. Raises `ConfigError` if it exceeds a limit."""
        limits = PlatformSettings()
        _check_size(self.size_bytes, limits.unzipped_bytes, "unpacked")
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in self.files():
                name = path.relative_to(self.directory).as_posix()
                entry = zipfile.ZipInfo(name, _ZIP_DATE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16  # readable by the user that runs the function
                archive.writestr(entry, path.read_bytes())
        _check_size(target.stat().st_size, limits.zip_bytes, "as a zip file")
        return target.read_bytes()


def pack(
    app: Path, config: AppConfig, target: Path, *, include: Iterable[str], is_zipped: bool
) -> Package:
    """Copy the files of a function into an empty directory; `include` are patterns of more files.

    Raises `ConfigError` if a file is missing or outside of the application's directory, or if the
    files exceed the limit of a zip file.
    """
    base = app.resolve().parent
    paths = {app.resolve()}
    paths.update(_models(app, base, config))
    paths.update(_python(base, target.resolve()))
    for pattern in include:
        parts = PurePosixPath(pattern).parts
        if not parts or "/" in parts or ".." in parts:
            problem = "is not a pattern relative to the application"
            raise ConfigError(problem, where="deploy", key="--include", value=pattern,
                              allowed="labels.txt, data/**/*.json")  # fmt: skip
        matches = {path for path in base.glob(pattern) if path.is_file()}
        if not matches:
            raise ConfigError("matches no file", where=str(base), key="--include", value=pattern)
        paths.update(matches)
    if is_zipped:
        size_bytes = sum(path.stat().st_size for path in paths)
        _check_size(size_bytes, PlatformSettings().unzipped_bytes, "unpacked")
    for path in paths:
        copy = target / path.relative_to(base)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        except OSError as error:
            raise ConfigError(f"cannot be packed: {error.strerror}", where=str(path)) from None
    return Package(target)


def rough_size(size_bytes: int) -> str:
    """Format a size with three digits.

    >>> rough_size(69_364_847), rough_size(244)
    ('69.4MB', '244B')
    """
    return format_size(round(size_bytes, 3 - len(str(size_bytes))))


def bundle(directory: Path, *, has_onnx: bool) -> None:
    """Copy Headgate beside the user's files, and install its dependencies there.

    Raises `ConfigError` with the message of pip if that fails.
    """
    package = Path(headgate.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(package, directory / "headgate", ignore=ignored, dirs_exist_ok=True)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    command = (*pip, "--target", str(directory), *requirements(has_onnx=has_onnx))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip failed"]
        raise ConfigError(lines[-1].removeprefix("ERROR: "), where="deploy", key="--bundle")


def requirements(*, has_onnx: bool) -> list[str]:
    """Return the dependencies of Headgate, pinned to the versions installed here."""
    pyproject = Path(headgate.__file__).resolve().parents[2] / "pyproject.toml"
    try:
        lines = [line for line in metadata.requires("headgate") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:  # not installed, run from its sources
        lines = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in lines]
    names += ["onnxruntime"] if has_onnx else []
    return [f"{name}=={metadata.version(name)}" for name in names]


def write_dockerfile(
    package: Package, name: str, handler: str, environment: Mapping[str, str], *, is_bundled: bool
) -> None:
    """Write a Dockerfile that builds an image for Lambda from the package's directory."""
    text = _DOCKERFILE.format(
        name=name,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        installed="awslambdaric" + ("" if is_bundled else f" headgate[onnx]=={__version__}"),
        variables="\n".join(f"ENV {key}={quote(value)}" for key, value in environment.items()),
        handler=handler,
    )
    (package.directory / "Dockerfile").write_text(text, encoding="utf-8")


def try_import(
    directory: Path,
    handler: str,
    environment: Mapping[str, str],
    *,
    codes: Sequence[str],
) -> None:
    """Import the handler in a process of its own, from the package's directory.

    Raises `ConfigError` with the error of the import.
    """
    directory = directory.resolve()  # the process has another working directory
    path = os.pathsep.join((str(directory), str(Path(headgate.__file__).resolve().parents[1])))
    variables = {**os.environ, **environment, "LAMBDA_TASK_ROOT": str(directory)}
    variables |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            (sys.executable, "-c", _IMPORTS, handler, *codes),
            cwd=directory,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"cannot be imported within {_IMPORT_S:g} s"
        raise ConfigError(problem, where="deploy", key="handler", value=handler) from None
    # A module that exits while it is imported may do so with status 0.
    if done.returncode or not done.stdout.endswith("\nimported\n"):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"the process exits with {done.returncode}"
        problem = f"cannot be imported: {reason.removeprefix('headgate.core.errors.')}"
        raise ConfigError(problem, where="deploy", key="handler", value=handler)


def _models(app: Path, base: Path, config: AppConfig) -> Iterator[Path]:
    """Yield the files of models, with the weights that ONNX keeps beside them."""
    for variant, source in zip(config.app.variants, config.sources, strict=True):
        if source is None or source.model is None or "://" in source.model:
            continue  # simulated only, or Python code, or fetched at start
        key = f"functions.{variant.name}.model"
        path = PurePosixPath(source.model)
        if path.is_absolute() or ".." in path.parts:
            problem = "is outside of the application's directory and cannot be packed"
            raise ConfigError(problem, where=str(app), key=key, value=source.model)
        if not (base / path).is_file():
            raise ConfigError("is not a file", where=str(app), key=key, value=source.model)
        yield from (base / path.parent).glob(f"{escape(path.name)}*")


def _python(base: Path, target: Path) -> Iterator[Path]:
    """Yield the user's modules, without virtual environments, hidden and generated files."""
    for path in base.iterdir():
        if path.name.startswith(".") or path.name in _EXCLUDED or path.resolve() == target:
            continue
        is_loop = path.is_symlink() and base.resolve().is_relative_to(path.resolve())
        if path.is_dir() and not is_loop and not (path / "pyvenv.cfg").exists():
            yield from _python(path, target)
        elif path.suffix == ".py" and path.is_file():
            yield path


def _check_size(size_bytes: int, limit_bytes: int, how: str) -> None:
    if size_bytes > limit_bytes:
        problem = f"the package is {rough_size(size_bytes)} {how}"
        allowed = f"up to {format_size(limit_bytes)}; --directory makes a container image of it"
        raise ConfigError(problem, where="deploy", allowed=allowed)
