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
from headgate.functions.words import LETTERS_MAX, sendable
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


def _judge_answer(error: ClientError, throttles: tuple[int, ...]) -> Fate:
    status = status_of(error)
    if status in throttles:
        return Refused(Refusal.THROTTLED, first_line(error))
    code = error.response.get("Error", {}).get("Code", "")
    if status in _NOT_LET_IN or code in _NOT_LET_IN_CODES:
        return Refused(Refusal.GONE, first_line(error))
    return Failed(first_line(error))
