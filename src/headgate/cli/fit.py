"""Whether a policy can take what an application asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headgate.core.errors import ConfigError
from headgate.core.model import App
from headgate.core.policy import PolicyKind
from headgate.policies import find_policy, policy_names


@dataclass(frozen=True, slots=True)
class Need:
    """Something in an application that not every policy can take."""

    flag: str  # the field of `Takes` that must be true
    key: str  # where in the application it is
    noun: str


def check_fit(app: App, name: str, kind: PolicyKind, where: str) -> None:
    """Raise `ConfigError` if the policy cannot take the application, naming those that can."""
    for need in needs(app):
        if not getattr(kind.takes, need.flag):
            raise ConfigError(
                f"policy {name} does not take {need.noun}",
                where=where,
                key=need.key,
                allowed=", ".join(policies_for(app)) or "no policy takes this yet",
            )


def policies_for(app: App) -> list[str]:
    """Return the policies that can take all of the application."""
    flags = {need.flag for need in needs(app)}
    return [
        name
        for name in policy_names()
        if all(getattr(find_policy(name).takes, flag) for flag in flags)
    ]


def needs(app: App) -> Iterator[Need]:
    """Yield what the application asks of a policy."""
    for pool in app.pools:
        if pool.serverless is not None:
            yield Need("serverless", f"pools.{pool.name}", "serverless pools")
    for pipeline in app.pipelines:
        if any(stage.after for stage in pipeline.stages):
            yield Need("pipelines", f"pipelines.{pipeline.name}", "stages that wait for others")
    for pool in app.pools:
        if pool.serverless is None:
            for function, variant in zip(app.functions, app.variants_on(pool.id), strict=True):
                if variant is None:
                    noun = f"a function that the nodes of pool {pool.name} cannot run"
                    yield Need("mixed_pools", f"functions.{function.name}", noun)
