"""Packs the compiled build as a wheel: what it decides is the same, several times as fast.

    python tools/wheel.py [--compiled DIR] [--out DIR]

The compiled package is built if it is not there (`compile.py`). The wheel is the one that pip
builds of the sources, with the compiled package in place of the sources, for this version of Python
and this platform. It asks for `mypy_extensions`, which compiled modules import.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import subprocess
import sys
import sysconfig
import tempfile
from base64 import urlsafe_b64encode
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from compile import ROOT, build

_NEEDED = "Requires-Dist: mypy_extensions>=1.0\n"


def main() -> None:
    """Build, and say which file was written."""
    parser = argparse.ArgumentParser(description="Build a wheel with the compiled package.")
    parser.add_argument("--compiled", type=Path, default=ROOT / "build" / "compiled")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        print(_pack(_wheel_of_sources(Path(scratch)), build(options.compiled), options.out))


def _wheel_of_sources(out: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(out)]
    command += ["--no-build-isolation", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"pip failed:\n{done.stdout}\n{done.stderr}")
    (wheel,) = out.glob("*.whl")
    return wheel


def _pack(wheel: Path, compiled: Path, out: Path) -> Path:
    """Write the wheel again, with the compiled package; return the file."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    name, version = wheel.name.split("-")[:2]
    files = {
        str(path.relative_to(compiled)): path.read_bytes()
        for path in sorted(compiled.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    }
    info = f"{name}-{version}.dist-info"
    with ZipFile(wheel) as sources:
        for entry in sources.namelist():
            if entry.startswith(f"{info}/") and not entry.endswith("/RECORD"):
                files[entry] = sources.read(entry)
    metadata = files[f"{info}/METADATA"].decode()
    files[f"{info}/METADATA"] = metadata.replace(
        "Requires-Dist:", f"{_NEEDED}Requires-Dist:", 1
    ).encode()
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: headgate\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    )
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    packed = out / f"{name}-{version}-{tag}.whl"
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        for entry, content in files.items():
            archive.writestr(entry, content)
    return packed


def _record(files: dict[str, bytes], own: str) -> bytes:
    """The list of the files of a wheel, with their hashes."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for entry, content in files.items():
        digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow((entry, f"sha256={digest}", len(content)))
    rows.writerow((own, "", ""))
    return text.getvalue().encode()


if __name__ == "__main__":
    main()
