"""The policy that was chosen, with its settings: by the application file or on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headgate.app import LoadedApp, make_config
from headgate.app.names import unknown
from headgate.cli.fit import check_fit
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.policies import find_policy, policy_names


@dataclass(frozen=True, slots=True)
class Chosen:
    """A policy, ready to be built."""

    name: str
    kind: PolicyKind
    config: PolicyConfig
    settings: dict[str, object]  # as written, for the log

    @property
    def is_clairvoyant(self) -> bool:
        """Whether requests are to be announced to it before they arrive."""
        return self.kind.takes.clairvoyance and getattr(self.config, "clairvoyant", False)


def choose(
    loaded: LoadedApp,
    where: str,
    name: str | None,
    given: Mapping[str, object],
    *,
    option: str = "--policy",
) -> Chosen:
    """Return the policy to use; raise `ConfigError` if it does not exist, or not for this app.

    The settings of the file count if it is the file's policy; those `given` go before them.
    """
    own = loaded.policy
    if name is None:
        name = own.name
        kind = known_policy(name, where, "policy")
    else:
        kind = known_policy(name, option)
    make_config(kind.config, given, "--set")  # alone, so that an error names the right place
    settings = {**(own.settings if name == own.name else {}), **given}
    config = make_config(kind.config, settings, where)
    check_fit(loaded.app, name, kind, where)
    return Chosen(name, kind, config, settings)


def known_policy(name: str, where: str, key: str | None = None) -> PolicyKind:
    """Return the policy of that name, or raise `ConfigError` saying which one was meant."""
    names = policy_names()
    if name not in names:
        raise unknown("policy", name, names, where=where, key=key)
    return find_policy(name)
