"""Request bodies of the Lambda API, and checks of their values.

A parameter that AWS knows but the emulator does not support is rejected, unless its value is the
default of AWS. An unknown parameter is rejected, too: a client that sets it expects an effect.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from headgate.lambda_emulator.http import ServiceError, invalid
from headgate.lambda_emulator.instance import RESERVED_VARIABLES

RUNTIME: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"  # the only one
ARCHITECTURE: Final = "arm64" if platform.machine() in ("aarch64", "arm64") else "x86_64"
_TAGS_MAX: Final = 50
_TAG_KEY_MAX: Final = 128
_TAG_VALUE_MAX: Final = 256

# Unsupported parameters with the value that AWS takes for "not used", which is accepted. Empty
# values are accepted, too.
_UNSUPPORTED_CONFIGURATION: Final[Mapping[str, object]] = {
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
_UNSUPPORTED_CODE: Final[Mapping[str, object]] = {
    "S3Bucket": None,
    "S3Key": None,
    "S3ObjectStorageMode": None,
    "S3ObjectVersion": None,
    "SourceKMSKeyArn": None,
}


class ApiRequest(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """A request body, or a structure inside of one."""


ParamsT = TypeVar("ParamsT", bound=ApiRequest)


class EnvironmentVariables(ApiRequest):
    """The structure `Environment`."""

    variables: dict[str, str] = {}


class FunctionCode(ApiRequest):
    """The source of the code: a zip, or (an extension of the emulator) `file:///directory`."""

    zip_file: bytes | None = None
    image_uri: str | None = None


class CreateFunction(ApiRequest):
    """`CreateFunction`. `Role` is stored and returned, and has no effect."""

    function_name: str
    code: FunctionCode
    handler: str = ""
    runtime: str = RUNTIME
    role: str = ""
    description: str = ""
    timeout: int = 3
    memory_size: int = 128
    publish: bool = False
    environment: EnvironmentVariables | None = None
    package_type: str = "Zip"
    architectures: list[str] = msgspec.field(default_factory=lambda: [ARCHITECTURE])
    tags: dict[str, str] = {}


class UpdateCode(FunctionCode):
    """`UpdateFunctionCode`."""

    publish: bool = False
    dry_run: bool = False
    architectures: list[str] = msgspec.field(default_factory=lambda: [ARCHITECTURE])
    revision_id: str | None = None


class UpdateConfiguration(ApiRequest):
    """`UpdateFunctionConfiguration`: parameters that are not set keep their value."""

    handler: str | UnsetType = UNSET
    runtime: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    timeout: int | UnsetType = UNSET
    memory_size: int | UnsetType = UNSET
    environment: EnvironmentVariables | UnsetType = UNSET
    revision_id: str | None = None


class PublishVersion(ApiRequest):
    """`PublishVersion`."""

    description: str = ""
    code_sha256: str | None = msgspec.field(default=None, name="CodeSha256")
    revision_id: str | None = None


class WriteAlias(ApiRequest):
    """`CreateAlias` and `UpdateAlias`: parameters that are not set keep their value."""

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


_UNSUPPORTED: Final[Mapping[type[ApiRequest], Mapping[str, object]]] = {
    CreateFunction: {
        **_UNSUPPORTED_CONFIGURATION,
        "CodeSigningConfigArn": None,
        "PublishTo": None,
        "TenancyConfig": None,
    },
    UpdateConfiguration: _UNSUPPORTED_CONFIGURATION,
    UpdateCode: {**_UNSUPPORTED_CODE, "PublishTo": None},
    PublishVersion: {"PublishTo": None},
    WriteAlias: {"RoutingConfig": None},
}


def read(body: bytes, kind: type[ParamsT]) -> ParamsT:
    """Decode a request body. Raises `ServiceError` that names the offending parameter."""
    try:
        # Values stay raw bytes at first: the code is large and must not be decoded twice.
        raw = msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw])
        _drop_unsupported(raw, _UNSUPPORTED.get(kind, {}))
        if kind is CreateFunction and "Code" in raw:
            code = msgspec.json.decode(raw["Code"], type=dict[str, msgspec.Raw])
            _drop_unsupported(code, _UNSUPPORTED_CODE)
            raw["Code"] = msgspec.Raw(msgspec.json.encode(code))
        return msgspec.json.decode(msgspec.json.encode(raw), type=kind)
    # What decoding untrusted JSON can raise; ValueError stands for invalid UTF-8 or base64.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise invalid(f"1 validation error detected: {error}") from None


def _drop_unsupported(raw: dict[str, msgspec.Raw], unsupported: Mapping[str, object]) -> None:
    """Remove unsupported parameters that have their default; reject any other value."""
    for name in sorted(raw.keys() & unsupported.keys()):
        value = msgspec.json.decode(raw.pop(name))
        default = unsupported[name]
        if value != default and not _is_empty(value):
            allowed = "" if default is None else f" but {msgspec.json.encode(default).decode()}"
            raise invalid(f"{name}: the embedded platform supports no value{allowed}")


def _is_empty(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_empty(each) for each in value.values())
    return value in (None, "", False) or value == []


def check_revision(wanted: str | None, current: str) -> None:
    """Reject a change of something that has changed since the client read it."""
    if wanted not in (None, "", current):
        raise ServiceError(
            412,
            "PreconditionFailedException",
            "The RevisionId provided does not match the latest RevisionId.",
        )


def check_runtime(runtime: str) -> str:
    """Return the runtime. Raises `ServiceError` if it is not the one supported."""
    if runtime != RUNTIME:
        raise invalid(f"Runtime: {runtime!r} does not run here, but {RUNTIME}")
    return runtime


def check_architectures(architectures: list[str]) -> list[str]:
    """Return the architectures. Raises `ServiceError` if this machine has another one."""
    if architectures != [ARCHITECTURE]:
        raise invalid(f"Architectures: this machine has {ARCHITECTURE}")
    return architectures


def check_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a function. Raises `ServiceError` if AWS would reject them."""
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
    """Return the variables. Raises `ServiceError` for malformed and reserved ones."""
    for name, value in variables.items():
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise invalid(
                f"1 validation error detected: Value at 'environment.variables.{name}' failed to "
                "satisfy constraint: names are letters, digits and _, values have no NUL"
            )
    taken = sorted(RESERVED_VARIABLES & variables.keys())
    if taken:
        raise invalid(
            "Lambda was unable to configure your environment variables because the environment "
            "variables you have provided contains reserved keys that are currently not supported "
            f"for modification. Reserved keys used in this request: {', '.join(taken)}"
        )
    return variables


def check_handler(handler: str) -> str:
    """Return the handler. Raises `ServiceError` if it is malformed."""
    if not handler:
        raise invalid("Handler is mandatory, also for a directory")
    if not re.fullmatch(r"\S{1,128}", handler) or not handler.isprintable():
        raise invalid(
            "1 validation error detected: Value at 'handler' failed to satisfy constraint: up to "
            "128 characters, none of them a space"
        )
    return handler


def check_range(name: str, value: int, least: int, most: int) -> int:
    """Return a number. Raises `ServiceError` if it is not between `least` and `most`."""
    if not least <= value <= most:
        side = "greater" if value < least else "less"
        bound = least if value < least else most
        raise invalid(
            f"1 validation error detected: Value '{value}' at '{name}' failed to satisfy "
            f"constraint: Member must have value {side} than or equal to {bound}"
        )
    return value
