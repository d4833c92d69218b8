"""Request bodies of the Lambda API, and checks of their values.

A parameter that AWS knows but the emulator does not support is rejected, unless its value is the
default of AWS. An unknown parameter is rejected, too: a client that sets it expects an effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from headgate.lambda_emulator.functions import ARCHITECTURE, RUNTIME
from headgate.lambda_emulator.http import ServiceError, invalid
from headgate.lambda_emulator.instance import RESERVED_VARIABLES
from headgate.lambda_emulator.settings import PlatformSettings

# What decoding untrusted JSON can raise; ValueError stands for invalid UTF-8 or base64.
BAD_JSON: Final = (msgspec.DecodeError, ValueError, RecursionError)
_TAGS_MAX: Final = 50
_TAG_KEY_MAX: Final = 128
_TAG_VALUE_MAX: Final = 256

# Unsupported parameters with the value that AWS takes for "not used", which is accepted. Empty
# values are accepted, too.
_UNSUPPORTED_CONFIGURATION: Final[Mapping[str, object]] = {
    **dict.fromkeys(("CapacityProviderConfig", "DeadLetterConfig", "DurableConfig")),
    **dict.fromkeys(("FileSystemConfigs", "ImageConfig", "KMSKeyArn", "Layers", "VpcConfig")),
    "EphemeralStorage": {"Size": 512},
    "LoggingConfig": {"LogFormat": "Text"},
    "SnapStart": {"ApplyOn": "None"},
    "TracingConfig": {"Mode": "PassThrough"},
}
_UNSUPPORTED_CODE: Final[Mapping[str, object]] = dict.fromkeys(
    ("S3Bucket", "S3Key", "S3ObjectStorageMode", "S3ObjectVersion", "SourceKMSKeyArn")
)


class ApiRequest(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """A request body, or a structure inside of one."""

    unsupported: ClassVar[Mapping[str, object]] = {}


ParamsT = TypeVar("ParamsT", bound=ApiRequest)


class EnvironmentVariables(ApiRequest):
    """The structure `Environment`."""

    variables: dict[str, str] = {}


class FunctionCode(ApiRequest):
    """The source of the code: a zip, or (an extension of the emulator) `file:///directory`."""

    unsupported = _UNSUPPORTED_CODE

    zip_file: bytes | None = None
    image_uri: str | None = None


class Configuration(ApiRequest):
    """The parameters of a function. `Role` is stored and returned, and has no effect."""

    handler: str | UnsetType = UNSET
    runtime: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    timeout: int | UnsetType = UNSET
    memory_size: int | UnsetType = UNSET
    environment: EnvironmentVariables | UnsetType | None = UNSET


class CreateFunction(Configuration, kw_only=True):
    """`CreateFunction`."""

    unsupported = {
        **_UNSUPPORTED_CONFIGURATION,
        **dict.fromkeys(("CodeSigningConfigArn", "PublishTo", "TenancyConfig")),
    }

    function_name: str
    code: FunctionCode
    handler: str = ""
    publish: bool = False
    package_type: str = "Zip"
    architectures: tuple[str, ...] = (ARCHITECTURE,)
    tags: dict[str, str] = {}


class UpdateCode(FunctionCode):
    """`UpdateFunctionCode`."""

    unsupported = {**_UNSUPPORTED_CODE, "PublishTo": None}

    publish: bool = False
    dry_run: bool = False
    architectures: tuple[str, ...] = (ARCHITECTURE,)
    revision_id: str | None = None


class UpdateConfiguration(Configuration):
    """`UpdateFunctionConfiguration`: parameters that are not set keep their value."""

    unsupported = _UNSUPPORTED_CONFIGURATION

    revision_id: str | None = None


class PublishVersion(ApiRequest):
    """`PublishVersion`."""

    unsupported = {"PublishTo": None}

    description: str = ""
    code_sha256: str | None = msgspec.field(default=None, name="CodeSha256")
    revision_id: str | None = None


class WriteAlias(ApiRequest):
    """`CreateAlias` and `UpdateAlias`: parameters that are not set keep their value."""

    unsupported = {"RoutingConfig": None}

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


def read(body: bytes, kind: type[ParamsT]) -> ParamsT:
    """Decode a request body. Raises `ServiceError` that names the offending parameter."""
    try:
        # Values stay raw bytes at first: the code is large and must not be decoded twice.
        raw = msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw])
        _drop_unsupported(raw, kind.unsupported)
        if kind is CreateFunction and "Code" in raw:
            code = msgspec.json.decode(raw["Code"], type=dict[str, msgspec.Raw])
            _drop_unsupported(code, _UNSUPPORTED_CODE)
            raw["Code"] = msgspec.Raw(msgspec.json.encode(code))
        return msgspec.json.decode(msgspec.json.encode(raw), type=kind)
    except BAD_JSON as error:
        raise invalid(f"1 validation error detected: {error}") from None


def _drop_unsupported(raw: dict[str, msgspec.Raw], unsupported: Mapping[str, object]) -> None:
    """Remove unsupported parameters that have their default; reject any other value."""
    for name in sorted(raw.keys() & unsupported.keys()):
        value = msgspec.json.decode(raw.pop(name))
        default = unsupported[name]
        if value != default and not _is_empty(value):
            allowed = "" if default is None else f" but {msgspec.json.encode(default).decode()}"
            raise invalid(f"{name}: the Lambda emulator supports no value{allowed}")


def _is_empty(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_empty(each) for each in value.values())
    return value in (None, "", False) or value == []


def checked_configuration(params: Configuration, settings: PlatformSettings) -> dict[str, Any]:
    """Return the fields of a `FunctionVersion` that a request sets. Raises `ServiceError`."""
    fields: dict[str, Any] = {"role": params.role, "description": params.description}
    if params.handler is not UNSET:
        fields["handler"] = _check_handler(params.handler)
    if params.runtime is not UNSET:
        if params.runtime != RUNTIME:
            raise invalid(f"Runtime: {params.runtime!r} does not run here, but {RUNTIME}")
        fields["runtime"] = params.runtime
    if params.timeout is not UNSET:
        check_range("timeout", params.timeout, 1, settings.timeout_s_max)
        fields["timeout_s"] = params.timeout
    if params.memory_size is not UNSET:
        check_range("memorySize", params.memory_size, 128, settings.memory_mb_max)
        fields["memory_mb"] = params.memory_size
    if params.environment is not UNSET and params.environment is not None:
        fields["environment"] = _check_environment(params.environment.variables)
    return {name: value for name, value in fields.items() if value is not UNSET}


def check_revision(wanted: str | None, current: str) -> None:
    """Reject a change of something that has changed since the client read it."""
    if wanted not in (None, "", current):
        problem = "The RevisionId provided does not match the latest RevisionId."
        raise ServiceError(412, "PreconditionFailedException", problem)


def check_architectures(architectures: tuple[str, ...]) -> None:
    """Reject code for another machine. Raises `ServiceError`."""
    if architectures != (ARCHITECTURE,):
        raise invalid(f"Architectures: this machine has {ARCHITECTURE}")


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


def _check_environment(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            allowed = "names are letters, digits and _, values have no NUL"
            raise _violation(f"at 'environment.variables.{name}'", allowed)
    taken = sorted(RESERVED_VARIABLES & variables.keys())
    if taken:
        raise invalid(
            "Lambda was unable to configure your environment variables because the environment "
            "variables you have provided contains reserved keys that are currently not supported "
            f"for modification. Reserved keys used in this request: {', '.join(taken)}"
        )
    return variables


def _check_handler(handler: str) -> str:
    if not handler:
        raise invalid("Handler is mandatory, also for a directory")
    if not re.fullmatch(r"\S{1,128}", handler) or not handler.isprintable():
        raise _violation("at 'handler'", "up to 128 characters, none of them a space")
    return handler


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise `ServiceError` if a number is not between `least` and `most`."""
    if not least <= value <= most:
        side, bound = ("greater", least) if value < least else ("less", most)
        allowed = f"Member must have value {side} than or equal to {bound}"
        raise _violation(f"'{value}' at '{name}'", allowed)


def _violation(value: str, allowed: str) -> ServiceError:
    problem = f"1 validation error detected: Value {value} failed to satisfy constraint"
    return invalid(f"{problem}: {allowed}")
