"""The policies, one file each. A policy's name is its file's name; there is no list to edit."""

from __future__ import annotations

import importlib
import pkgutil

from headgate.core.errors import ConfigError
from headgate.core.policy import PolicyKind


def policy_names() -> list[str]:
    """Every policy there is.

    >>> "balance" in policy_names()
    True
    """
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def find_policy(name: str, where: str | None = None) -> PolicyKind:
    """Return the policy of that name, or raise `ConfigError` listing those there are."""
    if name not in policy_names():
        raise ConfigError(
            "unknown policy",
            where=where,
            key="policy",
            value=name,
            allowed=", ".join(policy_names()),
        )
    kind = importlib.import_module(f"{__name__}.{name}").POLICY
    if not isinstance(kind, PolicyKind):
        raise TypeError(f"headgate.policies.{name}.POLICY is not a PolicyKind")
    return kind


def describe_policy(name: str) -> str:
    """Return the first line of a policy's documentation: what it does."""
    module = importlib.import_module(f"{__name__}.{name}")
    return (module.__doc__ or "").strip().splitlines()[0]
