"""Loading APP, as a command does it: from where the user stands, blaming the right file."""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import click

from headgate.config import AppConfig, from_spec, load, make_config
from headgate.config.build import variant_spec
from headgate.config.errors import unknown_name_error
from headgate.config.objectives import unreachable_objectives
from headgate.core.errors import ConfigError
from headgate.core.model import App
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.core.units import format_duration
from headgate.policies import find_policy, policy_names


def load_app(reference: str) -> AppConfig:
    """Load a YAML file, or `module:app` from the working directory or wherever Python looks."""
    if ":" in reference and not reference.endswith((".yaml", ".yml")):
        directory = str(Path.cwd())
        if directory not in sys.path:
            sys.path.insert(0, directory)
        _import(reference)
    return load(reference)


def with_known_times(loaded: AppConfig, where: str, assumed_ns: int | None) -> AppConfig:
    """Return the application with a time for every function, or refuse: what nobody has measured
    cannot be simulated, unless the user says what to assume.
    """
    if not loaded.unmeasured:
        return loaded
    if assumed_ns is None:
        raise ConfigError(
            "is not known: nobody has measured it",
            where=where,
            key=f"{_key(loaded.unmeasured[0])}.exec_time",
            allowed=f"exec_time: 5ms (run `headgate profile {where}`), or --assume-exec-time 5ms",
        )
    spec = copy.deepcopy(loaded.spec)
    for name in loaded.unmeasured:
        entry = variant_spec(spec, name)
        entry["exec_time"] = [format_duration(assumed_ns)] * entry["batch_max"]
    return from_spec(spec, where)


def assumed_times(loaded: AppConfig, assumed_ns: int | None) -> dict[str, str]:
    """Return what was assumed of whom, for the output; nothing if nothing was."""
    if assumed_ns is None:
        return {}
    return dict.fromkeys(loaded.unmeasured, format_duration(assumed_ns))


def _key(variant: str) -> str:
    function, _, own = variant.partition("/")
    return f"functions.{function}.variants.{own}" if own else f"functions.{function}"


def warn_of_objectives(loaded: AppConfig, where: str) -> None:
    """Say on stderr which objectives nothing can meet: whoever asks for that may have reasons."""
    for problem in unreachable_objectives(loaded, where):
        click.echo(f"headgate: warning: {problem}", err=True)


def _import(reference: str) -> None:
    """Import the module now, so that what its own code raises is the user's and not our defect."""
    name = reference.partition(":")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        return  # `load` says so
    try:
        import_module(name)
    except ConfigError:
        raise
    except ImportError:
        return  # as above
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        if isinstance(error, SyntaxError):
            where = f"{error.filename}:{error.lineno}"
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(problem, where=where, key=reference) from None


# Whether a policy can take what an application asks of it.


@dataclass(frozen=True, slots=True)
class Requirement:
    """Something in an application that not every policy can take."""

    flag: str  # the field of `Capabilities` that must be true
    key: str  # where in the application it is
    noun: str


def check_fit(app: App, name: str, kind: PolicyKind, where: str) -> None:
    """Raise `ConfigError` if the policy cannot take the application, naming those that can."""
    for need in needs(app):
        if not getattr(kind.capabilities, need.flag):
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
        if all(getattr(find_policy(name).capabilities, flag) for flag in flags)
    ]


def needs(app: App) -> Iterator[Requirement]:
    """Yield what the application asks of a policy."""
    for pool in app.pools:
        if pool.faas is not None:
            yield Requirement("serverless", f"pools.{pool.name}", "serverless pools")
    for pipeline in app.pipelines:
        if any(stage.after for stage in pipeline.stages):
            yield Requirement(
                "pipelines", f"pipelines.{pipeline.name}", "stages that wait for others"
            )
    for pool in app.pools:
        if pool.faas is None:
            for function, variant in zip(app.functions, app.variants_on(pool.id), strict=True):
                if variant is None:
                    noun = f"a function that the nodes of pool {pool.name} cannot run"
                    yield Requirement("mixed_pools", f"functions.{function.name}", noun)


# The policy that was chosen, with its settings: by the application file or on the command line.


@dataclass(frozen=True, slots=True)
class SelectedPolicy:
    """A policy, ready to be built."""

    name: str
    kind: PolicyKind
    config: PolicyConfig
    settings: dict[str, object]  # as written, for the log

    @property
    def is_clairvoyant(self) -> bool:
        """Whether requests are to be announced to it before they arrive."""
        return self.kind.capabilities.clairvoyance and getattr(self.config, "clairvoyant", False)


def choose(
    loaded: AppConfig,
    where: str,
    name: str | None,
    given: Mapping[str, object],
    *,
    option: str = "--policy",
) -> SelectedPolicy:
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
    return SelectedPolicy(name, kind, config, settings)


def known_policy(name: str, where: str, key: str | None = None) -> PolicyKind:
    """Return the policy of that name, or raise `ConfigError` saying which one was meant."""
    names = policy_names()
    if name not in names:
        raise unknown_name_error("policy", name, names, where=where, key=key)
    return find_policy(name)
