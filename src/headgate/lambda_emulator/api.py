"""The HTTP API of AWS Lambda: routes requests to the control plane and the invoke service.

Operations and parameters that the emulator does not support are rejected in the shape of AWS.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, final
from urllib.parse import parse_qsl

import msgspec

from headgate.lambda_emulator import api_models
from headgate.lambda_emulator.api_models import read
from headgate.lambda_emulator.auth import RequestAuth
from headgate.lambda_emulator.control_plane import ControlPlane
from headgate.lambda_emulator.functions import EmulatedFunction, FunctionVersion
from headgate.lambda_emulator.http import (
    EmulatorRequest,
    Response,
    ServiceError,
    invalid,
    not_found,
    too_large,
)
from headgate.lambda_emulator.instance import Invocation, InvocationResult
from headgate.lambda_emulator.invoker import AsyncEventQueue, BillingRecord, Invoker
from headgate.lambda_emulator.settings import PlatformSettings
from headgate.system.process import memory_bytes

JsonObject: TypeAlias = dict[str, object]

_LOG_BYTES_MAX: Final = 4_096
_CLIENT_CONTEXT_BYTES_MAX: Final = 3_583
_PAGE_ITEMS_MAX: Final = 50
_QUOTED_MAX: Final = 100  # of client input, in an error message
_PARAMETERS: Final = frozenset(("Qualifier", "Marker", "MaxItems", "List", "tagKeys"))
_UNSUPPORTED_HEADERS: Final[Mapping[str, str]] = {
    "x-amz-durable-execution-name": "DurableExecutionName",
    "x-amz-tenant-id": "TenantId",
}
# What decoding untrusted JSON can raise; ValueError stands for invalid UTF-8 or base64.
_BAD_JSON: Final = (msgspec.DecodeError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class InvokeResponse:
    """Body and headers of the response to `Invoke`. The status is 200 even on function errors."""

    body: bytes
    headers: Mapping[str, str]


@final
class InvokeService:
    """Runs invocations and queues events for the API."""

    def __init__(
        self,
        settings: PlatformSettings,
        functions: Mapping[str, EmulatedFunction],
        invoker: Invoker,
        events: AsyncEventQueue,
    ) -> None:
        self._settings = settings
        self._functions = functions
        self._invoker = invoker
        self._events = events

    def function_names(self) -> list[str]:
        """Return the names of all functions, sorted."""
        return sorted(self._functions)

    def enqueue(self, function: EmulatedFunction, call: Invocation) -> None:
        """Queue an event: an asynchronous invocation. Raises `Throttled`."""
        self._events.put(function, call)

    async def run(
        self, function: EmulatedFunction, call: Invocation, *, wants_log: bool
    ) -> InvokeResponse:
        """Run an invocation and return its response. Raises `Throttled`."""
        result, record = await self._invoker.run(function, call)
        headers = {}
        if result.error_type:
            headers["X-Amz-Function-Error"] = "Unhandled"
        if wants_log:
            log = _log(call, result, record)[-_LOG_BYTES_MAX:]
            headers["X-Amz-Log-Result"] = base64.b64encode(log).decode()
        return InvokeResponse(result.payload, headers)

    def describe_account(self) -> dict[str, object]:
        """Return `GetAccountSettings`."""
        settings = self._settings
        sizes = [
            version.code.size_bytes
            for f in self._functions.values()
            for version in f.all_versions()
        ]
        return {
            "AccountLimit": {
                "ConcurrentExecutions": settings.concurrency,
                "UnreservedConcurrentExecutions": self._invoker.admission.unreserved(),
                "CodeSizeZipped": settings.zip_bytes,
                "CodeSizeUnzipped": settings.unzipped_bytes,
            },
            "AccountUsage": {"FunctionCount": len(self._functions), "TotalCodeSize": sum(sizes)},
        }


@final
class Api:
    """Handles HTTP requests. Errors have the shape that AWS uses."""

    def __init__(
        self,
        settings: PlatformSettings,
        auth: RequestAuth,
        control_plane: ControlPlane,
        invoke_service: InvokeService,
    ) -> None:
        self._settings = settings
        self._auth = auth
        self._control_plane = control_plane
        self._invoke_service = invoke_service

    async def handle(self, request: EmulatorRequest) -> Response:
        """Return the response to a request; errors become responses as well."""
        request_id = str(uuid.uuid4())
        try:
            if request.is_too_long:
                raise ServiceError(
                    413, "RequestEntityTooLargeException", "The request is too large."
                )
            self._auth.check(request)
            _check_query(request)
            response = await self._route(request, request_id)
        except ServiceError as error:
            response = error.response()
        headers = {"x-amzn-RequestId": request_id, **response.headers}
        return Response(response.status, response.body, headers)

    async def _route(self, request: EmulatorRequest, request_id: str) -> Response:
        match (request.method, *request.parts):
            case ("POST", "2015-03-31", "functions", name, "invocations"):
                return await self._invoke(name, request, request_id)
            case ("POST", "2015-03-31", "functions"):
                created = await self._control_plane.create(
                    read(request.body, api_models.CreateFunction)
                )
                return _json_response(created.describe(self._settings), 201)
            case ("GET", "2015-03-31", "functions"):
                return _json_response(self._list(request))
            case ("GET", "2016-08-19", "account-settings"):
                return _json_response(self._invoke_service.describe_account())
            case (method, "2015-03-31", "functions", name, *rest):
                resolved = self._control_plane.resolve(name, request.query.get("Qualifier"))
                if rest and method != "GET":  # a version can only be read, invoked or deleted
                    self._control_plane.resolve_unqualified(name, request.query.get("Qualifier"))
                return await self._manage(method, tuple(rest), request, resolved)
            case (method, "2017-10-31" | "2019-09-30", "functions", name, "concurrency"):
                function = self._control_plane.resolve_unqualified(
                    name, request.query.get("Qualifier")
                )
                return self._reserve(method, request, function)
            case (method, "2017-03-31", "tags", resource):
                return self._tag(method, request, self._control_plane.resolve_unqualified(resource))
            case (method, "2019-09-30", "functions", name, "provisioned-concurrency"):
                function, _, qualifier = self._control_plane.resolve(
                    name, request.query.get("Qualifier")
                )
                return self._provision(method, request, function, qualifier)
        raise not_found(f"no such operation: {request.method} {request.path}")

    async def _manage(
        self,
        method: str,
        rest: tuple[str, ...],
        request: EmulatorRequest,
        resolved: tuple[EmulatedFunction, FunctionVersion, str | None],
    ) -> Response:
        """Handle an operation on one function."""
        control_plane, settings = self._control_plane, self._settings
        function, version, qualifier = resolved
        match (method, *rest):
            case ("GET",):
                body: JsonObject = {
                    "Configuration": version.describe(settings, qualifier),
                    "Code": {
                        "RepositoryType": "Directory",
                        "Location": str(version.code.directory),
                    },
                }
                if function.tags:
                    body["Tags"] = function.tags
                if function.reserved is not None:
                    body["Concurrency"] = {"ReservedConcurrentExecutions": function.reserved}
                return _json_response(body)
            case ("GET", "configuration"):
                return _json_response(version.describe(settings, qualifier))
            case ("PUT", "configuration"):
                params = read(request.body, api_models.UpdateConfiguration)
                return _json_response(
                    control_plane.update_configuration(function, params).describe(settings)
                )
            case ("PUT", "code"):
                update = read(request.body, api_models.UpdateCode)
                return _json_response(
                    (await control_plane.update_code(function, update)).describe(settings)
                )
            case ("DELETE",):
                control_plane.delete(function, qualifier)
                return Response(204)
            case ("GET", "versions"):
                versions = {
                    each.version: each.describe(settings) for each in function.all_versions()
                }
                return _json_response(_page(request, "Versions", versions))
            case ("POST", "versions"):
                created = control_plane.publish(
                    function, read(request.body, api_models.PublishVersion)
                )
                return _json_response(created.describe(settings), 201)
        return self._alias(method, rest, request, function)

    def _alias(
        self,
        method: str,
        rest: tuple[str, ...],
        request: EmulatorRequest,
        function: EmulatedFunction,
    ) -> Response:
        control_plane, settings = self._control_plane, self._settings
        match (method, *rest):
            case ("GET", "aliases"):
                aliases = {
                    name: alias.describe(settings, function.name)
                    for name, alias in function.aliases.items()
                }
                return _json_response(_page(request, "Aliases", aliases))
            case ("POST", "aliases"):
                params = read(request.body, api_models.WriteAlias)
                alias = control_plane.write_alias(function, params, is_new=True)
                return _json_response(alias.describe(settings, function.name), 201)
            case ("PUT", "aliases", name):
                params = read(request.body, api_models.WriteAlias)
                params.name = name
                alias = control_plane.write_alias(function, params, is_new=False)
                return _json_response(alias.describe(settings, function.name))
            case ("GET", "aliases", name) if name in function.aliases:
                return _json_response(function.aliases[name].describe(settings, function.name))
            case ("DELETE", "aliases", name):
                control_plane.delete_alias(function, name)
                return Response(204)
        raise not_found(f"no such operation: {method} {request.path}")

    def _reserve(
        self, method: str, request: EmulatorRequest, function: EmulatedFunction
    ) -> Response:
        if method == "DELETE":
            self._control_plane.reserve(function, None)
            return Response(204)
        if method == "PUT":
            params = read(request.body, api_models.PutConcurrency)
            self._control_plane.reserve(function, params.reserved_concurrent_executions)
        elif method != "GET":
            raise not_found(f"no such operation: {method} {request.path}")
        if function.reserved is None:
            return _json_response({})
        return _json_response({"ReservedConcurrentExecutions": function.reserved})

    def _provision(
        self,
        method: str,
        request: EmulatorRequest,
        function: EmulatedFunction,
        qualifier: str | None,
    ) -> Response:
        control_plane = self._control_plane
        if method == "PUT":
            params = read(request.body, api_models.PutProvisioned)
            control_plane.provision(function, qualifier, params.provisioned_concurrent_executions)
            return _json_response(control_plane.describe_provisioned(function, qualifier), 202)
        if method == "DELETE":
            control_plane.unprovision(function, qualifier)
            return Response(204)
        if method != "GET":
            raise not_found(f"no such operation: {method} {request.path}")
        if request.query.get("List") == "ALL":
            each = {
                name: {
                    "FunctionArn": self._settings.arn(function.name, name),
                    **control_plane.describe_provisioned(function, name),
                }
                for name in function.provisioned
            }
            return _json_response(_page(request, "ProvisionedConcurrencyConfigs", each))
        return _json_response(control_plane.describe_provisioned(function, qualifier))

    def _tag(self, method: str, request: EmulatorRequest, function: EmulatedFunction) -> Response:
        if method == "POST":
            params = read(request.body, api_models.TagResource)
            function.tags = api_models.check_tags({**function.tags, **params.tags})
            return Response(204)
        if method == "DELETE":
            pairs = parse_qsl(request.query_string, keep_blank_values=True)
            removed = {value for name, value in pairs if name == "tagKeys"}
            function.tags = {k: v for k, v in function.tags.items() if k not in removed}
            return Response(204)
        if method != "GET":
            raise not_found(f"no such operation: {method} {request.path}")
        return _json_response({"Tags": function.tags})

    def _list(self, request: EmulatorRequest) -> JsonObject:
        latest = {
            name: self._control_plane.resolve(name)[1]
            for name in self._invoke_service.function_names()
        }
        descriptions = {name: each.describe(self._settings) for name, each in latest.items()}
        return _page(request, "Functions", descriptions)

    async def _invoke(self, name: str, request: EmulatorRequest, request_id: str) -> Response:
        function, version, qualifier = self._control_plane.resolve(
            name, request.query.get("Qualifier")
        )
        _check_invocation(request)
        kind = request.headers.get("x-amz-invocation-type", "RequestResponse")
        payload = self._payload(request, kind)
        arn = self._settings.arn(function.name, qualifier)
        context = _client_context(request.headers.get("x-amz-client-context", ""))
        call = Invocation(version, arn, payload, context, request_id)
        if kind == "DryRun":
            return Response(204)
        executed = {"X-Amz-Executed-Version": version.version}
        if kind == "Event":
            self._invoke_service.enqueue(function, call)
            return Response(202, b"", executed)
        wants_log = request.headers.get("x-amz-log-type") == "Tail"
        response = await self._invoke_service.run(function, call, wants_log=wants_log)
        return Response(200, response.body, {**executed, **response.headers})

    def _payload(self, request: EmulatorRequest, kind: str) -> bytes:
        """Return the payload. Raises `ServiceError` if it is too large or not JSON."""
        if kind not in ("RequestResponse", "Event", "DryRun"):
            raise invalid(f"Value '{kind}' at 'invocationType' failed to satisfy constraint")
        is_event = kind == "Event"
        limit = (
            self._settings.event_payload_bytes if is_event else self._settings.sync_payload_bytes
        )
        size = len(request.body)
        if size > limit:
            raise too_large(
                f"{size} byte payload is too large for the {kind} invocation type "
                f"(limit {limit} bytes)"
            )
        payload = request.body or b"{}"
        try:
            msgspec.json.decode(payload)
        except _BAD_JSON as error:
            raise ServiceError(
                400,
                "InvalidRequestContentException",
                f"Could not parse request body into json: {error}",
            ) from None
        return payload


def _log(call: Invocation, result: InvocationResult, record: BillingRecord) -> bytes:
    """Return the log of an invocation: the function's output between the lines that AWS adds."""
    start = f"START RequestId: {call.id} Version: {call.function.version}\n"
    report = [
        f"REPORT RequestId: {call.id}",
        f"Duration: {record.duration_ms:.2f} ms",
        f"Billed Duration: {record.billed_ms} ms",
        f"Memory Size: {record.memory_mb} MB",
        f"Max Memory Used: {memory_bytes(record.instance, 'VmHWM') >> 20} MB",
    ]
    if result.is_cold:
        report.append(f"Init Duration: {record.init_ms:.2f} ms")
    end = f"END RequestId: {call.id}\n" + "\t".join((*report, "\n"))
    log = result.log if result.log.endswith(b"\n") or not result.log else result.log + b"\n"
    return start.encode() + log + end.encode()


def _json_response(body: JsonObject, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(body))


def _page(request: EmulatorRequest, key: str, items: Mapping[str, JsonObject]) -> JsonObject:
    """Return a page of a list, starting after the item that `Marker` names."""
    limit, marker = request.query.get("MaxItems", ""), request.query.get("Marker", "")
    count = int(limit) if re.fullmatch("[1-9]|[1-4][0-9]", limit) else _PAGE_ITEMS_MAX
    names = list(items)
    first = names.index(marker) + 1 if marker in items else 0
    page: JsonObject = {key: [items[name] for name in names[first : first + count]]}
    if len(names) > first + count:
        page["NextMarker"] = names[first + count - 1]
    return page


def _check_query(request: EmulatorRequest) -> None:
    """Reject query parameters that the emulator does not know."""
    unknown = sorted(request.query.keys() - _PARAMETERS)
    if unknown:
        raise invalid(f"{unknown[0][:_QUOTED_MAX]}: the embedded platform has no such parameter")


def _check_invocation(request: EmulatorRequest) -> None:
    """Reject headers of `Invoke` that the emulator does not support."""
    for header, name in _UNSUPPORTED_HEADERS.items():
        if header in request.headers:
            raise invalid(f"{name}: the embedded platform supports no value")
    log = request.headers.get("x-amz-log-type", "None")
    if log not in ("None", "Tail"):
        raise invalid(f"LogType: {log[:_QUOTED_MAX]!r} is neither None nor Tail")


def _client_context(encoded: str) -> str:
    """Return the client context as JSON in one line: it is passed on in a header."""
    if not encoded:
        return ""
    try:
        if len(encoded) > _CLIENT_CONTEXT_BYTES_MAX:
            raise invalid(f"Client context must be no more than {_CLIENT_CONTEXT_BYTES_MAX} bytes")
        text = base64.b64decode(encoded, validate=True)
        # json, not msgspec: its output is pure ASCII, as a header must be.
        return json.dumps(msgspec.json.decode(text, type=dict[str, object]))
    except _BAD_JSON:
        raise ServiceError(
            400,
            "InvalidRequestContentException",
            "Client context must be a valid Base64-encoded JSON object.",
        ) from None
