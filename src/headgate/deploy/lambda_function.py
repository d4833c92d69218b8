"""Creates or updates a function through boto3, on AWS Lambda or on the Lambda emulator."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from headgate.config.providers import is_aws_url, is_local_url, is_valid_url
from headgate.core.errors import ConfigError
from headgate.lambda_emulator.auth import REGION, client_options

# The API requires a role; the Lambda emulator ignores it.
_ANY_ROLE: Final = "arn:aws:iam::000000000000:role/embedded"


@dataclass(frozen=True, slots=True)
class LambdaFunction:
    """The desired state of a function. Its code is the bytes of a zip file, or a directory."""

    name: str
    handler: str
    memory_mb: int
    timeout_s: int
    environment: Mapping[str, str]
    code: bytes | Path
    role: str | None = None


def connect(endpoint_url: str | None) -> Any:  # boto3 has no types
    """Return a client of Lambda. Raises `ConfigError` if boto3 or credentials are missing.

    An endpoint on this machine gets the keys of the emulator there, and never credentials of AWS.
    """
    try:
        import boto3  # noqa: PLC0415  # large, and needed only here
    except ImportError:
        raise ConfigError("boto3 is not installed: pip install boto3", where="deploy") from None
    with _one_line_errors(endpoint_url):
        session = boto3.session.Session()
        if endpoint_url is not None and is_local_lambda(endpoint_url):
            return _connect_local(session, endpoint_url)
        if session.get_credentials() is None:
            allowed = "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, a profile, a role"
            raise ConfigError("no credentials for AWS were found", where="deploy", allowed=allowed)
        client = session.client("lambda", endpoint_url=endpoint_url)
        url = client.meta.endpoint_url  # variables and profiles of AWS may set another
        if is_aws_url(url) or not is_local_lambda(url):
            return client
        client.close()
        return _connect_local(session, url)


def is_local_lambda(endpoint_url: str | None) -> bool:
    """Whether an endpoint is a Lambda emulator on this machine. Raises `ConfigError`.

    >>> is_local_lambda("http://127.0.0.1:9001"), is_local_lambda(None)
    (True, False)
    """
    key = "--endpoint-url"
    if endpoint_url is None:
        return False
    if not is_valid_url(endpoint_url):
        problem, allowed = "is not a valid URL", "http://127.0.0.1:9001; without a user name"
        raise ConfigError(problem, where="deploy", key=key, value=endpoint_url, allowed=allowed)
    return is_local_url(endpoint_url, where="deploy", key=key)


def deploy(
    client: Any, function: LambdaFunction, endpoint_url: str | None
) -> Literal["created", "updated"]:
    """Create the function, or update the one of that name; wait until it can be called.

    Raises `ConfigError` if the platform refuses.
    """
    with _one_line_errors(endpoint_url):
        try:
            old = client.get_function_configuration(FunctionName=function.name)
        except client.exceptions.ResourceNotFoundException:
            _create(client, function, endpoint_url)
            return "created"
        _update(client, function, old)
        return "updated"


def _connect_local(session: Any, endpoint_url: str) -> Any:  # boto3 has no types
    from botocore.config import Config  # noqa: PLC0415  # as boto3

    options = client_options(endpoint_url, session.region_name or REGION)
    return session.client("lambda", **options, config=Config(proxies={}))


def _create(client: Any, function: LambdaFunction, endpoint_url: str | None) -> None:
    role = function.role or (_ANY_ROLE if is_local_lambda(endpoint_url) else None)
    if role is None:
        problem, arn = "AWS requires a role to create a function", "arn:aws:iam::ACCOUNT:role/NAME"
        raise ConfigError(problem, where="deploy", key="--role", allowed=arn)
    client.create_function(
        **_configuration(function, function.environment),
        Role=role,
        Code=_code(function),
        PackageType="Zip" if isinstance(function.code, bytes) else "Image",
    )
    client.get_waiter("function_active_v2").wait(FunctionName=function.name)


def _update(client: Any, function: LambdaFunction, old: Mapping[str, Any]) -> None:
    updated = client.get_waiter("function_updated_v2")
    client.update_function_code(FunctionName=function.name, **_code(function))
    updated.wait(FunctionName=function.name)
    # Keep variables that were set by hand, because the call below replaces all of them.
    kept = old.get("Environment", {}).get("Variables", {})
    changes = {"Role": function.role} if function.role else {}
    configuration = _configuration(function, {**kept, **function.environment})
    client.update_function_configuration(**configuration, **changes)
    updated.wait(FunctionName=function.name)


def _code(function: LambdaFunction) -> dict[str, object]:
    if isinstance(function.code, bytes):
        return {"ZipFile": function.code}
    return {"ImageUri": function.code.resolve().as_uri()}


def _configuration(function: LambdaFunction, variables: Mapping[str, str]) -> dict[str, object]:
    return {
        "FunctionName": function.name,
        "Runtime": f"python{sys.version_info.major}.{sys.version_info.minor}",
        "Handler": function.handler,
        "MemorySize": function.memory_mb,
        "Timeout": function.timeout_s,
        "Environment": {"Variables": dict(variables)},
    }


@contextmanager
def _one_line_errors(endpoint_url: str | None) -> Iterator[None]:
    """Turn exceptions of boto3 into `ConfigError`: they are not defects of Headgate."""
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    try:
        yield
    except ClientError as error:
        details = error.response.get("Error", {})
        # The first line only: the next ones may quote the request with its session token.
        message = str(details.get("Message", "")).partition("\n")[0]
        problem = f"{details.get('Code', 'error')}: {message}"
        raise ConfigError(problem, where=endpoint_url or "AWS Lambda") from None
    except (BotoCoreError, ValueError) as error:  # ValueError: an invalid URL
        raise ConfigError(str(error), where=endpoint_url or "AWS Lambda") from None
