"""Shrinking of a world: the smallest application file in which a policy still loses.

Greedy: each step tries the simplifications of the world, the largest first, and takes the first
with which the policy still loses in the same way. The number of tries is bounded, so the result is
small, not minimal. A simplification never leaves the rules of a world: at least 1,000 requests with
objectives, and each objective at least twice the critical path.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from headgate.core.errors import ConfigError
from headgate.core.units import format_duration, parse_duration
from headgate.lab.regret.references import REFERENCE, REFERENCES
from headgate.lab.regret.scores import Judge
from headgate.lab.regret.search import RATIO_MIN, SHARE_MIN, Reason, WorldResult
from headgate.lab.regret.worlds import (
    REQUESTS_MIN,
    Spec,
    World,
    critical_path_ns,
    has_objective,
)
from headgate.policies import find_policy

TRIES_MAX: Final = 300
REQUESTS_MAX: Final = 12_000  # a simplification must not make the world slow to run
_RATE: Final = re.compile(r"([\d.]+)/s")
_DRAWN: Final = re.compile(r",(?:items|priority)=[\d+]+")
# Keys that can be left out, by section.
_POOL_KEYS: Final = ("host_memory", "network_delay", "slots", "compute", "cpu_price", "gpu_price")
_ELASTIC_KEYS: Final = ("elastic", "boot_time", "idle_timeout")
_CASCADE_KEYS: Final = ("only_if_unsure", "unsure_probability")
_BUILD_KEYS: Final = ("slowdown", "swap_in", "cold_start", "concurrency", "shapes")


def shrink(
    world: World,
    loses: Callable[[World], bool],
    *,
    tries_max: int = TRIES_MAX,
    on_try: Callable[[int], None] | None = None,
) -> World:
    """Return a world as small as can be found in which `loses` still holds.

    `loses` is called with valid worlds only. The result is the world itself if nothing helps.
    """
    tries = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for spec in simplifications(world.spec):
            candidate = World(spec, world.seed)
            if not is_valid(candidate):
                continue
            if tries == tries_max:
                return world
            tries += 1
            if on_try is not None:
                on_try(tries)
            if loses(candidate):
                world, is_smaller = candidate, True
                break
    return world


def is_valid(world: World) -> bool:
    """Whether a world can be loaded and keeps the rules of worlds."""
    try:
        loaded = world.load()
    except ConfigError:
        return False
    app, arrivals = loaded.app, loaded.arrivals
    by_name = {pipeline.name: pipeline for pipeline in app.pipelines}
    scored = 0
    for index, name in enumerate(arrivals.pipelines):
        if has_objective(by_name[name]):
            scored += int((arrivals.pipeline == index).sum())
    items = int(arrivals.sizes.max()) if len(arrivals) else 1
    return REQUESTS_MIN <= scored <= len(arrivals) <= REQUESTS_MAX and all(
        p.slo.latency_ns >= 2 * critical_path_ns(app, p, items)
        for p in app.pipelines
        if has_objective(p)
    )


def loss_of(result: WorldResult, policy: str) -> tuple[Reason, Callable[[World], bool]]:
    """Return how a world is lost, and the test that finds the same loss in a smaller one.

    Against the rival that was best in the whole world only, because all would take too long.
    """
    reason = result.losses[0]
    best = result.best_rival
    kind = find_policy(policy)

    def loses(world: World) -> bool:
        judge = Judge(world.load())
        own = judge.run(kind)
        if reason == "share":
            return own.share < SHARE_MIN
        if reason == "kept":
            return not own.keeps
        if reason == "best effort":
            return not own.serves_best_effort
        assert best is not None, "a ratio below 1 has a rival"
        config = REFERENCES.get(best)
        rival = judge.run(find_policy(best) if config is None else REFERENCE, config)
        goodput = own.goodput if own.counts else 0.0
        return rival.counts and rival.goodput > 0 and goodput < RATIO_MIN * rival.goodput

    return reason, loses


def simplifications(spec: Spec) -> Iterator[Spec]:
    """Yield simpler worlds, those that simplify most first. The world itself is not changed."""
    for change in _changes(spec):
        simpler = copy.deepcopy(spec)
        change(simpler)
        _drop_unused(simpler)
        if simpler != spec:
            yield simpler


Change = Callable[[Spec], None]
Keys = tuple[str | int, ...]  # the path of a section in a world


def _changes(spec: Spec) -> Iterator[Change]:
    if "simulation" in spec:
        yield partial(_drop, path=("simulation",))
    for name in spec["pipelines"]:
        yield partial(_drop_pipeline, name=name)
    for name in list(spec["clients"])[1:]:
        yield partial(_drop_client, name=name)
    for index in range(len(spec["workload"]["arrivals"])):
        yield partial(_drop, path=("workload", "arrivals", index))
    yield from _stage_changes(spec)
    yield from _build_changes(spec)
    yield from _pool_changes(spec)
    yield from _workload_changes(spec)


def _stage_changes(spec: Spec) -> Iterator[Change]:
    for name, pipeline in spec["pipelines"].items():
        at: Keys = ("pipelines", name)
        for stage, body in pipeline["stages"].items():
            if len(pipeline["stages"]) > 1:
                yield partial(_drop_stage, pipeline=name, stage=stage)
            if "only_if_unsure" in body:
                yield partial(_drop_keys, path=(*at, "stages", stage), keys=_CASCADE_KEYS)
        for key in ("hard_deadline", "quantile"):
            if key in pipeline.get("slo", {}):
                yield partial(_drop, path=(*at, "slo", key))


def _build_changes(spec: Spec) -> Iterator[Change]:
    for name, function in spec["functions"].items():
        builds = function["variants"]
        if len(builds) > 1:
            for build in builds:
                yield partial(_drop, path=("functions", name, "variants", build))
        if any(len(body["exec_time"]) > 1 for body in builds.values()):
            yield partial(_drop_batches, function=name)
        for build, body in builds.items():
            for index in range(len(body.get("shapes", ()))):
                yield partial(_drop_shape, function=name, build=build, index=index)
        if "prewarm_nodes" in function:
            yield partial(_drop, path=("functions", name, "prewarm_nodes"))
        for key in _BUILD_KEYS:
            if any(key in body for body in builds.values()):
                yield partial(_drop_of_builds, function=name, key=key)


def _pool_changes(spec: Spec) -> Iterator[Change]:
    if any("memory" in body for f in spec["functions"].values() for body in f["variants"].values()):
        yield _drop_memory
    for name, pool in spec["pools"].items():
        if pool.get("elastic"):
            yield partial(_drop_keys, path=("pools", name), keys=_ELASTIC_KEYS)
        for key in _POOL_KEYS:
            if key in pool:
                yield partial(_drop, path=("pools", name, key))
        nodes = pool.get("nodes", 1)
        for fewer in sorted({1, nodes // 2} - {0, nodes}):
            yield partial(_set, path=("pools", name, "nodes"), value=fewer)
    if any(pool.get("nodes", 1) > 1 for pool in spec["pools"].values()):
        yield _halve_scale


def _workload_changes(spec: Spec) -> Iterator[Change]:
    yield _halve_duration
    for name, client in spec["clients"].items():
        if client:
            yield partial(_set, path=("clients", name), value={})
    for index, arrivals in enumerate(spec["workload"]["arrivals"]):
        process: str = arrivals["process"]
        at: Keys = ("workload", "arrivals", index, "process")
        drawn: list[str] = _DRAWN.findall(process)
        for each in drawn:
            yield partial(_set, path=at, value=process.replace(each, ""))
        if not process.startswith("poisson"):
            plain = _poisson(_DRAWN.sub("", process))
            yield partial(_set, path=at, value=plain + "".join(drawn))


def _section(spec: Spec, path: Keys) -> Any:
    section: Any = spec
    for key in path:
        section = section[key]
    return section


def _drop(spec: Spec, path: Keys) -> None:
    del _section(spec, path[:-1])[path[-1]]


def _drop_keys(spec: Spec, path: Keys, keys: tuple[str, ...]) -> None:
    section = _section(spec, path)
    for key in keys:
        section.pop(key, None)


def _set(spec: Spec, path: Keys, value: object) -> None:
    _section(spec, path[:-1])[path[-1]] = value


def _drop_pipeline(spec: Spec, name: str) -> None:
    del spec["pipelines"][name]
    streams = spec["workload"]["arrivals"]
    spec["workload"]["arrivals"] = [each for each in streams if each["pipeline"] != name]


def _drop_client(spec: Spec, name: str) -> None:
    """Drop a client; its requests come from the first one instead."""
    del spec["clients"][name]
    first = next(iter(spec["clients"]))
    for each in spec["workload"]["arrivals"]:
        if each["client"] == name:
            each["client"] = first


def _drop_stage(spec: Spec, pipeline: str, stage: str) -> None:
    """Drop a stage; the stages after it wait for those before it."""
    stages = spec["pipelines"][pipeline]["stages"]
    before = stages.pop(stage).get("after", [])
    for body in stages.values():
        after = body.get("after", [])
        if stage in after:
            kept = [each for each in after if each != stage]
            body["after"] = kept + [each for each in before if each not in kept]
            if not body["after"]:
                for key in ("after", *_CASCADE_KEYS):
                    body.pop(key, None)


def _drop_of_builds(spec: Spec, function: str, key: str) -> None:
    for body in spec["functions"][function]["variants"].values():
        body.pop(key, None)


def _drop_batches(spec: Spec, function: str) -> None:
    for body in spec["functions"][function]["variants"].values():
        for shape in (body, *body.get("shapes", ())):
            shape["exec_time"] = {"1": shape["exec_time"]["1"]}


def _drop_shape(spec: Spec, function: str, build: str, index: int) -> None:
    body = spec["functions"][function]["variants"][build]
    body["shapes"] = body["shapes"][:index] + body["shapes"][index + 1 :]
    if not body["shapes"]:
        del body["shapes"]


def _drop_memory(spec: Spec) -> None:
    for function in spec["functions"]:
        for key in ("memory", "swap_in"):
            _drop_of_builds(spec, function, key)
    for name, pool in spec["pools"].items():
        if pool.get("tier") != "serverless":
            _drop_keys(spec, ("pools", name), ("memory", "host_memory"))


def _halve_scale(spec: Spec) -> None:
    """Halve all nodes and all rates: the same load on a smaller fleet."""
    for pool in spec["pools"].values():
        if pool.get("nodes", 1) > 1:
            pool["nodes"] //= 2
    for each in spec["workload"]["arrivals"]:
        each["process"] = _RATE.sub(_half, each["process"])


def _half(match: re.Match[str]) -> str:
    return f"{float(match[1]) / 2:f}".rstrip("0").rstrip(".") + "/s"


def _halve_duration(spec: Spec) -> None:
    length_ns = parse_duration(spec["workload"]["duration"])
    spec["workload"]["duration"] = format_duration(length_ns // 2)


def _poisson(process: str) -> str:
    """A Poisson process with the mean of the rates of a bursty one.

    For a `mmpp` that is not the mean rate, because its states last differently: still simpler.
    """
    rates = [float(rate) for rate in _RATE.findall(process)]
    mean = f"{sum(rates) / len(rates):f}".rstrip("0").rstrip(".")
    return f"poisson:rate={mean}/s"


def _drop_unused(spec: Spec) -> None:
    """Drop the pipelines, clients, functions and pools that nothing needs any more."""
    streams: list[dict[str, Any]] = spec["workload"]["arrivals"]
    wanted = {each["pipeline"] for each in streams}
    _keep(spec["pipelines"], wanted)
    _keep(spec["clients"], {each["client"] for each in streams})
    stages = [stage for p in spec["pipelines"].values() for stage in p["stages"].values()]
    _keep(spec["functions"], {stage["function"] for stage in stages})
    builds = [body for f in spec["functions"].values() for body in f["variants"].values()]
    _keep(spec["pools"], {pool for body in builds for pool in body["pools"]})
    scale = spec.get("simulation", {}).get("service_times", {}).get("scale")
    if scale:
        _keep(scale, set(spec["functions"]))


def _keep(section: Spec, names: set[str]) -> None:
    for name in list(section):
        if name not in names:
            del section[name]
