"""Loads the application and the policy of a command, and checks that they go together.

APP is found from the working directory, and errors name the file or option that caused them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

import click
import yaml

from headgate.cli.options import writing
from headgate.config import AppConfig, from_spec, load, make_config
from headgate.config.build import variant_spec
from headgate.config.loader import without_defaults
from headgate.config.options import (
    cascades_beyond_objectives,
    least_factor,
    slo_key,
    unreachable_objectives,
)
from headgate.config.schema import BATCH_MAX
from headgate.core.errors import ConfigError, import_problem, unknown_name_error
from headgate.core.event_log import is_log
from headgate.core.model import App, Variant
from headgate.core.policy import Capabilities, PolicyConfig, PolicyKind
from headgate.core.units import format_duration
from headgate.functions.source_modules import search_first
from headgate.planning.frontier.candidates import unreachable_together
from headgate.policies import (
    find_policy,
    lacks_serverless,
    policies_for,
    policy_names,
    requirements,
)


def load_app(reference: str) -> AppConfig:
    """Load a YAML file, an ONNX file, or `module:app` from the working directory or Python path."""
    path = Path(reference)
    if is_log(path):
        allowed = f"an application; `headgate calibrate {reference} --out app.yaml` makes one of it"
        raise ConfigError("is an event log", where=reference, allowed=allowed)
    if path.suffix.lower() == ".onnx":
        if not path.is_file():
            raise ConfigError("is not a file", where=reference, allowed="model.onnx, app.yaml")
        name = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in path.stem)
        function = {"model": path.name}
        return from_spec({"functions": {name.lstrip(".-") or "model": function}}, reference)
    if ":" in reference and not reference.endswith((".yaml", ".yml")):
        search_first(str(Path.cwd()))
        _import(reference)
    return load(reference)


def base_directory(reference: str) -> Path:
    """Return the directory in which `model` and `code` of an application are found."""
    if Path(reference).suffix.lower() in (".yaml", ".yml", ".onnx"):
        return Path(reference).resolve().parent
    return Path.cwd()


def write_app(path: Path, option: str, spec: Mapping[str, object], comment: str = "") -> None:
    """Write an application file for people, without the keys that have their defaults."""
    text = yaml.safe_dump(
        without_defaults(spec), sort_keys=False, default_flow_style=None, width=100
    )
    with writing(path, option):
        path.write_text(f"{comment}{text}", encoding="utf-8")


def with_known_times(config: AppConfig, where: str, assumed_ns: int | None) -> AppConfig:
    """Return the application with an execution time for every function.

    Raises `ConfigError` for a function that nobody has measured, unless the user says which time
    to assume: without one it cannot be simulated.
    """
    if not config.unmeasured:
        return config
    if assumed_ns is None:
        raise ConfigError(
            "is not known: nobody has measured it",
            where=where,
            key=f"{_key(config.unmeasured[0])}.exec_time",
            allowed=f"exec_time: 5ms (run `{profile_command(config, where)}`), "
            "or --assume-exec-time 5ms",
        )
    spec = copy.deepcopy(config.spec)
    for name in config.unmeasured:
        section = variant_spec(spec, name)
        section["exec_time"] = [format_duration(assumed_ns)] * section["batch_max"]
    return from_spec(spec, where)


def profile_command(config: AppConfig, where: str) -> str:
    """Return the command that measures the first function that nobody has measured."""
    function = config.unmeasured[0].partition("/")[0]
    which = f" --function {function}" if len(config.app.functions) > 1 else ""
    return f"headgate profile {where}{which}"


def load_for_simulation(where: str, assumed_ns: int | None) -> tuple[AppConfig, dict[str, str]]:
    """Load an application to simulate it; warn of objectives and limits that cannot be met or kept.

    Returns also the assumed execution times by variant, for the output; empty if none were.
    """
    config = load_app(where)
    assumed = (
        {} if assumed_ns is None else dict.fromkeys(config.unmeasured, format_duration(assumed_ns))
    )
    config = with_known_times(config, where, assumed_ns)
    warn_of_unreachable_objectives(config, where)
    warn_of_what_is_overlooked(config, where)
    _warn_of_client_limits(config, where)
    return config, assumed


def _warn_of_client_limits(config: AppConfig, where: str) -> None:
    """Warn on stderr of clients that a server would limit before the Scheduler sees requests."""
    limited = [
        client.name
        for client, spec in zip(config.app.clients, config.tenants, strict=False)
        if spec.rate_per_s is not None or spec.concurrency is not None
    ]
    if limited:
        problem = "rate and concurrency limit clients of headgate serve; a simulation ignores them"
        click.echo(
            f"headgate: warning: {where}: clients: {', '.join(limited)}: {problem}", err=True
        )


def with_admission(config: AppConfig, where: str, admission: str | None) -> AppConfig:
    """Return the application with admission enforced or observed; None: as it is."""
    if admission is None:
        return config
    limits = config.spec["limits"]
    assert isinstance(limits, dict)
    return from_spec({**config.spec, "limits": {**limits, "admission": admission}}, where)


def warn_of_unreachable_objectives(config: AppConfig, where: str) -> None:
    """Warn on stderr of objectives that no placement can meet; the user may have reasons."""
    for error in objective_errors(config, where):
        click.echo(f"headgate: warning: {error}", err=True)


def easily_overlooked(config: AppConfig) -> list[str]:
    """Return a sentence for each pool on which no function runs, each `batch_max` that does not
    count, each cascade too long, and each cost that only a shared batch can meet.
    """
    used = {pool_id for variant in config.app.variants for pool_id in variant.pool_ids}
    why = "no function runs on it; each needs more than it has, or names other pools"
    unused = [f"pools.{pool.name}: {why}" for pool in config.app.pools if pool.id not in used]
    return [
        *unused,
        *_ignored_sizes(config),
        *cascades_beyond_objectives(config),
        *_costs_of_shared_batches(config),
    ]


def _ignored_sizes(config: AppConfig) -> Iterator[str]:
    """Yield a sentence for each function whose times are declared, for other batches."""
    for variant, source in zip(config.app.variants, config.sources, strict=True):
        most = variant.profile.items_max
        if source is None or source.is_measured or source.batch_max in (BATCH_MAX, most):
            continue
        yield (
            f"{_key(variant.name)}: batch_max {source.batch_max} counts only where times are "
            f"measured; exec_time has those of batches of up to {most}"
        )


def warn_of_what_is_overlooked(config: AppConfig, where: str) -> None:
    """Warn on stderr of what `easily_overlooked` finds."""
    for sentence in easily_overlooked(config):
        click.echo(f"headgate: warning: {where}: {sentence}", err=True)


def objective_errors(config: AppConfig, where: str) -> Iterator[ConfigError]:
    """Yield an error for each objective that no placement can meet, then for each such pair."""
    yield from unreachable_objectives(config, where)
    app = config.app
    factors = [least_factor(config, function) for function in app.functions]
    for pipeline in app.pipelines:
        error = unreachable_together(app, pipeline, factors, config.unmeasured)
        if error is not None:
            yield error.located(where, slo_key(config, pipeline))


def _costs_of_shared_batches(config: AppConfig) -> Iterator[str]:
    """Yield a sentence for each pipeline whose cost objective no request alone in a batch meets."""
    for pipeline in config.app.pipelines:
        of_one = replace(config, app=replace(config.app, pipelines=(pipeline,)))
        if pipeline.slo.cost_usd == inf or any(objective_errors(of_one, "")):
            continue
        for error in objective_errors(replace(of_one, app=_without_batches(of_one.app)), ""):
            yield (
                f"{error}; a shared batch costs each request less, but policies that promise a "
                "cost do not count on others to share it, and reject all"
            )


def _without_batches(app: App) -> App:
    """Return the application with batches of one item only."""
    functions = tuple(
        replace(function, variants=tuple(_of_one_item(variant) for variant in function.variants))
        for function in app.functions
    )
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(replace(s, function=functions[s.function.id]) for s in pipeline.stages),
        )
        for pipeline in app.pipelines
    )
    return replace(app, functions=functions, pipelines=pipelines)


def _of_one_item(variant: Variant) -> Variant:
    return replace(
        variant,
        profile=replace(variant.profile, exec_ns=variant.profile.exec_ns[:1]),
        more_shapes=tuple(replace(t, exec_ns=t.exec_ns[:1]) for t in variant.more_shapes),
    )


def check_support(app: App, name: str, kind: PolicyKind, where: str) -> None:
    """Raise `ConfigError` if the policy does not support the application; name those that do."""
    for requirement in requirements(app):
        if not getattr(kind.capabilities, requirement.flag):
            raise ConfigError(
                f"policy {name} does not support {requirement.noun}",
                where=where,
                key=requirement.key,
                allowed=", ".join(policies_for(app)) or "no policy supports this yet",
            )
    if lacks_serverless(kind, app):
        raise ConfigError(
            f"policy {name} needs a serverless pool, and there is none",
            where=where,
            key="pools",
            allowed=f"a pool with `tier: serverless`, or {', '.join(policies_for(app))}",
        )


@dataclass(frozen=True, slots=True)
class SelectedPolicy:
    """A policy with its checked configuration."""

    name: str
    kind: PolicyKind
    config: PolicyConfig
    settings: dict[str, object]  # as written, for the log

    @property
    def is_clairvoyant(self) -> bool:
        """Whether requests are announced to the policy before they arrive."""
        return self.kind.capabilities.clairvoyance and getattr(self.config, "clairvoyant", False)


def select_policy(
    config: AppConfig,
    where: str,
    name: str | None,
    given: Mapping[str, object],
    *,
    option: str = "--policy",
) -> SelectedPolicy:
    """Return the policy to use. Raises `ConfigError` if it is unknown or lacks a capability.

    The settings of the file apply if the policy is the file's; those `given` take precedence.
    """
    default = config.policy
    if name is None:
        name = default.name
        kind = known_policy(name, where, "policy")
    else:
        kind = known_policy(name, option)
    make_config(kind.config, given, "--set")  # alone, so that an error names the right place
    settings = {**(default.settings if name == default.name else {}), **given}
    policy_config = make_config(kind.config, settings, where)
    check_support(config.app, name, kind, where)
    return SelectedPolicy(name, kind, policy_config, settings)


def known_policy(name: str, where: str, key: str | None = None) -> PolicyKind:
    """Return the policy of this name, or raise `ConfigError` with the closest name."""
    names = policy_names()
    if name not in names:
        raise unknown_name_error("policy", name, names, where=where, key=key)
    return find_policy(name)


def _key(variant: str) -> str:
    function, _, own = variant.partition("/")
    return f"functions.{function}.variants.{own}" if own else f"functions.{function}"


def _import(reference: str) -> None:
    """Import the module now, so that an exception of its own code is reported as bad input."""
    name = reference.partition(":")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        return  # `load` reports it
    try:
        import_module(name)
    except ImportError:
        return  # `load` reports it
    except Exception as error:
        raise import_problem(error, reference) from None


def shared_by_gateways(
    config: AppConfig, capabilities: Capabilities, gateways: int
) -> dict[str, Any]:
    """Return the application as each of several gateways serves or simulates it.

    The budgets and the concurrency of platforms are divided among the gateways. A policy that picks
    free nodes by itself counts every slot as its own. So a node queues as many batches as the slots
    that the other gateways believe to be free, instead of refusing them. A policy that is made for
    refusals gets them (`Capabilities.multi_gateway` and `retries_busy`).
    """
    takes_refusals = capabilities.multi_gateway or capabilities.retries_busy
    pools: dict[str, Any] = {}
    spec: dict[str, Any] = dict(config.spec)
    for pool in config.app.pools:
        terms = dict((spec["pools"] or {}).get(pool.name, {"tier": "dedicated"}))
        if pool.faas is not None:
            terms["concurrency"] = max(1, pool.faas.concurrency_max // gateways)
            terms["budget"] = {
                period: None if usd is None else _divided_usd(usd, gateways)
                for period, usd in terms["budget"].items()
            }
        elif not takes_refusals:
            terms["queue_max"] = max(pool.queue_max, (gateways - 1) * pool.slots)
        pools[pool.name] = terms
    return {**spec, "pools": pools}


def of_one_gateway(
    config: AppConfig, where: str, policy: SelectedPolicy, gateways: int
) -> AppConfig:
    """Return the application as each of `gateways` simulates it under a policy."""
    check_gateways(policy, gateways)
    if gateways == 1:
        return config
    return from_spec(shared_by_gateways(config, policy.kind.capabilities, gateways), where)


def of_all_gateways(spec: Mapping[str, Any], gateways: int) -> dict[str, Any]:
    """Return the application that several gateways share, from that of one of them.

    The inverse of `shared_by_gateways`, but for concurrencies that had a remainder, and for the
    queues of nodes, which stay as they were.
    """
    pools: dict[str, Any] = {}
    for name, pool in (spec["pools"] or {}).items():
        terms = dict(pool)
        if terms.get("tier") == "serverless":
            terms["concurrency"] *= gateways
            terms["budget"] = {
                period: None if usd is None else _divided_usd(usd, 1 / gateways)
                for period, usd in terms["budget"].items()
            }
        pools[name] = terms
    return {**spec, "pools": pools or spec["pools"]}


def supports_gateways(kind: PolicyKind) -> bool:
    """Whether a policy can share its pools with other gateways."""
    return kind.capabilities.multi_gateway or kind.capabilities.shares_nodes


def check_gateways(
    policy: SelectedPolicy, gateways: int, where: str = "--gateways", key: str | None = None
) -> None:
    """Raise `ConfigError` if a policy cannot share its pools with other gateways."""
    if gateways > 1 and not supports_gateways(policy.kind):
        able = [name for name in policy_names() if supports_gateways(find_policy(name))]
        problem = f"policy {policy.name} does not support several gateways"
        allowed = f"1, or one of the policies {', '.join(able)}"
        raise ConfigError(problem, where=where, key=key, value=gateways, allowed=allowed)


def _divided_usd(text: str, parts: float) -> str:
    """Return a part of an amount, in the form of the application file.

    >>> _divided_usd("$0.06", 2)
    '$0.03'
    """
    return f"${float(text.removeprefix('$')) / parts:.12g}"
