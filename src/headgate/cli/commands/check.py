"""`headgate check`: loads an application and prints its functions, pipelines and pools."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Final

import click
from rich.text import Text

from headgate.cli.app_loading import (
    base_directory,
    check_gateways,
    check_support,
    easily_overlooked,
    known_policy,
    load_app,
    objective_errors,
    profile_command,
    select_policy,
)
from headgate.cli.options import WorkloadOptions, app_argument, json_option, traces_option
from headgate.cli.output import show, show_json
from headgate.cli.workload import choose_workload
from headgate.config import AppConfig, make_config
from headgate.core.clock import NEVER_NS
from headgate.core.model import (
    COMPUTE_NAMES,
    TIER_NAMES,
    UNLIMITED,
    App,
    Compute,
    Pipeline,
    Pool,
    Variant,
)
from headgate.core.units import format_duration, format_size
from headgate.metrics.format import percent
from headgate.metrics.table import rows_table
from headgate.policies import policies_for

_DEFAULT_POLICY: Final = "headgate"  # of a file without `policy`


@click.command("check")
@app_argument
@traces_option
@json_option
def command(app: str, traces: Path | None, as_json: bool) -> None:
    """Load APP, and print what it declares or what is wrong with it.

    A latency objective below the critical path of its pipeline is wrong, and so is a cost objective
    below its cheapest placement, or a pair that no placement meets together: nothing can meet them.
    """
    config = load_app(app)
    kind = known_policy(config.policy.name, app, "policy")
    make_config(kind.config, config.policy.settings, app)
    if config.policy.name != _DEFAULT_POLICY:  # named by the file, so `simulate` would fail
        check_support(config.app, config.policy.name, kind, app)
    if config.serve.gateways > 1:
        selected = select_policy(config, app, None, {})
        check_gateways(selected, config.serve.gateways, app, "serve.gateways")
    if config.workload.streams:  # for 1 ns: only whether the processes can be parsed matters
        choose_workload(config, app, WorkloadOptions(duration_ns=1, traces=traces), seed=0)
    for error in objective_errors(config, app):
        raise error
    if as_json:
        content = {
            "app": app,
            "policies": policies_for(config.app),
            "unmeasured": list(config.unmeasured),
            "models_not_found": _models_not_found(app, config),
            "code_not_found": _code_not_found(app, config),
            "spec": config.spec,
        }
        show_json(content)
    else:
        _show(app, config)


def _show(name: str, config: AppConfig) -> None:
    app = config.app
    show(
        rows_table([_function(variant, config) for variant in app.variants], "Functions"),
        rows_table([_pipeline(pipeline, app) for pipeline in app.pipelines], "Pipelines"),
        rows_table([_pool(pool, app) for pool in app.pools], "Pools"),
    )
    streams = [
        {"workload": stream.process, "pipeline": stream.pipeline.name, "client": stream.client.name}
        for stream in config.workload.streams
    ]
    if streams:
        duration = format_duration(config.workload.duration_ns)
        show(rows_table(streams, f"Workload of {duration}"))
    show(Text(_supported_by(app, config.policy.name)))
    for sentence in easily_overlooked(config):
        show(Text(sentence, "yellow"))
    if config.unmeasured:
        names = ", ".join(config.unmeasured)
        remedy = f"headgate serve measures at start, {profile_command(config, name)} now"
        show(Text(f"not measured: {names}; {remedy}; simulations need `exec_time`", "yellow"))
    if paths := [*_models_not_found(name, config), *_code_not_found(name, config)]:
        show(Text(f"not found: {', '.join(paths)}; headgate serve needs these files", "yellow"))
    show(Text(f"{name} is valid", "green"))


def _models_not_found(name: str, config: AppConfig) -> list[str]:
    """Return the ONNX files that are not there. A simulation needs none of them."""
    base = base_directory(name)
    models = [source.model for source in config.sources if source is not None]
    return [model for model in models if model is not None and not (base / model).is_file()]


def _code_not_found(name: str, config: AppConfig) -> list[str]:
    """Return what is in no module that can be found. Nothing is imported: it might take long."""
    base = base_directory(name)
    sources = [source.code for source in config.sources if source is not None]
    return [code for code in sources if code is not None and not _has_module(code, base)]


def _has_module(code: str, base: Path) -> bool:
    first, *others = code.partition(":")[0].split(".")
    try:
        spec = PathFinder.find_spec(first, [str(base)]) or find_spec(first)
    except ValueError:  # a module without a specification, such as `__main__`
        return True
    for part in others:
        if spec is not None:
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    return spec is not None


def _supported_by(app: App, policy: str) -> str:
    names = policies_for(app)
    if not names:
        return "no policy of this release supports this application"
    text = f"policy: {policy}; policies that support this application: {', '.join(names)}"
    return text if policy in names else f"{text}; choose one with --policy"


def _function(variant: Variant, config: AppConfig) -> dict[str, object]:
    profile = variant.profile
    is_known = variant.name not in config.unmeasured
    has_shapes = any(each.more_shapes for each in config.app.variants)
    return {
        "function": variant.name,
        "exec_time": format_duration(profile.exec_ns[0]) if is_known else "not measured",
        "batch_max": profile.items_max,
        **({"shapes": len(variant.shapes)} if has_shapes else {}),
        "cold_start": format_duration(profile.cold_start_ns),
        "swap_in": format_duration(profile.swap_in_ns),
        "memory": format_size(profile.memory_bytes),
        "pools": ", ".join(config.app.pools[pool_id].name for pool_id in variant.pool_ids),
    }


def _pipeline(pipeline: Pipeline, app: App) -> dict[str, object]:
    slo = pipeline.slo
    has_latency = slo.latency_ns != NEVER_NS
    cost = f"${1e6 * slo.cost_usd:.6g}/1M" if slo.cost_usd < inf else "any"
    has_cost = any(each.slo.cost_usd < inf for each in app.pipelines)
    return {
        "pipeline": pipeline.name,
        "stages": " ".join(stage.function.name for stage in pipeline.stages),
        "latency": format_duration(slo.latency_ns) if has_latency else "any",
        "quantile": percent(slo.quantile) if has_latency else "",
        **({"cost": cost} if has_cost else {}),
    }


def _pool(pool: Pool, app: App) -> dict[str, object]:
    is_unlimited = pool.memory_bytes == UNLIMITED
    has_choice = any(each.compute != Compute.PER_BATCH for each in app.pools)
    return {
        "pool": pool.name,
        "tier": TIER_NAMES[pool.tier],
        "nodes": pool.nodes if pool.faas is None else f"up to {pool.faas.concurrency_max}",
        "slots": pool.slots,
        **({"compute": COMPUTE_NAMES[pool.compute]} if has_choice else {}),
        "memory": "unlimited" if is_unlimited else format_size(pool.memory_bytes),
    }
