"""From the application file to the declared records of the core, with every check between."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.app.entry import Entry
from headgate.app.functions import build_functions
from headgate.app.pipelines import build_pipelines
from headgate.app.pools import build_pools
from headgate.app.spec import AppSpec, ClientSpec, LimitsSpec, PoolSpec
from headgate.core.errors import ConfigError
from headgate.core.model import App, Client, Limits


def build(spec: AppSpec, where: str) -> App:
    """Return the declared records; raise `ConfigError` if they do not fit together."""
    if not spec.functions:
        raise ConfigError("is empty", where=where, key="functions", allowed="at least one")
    pools = build_pools(spec.pools or {"local": PoolSpec(tier="dedicated")}, where)
    functions = build_functions(spec.functions, pools, where)
    return App(
        functions=functions,
        pipelines=build_pipelines(spec, functions, where),
        pools=pools,
        clients=_build_clients(spec.clients),
        limits=_build_limits(Entry(spec.limits, where, "limits")),
    )


def _build_clients(specs: Mapping[str, ClientSpec]) -> tuple[Client, ...]:
    named = specs or {"client": ClientSpec()}
    return tuple(Client(id, name, spec.weight) for id, (name, spec) in enumerate(named.items()))


def _build_limits(entry: Entry[LimitsSpec]) -> Limits:
    spec = entry.spec
    return Limits(
        attempts_max=spec.attempts,
        refusals_max=spec.refusals,
        backoff_ns=entry.duration_ns("backoff"),
        lost_after=spec.lost_after,
        open_requests_max=spec.open_requests,
    )
