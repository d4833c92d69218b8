"""What clients may ask for, as they write it. What the platform has no use for is let pass."""

from __future__ import annotations

import re

import msgspec
from msgspec import UNSET, UnsetType

from headgate.serverless.errors import invalid
from headgate.serverless.launch import RESERVED


class Variables(msgspec.Struct, rename="pascal"):
    """`Environment`."""

    variables: dict[str, str] = {}


class CodeSent(msgspec.Struct, rename="pascal"):
    """Where the code comes from: a zip, or (only here) a directory as `file:///path`."""

    zip_file: bytes | None = None
    image_uri: str | None = None
    s3_bucket: str | None = None


class CreateFunction(msgspec.Struct, rename="pascal"):
    """`CreateFunction`."""

    function_name: str
    code: CodeSent
    handler: str = ""
    runtime: str = ""
    role: str = ""
    description: str = ""
    timeout: int = 3
    memory_size: int = 128
    publish: bool = False
    environment: Variables | None = None
    package_type: str = "Zip"
    architectures: list[str] = msgspec.field(default_factory=lambda: ["x86_64"])
    layers: list[str] = []
    ephemeral_storage: dict[str, int] | None = None
    tags: dict[str, str] = {}


class UpdateCode(CodeSent, rename="pascal"):
    """`UpdateFunctionCode`."""

    publish: bool = False
    dry_run: bool = False


class UpdateConfiguration(msgspec.Struct, rename="pascal"):
    """`UpdateFunctionConfiguration`: what is not named stays as it is."""

    handler: str | UnsetType = UNSET
    runtime: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    timeout: int | UnsetType = UNSET
    memory_size: int | UnsetType = UNSET
    environment: Variables | UnsetType = UNSET


class PublishVersion(msgspec.Struct, rename="pascal"):
    """`PublishVersion`."""

    description: str = ""
    code_sha256: str | None = msgspec.field(default=None, name="CodeSha256")


class WriteAlias(msgspec.Struct, rename="pascal"):
    """`CreateAlias` and `UpdateAlias`."""

    name: str = ""
    function_version: str = ""
    description: str = ""


class PutConcurrency(msgspec.Struct, rename="pascal"):
    """`PutFunctionConcurrency`."""

    reserved_concurrent_executions: int


class PutProvisioned(msgspec.Struct, rename="pascal"):
    """`PutProvisionedConcurrencyConfig`."""

    provisioned_concurrent_executions: int


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
