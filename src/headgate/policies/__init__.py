"""The policies, one file each. A policy has the name of its file; there is no list to edit."""

from __future__ import annotations

import importlib
import pkgutil

from headgate.core.errors import ConfigError
from headgate.core.policy import PolicyKind


def policy_names() -> list[str]:
    """Return the names of all policies.

    >>> "balance" in policy_names()
    True
    """
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def find_policy(name: str, where: str | None = None) -> PolicyKind:
    """Return the policy of that name, or raise `ConfigError` listing all policies."""
    if name not in policy_names():
        allowed = ", ".join(policy_names())
        raise ConfigError("unknown policy", where=where, key="policy", value=name, allowed=allowed)
    kind = importlib.import_module(f"{__name__}.{name}").POLICY
    if not isinstance(kind, PolicyKind):
        raise TypeError(f"headgate.policies.{name}.POLICY is not a PolicyKind")
    return kind


def describe_policy(name: str) -> str:
    """Return the first line of a policy's docstring: what it does."""
    module = importlib.import_module(f"{__name__}.{name}")
    return (module.__doc__ or name).strip().splitlines()[0]  # a compiled module has no docstring
