"""What clients may ask for, as they write it.

A parameter that AWS knows and the platform has not is refused unless its value asks for nothing,
and so is one that nobody knows: whoever sets one expects it to do something.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from headgate.lambda_emulator.errors import ServiceError, invalid
from headgate.lambda_emulator.instance import RESERVED

RUNTIME: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"  # the one there is
ARCHITECTURE: Final = "arm64" if platform.machine() in ("aarch64", "arm64") else "x86_64"
_TAGS_MAX: Final = 50
_TAG_KEY_MAX: Final = 128
_TAG_VALUE_MAX: Final = 256

# What the platform has not, by request, each with the value that AWS takes for "not at all". So do
# empty values, whatever is in them.
_ABSENT_OF_CONFIGURATION: Final[Mapping[str, object]] = {
    "CapacityProviderConfig": None,
    "DeadLetterConfig": None,
    "DurableConfig": None,
    "EphemeralStorage": {"Size": 512},
    "FileSystemConfigs": None,
    "ImageConfig": None,
    "KMSKeyArn": None,
    "Layers": None,
    "LoggingConfig": {"LogFormat": "Text"},
    "SnapStart": {"ApplyOn": "None"},
    "TracingConfig": {"Mode": "PassThrough"},
    "VpcConfig": None,
}
_ABSENT_OF_CODE: Final[Mapping[str, object]] = {
    "S3Bucket": None,
    "S3Key": None,
    "S3ObjectStorageMode": None,
    "S3ObjectVersion": None,
    "SourceKMSKeyArn": None,
}


class ApiRequest(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """A request, or a part of one."""


AskedT = TypeVar("AskedT", bound=ApiRequest)


class Variables(ApiRequest):
    """`Environment`."""

    variables: dict[str, str] = {}


class CodeSent(ApiRequest):
    """Where the code comes from: a zip, or (only here) a directory as `file:///path`."""

    zip_file: bytes | None = None
    image_uri: str | None = None


class CreateFunction(ApiRequest):
    """`CreateFunction`. What it says of `Role` is said again, and no more."""

    function_name: str
    code: CodeSent
    handler: str = ""
    runtime: str = RUNTIME
    role: str = ""
    description: str = ""
    timeout: int = 3
    memory_size: int = 128
    publish: bool = False
    environment: Variables | None = None
    package_type: str = "Zip"
    architectures: list[str] = msgspec.field(default_factory=lambda: [ARCHITECTURE])
    tags: dict[str, str] = {}


class UpdateCode(CodeSent):
    """`UpdateFunctionCode`."""

    publish: bool = False
    dry_run: bool = False
    architectures: list[str] = msgspec.field(default_factory=lambda: [ARCHITECTURE])
    revision_id: str | None = None


class UpdateConfiguration(ApiRequest):
    """`UpdateFunctionConfiguration`: what is not named stays as it is."""

    handler: str | UnsetType = UNSET
    runtime: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    timeout: int | UnsetType = UNSET
    memory_size: int | UnsetType = UNSET
    environment: Variables | UnsetType = UNSET
    revision_id: str | None = None


class PublishVersion(ApiRequest):
    """`PublishVersion`."""

    description: str = ""
    code_sha256: str | None = msgspec.field(default=None, name="CodeSha256")
    revision_id: str | None = None


class WriteAlias(ApiRequest):
    """`CreateAlias` and `UpdateAlias`: what is not named stays as it is."""

    name: str = ""
    function_version: str = ""
    description: str | None = None
    revision_id: str | None = None


class PutConcurrency(ApiRequest):
    """`PutFunctionConcurrency`."""

    reserved_concurrent_executions: int


class PutProvisioned(ApiRequest):
    """`PutProvisionedConcurrencyConfig`."""

    provisioned_concurrent_executions: int


class TagResource(ApiRequest):
    """`TagResource`."""

    tags: dict[str, str]


_ABSENT: Final[Mapping[type[ApiRequest], Mapping[str, object]]] = {
    CreateFunction: {
        **_ABSENT_OF_CONFIGURATION,
        "CodeSigningConfigArn": None,
        "PublishTo": None,
        "TenancyConfig": None,
    },
    UpdateConfiguration: _ABSENT_OF_CONFIGURATION,
    UpdateCode: {**_ABSENT_OF_CODE, "PublishTo": None},
    PublishVersion: {"PublishTo": None},
    WriteAlias: {"RoutingConfig": None},
}


def read(body: bytes, kind: type[AskedT]) -> AskedT:
    """Read a request. Raises `ServiceError` that names the parameter that is in the way."""
    try:
        # As bytes first: code in it is large, and is not looked at twice.
        raw = msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw])
        _drop_absent(raw, _ABSENT.get(kind, {}))
        if kind is CreateFunction and "Code" in raw:
            code = msgspec.json.decode(raw["Code"], type=dict[str, msgspec.Raw])
            _drop_absent(code, _ABSENT_OF_CODE)
            raw["Code"] = msgspec.Raw(msgspec.json.encode(code))
        return msgspec.json.decode(msgspec.json.encode(raw), type=kind)
    # What reading somebody's JSON can raise: a ValueError is text or base64 that is none.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise invalid(f"1 validation error detected: {error}") from None


def _drop_absent(raw: dict[str, msgspec.Raw], absent: Mapping[str, object]) -> None:
    """Take out what asks for nothing; refuse what asks for something that is not there."""
    for name in sorted(raw.keys() & absent.keys()):
        value = msgspec.json.decode(raw.pop(name))
        nothing = absent[name]
        if value != nothing and not _is_empty(value):
            allowed = "" if nothing is None else f" but {msgspec.json.encode(nothing).decode()}"
            raise invalid(f"{name}: the embedded platform supports no value{allowed}")


def _is_empty(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_empty(each) for each in value.values())
    return value in (None, "", False) or value == []


def check_revision(wanted: str | None, current: str) -> None:
    """Refuse a change to something that has changed since the client has looked at it."""
    if wanted not in (None, "", current):
        raise ServiceError(
            412,
            "PreconditionFailedException",
            "The RevisionId provided does not match the latest RevisionId.",
        )


def check_runtime(runtime: str) -> str:
    """Return the runtime, if it is the one that runs here."""
    if runtime != RUNTIME:
        raise invalid(f"Runtime: {runtime!r} does not run here, but {RUNTIME}")
    return runtime


def check_architectures(architectures: list[str]) -> list[str]:
    """Return the architectures, if they are that of this machine."""
    if architectures != [ARCHITECTURE]:
        raise invalid(f"Architectures: this machine has {ARCHITECTURE}")
    return architectures


def check_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a function, if AWS would take them."""
    for key, value in tags.items():
        is_key = 0 < len(key) <= _TAG_KEY_MAX and not key.lower().startswith("aws:")
        if not is_key or len(value) > _TAG_VALUE_MAX:
            raise invalid(
                f"Tags: keys have 1 to {_TAG_KEY_MAX} characters and do not begin with aws:, "
                f"values have up to {_TAG_VALUE_MAX}"
            )
    if len(tags) > _TAGS_MAX:
        raise invalid(f"Tags: a function has up to {_TAGS_MAX}")
    return dict(tags)


def check_environment(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables, unless one cannot be, or is the platform's own."""
    for name, value in variables.items():
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise invalid(
                f"1 validation error detected: Value at 'environment.variables.{name}' failed to "
                "satisfy constraint: names are letters, digits and _, values have no NUL"
            )
    taken = sorted(RESERVED & variables.keys())
    if taken:
        raise invalid(
            "Lambda was unable to configure your environment variables because the environment "
            "variables you have provided contains reserved keys that are currently not supported "
            f"for modification. Reserved keys used in this request: {', '.join(taken)}"
        )
    return variables


def check_handler(handler: str) -> str:
    """Return what a runtime can be told to import."""
    if not handler:
        raise invalid("Handler is mandatory, also for a directory")
    if not re.fullmatch(r"\S{1,128}", handler) or not handler.isprintable():
        raise invalid(
            "1 validation error detected: Value at 'handler' failed to satisfy constraint: up to "
            "128 characters, none of them a space"
        )
    return handler


def check_range(name: str, value: int, least: int, most: int) -> int:
    """Return a number that lies between its bounds."""
    if not least <= value <= most:
        side = "greater" if value < least else "less"
        bound = least if value < least else most
        raise invalid(
            f"1 validation error detected: Value '{value}' at '{name}' failed to satisfy "
            f"constraint: Member must have value {side} than or equal to {bound}"
        )
    return value
