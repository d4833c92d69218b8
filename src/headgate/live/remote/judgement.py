"""What an error of AWS's client means for the work that was sent: above all, whether it ran.

Work is repeated freely only where it certainly never ran. That is so where no connection came
about, and where the platform says so: it throttles, does not know the target, or does not let us.
"""

from __future__ import annotations

from typing import Final

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

from headgate.core.events import Refusal
from headgate.functions.words import words
from headgate.live.remote.fate import Failed, Fate, Lost, Refused

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


def judge(error: Exception, *, throttles: tuple[int, ...], too_large: tuple[int, ...] = ()) -> Fate:
    """Return what became of the work.

    `throttles` are the statuses that say "not now", `too_large` those that say "not here".
    """
    if isinstance(error, ClientError):
        if status_of(error) in too_large:
            return Refused(Refusal.TOO_LARGE, words(error))
        return _judge_answer(error, throttles)
    if isinstance(error, _BEFORE_SENDING):
        return Refused(Refusal.GONE, words(error))
    if isinstance(error, BotoCoreError):
        return Lost(words(error))  # timed out while reading, or the connection broke
    return Lost(words(error))


def status_of(error: ClientError) -> int:
    """Return the status of HTTP that came with an error."""
    status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status


def _judge_answer(error: ClientError, throttles: tuple[int, ...]) -> Fate:
    status = status_of(error)
    if status in throttles:
        return Refused(Refusal.THROTTLED, words(error))
    code = error.response.get("Error", {}).get("Code", "")
    if status in _NOT_LET_IN or code in _NOT_LET_IN_CODES:
        return Refused(Refusal.GONE, words(error))
    return Failed(words(error))
