"""Clients of AWS, made so that nothing is ever sent twice behind our back.

Credentials of AWS go to AWS. An endpoint on this machine gets the keys of the platform there.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, final

import boto3
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import BotoCoreError
from botocore.session import get_session

from headgate import __version__
from headgate.app.endpoints import is_here, is_of_aws, keys_for
from headgate.app.providers import Provider
from headgate.core.errors import ConfigError

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
        if url is None or not is_here(url, where=where, key=url_key):
            client = _of_aws(service, provider, config, where, key)
            url = client.meta.endpoint_url  # variables and profiles of AWS may name another
            if is_of_aws(url) or not is_here(url, where=where, key=url_key):
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
