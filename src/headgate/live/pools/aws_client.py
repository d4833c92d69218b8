"""AWS clients without retries of their own, and the classification of their errors.

The client never repeats a request, because the Scheduler decides about retries. AWS credentials are
sent to AWS only; an endpoint on this machine gets the keys of the local platform.

Errors are classified above all by whether the work has run. Work may be repeated freely only if it
has certainly not run: if no connection was made, or if the platform says so (it throttles, does not
know the target, or denies access).
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
from headgate.core.errors import CHARS_MAX, ConfigError, sendable
from headgate.core.events import Refusal
from headgate.live.pools.remote_pool import CallResult, Failed, Lost, Refused

Service: TypeAlias = Literal["lambda", "sagemaker-runtime"]
CONNECT_S: Final = 3.0
READ_GRACE_S: Final = 5.0  # the caller has timed out before
_LOCAL_REGION: Final = "us-east-1"
_BEFORE_SENDING: Final = (
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ProxyConnectionError,
    SSOError,
)
_DENIED_STATUSES: Final = (401, 403, 404)
# These come with status 400, as other errors do.
_DENIED_CODES: Final = (
    "ExpiredTokenException",
    "IncompleteSignature",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
)


def make_client(
    service: Service, provider: Provider, *, connections: int, hang_s: float, where: str, key: str
) -> Any:  # boto3 has no types: it creates its classes at run time
    """Return a thread-safe client. Raises `ConfigError` if it could never work."""
    config = Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=CONNECT_S,
        read_timeout=hang_s + READ_GRACE_S,
        max_pool_connections=connections,
        tcp_keepalive=True,
        parameter_validation=False,  # our requests are valid, and validation takes time
        user_agent_extra=f"headgate/{__version__}",
    )
    url, url_key = provider.endpoint_url, f"{key}.endpoint_url"
    try:
        if url is None or not is_local_url(url, where=where, key=url_key):
            client = _aws_client(service, provider, config, where, key)
            url = client.meta.endpoint_url  # AWS variables and profiles may set another
            if is_aws_url(url) or not is_local_url(url, where=where, key=url_key):
                return client
            client.close()
        return _local_client(service, provider, config, url)
    except BotoCoreError as error:
        raise ConfigError(f"invalid AWS settings: {error}", where=where, key=key) from None
    except ValueError as error:
        raise ConfigError(str(error), where=where, key=key) from None


def classify_error(
    error: Exception, *, throttles: tuple[int, ...], too_large: tuple[int, ...] = ()
) -> CallResult:
    """Return whether a call ran, as far as its error tells.

    `throttles` are the HTTP statuses that mean throttling, `too_large` those that mean too large a
    payload.
    """
    text = first_line(error)
    if isinstance(error, ClientError):
        status, code = status_of(error), error.response.get("Error", {}).get("Code", "")
        if status in too_large:
            return Refused(Refusal.TOO_LARGE, text)
        if status in throttles:
            return Refused(Refusal.THROTTLED, text)
        if status in _DENIED_STATUSES or code in _DENIED_CODES:
            return Refused(Refusal.GONE, text)
        return Failed(text)
    if isinstance(error, _BEFORE_SENDING):
        return Refused(Refusal.GONE, text)
    return Lost(text)  # among others a read timeout or a broken connection


def first_line(error: Exception) -> str:
    """Return the first line of an error, for a log. The lines after it may quote the signed
    request, including the session token of the credentials.

    >>> first_line(ValueError("the signature is wrong.\\n\\nx-amz-security-token:IQoJ"))
    'ValueError: the signature is wrong.'
    """
    line = f"{type(error).__name__}: {error}".partition("\n")[0]
    return sendable(line[:CHARS_MAX].strip())


def status_of(error: ClientError) -> int:
    status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status


def _aws_client(service: Service, provider: Provider, config: Config, where: str, key: str) -> Any:
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


def _local_client(service: Service, provider: Provider, config: Config, url: str) -> Any:
    """Return a client for an endpoint on this machine. Of AWS settings only the region counts."""
    session = get_session()
    # The only credential provider, so that no AWS credentials can be found.
    session.register_component("credential_provider", _PlatformKeys(url))
    region = provider.region or session.get_config_variable("region") or _LOCAL_REGION
    return boto3.Session(botocore_session=session).client(
        service, region_name=region, endpoint_url=url, config=config.merge(Config(proxies={}))
    )


@final
class _PlatformKeys(Credentials):  # type: ignore[misc]  # botocore has no types
    """Credentials that are read for every request, because a restarted platform has new ones."""

    def __init__(self, url: str) -> None:
        keys = keys_for(url)
        super().__init__(keys.access_key_id, keys.secret_access_key, method="headgate")
        self._url = url

    def load_credentials(self) -> _PlatformKeys:
        return self

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the credentials that the next request is signed with."""
        keys = keys_for(self._url)
        return ReadOnlyCredentials(keys.access_key_id, keys.secret_access_key, None)
