"""Functions, versions, aliases and their concurrency: all that is not calling them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, Final, final

from msgspec import UNSET

from headgate.lambda_emulator import api_models as requests
from headgate.lambda_emulator.api_models import check_environment, check_handler, check_range
from headgate.lambda_emulator.errors import ServiceError, conflict, invalid, not_found
from headgate.lambda_emulator.functions import (
    LATEST,
    Alias,
    Code,
    EmulatedFunction,
    FunctionVersion,
    unpack,
    use_directory,
)
from headgate.lambda_emulator.invoker import Invoker
from headgate.lambda_emulator.settings import PlatformSettings

# A bare name, or the whole or the end of an ARN; with a version or an alias, or without.
_NAME: Final = re.compile(
    r"(?:(?:arn:aws[\w-]*:lambda:[\w-]+:)?\d{12}:)?(?:function:)?"
    r"(?P<name>[A-Za-z0-9_-]{1,64})(?::(?P<qualifier>\$LATEST|[A-Za-z0-9_-]{1,128}))?"
)
# In what two versions may differ and still be the same.
_ANY: Final = {"version": "", "modified": "", "revision": "", "description": ""}


@final
class ControlPlane:
    """The control plane: changes `functions` and has the invoker follow. Raises `ServiceError`."""

    def __init__(
        self,
        settings: PlatformSettings,
        functions: dict[str, EmulatedFunction],
        invoker: Invoker,
        codes: Path,
    ) -> None:
        self._settings = settings
        self._functions = functions
        self._invoker = invoker
        self._codes = codes

    def resolve(
        self, text: str, qualifier: str | None = None
    ) -> tuple[EmulatedFunction, FunctionVersion, str | None]:
        """Find a function by a name or an ARN: with its version, and how that was named."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise invalid(f"1 validation error detected: Value '{text}' at 'functionName' is bad")
        if qualifier and match["qualifier"] and qualifier != match["qualifier"]:
            raise invalid("The derived qualifier from the function name does not match")
        qualifier = qualifier or match["qualifier"]
        function = self._functions.get(match["name"])
        version = function.find(qualifier) if function else None
        if function is None or version is None:
            raise not_found(f"Function not found: {self._settings.arn(match['name'], qualifier)}")
        return function, version, qualifier

    def resolve_whole(self, text: str, qualifier: str | None = None) -> EmulatedFunction:
        """Find a function for something that cannot be done to one of its versions."""
        function, _, qualifier = self.resolve(text, qualifier)
        if qualifier not in (None, LATEST):
            raise invalid(f"Qualifier: {qualifier!r}: this is done to a function, not to a version")
        return function

    async def create(self, asked: requests.CreateFunction) -> FunctionVersion:
        """Create a function. The code comes last: what is refused leaves none behind."""
        match = _NAME.fullmatch(asked.function_name)
        if match is None or match["qualifier"]:
            raise invalid(f"Value '{asked.function_name}' at 'functionName' is not a name")
        tags = requests.check_tags(asked.tags)
        is_image = asked.code.image_uri is not None
        if asked.package_type != ("Image" if is_image else "Zip"):
            raise invalid(f"PackageType: {asked.package_type!r} is not what Code is")
        checked: dict[str, Any] = {
            "handler": check_handler(asked.handler),
            "memory_mb": self._memory_mb(asked.memory_size),
            "timeout_s": self._timeout_s(asked.timeout),
            "environment": check_environment(
                asked.environment.variables if asked.environment else {}
            ),
            "runtime": requests.check_runtime(asked.runtime),
            "architectures": tuple(requests.check_architectures(asked.architectures)),
        }
        self._check_free(match["name"])
        made = FunctionVersion(
            name=match["name"],
            code=await self._code(asked.code),
            role=asked.role,
            description=asked.description,
            package_type=asked.package_type,
            **checked,
        )
        self._check_free(made.name)  # once more: others had their turn while it was unpacked
        function = self._functions[made.name] = EmulatedFunction(made, tags=tags)
        return self.publish(function, requests.PublishVersion()) if asked.publish else made

    async def update_code(
        self, function: EmulatedFunction, asked: requests.UpdateCode
    ) -> FunctionVersion:
        """Replace the code; calls that run go on with the old."""
        requests.check_architectures(asked.architectures)
        requests.check_revision(asked.revision_id, function.latest.revision)
        if (asked.image_uri is not None) != (function.latest.package_type == "Image"):
            raise invalid(f"PackageType: this function's is {function.latest.package_type}")
        code = await self._code(asked)
        # Once more: others had their turn while it was unpacked, and what they changed stays.
        requests.check_revision(asked.revision_id, function.latest.revision)
        changed = function.latest.changed(code=code)
        if asked.dry_run:
            return changed
        function.latest = changed
        self._invoker.settle(function)
        return self.publish(function, requests.PublishVersion()) if asked.publish else changed

    def update_configuration(
        self, function: EmulatedFunction, asked: requests.UpdateConfiguration
    ) -> FunctionVersion:
        """Change what is named."""
        requests.check_revision(asked.revision_id, function.latest.revision)
        changes: dict[str, object] = {
            name: getattr(asked, name)
            for name in ("role", "description")
            if getattr(asked, name) is not UNSET
        }
        if asked.runtime is not UNSET:
            changes["runtime"] = requests.check_runtime(asked.runtime)
        if asked.handler is not UNSET:
            changes["handler"] = check_handler(asked.handler)
        if asked.timeout is not UNSET:
            changes["timeout_s"] = self._timeout_s(asked.timeout)
        if asked.memory_size is not UNSET:
            changes["memory_mb"] = self._memory_mb(asked.memory_size)
        if asked.environment is not UNSET:
            changes["environment"] = check_environment(asked.environment.variables)
        function.latest = function.latest.changed(**changes)
        self._invoker.settle(function)
        return function.latest

    def delete(self, function: EmulatedFunction, qualifier: str | None) -> None:
        """Delete a version, or all of it; calls that run come to their end."""
        if qualifier is None:
            del self._functions[function.name]
            self._invoker.admission.forget(function.name)
        elif qualifier == LATEST or qualifier in function.aliases:
            raise invalid(f"{qualifier} cannot be deleted: only a published version")
        elif any(alias.version == qualifier for alias in function.aliases.values()):
            raise conflict(f"Version {qualifier} has an alias")
        else:
            del function.versions[qualifier]
            function.provisioned.pop(qualifier, None)
        self._invoker.settle(function)

    def publish(
        self, function: EmulatedFunction, asked: requests.PublishVersion
    ) -> FunctionVersion:
        """Publish the latest state as a version, unless it is what was published last."""
        latest = function.latest
        requests.check_revision(asked.revision_id, latest.revision)
        if asked.code_sha256 not in (None, latest.code.sha256):
            raise invalid(f"CodeSHA256 ({asked.code_sha256}) is different from current CodeSHA256")
        last = function.versions.get(str(function.published))
        if last is not None and _is_same(last, latest):
            return last
        function.published += 1
        number = str(function.published)
        description = asked.description or latest.description
        made = function.versions[number] = latest.changed(version=number, description=description)
        return made

    def write_alias(
        self, function: EmulatedFunction, asked: requests.WriteAlias, *, is_new: bool
    ) -> Alias:
        """Give a version another name, or give a name to another version."""
        old = function.aliases.get(asked.name)
        if is_new and old is not None:
            raise conflict(f"Alias already exists: {self._settings.arn(function.name, asked.name)}")
        if not is_new and old is None:
            raise not_found(f"Alias not found: {self._settings.arn(function.name, asked.name)}")
        if not re.fullmatch(r"(?!\d+$)[A-Za-z0-9_-]{1,128}", asked.name):
            raise invalid(f"Value '{asked.name}' at 'name' is not the name of an alias")
        number = asked.function_version or (old.version if old else "")
        if number != LATEST and number not in function.versions:
            raise not_found(f"Function not found: {self._settings.arn(function.name, number)}")
        if old is not None:
            requests.check_revision(asked.revision_id, old.revision)
        description = asked.description
        if description is None:
            description = old.description if old is not None else ""
        alias = function.aliases[asked.name] = Alias(asked.name, number, description)
        self._invoker.settle(function)
        return alias

    def delete_alias(self, function: EmulatedFunction, name: str) -> None:
        """Forget an alias."""
        if function.aliases.pop(name, None) is None:
            raise not_found(f"Alias not found: {self._settings.arn(function.name, name)}")
        function.provisioned.pop(name, None)
        self._invoker.settle(function)

    def reserve(self, function: EmulatedFunction, count: int | None) -> None:
        """Reserve concurrency for a function, which then has no more than that; None: no more."""
        if count is not None:
            check_range("reservedConcurrentExecutions", count, 0, self._settings.concurrency)
            self._invoker.admission.check_reservation(function, count)
            if count < sum(function.provisioned.values()):
                raise invalid("ReservedConcurrentExecutions is less than what is provisioned")
        function.reserved = count

    def provision(self, function: EmulatedFunction, qualifier: str | None, count: int) -> str:
        """Keep instances of a published version ready."""
        qualifier = self._published(function, qualifier)
        check_range("provisionedConcurrentExecutions", count, 1, self._settings.concurrency)
        others = sum(n for name, n in function.provisioned.items() if name != qualifier)
        available = self._available(function)
        if others + count > available:
            raise invalid(
                "Specified ConcurrentExecutions for function is greater than "
                f"function's reserved or the account's unreserved concurrency [{available}]."
            )
        function.provisioned[qualifier] = count
        self._invoker.settle(function)
        return qualifier

    def unprovision(self, function: EmulatedFunction, qualifier: str | None) -> None:
        """Keep none ready."""
        if function.provisioned.pop(self._published(function, qualifier), None) is not None:
            self._invoker.settle(function)

    def describe_provisioned(
        self, function: EmulatedFunction, qualifier: str | None
    ) -> dict[str, object]:
        """How far it has come."""
        qualifier = self._published(function, qualifier)
        version, count = function.find(qualifier), function.provisioned.get(qualifier)
        if version is None or count is None:
            raise ServiceError(
                404,
                "ProvisionedConcurrencyConfigNotFoundException",
                "No Provisioned Concurrency Config found for this function",
            )
        fleet = self._invoker.fleet(version)
        ready = min(count, fleet.provisioned_ready)
        shown: dict[str, object] = {
            "RequestedProvisionedConcurrentExecutions": count,
            "AvailableProvisionedConcurrentExecutions": ready,
            "AllocatedProvisionedConcurrentExecutions": ready,
            "Status": "READY" if ready == count else "IN_PROGRESS",
            "LastModified": version.modified,
        }
        if fleet.provisioning_failed and ready < count:
            shown |= {"Status": "FAILED", "StatusReason": "FUNCTION_ERROR_INIT_FAILURE"}
        return shown

    def _available(self, function: EmulatedFunction) -> int:
        if function.reserved is not None:
            return function.reserved
        others = (f for f in self._functions.values() if f.reserved is None and f is not function)
        return self._invoker.admission.unreserved() - sum(
            sum(other.provisioned.values()) for other in others
        )

    def _published(self, function: EmulatedFunction, qualifier: str | None) -> str:
        version = function.find(qualifier)
        if qualifier is None or version is None or version.version == LATEST:
            raise invalid(
                "Provisioned Concurrency Configs cannot be applied to unpublished function "
                "versions."
            )
        return qualifier

    async def _code(self, sent: requests.CodeSent) -> Code:
        # In a thread, because calls that are under way must not wait for a large package.
        if sent.zip_file is not None:
            return await asyncio.to_thread(unpack, sent.zip_file, self._codes, self._settings)
        if sent.image_uri is not None and sent.image_uri.startswith("file:///"):
            path = Path(sent.image_uri.removeprefix("file://"))
            return await asyncio.to_thread(use_directory, path)
        raise invalid("Code: the embedded platform takes ZipFile, or ImageUri file:///path")

    def _check_free(self, name: str) -> None:
        if name in self._functions:
            raise conflict(f"Function already exist: {name}")

    def _memory_mb(self, value: int) -> int:
        return check_range("memorySize", value, 128, self._settings.memory_mb_max)

    def _timeout_s(self, value: int) -> int:
        return check_range("timeout", value, 1, self._settings.timeout_s_max)


def _is_same(one: FunctionVersion, other: FunctionVersion) -> bool:
    """Whether both would run alike."""
    return one.changed(**_ANY) == other.changed(**_ANY)
