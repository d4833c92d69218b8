"""Corrupt and hostile packages: each is rejected, and leaves no files behind."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from platform_rig import Caller, eventually, platform_in, zipped

from headgate.lambda_emulator import EmbeddedPlatform, PlatformSettings
from headgate.lambda_emulator.functions import RUNTIME, unpack
from headgate.lambda_emulator.http import ServiceError

MODULE = "def handle(event, context):\n    return 1\n" * 50
GOOD = zipped({"module.py": MODULE})
ROLE = "arn:aws:iam::000000000000:role/any"


def deflated(text: str = MODULE) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("module.py", text)
    return buffer.getvalue()


def flipped(package: bytes, position: int) -> bytes:
    """Return a package with all bits of one byte flipped."""
    return package[:position] + bytes([package[position] ^ 0xFF]) + package[position + 1 :]


def with_mode(mode: int, name: str = "link", text: str = "/etc/passwd") -> bytes:
    """Return a package with a member of another file type."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = mode << 16
        archive.writestr(entry, text)
    return buffer.getvalue()


def packed(how: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        archive.writestr("module.py", MODULE)
    return buffer.getvalue()


def lying(size: int) -> bytes:
    """Return a package that declares a wrong size in the local and the central header."""
    package = deflated(text="x" * 1_000_000)
    return package.replace(struct.pack("<L", 1_000_000), struct.pack("<L", size))


BROKEN = {
    "cut short": GOOD[:-30],
    "text": b"no zip",
    "nothing": b"",
    "a deflated stream that is none": flipped(deflated(), 60),
    "another text than that of the checksum": flipped(GOOD, 60),
    "up and away": zipped({"../../evil.py": ""}),
    "up and away, further down": zipped({"a/../../evil.py": ""}),
    "absolute": zipped({"/evil.py": ""}),
    "a link": with_mode(stat.S_IFLNK | 0o777),
    "a link to a directory, and a file in it": with_mode(stat.S_IFLNK | 0o777, "a", "/tmp"),
    "a device": with_mode(stat.S_IFCHR | 0o777),
    "a pipe": with_mode(stat.S_IFIFO | 0o777),
    "a name that is too long": zipped({"a" * 300: ""}),
    "a file where a directory should be": zipped({"a": "", "a/b": ""}),
    "packed with bzip2": packed(zipfile.ZIP_BZIP2),
    "packed with LZMA": packed(zipfile.ZIP_LZMA),
    "larger than it says": lying(10),
}


@pytest.fixture(scope="module")
def victim(served: tuple[EmbeddedPlatform, Caller]) -> str:
    """A function whose code must not change by an invalid package."""
    served[1].create("victim", MODULE)
    return "victim"


@pytest.mark.parametrize("package", BROKEN.values(), ids=BROKEN.keys())
def test_invalid_packages_are_rejected(
    platform: EmbeddedPlatform, caller: Caller, victim: str, package: bytes
) -> None:
    """Neither creates nor changes a function; the error message is that of AWS."""
    before = _stored_code(platform)
    description = caller.boto.get_function(FunctionName=victim)["Configuration"]
    for status, code, message in (
        caller.rejected(
            "create_function",
            FunctionName="broken",
            Role=ROLE,
            Runtime=RUNTIME,
            Handler="module.handle",
            Code={"ZipFile": package},
        ),
        caller.rejected("update_function_code", FunctionName=victim, ZipFile=package),
    ):
        assert (status, code) == (400, "InvalidParameterValueException"), message
        assert "Could not unzip uploaded file" in message
        assert str(platform.directory) not in message
    assert caller.rejected("get_function", FunctionName="broken")[0] == 404
    assert caller.boto.get_function(FunctionName=victim)["Configuration"] == description
    assert _stored_code(platform) == before, "files were left behind"
    assert not list(platform.directory.parent.rglob("evil.py"))


def test_empty_package(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="must be a non-empty zip"):
        unpack(zipped({}), tmp_path, PlatformSettings())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [262_144_001, 2**32 - 2])
def test_zip_bomb(platform: EmbeddedPlatform, caller: Caller, size: int) -> None:
    """Rejected by its declared size, without unpacking."""
    before = _stored_code(platform)
    rejected = caller.rejected(
        "create_function",
        FunctionName="bomb",
        Role=ROLE,
        Runtime=RUNTIME,
        Handler="module.handle",
        Code={"ZipFile": lying(size)},
    )
    assert rejected[0] == 400 and "Unzipped size must be smaller than 262144000" in rejected[2]
    assert _stored_code(platform) == before


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.lambda_emulator.functions._FILES_MAX", 3)
    assert unpack(
        zipped({str(n): "" for n in range(3)}), tmp_path, PlatformSettings()
    ).directory.is_dir()
    with pytest.raises(ServiceError, match="more than 3 files"):
        unpack(zipped({str(n): "" for n in range(4)}), tmp_path, PlatformSettings())


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_corruption_is_a_client_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A corrupted package is unpacked or rejected with 400; there is never a server error."""
    package = data.draw(st.sampled_from((GOOD, deflated())))
    for _ in range(data.draw(st.integers(1, 4))):
        package = flipped(package, data.draw(st.integers(0, len(package) - 1)))
    parent = tmp_path_factory.mktemp("damaged")
    try:
        unpack(package, parent, PlatformSettings())
    except ServiceError as error:
        assert error.status == 400
        assert list(parent.iterdir()) == []


def test_full_disk_is_a_server_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    with pytest.raises(ServiceError) as caught:
        unpack(GOOD, tmp_path, PlatformSettings())
    assert caught.value.status == 500 and str(tmp_path) not in caught.value.message
    assert list(tmp_path.iterdir()) == []
    assert "No space left on device" in caplog.text


def test_code_of_otherwise_invalid_request_is_not_unpacked(tmp_path: Path) -> None:
    with platform_in(tmp_path) as (platform, caller):
        before = _stored_code(platform)
        for wrong in ({"MemorySize": 20_000}, {"Handler": " "}, {"Tags": {"aws:a": "b"}}):
            request = {
                "FunctionName": "new",
                "Role": ROLE,
                "Runtime": RUNTIME,
                "Handler": "module.handle",
                "Code": {"ZipFile": GOOD},
            }
            assert caller.rejected("create_function", **(request | wrong))[0] == 400
        assert _stored_code(platform) == before
        caller.create("new", MODULE)
        assert eventually(lambda: caller.invoke("new", {}).body == 1)


def _stored_code(platform: EmbeddedPlatform) -> list[Path]:
    code_directory = platform.directory / "code"
    return sorted(code_directory.iterdir()) if code_directory.is_dir() else []
