"""Calls AWS Lambda functions, and those of compatible platforms."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, Final, final

from msgspec import Struct
from msgspec.json import Decoder

from headgate.config.providers import Provider
from headgate.core.errors import error_text, sendable
from headgate.core.events import Refusal
from headgate.functions.lambda_payload import (
    body_bytes,
    decode_response,
    encode_ping,
    encode_request,
)
from headgate.live.pools.aws_client import classify_error, first_line
from headgate.live.pools.remote_pool import (
    CallResult,
    Done,
    Failed,
    Refused,
    RemoteCall,
    check_outputs,
    error_status,
)

THROTTLES: Final = (429,)  # the call has not run
TOO_LARGE: Final = (413,)  # the call has not run either; no other status says so for certain
_MESSAGE_CHARS_MAX: Final = 500
_TOOK_MS_MAX: Final = 1e9  # bound for the duration that a platform reports


@final
@dataclass(eq=False)
class LambdaFunctions:
    """Calls functions. All methods block, and none raises."""

    client: Any  # boto3 has no types
    provider: Provider
    payload_bytes_max: int

    def call(self, call: RemoteCall) -> CallResult:
        """Run a batch and wait for its result."""
        size, limit = body_bytes([task.inputs for task in call.tasks]), self.payload_bytes_max
        if size > limit:
            return Refused(Refusal.TOO_LARGE, f"the payload has {size} bytes; at most {limit}")
        body = encode_request(
            call.function,
            call.tasks,
            deadline_ms=call.time_left_ms(monotonic_ns()),
            is_hard=call.is_hard,
            traceparent=call.traceparent,
            tenant=call.tenant,
        )
        return self._invoke(call.function, body)

    def ping(self, function: str) -> CallResult:
        """Start an instance, or keep one warm."""
        return self._invoke(function, encode_ping())

    def provision(self, function: str, count: int) -> str:
        """Set the provisioned concurrency; return the problem, if any."""
        target = self.provider.target_of(function)
        head, _, qualifier = target.rpartition(":")
        # An ARN itself contains colons: arn:aws:lambda:REGION:ACCOUNT:function:NAME[:QUALIFIER].
        if not head or (target.startswith("arn:") and target.count(":") < 7):
            return f"{target}: only an alias can have provisioned instances (target: name:alias)"
        try:
            if count:
                self.client.put_provisioned_concurrency_config(
                    FunctionName=head, Qualifier=qualifier, ProvisionedConcurrentExecutions=count
                )
            else:
                self.client.delete_provisioned_concurrency_config(
                    FunctionName=head, Qualifier=qualifier
                )
        except Exception as error:  # boto3 may raise anything
            return f"{target}: {first_line(error)}"
        return ""

    def _invoke(self, function: str, body: bytes) -> CallResult:
        try:
            response = self.client.invoke(
                FunctionName=self.provider.target_of(function), Payload=body
            )
            payload: bytes = response["Payload"].read()
        except Exception as error:  # boto3 may raise anything
            return classify_error(error, throttles=THROTTLES, too_large=TOO_LARGE)
        if response.get("FunctionError"):  # the HTTP status is 200 nevertheless
            return Failed(_error_message(payload))
        try:
            response_json = decode_response(payload)
            for result in response_json.results:
                check_outputs(result.outputs)
                result.status = error_status(result.status) if result.error else 200
        except (ValueError, RecursionError) as error:
            return Failed(f"invalid response: {error_text(error)}")
        took_ms = min(max(0.0, response_json.took_ms), _TOOK_MS_MAX)
        return Done(response_json.results, int(took_ms * 1e6), response_json.cold)


@final
class _ErrorJson(Struct, rename="camel"):
    error_message: str = ""
    error_type: str = ""


def _error_message(payload: bytes) -> str:
    """Return the error of a failed function, from its payload."""
    error = _ErrorJson()
    with suppress(ValueError, RecursionError):
        error = _DECODER.decode(payload)
    message = ": ".join(filter(None, (error.error_type, error.error_message)))
    return sendable(" ".join(message[:_MESSAGE_CHARS_MAX].split())) or "the function failed"


# Created once at import: the first inspection of a type by msgspec is not thread-safe.
_DECODER: Final = Decoder(_ErrorJson)
