"""The control plane: functions, versions, aliases, reserved and provisioned concurrency."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, final

from headgate.lambda_emulator import api_models
from headgate.lambda_emulator.api_models import check_range, check_revision, checked_configuration
from headgate.lambda_emulator.functions import (
    LATEST,
    Alias,
    Code,
    EmulatedFunction,
    FunctionVersion,
    unpack,
    use_directory,
)
from headgate.lambda_emulator.http import ServiceError, conflict, invalid, not_found
from headgate.lambda_emulator.invoker import Invoker
from headgate.lambda_emulator.settings import PlatformSettings

# A function name, or a full or partial ARN, optionally with a version or an alias.
_NAME: Final = re.compile(
    r"(?:(?:arn:aws[\w-]*:lambda:[\w-]+:)?\d{12}:)?(?:function:)?"
    r"(?P<name>[A-Za-z0-9_-]{1,64})(?::(?P<qualifier>\$LATEST|[A-Za-z0-9_-]{1,128}))?"
)
# Fields in which two versions may differ and still run the same function.
_IGNORED: Final = {"version": "", "modified": "", "revision": "", "description": ""}


@final
@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Changes `functions` and has the invoker reconcile its instances. Raises `ServiceError`."""

    settings: PlatformSettings
    functions: dict[str, EmulatedFunction]
    invoker: Invoker
    code_directory: Path

    def resolve(
        self, text: str, qualifier: str | None = None
    ) -> tuple[EmulatedFunction, FunctionVersion, str | None]:
        """Find a function by name or ARN. Returns it with the version and the qualifier given."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise invalid(f"1 validation error detected: Value '{text}' at 'functionName' is bad")
        if qualifier and match["qualifier"] and qualifier != match["qualifier"]:
            raise invalid("The derived qualifier from the function name does not match")
        qualifier = qualifier or match["qualifier"]
        function = self.functions.get(match["name"])
        version = function.find(qualifier) if function else None
        if function is None or version is None:
            raise not_found(f"Function not found: {self.settings.arn(match['name'], qualifier)}")
        return function, version, qualifier

    def resolve_unqualified(self, text: str, qualifier: str | None = None) -> EmulatedFunction:
        """Find a function for an operation that applies to no version or alias."""
        function, _, qualifier = self.resolve(text, qualifier)
        if qualifier not in (None, LATEST):
            raise invalid(f"Qualifier: {qualifier!r}: this is done to a function, not to a version")
        return function

    async def create(self, params: api_models.CreateFunction) -> FunctionVersion:
        """Create a function.

        The code is unpacked after all other checks: a rejected request leaves no code behind.
        """
        match = _NAME.fullmatch(params.function_name)
        if match is None or match["qualifier"]:
            raise invalid(f"Value '{params.function_name}' at 'functionName' is not a name")
        name, tags = match["name"], api_models.check_tags(params.tags)
        is_image = params.code.image_uri is not None
        if params.package_type != ("Image" if is_image else "Zip"):
            raise invalid(f"PackageType: {params.package_type!r} is not what Code is")
        api_models.check_architectures(params.architectures)
        fields = checked_configuration(params, self.settings)
        self._check_free(name)
        code = await self._code(params.code)
        self._check_free(name)  # again: unpacking yields to other requests
        created = FunctionVersion(name, code, package_type=params.package_type, **fields)
        function = self.functions[name] = EmulatedFunction(created, tags=tags)
        return self.publish(function, api_models.PublishVersion()) if params.publish else created

    async def update_code(
        self, function: EmulatedFunction, params: api_models.UpdateCode
    ) -> FunctionVersion:
        """Replace the code. Running invocations finish with the old code."""
        api_models.check_architectures(params.architectures)
        check_revision(params.revision_id, function.latest.revision)
        if (params.image_uri is not None) != (function.latest.package_type == "Image"):
            raise invalid(f"PackageType: this function's is {function.latest.package_type}")
        code = await self._code(params)
        # Check again: unpacking yields to other requests, and their changes must not be lost.
        check_revision(params.revision_id, function.latest.revision)
        changed = function.latest.with_changes(code=code)
        if params.dry_run:
            return changed
        function.latest = changed
        self.invoker.reconcile(function)
        return self.publish(function, api_models.PublishVersion()) if params.publish else changed

    def update_configuration(
        self, function: EmulatedFunction, params: api_models.UpdateConfiguration
    ) -> FunctionVersion:
        """Change the parameters that the request sets."""
        check_revision(params.revision_id, function.latest.revision)
        changes = checked_configuration(params, self.settings)
        function.latest = function.latest.with_changes(**changes)
        self.invoker.reconcile(function)
        return function.latest

    def delete(self, function: EmulatedFunction, qualifier: str | None) -> None:
        """Delete a version, or the function without a qualifier. Running invocations finish."""
        if qualifier is None:
            del self.functions[function.name]
            self.invoker.admission.remove_function(function.name)
        elif qualifier == LATEST or qualifier in function.aliases:
            raise invalid(f"{qualifier} cannot be deleted: only a published version")
        elif any(alias.version == qualifier for alias in function.aliases.values()):
            raise conflict(f"Version {qualifier} has an alias")
        else:
            del function.versions[qualifier]
            function.provisioned.pop(qualifier, None)
        self.invoker.reconcile(function)

    def publish(
        self, function: EmulatedFunction, params: api_models.PublishVersion
    ) -> FunctionVersion:
        """Publish the latest state as a version, unless it equals the last published version."""
        latest = function.latest
        check_revision(params.revision_id, latest.revision)
        if params.code_sha256 not in (None, latest.code.sha256):
            raise invalid(f"CodeSHA256 ({params.code_sha256}) is different from current CodeSHA256")
        last = function.versions.get(str(function.published))
        if last and last.with_changes(**_IGNORED) == latest.with_changes(**_IGNORED):
            return last
        function.published += 1
        number, description = str(function.published), params.description or latest.description
        created = latest.with_changes(version=number, description=description)
        function.versions[number] = created
        return created

    def write_alias(
        self, function: EmulatedFunction, params: api_models.WriteAlias, existing: str = ""
    ) -> Alias:
        """Create an alias of a version, or point the existing alias to another version."""
        name = existing or params.name
        old = function.aliases.get(name)
        if old is not None and not existing:
            raise conflict(f"Alias already exists: {self.settings.arn(function.name, name)}")
        if old is None and existing:
            self._raise_no_alias(function, name)
        if not re.fullmatch(r"(?!\d+$)[A-Za-z0-9_-]{1,128}", name):
            raise invalid(f"Value '{name}' at 'name' is not the name of an alias")
        number = params.function_version or (old.version if old else "")
        if number != LATEST and number not in function.versions:
            raise not_found(f"Function not found: {self.settings.arn(function.name, number)}")
        if old is not None:
            check_revision(params.revision_id, old.revision)
        description = params.description
        if description is None:
            description = old.description if old is not None else ""
        alias = function.aliases[name] = Alias(function.name, name, number, description)
        self.invoker.reconcile(function)
        return alias

    def delete_alias(self, function: EmulatedFunction, name: str) -> None:
        if function.aliases.pop(name, None) is None:
            self._raise_no_alias(function, name)
        function.provisioned.pop(name, None)
        self.invoker.reconcile(function)

    def reserve(self, function: EmulatedFunction, count: int | None) -> None:
        """Reserve concurrency for a function, which is also its limit; None removes both."""
        if count is not None:
            check_range("reservedConcurrentExecutions", count, 0, self.settings.concurrency)
            self.invoker.admission.check_reservation(function, count)
            if count < sum(function.provisioned.values()):
                raise invalid("ReservedConcurrentExecutions is less than what is provisioned")
        function.reserved = count

    def provision(self, function: EmulatedFunction, qualifier: str | None, count: int) -> None:
        """Provision concurrency for a published version or an alias."""
        qualifier = self._published(function, qualifier)
        check_range("provisionedConcurrentExecutions", count, 1, self.settings.concurrency)
        others = sum(n for name, n in function.provisioned.items() if name != qualifier)
        available = self._available(function)
        if others + count > available:
            raise invalid(
                "Specified ConcurrentExecutions for function is greater than "
                f"function's reserved or the account's unreserved concurrency [{available}]."
            )
        function.provisioned[qualifier] = count
        self.invoker.reconcile(function)

    def unprovision(self, function: EmulatedFunction, qualifier: str | None) -> None:
        """Remove the provisioned concurrency of a published version or an alias."""
        if function.provisioned.pop(self._published(function, qualifier), None) is not None:
            self.invoker.reconcile(function)

    def describe_provisioned(
        self, function: EmulatedFunction, qualifier: str | None
    ) -> dict[str, object]:
        """Return `GetProvisionedConcurrencyConfig`: requested, available, and the status."""
        qualifier = self._published(function, qualifier)
        version, count = function.find(qualifier), function.provisioned.get(qualifier)
        if version is None or count is None:
            kind = "ProvisionedConcurrencyConfigNotFoundException"
            problem = "No Provisioned Concurrency Config found for this function"
            raise ServiceError(404, kind, problem)
        pool = self.invoker.pool(version)
        ready = min(count, pool.provisioned_ready)
        description: dict[str, object] = {
            "RequestedProvisionedConcurrentExecutions": count,
            "AvailableProvisionedConcurrentExecutions": ready,
            "AllocatedProvisionedConcurrentExecutions": ready,
            "Status": "READY" if ready == count else "IN_PROGRESS",
            "LastModified": version.modified,
        }
        if pool.provisioning_failed and ready < count:
            description |= {"Status": "FAILED", "StatusReason": "FUNCTION_ERROR_INIT_FAILURE"}
        return description

    def _available(self, function: EmulatedFunction) -> int:
        if function.reserved is not None:
            return function.reserved
        others = (f for f in self.functions.values() if f.reserved is None and f is not function)
        return self.invoker.admission.unreserved() - sum(
            sum(other.provisioned.values()) for other in others
        )

    def _published(self, function: EmulatedFunction, qualifier: str | None) -> str:
        version = function.find(qualifier)
        if qualifier is None or version is None or version.version == LATEST:
            problem = "Provisioned Concurrency Configs cannot be applied to unpublished function"
            raise invalid(f"{problem} versions.")
        return qualifier

    async def _code(self, code: api_models.FunctionCode) -> Code:
        # In a thread: unpacking a large package must not block running invocations.
        if code.zip_file is not None:
            return await asyncio.to_thread(
                unpack, code.zip_file, self.code_directory, self.settings
            )
        if code.image_uri is not None and code.image_uri.startswith("file:///"):
            path = Path(code.image_uri.removeprefix("file://"))
            return await asyncio.to_thread(use_directory, path)
        raise invalid("Code: the Lambda emulator takes ZipFile, or ImageUri file:///path")

    def _check_free(self, name: str) -> None:
        if name in self.functions:
            raise conflict(f"Function already exist: {name}")

    def _raise_no_alias(self, function: EmulatedFunction, name: str) -> NoReturn:
        raise not_found(f"Alias not found: {self.settings.arn(function.name, name)}")
