"""`headgate check`: whether an application loads, and what it declares."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from rich.text import Text

from headgate.cli.app_loading import check_fit, known_policy, load_app, policies_for
from headgate.cli.options import app_argument, json_option, traces_option
from headgate.cli.output import rows_table, show, show_json
from headgate.cli.workload import WorkloadOptions, choose_workload
from headgate.config import AppConfig, make_config
from headgate.config.objectives import unreachable_objectives
from headgate.core.clock import NEVER_NS
from headgate.core.model import TIER_NAMES, App, Pipeline, Pool, Variant
from headgate.core.units import format_duration, format_size

_DEFAULT_POLICY: Final = "headgate"  # of a file that names none


@click.command("check")
@app_argument
@traces_option
@json_option
def command(app: str, traces: Path | None, as_json: bool) -> None:
    """Load APP, and say what it declares or what is wrong with it.

    An objective that nothing could meet is wrong: a latency below the fastest way through.
    """
    loaded = load_app(app)
    kind = known_policy(loaded.policy.name, app, "policy")
    make_config(kind.config, loaded.policy.settings, app)
    if loaded.policy.name != _DEFAULT_POLICY:  # the file asks for it, so `simulate` would fail
        check_fit(loaded.app, loaded.policy.name, kind, app)
    if loaded.workload.streams:  # over an instant, because only what they say matters
        choose_workload(loaded, app, WorkloadOptions(duration_ns=1, traces=traces), seed=0)
    for problem in unreachable_objectives(loaded, app):
        raise problem
    if as_json:
        content = {
            "app": app,
            "policies": policies_for(loaded.app),
            "unmeasured": list(loaded.unmeasured),
            "spec": loaded.spec,
        }
        show_json(content)
    else:
        _show(app, loaded)


def _show(name: str, loaded: AppConfig) -> None:
    app = loaded.app
    show(
        rows_table([_function(variant, loaded) for variant in app.variants], "Functions"),
        rows_table([_pipeline(pipeline) for pipeline in app.pipelines], "Pipelines"),
        rows_table([_pool(pool) for pool in app.pools], "Pools"),
    )
    streams = [
        {"workload": stream.process, "pipeline": stream.pipeline.name, "client": stream.client.name}
        for stream in loaded.workload.streams
    ]
    if streams:
        duration = format_duration(loaded.workload.duration_ns)
        show(rows_table(streams, f"Workload of {duration}"))
    show(Text(_who_takes(app, loaded.policy.name)))
    if loaded.unmeasured:
        who = ", ".join(loaded.unmeasured)
        how = f"headgate serve measures when it starts; headgate profile {name} does now"
        show(Text(f"not measured: {who}; {how}; simulations need `exec_time`", "yellow"))
    show(Text(f"{name} is in order", "green"))


def _who_takes(app: App, policy: str) -> str:
    takers = policies_for(app)
    if not takers:
        return "no policy of this release can run this application"
    text = f"policy: {policy}; policies that can take this: {', '.join(takers)}"
    return text if policy in takers else f"{text}; choose one with --policy"


def _function(variant: Variant, loaded: AppConfig) -> dict[str, object]:
    profile = variant.profile
    is_known = variant.name not in loaded.unmeasured
    return {
        "function": variant.name,
        "exec_time": format_duration(profile.exec_ns[0]) if is_known else "not measured",
        "batch": profile.items_max,
        "cold_start": format_duration(profile.cold_start_ns),
        "swap_in": format_duration(profile.swap_in_ns),
        "memory": format_size(profile.memory_bytes),
        "pools": ", ".join(loaded.app.pools[pool_id].name for pool_id in variant.pool_ids),
    }


def _pipeline(pipeline: Pipeline) -> dict[str, object]:
    slo = pipeline.slo
    has_latency = slo.latency_ns != NEVER_NS
    return {
        "pipeline": pipeline.name,
        "stages": " ".join(stage.function.name for stage in pipeline.stages),
        "latency": format_duration(slo.latency_ns) if has_latency else "any",
        "quantile": f"{100 * slo.quantile:g} %" if has_latency else "",
    }


def _pool(pool: Pool) -> dict[str, object]:
    is_unlimited = pool.memory_bytes == NEVER_NS
    return {
        "pool": pool.name,
        "tier": TIER_NAMES[pool.tier],
        "nodes": pool.nodes if pool.faas is None else f"up to {pool.faas.concurrency_max}",
        "slots": pool.slots,
        "memory": "unlimited" if is_unlimited else format_size(pool.memory_bytes),
    }
