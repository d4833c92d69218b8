"""Clients of AWS, made so that nothing is ever sent twice behind our back.

Credentials of AWS go to AWS. An endpoint on this machine gets the keys of the platform there.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, final

import boto3
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ProxyConnectionError,
    SSOError,
)
from botocore.session import get_session

from headgate import __version__
from headgate.config.providers import Provider, is_aws_url, is_local_url, keys_for
from headgate.core.errors import ConfigError
from headgate.core.events import Refusal
from headgate.functions.error_text import LETTERS_MAX, sendable
from headgate.live.pools.remote_pool import CallResult, Failed, Lost, Refused

Service: TypeAlias = Literal["lambda", "sagemaker-runtime"]

CONNECT_S: Final = 3.0
READ_GRACE_S: Final = 5.0  # whoever waits has given up before
_HERE_REGION: Final = "us-east-1"


def make_client(
    service: Service,
    provider: Provider,
    *,
    connections: int,
    hang_s: float,
    where: str,
    key: str,
) -> Any:  # boto3 has no types, and makes its classes when it runs
    """Return a client that is safe between threads. Raises `ConfigError` if it could never work."""
    config = Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=CONNECT_S,
        read_timeout=hang_s + READ_GRACE_S,
        max_pool_connections=connections,
        tcp_keepalive=True,
        parameter_validation=False,  # we know what we send, and it takes time
        user_agent_extra=f"headgate/{__version__}",
    )
    url, url_key = provider.endpoint_url, f"{key}.endpoint_url"
    try:
        if url is None or not is_local_url(url, where=where, key=url_key):
            client = _of_aws(service, provider, config, where, key)
            url = client.meta.endpoint_url  # variables and profiles of AWS may name another
            if is_aws_url(url) or not is_local_url(url, where=where, key=url_key):
                return client
            client.close()
        return _of_platform(service, provider, config, url)
    except BotoCoreError as error:
        raise ConfigError(f"AWS's settings cannot be used: {error}", where=where, key=key) from None
    except ValueError as error:
        raise ConfigError(str(error), where=where, key=key) from None


def _of_aws(service: Service, provider: Provider, config: Config, where: str, key: str) -> Any:
    session = get_session()
    if session.get_credentials() is None:
        allowed = "AWS_ACCESS_KEY_ID, AWS_PROFILE, a role, ..."
        problem = "there are no AWS credentials"
        raise ConfigError(problem, where=where, key=f"{key}.provider", allowed=allowed)
    region = provider.region or session.get_config_variable("region")
    if region is None:
        problem, allowed = "there is no AWS region", "such as eu-central-1; or AWS_REGION"
        raise ConfigError(problem, where=where, key=f"{key}.region", allowed=allowed)
    return boto3.Session(botocore_session=session).client(
        service, region_name=region, endpoint_url=provider.endpoint_url, config=config
    )


def _of_platform(service: Service, provider: Provider, config: Config, url: str) -> Any:
    """A client for this machine: nothing that is set for AWS is looked at, but for the region."""
    session = get_session()
    # The only one to be asked: no other is left that could find credentials of AWS.
    session.register_component("credential_provider", _PlatformKeys(url))
    region = provider.region or session.get_config_variable("region") or _HERE_REGION
    return boto3.Session(botocore_session=session).client(
        service, region_name=region, endpoint_url=url, config=config.merge(Config(proxies={}))
    )


@final
class _PlatformKeys(Credentials):  # type: ignore[misc]  # botocore has no types
    """Looked up for every request: a platform that is started again has others."""

    def __init__(self, url: str) -> None:
        keys = keys_for(url)
        super().__init__(keys.access_key_id, keys.secret_access_key, method="headgate")
        self._url = url

    def load_credentials(self) -> _PlatformKeys:
        """Return the credentials of a session."""
        return self

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return what the next request is signed with."""
        keys = keys_for(self._url)
        return ReadOnlyCredentials(keys.access_key_id, keys.secret_access_key, None)


# What an error of AWS's client means for the work that was sent: above all, whether it ran.
#
# Work is repeated freely only where it certainly never ran. That is so where no connection came
# about, and where the platform says so: it throttles, does not know the target, or does not let us.


_BEFORE_SENDING: Final = (
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ProxyConnectionError,
    SSOError,
)
_NOT_LET_IN: Final = (401, 403, 404)
# Those come with 400, as other mistakes do.
_NOT_LET_IN_CODES: Final = (
    "ExpiredTokenException",
    "IncompleteSignature",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
)


def classify_error(
    error: Exception, *, throttles: tuple[int, ...], too_large: tuple[int, ...] = ()
) -> CallResult:
    """Return what became of the work.

    `throttles` are the statuses that say "not now", `too_large` those that say "not here".
    """
    if isinstance(error, ClientError):
        if status_of(error) in too_large:
            return Refused(Refusal.TOO_LARGE, first_line(error))
        return _judge_answer(error, throttles)
    if isinstance(error, _BEFORE_SENDING):
        return Refused(Refusal.GONE, first_line(error))
    if isinstance(error, BotoCoreError):
        return Lost(first_line(error))  # timed out while reading, or the connection broke
    return Lost(first_line(error))


def first_line(error: Exception) -> str:
    """Return what an error says, for a log: in the lines after the first, AWS may quote the signed
    request, the session token of the credentials included.

    >>> first_line(ValueError("the signature is wrong.\\n\\nx-amz-security-token:IQoJ"))
    'ValueError: the signature is wrong.'
    """
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return sendable(said[:LETTERS_MAX].strip())


def status_of(error: ClientError) -> int:
    """Return the status of HTTP that came with an error."""
    status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status


def _judge_answer(error: ClientError, throttles: tuple[int, ...]) -> CallResult:
    status = status_of(error)
    if status in throttles:
        return Refused(Refusal.THROTTLED, first_line(error))
    code = error.response.get("Error", {}).get("Code", "")
    if status in _NOT_LET_IN or code in _NOT_LET_IN_CODES:
        return Refused(Refusal.GONE, first_line(error))
    return Failed(first_line(error))
