"""Clients of AWS, made so that nothing is ever sent twice behind our back."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.session import Session, get_session

from headgate import __version__
from headgate.app.providers import Provider
from headgate.core.errors import ConfigError

CONNECT_S: Final = 3.0
READ_GRACE_S: Final = 5.0  # whoever waits has given up before
_HERE_REGION: Final = "us-east-1"


def make_client(
    service: Literal["lambda", "sagemaker-runtime"],
    provider: Provider,
    *,
    connections: int,
    hang_s: float,
    where: str,
    key: str,
) -> Any:  # boto3 has no types, and makes its classes when it runs
    """Return a client that is safe between threads. Raises `ConfigError` if it could never work."""
    is_here = provider.endpoint_url is not None and _is_loopback(provider.endpoint_url)
    try:
        session = get_session()
        if is_here:
            _look_nowhere_else(session)
        region = provider.region or session.get_config_variable("region")
        credentials = session.get_credentials()
        if credentials is None and is_here:  # nobody there asks who we are
            session.set_credentials("headgate", "headgate")
            credentials = session.get_credentials()
        if region is None and is_here:
            region = _HERE_REGION
    except BotoCoreError as error:
        raise ConfigError(f"AWS's settings cannot be used: {error}", where=where, key=key) from None
    if credentials is None:
        allowed = "AWS_ACCESS_KEY_ID, AWS_PROFILE, a role, ..."
        problem = "there are no AWS credentials"
        raise ConfigError(problem, where=where, key=f"{key}.provider", allowed=allowed)
    if region is None:
        problem, allowed = "there is no AWS region", "such as eu-central-1; or AWS_REGION"
        raise ConfigError(problem, where=where, key=f"{key}.region", allowed=allowed)
    config = Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=CONNECT_S,
        read_timeout=hang_s + READ_GRACE_S,
        max_pool_connections=connections,
        tcp_keepalive=True,
        parameter_validation=False,  # we know what we send, and it takes time
        user_agent_extra=f"headgate/{__version__}",
        proxies={} if is_here else None,
    )
    try:
        return boto3.Session(botocore_session=session).client(
            service, region_name=region, endpoint_url=provider.endpoint_url, config=config
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(str(error), where=where, key=key) from None


def _look_nowhere_else(session: Session) -> None:
    """Do not ask the machine's cloud for credentials: it may take seconds to find there is none."""
    resolver = session.get_component("credential_provider")
    for name in ("container-role", "iam-role"):
        resolver.remove(name)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
