"""The HTTP API of AWS Lambda: routes requests to the control plane and the invoker.

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

from headgate.lambda_emulator.api_models import (
    BAD_JSON,
    CreateFunction,
    PublishVersion,
    PutConcurrency,
    PutProvisioned,
    TagResource,
    UpdateCode,
    UpdateConfiguration,
    WriteAlias,
    check_tags,
    read,
)
from headgate.lambda_emulator.auth import RequestAuth
from headgate.lambda_emulator.control_plane import ControlPlane
from headgate.lambda_emulator.functions import Alias, EmulatedFunction, FunctionVersion
from headgate.lambda_emulator.http import (
    EmulatorRequest,
    Response,
    ServiceError,
    invalid,
    not_found,
)
from headgate.lambda_emulator.instance import Invocation, InvocationResult
from headgate.lambda_emulator.invoker import AsyncEventQueue, BillingRecord, Invoker
from headgate.lambda_emulator.settings import PlatformSettings
from headgate.system.process import memory_bytes

JsonObject: TypeAlias = dict[str, object]
Target: TypeAlias = tuple[EmulatedFunction, FunctionVersion, str | None]  # with the qualifier

_LOG_BYTES_MAX: Final = 4_096
_CLIENT_CONTEXT_BYTES_MAX: Final = 3_583
_PAGE_ITEMS_MAX: Final = 50
_QUOTED_MAX: Final = 100  # of client input, in an error message
_PARAMETERS: Final = frozenset(("Qualifier", "Marker", "MaxItems", "List", "tagKeys"))
_UNSUPPORTED_HEADERS: Final[Mapping[str, str]] = {
    "x-amz-durable-execution-name": "DurableExecutionName",
    "x-amz-tenant-id": "TenantId",
}


@final
@dataclass(frozen=True, slots=True)
class Api:
    """Handles HTTP requests. Errors have the shape that AWS uses.

    An operation returns the body of its response, or None for a response without one.
    """

    settings: PlatformSettings
    auth: RequestAuth
    functions: Mapping[str, EmulatedFunction]
    control_plane: ControlPlane
    invoker: Invoker
    events: AsyncEventQueue

    async def handle(self, request: EmulatorRequest) -> Response:
        """Return the response to a request; errors become responses as well."""
        request_id = str(uuid.uuid4())
        try:
            if request.is_too_long:
                problem = "The request is too large."
                raise ServiceError(413, "RequestEntityTooLargeException", problem)
            self.auth.check(request)
            _check_query(request)
            response = await self._route(request, request_id)
        except ServiceError as error:
            response = error.response()
        headers = {"x-amzn-RequestId": request_id, **response.headers}
        return Response(response.status, response.body, headers)

    async def _route(self, request: EmulatorRequest, request_id: str) -> Response:
        plane, qualifier = self.control_plane, request.query.get("Qualifier")
        status = 201 if request.method == "POST" else 200
        match (request.method, *request.parts):
            case ("POST", "2015-03-31", "functions", name, "invocations"):
                return await self._invoke(plane.resolve(name, qualifier), request, request_id)
            case ("POST", "2015-03-31", "functions"):
                params = read(request.body, CreateFunction)
                body: JsonObject | None = self._describe(await plane.create(params))
            case ("GET", "2015-03-31", "functions"):
                latest = {name: each.latest for name, each in sorted(self.functions.items())}
                body = self._page(request, "Functions", latest)
            case ("GET", "2016-08-19", "account-settings"):
                body = self._account()
            case (method, "2015-03-31", "functions", name, *rest):
                target = plane.resolve(name, qualifier)
                if rest and method != "GET":  # a version can only be read, invoked or deleted
                    plane.resolve_unqualified(name, qualifier)
                body = await self._manage((method, *rest), request, target)
            case (method, "2017-10-31" | "2019-09-30", "functions", name, "concurrency"):
                function = plane.resolve_unqualified(name, qualifier)
                body = self._reserve(method, request, function)
            case (method, "2017-03-31", "tags", resource):
                body = self._tag(method, request, plane.resolve_unqualified(resource))
            case (method, "2019-09-30", "functions", name, "provisioned-concurrency"):
                body = self._provision(method, request, plane.resolve(name, qualifier))
                status = 202 if method == "PUT" else 200
            case _:
                raise _no_operation(request)
        return Response(204) if body is None else Response(status, msgspec.json.encode(body))

    def _account(self) -> JsonObject:
        settings = self.settings
        versions = [each for f in self.functions.values() for each in f.all_versions()]
        return {
            "AccountLimit": {
                "ConcurrentExecutions": settings.concurrency,
                "UnreservedConcurrentExecutions": self.invoker.admission.unreserved(),
                "CodeSizeZipped": settings.zip_bytes,
                "CodeSizeUnzipped": settings.unzipped_bytes,
            },
            "AccountUsage": {
                "FunctionCount": len(self.functions),
                "TotalCodeSize": sum(version.code.size_bytes for version in versions),
            },
        }

    async def _manage(
        self, operation: tuple[str, ...], request: EmulatorRequest, target: Target
    ) -> JsonObject | None:
        """Handle an operation on one function: its method, and its path below the function."""
        plane, body = self.control_plane, request.body
        function, version, qualifier = target
        match operation:
            case ("GET",):
                return self._get(target)
            case ("GET", "configuration"):
                return version.describe(self.settings, qualifier)
            case ("PUT", "configuration"):
                params = read(body, UpdateConfiguration)
                return self._describe(plane.update_configuration(function, params))
            case ("PUT", "code"):
                return self._describe(await plane.update_code(function, read(body, UpdateCode)))
            case ("DELETE",):
                plane.delete(function, qualifier)
            case ("GET", "versions"):
                versions = {each.version: each for each in function.all_versions()}
                return self._page(request, "Versions", versions)
            case ("POST", "versions"):
                return self._describe(plane.publish(function, read(body, PublishVersion)))
            case ("GET", "aliases"):
                return self._page(request, "Aliases", function.aliases)
            case ("POST", "aliases"):
                return self._describe(plane.write_alias(function, read(body, WriteAlias)))
            case ("PUT", "aliases", name):
                return self._describe(plane.write_alias(function, read(body, WriteAlias), name))
            case ("GET", "aliases", name) if name in function.aliases:
                return self._describe(function.aliases[name])
            case ("DELETE", "aliases", name):
                plane.delete_alias(function, name)
            case _:
                raise _no_operation(request)
        return None

    def _get(self, target: Target) -> JsonObject:
        function, version, qualifier = target
        body: JsonObject = {
            "Configuration": version.describe(self.settings, qualifier),
            "Code": {"RepositoryType": "Directory", "Location": str(version.code.directory)},
        }
        if function.tags:
            body["Tags"] = function.tags
        if function.reserved is not None:
            body["Concurrency"] = {"ReservedConcurrentExecutions": function.reserved}
        return body

    def _reserve(
        self, method: str, request: EmulatorRequest, function: EmulatedFunction
    ) -> JsonObject | None:
        match method:
            case "DELETE":
                self.control_plane.reserve(function, None)
                return None
            case "PUT":
                params = read(request.body, PutConcurrency)
                self.control_plane.reserve(function, params.reserved_concurrent_executions)
            case "GET":
                if function.reserved is None:
                    return {}
            case _:
                raise _no_operation(request)
        return {"ReservedConcurrentExecutions": function.reserved}

    def _provision(
        self, method: str, request: EmulatorRequest, target: Target
    ) -> JsonObject | None:
        plane, (function, _, qualifier) = self.control_plane, target
        match method:
            case "PUT":
                params = read(request.body, PutProvisioned)
                plane.provision(function, qualifier, params.provisioned_concurrent_executions)
            case "DELETE":
                plane.unprovision(function, qualifier)
                return None
            case "GET" if request.query.get("List") == "ALL":
                each = {
                    name: {
                        "FunctionArn": self.settings.arn(function.name, name),
                        **plane.describe_provisioned(function, name),
                    }
                    for name in function.provisioned
                }
                return _page(request, "ProvisionedConcurrencyConfigs", each)
            case "GET":
                pass
            case _:
                raise _no_operation(request)
        return plane.describe_provisioned(function, qualifier)

    def _tag(
        self, method: str, request: EmulatorRequest, function: EmulatedFunction
    ) -> JsonObject | None:
        match method:
            case "GET":
                return {"Tags": function.tags}
            case "POST":
                params = read(request.body, TagResource)
                function.tags = check_tags({**function.tags, **params.tags})
            case "DELETE":
                pairs = parse_qsl(request.query_string, keep_blank_values=True)
                removed = {value for name, value in pairs if name == "tagKeys"}
                function.tags = {k: v for k, v in function.tags.items() if k not in removed}
            case _:
                raise _no_operation(request)
        return None

    async def _invoke(self, target: Target, request: EmulatorRequest, request_id: str) -> Response:
        function, version, qualifier = target
        _check_invocation(request)
        headers = request.headers
        kind = headers.get("x-amz-invocation-type", "RequestResponse")
        payload = self._payload(request, kind)
        arn = self.settings.arn(function.name, qualifier)
        context = _client_context(headers.get("x-amz-client-context", ""))
        call = Invocation(version, arn, payload, context, request_id)
        if kind == "DryRun":
            return Response(204)
        executed = {"X-Amz-Executed-Version": version.version}
        if kind == "Event":
            self.events.put(function, call)
            return Response(202, b"", executed)
        result, record = await self.invoker.run(function, call)
        if result.error_type:  # the status is 200 even then
            executed["X-Amz-Function-Error"] = "Unhandled"
        if headers.get("x-amz-log-type") == "Tail":
            log = _log(call, result, record)[-_LOG_BYTES_MAX:]
            executed["X-Amz-Log-Result"] = base64.b64encode(log).decode()
        return Response(200, result.payload, executed)

    def _payload(self, request: EmulatorRequest, kind: str) -> bytes:
        """Return the payload. Raises `ServiceError` if it is too large or not JSON."""
        if kind not in ("RequestResponse", "Event", "DryRun"):
            raise invalid(f"Value '{kind}' at 'invocationType' failed to satisfy constraint")
        settings, size = self.settings, len(request.body)
        limit = settings.event_payload_bytes if kind == "Event" else settings.sync_payload_bytes
        if size > limit:
            problem = f"{size} byte payload is too large for the {kind} invocation type"
            raise ServiceError(413, "RequestTooLargeException", f"{problem} (limit {limit} bytes)")
        payload = request.body or b"{}"
        try:
            msgspec.json.decode(payload)
        except BAD_JSON as error:
            raise _bad_content(f"Could not parse request body into json: {error}") from None
        return payload

    def _describe(self, described: FunctionVersion | Alias) -> JsonObject:
        return described.describe(self.settings)

    def _page(
        self, request: EmulatorRequest, key: str, items: Mapping[str, FunctionVersion | Alias]
    ) -> JsonObject:
        return _page(request, key, {name: self._describe(each) for name, each in items.items()})


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


def _no_operation(request: EmulatorRequest) -> ServiceError:
    return not_found(f"no such operation: {request.method} {request.path}")


def _bad_content(problem: str) -> ServiceError:
    return ServiceError(400, "InvalidRequestContentException", problem)


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
        raise invalid(f"{unknown[0][:_QUOTED_MAX]}: the Lambda emulator has no such parameter")


def _check_invocation(request: EmulatorRequest) -> None:
    """Reject headers of `Invoke` that the emulator does not support."""
    for header, name in _UNSUPPORTED_HEADERS.items():
        if header in request.headers:
            raise invalid(f"{name}: the Lambda emulator supports no value")
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
    except BAD_JSON:
        problem = "Client context must be a valid Base64-encoded JSON object."
        raise _bad_content(problem) from None
