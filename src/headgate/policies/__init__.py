"""The policies, one file each. A policy has the name of its file; there is no list to edit."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from headgate.core.errors import ConfigError, import_problem
from headgate.core.model import App
from headgate.core.policy import PolicyKind
from headgate.core.scheduler.scheduler import Scheduler


def policy_names() -> list[str]:
    """Return the names of all policies.

    >>> "balance" in policy_names()
    True
    """
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def find_policy(name: str) -> PolicyKind:
    """Return the policy of that name, or raise `ConfigError` listing all policies."""
    if name not in policy_names():
        allowed = ", ".join(policy_names())
        raise ConfigError("unknown policy", key="policy", value=name, allowed=allowed)
    module = _module(name)
    kind = getattr(module, "POLICY", None)
    if not isinstance(kind, PolicyKind):
        allowed = "POLICY = PolicyKind(...), the policy that the file is named after"
        raise ConfigError("has no policy", where=module.__file__, key="POLICY", allowed=allowed)
    return kind


def _module(name: str) -> ModuleType:
    """Return the file of a policy. Raises `ConfigError` if it raises, naming the line."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except Exception as error:
        raise import_problem(error, f"policy {name}") from error


def describe_policy(name: str) -> str:
    """Return the first line of a policy's docstring: what it does."""
    module = _module(name)
    return (module.__doc__ or name).strip().splitlines()[0]  # a compiled module has no docstring


@dataclass(frozen=True, slots=True)
class Requirement:
    """Something in an application that not every policy supports."""

    flag: str  # the field of `Capabilities` that must be true
    key: str  # its path in the application file
    noun: str


def policies_for(app: App) -> list[str]:
    """Return the policies that support everything in the application, with default settings."""
    flags = {requirement.flag for requirement in requirements(app)}
    kinds = {name: find_policy(name) for name in policy_names()}
    return [
        name
        for name, kind in kinds.items()
        if all(getattr(kind.capabilities, flag) for flag in flags)
        and not lacks_serverless(kind, app)
        and _accepts(kind, app)
    ]


def lacks_serverless(kind: PolicyKind, app: App) -> bool:
    """Whether a policy needs a FaaS pool, and the application has none."""
    return kind.capabilities.needs_serverless and all(pool.faas is None for pool in app.pools)


def _accepts(kind: PolicyKind, app: App) -> bool:
    """Whether a policy can be made for an application: some refuse what is too large for them."""
    try:
        Scheduler(app, kind)
    except ConfigError:
        return False
    return True


def requirements(app: App) -> Iterator[Requirement]:
    """Yield what the application requires of a policy."""
    for pool in app.pools:
        if pool.faas is not None:
            yield Requirement("serverless", f"pools.{pool.name}", "serverless pools")
    for pipeline in app.pipelines:
        if any(stage.after for stage in pipeline.stages):
            yield Requirement("pipelines", f"pipelines.{pipeline.name}", "stages with `after`")
    for pool in app.pools:
        if pool.faas is None:
            for function, variant in zip(app.functions, app.variants_on(pool.id), strict=True):
                if variant is None:
                    noun = f"a function that the nodes of pool {pool.name} cannot run"
                    yield Requirement("mixed_pools", f"functions.{function.name}", noun)
