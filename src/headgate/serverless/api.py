"""The API of AWS Lambda over HTTP, as far as it is there: which request is what."""

from __future__ import annotations

import base64
import json
import re
import uuid
from typing import Final, TypeAlias, TypeVar, final

import msgspec

from headgate.serverless import requests
from headgate.serverless.calling import Calling
from headgate.serverless.errors import ServiceError, invalid, not_found, too_large
from headgate.serverless.function import Function, FunctionVersion
from headgate.serverless.http import Request, Response
from headgate.serverless.invocation import Invocation
from headgate.serverless.management import Management
from headgate.serverless.settings import Settings

T = TypeVar("T")
Shown: TypeAlias = dict[str, object]

_CLIENT_CONTEXT_BYTES_MAX: Final = 3_583
_PAGE: Final = 50  # items of a list, unless fewer are asked for
# What reading somebody's JSON can raise: a ValueError is text or base64 that is none.
_BAD_JSON: Final = (msgspec.DecodeError, ValueError, RecursionError)


@final
class Api:
    """Answers requests. What is refused is answered in the shape that AWS uses."""

    def __init__(self, settings: Settings, management: Management, calling: Calling) -> None:
        self._settings = settings
        self._management = management
        self._calling = calling

    async def answer(self, request: Request) -> Response:
        """Return the answer to a request, whatever it is."""
        id = str(uuid.uuid4())
        try:
            if "authorization" not in request.headers and "X-Amz-Signature" not in request.query:
                raise ServiceError(
                    403, "MissingAuthenticationTokenException", "Missing Authentication Token"
                )
            if request.is_too_long:
                raise ServiceError(
                    413, "RequestEntityTooLargeException", "The request is too large."
                )
            response = await self._route(request, id)
        except ServiceError as error:
            response = error.response()
        headers = {"x-amzn-RequestId": id, **response.headers}
        return Response(response.status, response.body, headers)

    async def _route(self, request: Request, id: str) -> Response:
        match (request.method, *request.parts):
            case ("POST", "2015-03-31", "functions", name, "invocations"):
                return await self._invoke(name, request, id)
            case ("POST", "2015-03-31", "functions"):
                made = await self._management.create(_read(request, requests.CreateFunction))
                return _show(made.describe(self._settings), 201)
            case ("GET", "2015-03-31", "functions"):
                return _show(self._list(request))
            case ("GET", "2016-08-19", "account-settings"):
                return _show(self._calling.describe_account())
            case (method, "2015-03-31", "functions", name, *rest):
                found = self._management.resolve(name, request.query.get("Qualifier"))
                return await self._manage(method, tuple(rest), request, found)
            case (method, "2017-10-31" | "2019-09-30", "functions", name, "concurrency"):
                function, _, _ = self._management.resolve(name)
                return self._reserve(method, request, function)
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
        request: Request,
        found: tuple[Function, FunctionVersion, str | None],
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
                if function.reserved is not None:
                    shown["Concurrency"] = {"ReservedConcurrentExecutions": function.reserved}
                return _show(shown)
            case ("GET", "configuration"):
                return _show(version.describe(settings, qualifier))
            case ("PUT", "configuration"):
                asked = _read(request, requests.UpdateConfiguration)
                return _show(management.update_configuration(function, asked).describe(settings))
            case ("PUT", "code"):
                update = _read(request, requests.UpdateCode)
                return _show((await management.update_code(function, update)).describe(settings))
            case ("DELETE",):
                management.delete(function, qualifier)
                return Response(204)
            case ("GET", "versions"):
                versions = [each.describe(settings) for each in function.every()]
                return _show({"Versions": versions})
            case ("POST", "versions"):
                made = management.publish(function, _read(request, requests.PublishVersion))
                return _show(made.describe(settings), 201)
        return self._alias(method, rest, request, function)

    def _alias(
        self, method: str, rest: tuple[str, ...], request: Request, function: Function
    ) -> Response:
        management, settings = self._management, self._settings
        match (method, *rest):
            case ("GET", "aliases"):
                aliases = function.aliases.values()
                return _show({"Aliases": [a.describe(settings, function.name) for a in aliases]})
            case ("POST", "aliases"):
                asked = _read(request, requests.WriteAlias)
                alias = management.write_alias(function, asked, is_new=True)
                return _show(alias.describe(settings, function.name), 201)
            case ("PUT", "aliases", name):
                asked = _read(request, requests.WriteAlias)
                asked.name = name
                alias = management.write_alias(function, asked, is_new=False)
                return _show(alias.describe(settings, function.name))
            case ("GET", "aliases", name) if name in function.aliases:
                return _show(function.aliases[name].describe(settings, function.name))
            case ("DELETE", "aliases", name):
                management.delete_alias(function, name)
                return Response(204)
        raise not_found(f"no such operation: {method} {request.path}")

    def _reserve(self, method: str, request: Request, function: Function) -> Response:
        if method == "DELETE":
            self._management.reserve(function, None)
            return Response(204)
        if method == "PUT":
            asked = _read(request, requests.PutConcurrency)
            self._management.reserve(function, asked.reserved_concurrent_executions)
        elif method != "GET":
            raise not_found(f"no such operation: {method} {request.path}")
        if function.reserved is None:
            return _show({})
        return _show({"ReservedConcurrentExecutions": function.reserved})

    def _provision(
        self, method: str, request: Request, function: Function, qualifier: str | None
    ) -> Response:
        management = self._management
        if method == "PUT":
            asked = _read(request, requests.PutProvisioned)
            management.provision(function, qualifier, asked.provisioned_concurrent_executions)
            return _show(management.describe_provisioned(function, qualifier), 202)
        if method == "DELETE":
            management.unprovision(function, qualifier)
            return Response(204)
        if method != "GET":
            raise not_found(f"no such operation: {method} {request.path}")
        if request.query.get("List") == "ALL":
            each = [
                {
                    "FunctionArn": self._settings.arn(function.name, name),
                    **management.describe_provisioned(function, name),
                }
                for name in function.provisioned
            ]
            return _show({"ProvisionedConcurrencyConfigs": each})
        return _show(management.describe_provisioned(function, qualifier))

    def _list(self, request: Request) -> Shown:
        names = self._calling.names()
        after, most = request.query.get("Marker", ""), request.query.get("MaxItems", "")
        count = int(most) if re.fullmatch("[1-9]|[1-4][0-9]", most) else _PAGE
        rest = [name for name in names if name > after]
        latest = [self._management.resolve(name)[1] for name in rest[:count]]
        shown: Shown = {"Functions": [each.describe(self._settings) for each in latest]}
        if len(rest) > count:
            shown["NextMarker"] = rest[count - 1]
        return shown

    async def _invoke(self, name: str, request: Request, id: str) -> Response:
        function, version, qualifier = self._management.resolve(
            name, request.query.get("Qualifier")
        )
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

    def _payload(self, request: Request, kind: str) -> bytes:
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


def _read(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(request.body or b"{}", type=kind)
    except _BAD_JSON as error:
        raise invalid(f"1 validation error detected: {error}") from None


def _show(shown: Shown, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(shown))


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
