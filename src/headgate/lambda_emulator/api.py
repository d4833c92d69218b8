"""The API of AWS Lambda over HTTP, as far as it is there: which request is what."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, final
from urllib.parse import parse_qsl

import msgspec

from headgate.lambda_emulator import api_models as requests
from headgate.lambda_emulator.api_models import read
from headgate.lambda_emulator.auth import RequestAuth
from headgate.lambda_emulator.billing import BillingRecord
from headgate.lambda_emulator.control_plane import ControlPlane
from headgate.lambda_emulator.errors import ServiceError, invalid, not_found, too_large
from headgate.lambda_emulator.functions import EmulatedFunction, FunctionVersion
from headgate.lambda_emulator.http import EmulatorRequest, Response
from headgate.lambda_emulator.instance import Invocation, InvocationResult
from headgate.lambda_emulator.invoker import AsyncEventQueue, Invoker
from headgate.lambda_emulator.settings import PlatformSettings

# Calling functions: what a client gets back of a call, besides what the function returned.


_LOG_BYTES_MAX: Final = 4_096


@dataclass(frozen=True, slots=True)
class InvokeResponse:
    """The body and the headers of an answer; its status is 200, whatever the function did."""

    body: bytes
    headers: Mapping[str, str]


@final
class InvokeService:
    """Runs calls and queues events for the API."""

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

    def names(self) -> list[str]:
        """All functions there are, sorted."""
        return sorted(self._functions)

    def queue(self, function: EmulatedFunction, call: Invocation) -> None:
        """Take a call that nobody waits for. Raises `Throttled`."""
        self._events.put(function, call)

    async def run(
        self, function: EmulatedFunction, call: Invocation, *, wants_log: bool
    ) -> InvokeResponse:
        """Run a call and say how it went. Raises `Throttled`."""
        ended, record = await self._invoker.run(function, call)
        headers = {}
        if ended.error_type:
            headers["X-Amz-Function-Error"] = "Unhandled"
        if wants_log:
            log = _log(call, ended, record)[-_LOG_BYTES_MAX:]
            headers["X-Amz-Log-Result"] = base64.b64encode(log).decode()
        return InvokeResponse(ended.payload, headers)

    def describe_account(self) -> dict[str, object]:
        """`GetAccountSettings`."""
        settings = self._settings
        sizes = [version.code.size_bytes for f in self._functions.values() for version in f.every()]
        return {
            "AccountLimit": {
                "ConcurrentExecutions": settings.concurrency,
                "UnreservedConcurrentExecutions": self._invoker.admission.unreserved(),
                "CodeSizeZipped": settings.zip_bytes,
                "CodeSizeUnzipped": settings.unzipped_bytes,
            },
            "AccountUsage": {"FunctionCount": len(self._functions), "TotalCodeSize": sum(sizes)},
        }


def _log(call: Invocation, ended: InvocationResult, record: BillingRecord) -> bytes:
    """What the function printed, between the lines that AWS prints."""
    start = f"START RequestId: {call.id} Version: {call.function.version}\n"
    report = [
        f"REPORT RequestId: {call.id}",
        f"Duration: {record.duration_ms:.2f} ms",
        f"Billed Duration: {record.billed_ms} ms",
        f"Memory Size: {record.memory_mb} MB",
        f"Max Memory Used: {_memory_mb(record.instance)} MB",
    ]
    if ended.is_cold:
        report.append(f"Init Duration: {record.init_ms:.2f} ms")
    end = f"END RequestId: {call.id}\n" + "\t".join((*report, "\n"))
    said = ended.log if ended.log.endswith(b"\n") or not ended.log else ended.log + b"\n"
    return start.encode() + said + end.encode()


def _memory_mb(pid: int) -> int:
    """The most memory a process has ever held; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines() if line.startswith("VmHWM:"))
    return next((int(words[1]) // 1024 for words in lines), 0)


Shown: TypeAlias = dict[str, object]

_CLIENT_CONTEXT_BYTES_MAX: Final = 3_583
_PAGE: Final = 50  # items of a list, unless fewer are asked for
_SHOWN_MAX: Final = 100  # characters of what a client has sent
_PARAMETERS: Final = frozenset(("Qualifier", "Marker", "MaxItems", "List", "tagKeys"))
_ABSENT_OF_CALLS: Final[Mapping[str, str]] = {
    "x-amz-durable-execution-name": "DurableExecutionName",
    "x-amz-tenant-id": "TenantId",
}
# What reading somebody's JSON can raise: a ValueError is text or base64 that is none.
_BAD_JSON: Final = (msgspec.DecodeError, ValueError, RecursionError)


@final
class Api:
    """Answers requests. What is refused is answered in the shape that AWS uses."""

    def __init__(
        self,
        settings: PlatformSettings,
        access: RequestAuth,
        management: ControlPlane,
        calling: InvokeService,
    ) -> None:
        self._settings = settings
        self._access = access
        self._management = management
        self._calling = calling

    async def answer(self, request: EmulatorRequest) -> Response:
        """Return the answer to a request, whatever it is."""
        id = str(uuid.uuid4())
        try:
            if request.is_too_long:
                raise ServiceError(
                    413, "RequestEntityTooLargeException", "The request is too large."
                )
            self._access.check(request)
            _check_query(request)
            response = await self._route(request, id)
        except ServiceError as error:
            response = error.response()
        headers = {"x-amzn-RequestId": id, **response.headers}
        return Response(response.status, response.body, headers)

    async def _route(self, request: EmulatorRequest, id: str) -> Response:
        match (request.method, *request.parts):
            case ("POST", "2015-03-31", "functions", name, "invocations"):
                return await self._invoke(name, request, id)
            case ("POST", "2015-03-31", "functions"):
                made = await self._management.create(read(request.body, requests.CreateFunction))
                return _show(made.describe(self._settings), 201)
            case ("GET", "2015-03-31", "functions"):
                return _show(self._list(request))
            case ("GET", "2016-08-19", "account-settings"):
                return _show(self._calling.describe_account())
            case (method, "2015-03-31", "functions", name, *rest):
                found = self._management.resolve(name, request.query.get("Qualifier"))
                if rest and method != "GET":  # only what runs, or is deleted, has versions
                    self._management.resolve_whole(name, request.query.get("Qualifier"))
                return await self._manage(method, tuple(rest), request, found)
            case (method, "2017-10-31" | "2019-09-30", "functions", name, "concurrency"):
                function = self._management.resolve_whole(name, request.query.get("Qualifier"))
                return self._reserve(method, request, function)
            case (method, "2017-03-31", "tags", resource):
                return self._tag(method, request, self._management.resolve_whole(resource))
            case (method, "2019-09-30", "functions", name, "provisioned-concurrency"):
                function, _, qualifier = self._management.resolve(
                    name, request.query.get("Qualifier")
                )
                return self._provision(method, request, function, qualifier)
        raise not_found(f"no such operation: {request.method} {request.path}")

    async def _manage(
        self,
        method: str,
        rest: tuple[str, ...],
        request: EmulatorRequest,
        found: tuple[EmulatedFunction, FunctionVersion, str | None],
    ) -> Response:
        """What is done to one function."""
        management, settings = self._management, self._settings
        function, version, qualifier = found
        match (method, *rest):
            case ("GET",):
                shown: Shown = {
                    "Configuration": version.describe(settings, qualifier),
                    "Code": {
                        "RepositoryType": "Directory",
                        "Location": str(version.code.directory),
                    },
                }
                if function.tags:
                    shown["Tags"] = function.tags
                if function.reserved is not None:
                    shown["Concurrency"] = {"ReservedConcurrentExecutions": function.reserved}
                return _show(shown)
            case ("GET", "configuration"):
                return _show(version.describe(settings, qualifier))
            case ("PUT", "configuration"):
                asked = read(request.body, requests.UpdateConfiguration)
                return _show(management.update_configuration(function, asked).describe(settings))
            case ("PUT", "code"):
                update = read(request.body, requests.UpdateCode)
                return _show((await management.update_code(function, update)).describe(settings))
            case ("DELETE",):
                management.delete(function, qualifier)
                return Response(204)
            case ("GET", "versions"):
                versions = {each.version: each.describe(settings) for each in function.every()}
                return _show(_page(request, "Versions", versions))
            case ("POST", "versions"):
                made = management.publish(function, read(request.body, requests.PublishVersion))
                return _show(made.describe(settings), 201)
        return self._alias(method, rest, request, function)

    def _alias(
        self,
        method: str,
        rest: tuple[str, ...],
        request: EmulatorRequest,
        function: EmulatedFunction,
    ) -> Response:
        management, settings = self._management, self._settings
        match (method, *rest):
            case ("GET", "aliases"):
                aliases = {
                    name: alias.describe(settings, function.name)
                    for name, alias in function.aliases.items()
                }
                return _show(_page(request, "Aliases", aliases))
            case ("POST", "aliases"):
                asked = read(request.body, requests.WriteAlias)
                alias = management.write_alias(function, asked, is_new=True)
                return _show(alias.describe(settings, function.name), 201)
            case ("PUT", "aliases", name):
                asked = read(request.body, requests.WriteAlias)
                asked.name = name
                alias = management.write_alias(function, asked, is_new=False)
                return _show(alias.describe(settings, function.name))
            case ("GET", "aliases", name) if name in function.aliases:
                return _show(function.aliases[name].describe(settings, function.name))
            case ("DELETE", "aliases", name):
                management.delete_alias(function, name)
                return Response(204)
        raise not_found(f"no such operation: {method} {request.path}")

    def _reserve(
        self, method: str, request: EmulatorRequest, function: EmulatedFunction
    ) -> Response:
        if method == "DELETE":
            self._management.reserve(function, None)
            return Response(204)
        if method == "PUT":
            asked = read(request.body, requests.PutConcurrency)
            self._management.reserve(function, asked.reserved_concurrent_executions)
        elif method != "GET":
            raise not_found(f"no such operation: {method} {request.path}")
        if function.reserved is None:
            return _show({})
        return _show({"ReservedConcurrentExecutions": function.reserved})

    def _provision(
        self,
        method: str,
        request: EmulatorRequest,
        function: EmulatedFunction,
        qualifier: str | None,
    ) -> Response:
        management = self._management
        if method == "PUT":
            asked = read(request.body, requests.PutProvisioned)
            management.provision(function, qualifier, asked.provisioned_concurrent_executions)
            return _show(management.describe_provisioned(function, qualifier), 202)
        if method == "DELETE":
            management.unprovision(function, qualifier)
            return Response(204)
        if method != "GET":
            raise not_found(f"no such operation: {method} {request.path}")
        if request.query.get("List") == "ALL":
            each = {
                name: {
                    "FunctionArn": self._settings.arn(function.name, name),
                    **management.describe_provisioned(function, name),
                }
                for name in function.provisioned
            }
            return _show(_page(request, "ProvisionedConcurrencyConfigs", each))
        return _show(management.describe_provisioned(function, qualifier))

    def _tag(self, method: str, request: EmulatorRequest, function: EmulatedFunction) -> Response:
        if method == "POST":
            asked = read(request.body, requests.TagResource)
            function.tags = requests.check_tags({**function.tags, **asked.tags})
            return Response(204)
        if method == "DELETE":
            pairs = parse_qsl(request.query_string, keep_blank_values=True)
            gone = {value for name, value in pairs if name == "tagKeys"}
            function.tags = {k: v for k, v in function.tags.items() if k not in gone}
            return Response(204)
        if method != "GET":
            raise not_found(f"no such operation: {method} {request.path}")
        return _show({"Tags": function.tags})

    def _list(self, request: EmulatorRequest) -> Shown:
        latest = {name: self._management.resolve(name)[1] for name in self._calling.names()}
        shown = {name: each.describe(self._settings) for name, each in latest.items()}
        return _page(request, "Functions", shown)

    async def _invoke(self, name: str, request: EmulatorRequest, id: str) -> Response:
        function, version, qualifier = self._management.resolve(
            name, request.query.get("Qualifier")
        )
        _check_invocation(request)
        kind = request.headers.get("x-amz-invocation-type", "RequestResponse")
        payload = self._payload(request, kind)
        arn = self._settings.arn(function.name, qualifier)
        context = _client_context(request.headers.get("x-amz-client-context", ""))
        call = Invocation(version, arn, payload, context, id)
        if kind == "DryRun":
            return Response(204)
        executed = {"X-Amz-Executed-Version": version.version}
        if kind == "Event":
            self._calling.queue(function, call)
            return Response(202, b"", executed)
        wants_log = request.headers.get("x-amz-log-type") == "Tail"
        answer = await self._calling.run(function, call, wants_log=wants_log)
        return Response(200, answer.body, {**executed, **answer.headers})

    def _payload(self, request: EmulatorRequest, kind: str) -> bytes:
        """The payload, if it is JSON and not too much of it."""
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


def _show(shown: Shown, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(shown))


def _page(request: EmulatorRequest, key: str, items: Mapping[str, Shown]) -> Shown:
    """A list, or a part of it that begins after the item that `Marker` names."""
    most, marker = request.query.get("MaxItems", ""), request.query.get("Marker", "")
    count = int(most) if re.fullmatch("[1-9]|[1-4][0-9]", most) else _PAGE
    names = list(items)
    first = names.index(marker) + 1 if marker in items else 0
    shown: Shown = {key: [items[name] for name in names[first : first + count]]}
    if len(names) > first + count:
        shown["NextMarker"] = names[first + count - 1]
    return shown


def _check_query(request: EmulatorRequest) -> None:
    """Refuse parameters that nothing here looks at."""
    unknown = sorted(request.query.keys() - _PARAMETERS)
    if unknown:
        raise invalid(f"{unknown[0][:_SHOWN_MAX]}: the embedded platform has no such parameter")


def _check_invocation(request: EmulatorRequest) -> None:
    """Refuse ways of calling that are not here."""
    for header, name in _ABSENT_OF_CALLS.items():
        if header in request.headers:
            raise invalid(f"{name}: the embedded platform supports no value")
    log = request.headers.get("x-amz-log-type", "None")
    if log not in ("None", "Tail"):
        raise invalid(f"LogType: {log[:_SHOWN_MAX]!r} is neither None nor Tail")


def _client_context(encoded: str) -> str:
    """The client's context as JSON in one line: it goes on as a header."""
    if not encoded:
        return ""
    try:
        if len(encoded) > _CLIENT_CONTEXT_BYTES_MAX:
            raise invalid(f"Client context must be no more than {_CLIENT_CONTEXT_BYTES_MAX} bytes")
        text = base64.b64decode(encoded, validate=True)
        # Which leaves nothing but ASCII, unlike msgspec.
        return json.dumps(msgspec.json.decode(text, type=dict[str, object]))
    except _BAD_JSON:
        raise ServiceError(
            400,
            "InvalidRequestContentException",
            "Client context must be a valid Base64-encoded JSON object.",
        ) from None
