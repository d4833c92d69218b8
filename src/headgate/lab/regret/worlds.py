"""Random worlds of the regret search.

A *world* is an application file, as plain data, and the seed of its arrivals. So any world can be
written as a file that `headgate simulate FILE --seed N` runs, and one that was found can become a
test. `draw_world` draws the world of a seed.

A world is drawn in five steps: pools, functions with a build for some of them, pipelines, the
objectives as multiples of each critical path, and the load as a multiple of the fluid capacity.
Then the window is set. It must be long compared with the objectives, or the requests that are open
at its end would count; and it must not hold too many requests, or a search would take for ever. So
objectives are cut to the window, down to a multiple of the critical path that is drawn for the
world (2 to 16), and where even that is too long, the world is drawn again with half the nodes, or
with half the batch.

Worlds of the kind `shapes` are drawn from random streams of their own: their nodes have CPUs and
often a GPU, and most builds run in several shapes, the faster the more they hold of a node. Twice
the CPUs, or twice the share of the GPU, are less than twice as fast.

Worlds of the kind `single` are what textbooks have: one function in batches, one pool, one class of
requests. Their objectives are multiples of the time of a full batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random
from typing import Any, Final, Literal, final, get_args

from headgate.config import AppConfig, from_spec
from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.model import App, Pipeline
from headgate.core.rng import stream
from headgate.core.units import format_duration, format_size, parse_duration, parse_size
from headgate.lab.regret.fluid import Demand, FluidModel, shapes_on
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.workload import Arrivals, mix, named, parse_arrivals

Truth = Literal["exact", "scattered", "wrong"]
TRUTHS: Final[tuple[str, ...]] = get_args(Truth)
WorldKind = Literal["plain", "shapes", "single"]
WORLD_KINDS: Final[tuple[str, ...]] = get_args(WorldKind)
Spec = dict[str, Any]

REQUESTS_MIN: Final = 1_000  # with an objective; a world with fewer says too little
_REQUESTS_MAX: Final = 6_000
_OBJECTIVES_PER_WINDOW: Final = 30
_LOAD: Final = (0.3, 5.0)
_SINGLE_REQUESTS: Final = 5_000
_SINGLE_LOAD: Final = (0.5, 3.0)
_SINGLE_FACTOR: Final = (1.5, 10.0)  # of an objective, in full batches
_SINGLE_WINDOW: Final = 20  # objectives, at least
_SINGLE_BATCHES_MAX: Final = 400  # in the window, at the capacity of all nodes
_SCATTER_CV: Final = 0.1
_PROFILE_ERROR: Final = 0.3
_MEGABYTE: Final = 1_000_000
_COMPUTE: Final = ("per_batch", "per_instance", "resident")
_SHAPE_CPUS: Final = (1, 2, 4, 8, 16)
_SHAPE_SEVENTHS: Final = (1, 2, 3, 4, 7)  # the shares of a GPU that can be had as MIG slices


@dataclass(frozen=True, slots=True)
class World:
    """An application file with a workload, and the seed of its arrivals and service times."""

    spec: Spec
    seed: int

    def load(self) -> LoadedWorld:
        """Load the file, and draw the arrivals as `headgate simulate` does."""
        config = from_spec(self.spec, f"world {self.seed}")
        return LoadedWorld(config, self.seed, _arrivals(config, self.seed))


@dataclass(frozen=True, slots=True)
class LoadedWorld:
    """A world with its application, its arrivals and its true service times."""

    config: AppConfig
    seed: int
    arrivals: Arrivals

    @property
    def app(self) -> App:
        """The core's records."""
        return self.config.app

    @property
    def window_ns(self) -> int:
        """End of the arrivals."""
        return self.arrivals.duration_ns

    @property
    def truth(self) -> GroundTruthConfig:
        """The true service times."""
        options = self.config.simulation
        scale = options.scale if any(factor != 1.0 for factor in options.scale) else ()
        return GroundTruthConfig(options.distribution, cv=options.cv, scale=scale)

    @property
    def load(self) -> float:
        """Offered work over the fluid capacity, over the whole window."""
        app, arrivals = self.app, self.arrivals
        sizes = arrivals.sizes
        by_name = {pipeline.name: pipeline for pipeline in app.pipelines}
        offered = [
            Demand(by_name[name], float(sizes[arrivals.pipeline == index].sum()))
            for index, name in enumerate(arrivals.pipelines)
        ]
        model = FluidModel(app, self.window_ns, self.truth.scale)
        return 1.0 / model.capacity([demand for demand in offered if demand.items])


def _arrivals(config: AppConfig, seed: int) -> Arrivals:
    """The arrivals of the file: the same random streams as those of `headgate simulate`."""
    parts: list[Arrivals] = []
    for index, each in enumerate(config.workload.streams):
        own_seed = stream(seed, f"arrivals/{index}").getrandbits(63)
        part = parse_arrivals(each.process, duration_ns=config.workload.duration_ns, seed=own_seed)
        assert isinstance(part, Arrivals)
        parts.append(named(part, each.pipeline.name, each.client.name))
    return mix(parts) if len(parts) > 1 else parts[0]


def draw_world(seed: int, truth: Truth = "scattered", kind: WorldKind = "plain") -> World:
    """Return the world of a seed and a kind. The truth changes nothing but the service times.

    >>> draw_world(7) == draw_world(7)
    True
    """
    if kind == "single":
        return World(with_truth(_single_spec(stream(seed, "single world")), truth, seed), seed)
    halvings = 0
    prefix = "" if kind == "plain" else f"{kind} "
    while True:
        world, priorities = stream(seed, f"{prefix}world"), stream(seed, f"{prefix}priorities")
        shapes = stream(seed, "shapes") if kind == "shapes" else None
        spec = _Drawing(world, priorities, halvings, shapes).spec()
        if spec is not None:
            break
        halvings += 1
    return World(with_truth(spec, truth, seed), seed)


def with_truth(spec: Spec, truth: Truth, seed: int) -> Spec:
    """Return the world with these service times: as profiled, scattered, or profiled wrongly."""
    times: dict[str, object] = {}
    if truth != "exact":
        times = {"distribution": "lognormal", "cv": _SCATTER_CV}
    if truth == "wrong":
        rng = stream(seed, "profile errors")
        bounds = (1.0 - _PROFILE_ERROR, 1.0 + _PROFILE_ERROR)
        times["scale"] = {name: round(rng.uniform(*bounds), 3) for name in spec["functions"]}
    return {**spec, "simulation": {"service_times": times}} if times else spec


@final
class _Drawing:
    """Draws one world. `halvings` is how often the world was too large for its window."""

    def __init__(
        self, rng: Random, priorities: Random, halvings: int, shapes: Random | None
    ) -> None:
        self._rng = rng
        self._shapes = shapes  # None: builds have one shape, and nodes no limit but their slots
        self._node_shift = halvings
        self._batch_shift = max(0, halvings - 5)  # 40 nodes are one after five halvings
        self._load_divisor = 2 ** max(0, halvings - 10)  # then a batch of 32 is one
        self._has_faas = rng.random() < 0.12
        self._has_elastic = rng.random() < 0.12
        is_slow = self._has_faas or self._has_elastic  # renting takes seconds
        self._base_ms = self._log(30, 1_000) if is_slow else self._log(1, 1_000)
        self._has_memory_pressure = rng.random() < 0.12
        self._has_cold_starts = self._has_memory_pressure or is_slow or rng.random() < 0.4
        self._has_items = rng.random() < 0.15
        self._has_priorities = priorities.random() < 0.15
        self._priorities = priorities
        self._least_factor = self._log(2, 16)  # to which objectives may be cut, in critical paths

    def spec(self) -> Spec | None:
        """Draw the whole world; None if its window would be too short."""
        pools = self._pools()
        functions = self._functions(pools)
        if self._shapes is not None:
            _add_compute(self._shapes, pools, functions)
        pipelines = self._pipelines(list(functions))
        used = {
            stage["function"] for body in pipelines.values() for stage in body["stages"].values()
        }
        functions = {name: body for name, body in functions.items() if name in used}
        clients = self._clients()
        spec: Spec = {
            "functions": functions,
            "pools": _used_pools(pools, functions),
            "pipelines": pipelines,
            "clients": clients,
        }
        if self._has_memory_pressure:
            self._limit_memory(spec)
        items = self._items(functions)
        app = from_spec(spec, "a drawn world").app
        streams = self._streams(list(pipelines), list(clients))
        mean_items = sum(items) / len(items)
        demands = [
            Demand(app.pipelines[int(name[1:])], share * mean_items)
            for (_, name), share in streams.items()
        ]
        capacity_per_s = FluidModel(app, SECOND_NS).capacity(demands)
        rate_per_s = self._log(*_LOAD) * capacity_per_s / self._load_divisor
        shares = {name: sum(s for (_, p), s in streams.items() if p == name) for name in pipelines}
        objectives = self._objectives(app, shares, max(items))
        scored = sum(shares[name] for name, latency in objectives.items() if latency is not None)
        window_s = self._window_s(app, objectives, rate_per_s * scored, max(items))
        if window_s is None:
            return None
        for name, latency_ns in objectives.items():
            if latency_ns is not None:
                pipelines[name]["slo"] = self._slo(latency_ns)
        arrivals = [
            {
                "pipeline": name,
                "client": client,
                "process": self._process(share * rate_per_s, window_s, items),
            }
            for (client, name), share in streams.items()
        ]
        spec["workload"] = {"duration": _duration(window_s * 1e9), "arrivals": arrivals}
        return spec

    def _log(self, low: float, high: float) -> float:
        """Draw from the log-uniform distribution."""
        return _log_uniform(self._rng, low, high)

    def _pools(self) -> Spec:
        rng = self._rng
        pools: Spec = {}
        for index in range(rng.choice((1, 1, 1, 2, 2, 3))):
            nodes = max(1, int(self._log(1, 41)) >> self._node_shift)
            pool: Spec = {"nodes": nodes, "price": f"${self._log(0.1, 4):.3g}/h"}
            if rng.random() < 0.25:
                pool["slots"] = rng.choice((2, 3, 4, 8))
            if rng.random() < 0.35:
                pool["network_delay"] = _duration(self._base_ms * self._log(0.01, 1) * 1e6)
            pools[f"pool{index}"] = pool
        if self._has_elastic:
            pool = pools[f"pool{len(pools) - 1}"]
            pool["elastic"] = True
            pool["boot_time"] = _duration(self._base_ms * self._log(1, 20) * 1e6)
            pool["idle_timeout"] = _duration(self._base_ms * self._log(30, 300) * 1e6)
        if self._has_faas:
            pools["faas"] = {
                "tier": "serverless",
                "memory": "1GiB",
                "concurrency": max(1, int(self._log(2, 20)) >> self._node_shift),
                "price": f"${self._log(1e-5, 2e-3):.3g}/GB-s",
                "request_price": "$0.20/1M",
                "network_delay": _duration(self._base_ms * self._log(0.01, 0.2) * 1e6),
            }
        return pools

    def _functions(self, pools: Spec) -> Spec:
        rng = self._rng
        speeds = {name: 1.0 if name == "pool0" else self._log(1, 100) for name in pools}
        if "faas" in speeds:
            speeds["faas"] = self._log(0.7, 3)
        return {
            f"f{index}": self._function(pools, speeds)
            for index in range(rng.choice((1, 1, 2, 2, 3, 4, 5, 6)))
        }

    def _function(self, pools: Spec, speeds: Mapping[str, float]) -> Spec:
        rng = self._rng
        own = rng.sample(sorted(pools), rng.randint(1, len(pools)))
        time_ms = self._base_ms * self._log(0.2, 5)
        batch_max = max(1, rng.choice((1, 1, 2, 4, 8, 16, 32)) >> self._batch_shift)
        fixed = rng.uniform(0.0, 0.95)  # share of a batch of one that does not grow with it
        cold_ms = time_ms * self._log(1, 30) if self._has_cold_starts else 0.0
        memory_mb = rng.randint(100, 4_000) if self._has_memory_pressure else 0
        variants: Spec = {}
        for name in sorted(own):
            single_ms = time_ms * speeds[name] * self._log(0.7, 1.5)
            variant: Spec = {
                "pools": [name],
                "exec_time": _batch_times(single_ms, fixed, batch_max),
            }
            slots = pools[name].get("slots", 1)
            if slots > 1:
                variant["concurrency"] = slots
                growth = rng.choice((0.0, 0.2, 0.5, 0.9))
                if growth:
                    variant["slowdown"] = [round(1 + growth * c, 3) for c in range(slots)]
            if cold_ms:
                variant["cold_start"] = _duration(cold_ms * 1e6)
            if memory_mb:
                variant["memory"] = format_size(memory_mb * _MEGABYTE)
                variant["swap_in"] = _duration(cold_ms * 1e6 * rng.uniform(0.05, 0.5))
            variants[name] = variant
        prewarm = {"prewarm_nodes": 1_000} if cold_ms and rng.random() < 0.85 else {}
        return {**prewarm, "variants": variants}

    def _limit_memory(self, spec: Spec) -> None:
        """Give the nodes of a pool memory for the largest function, but not for all."""
        rng = self._rng
        for name, pool in spec["pools"].items():
            sizes = [
                parse_size(body["variants"][name]["memory"]) // _MEGABYTE
                for body in spec["functions"].values()
                if name in body["variants"]
            ]
            if pool.get("tier") == "serverless":
                pool["memory"] = "10GB"
            else:
                pool["memory"] = format_size(rng.randint(max(sizes), sum(sizes)) * _MEGABYTE)
                if rng.random() < 0.5:
                    pool["host_memory"] = format_size(sum(sizes) * _MEGABYTE)

    def _pipelines(self, functions: Sequence[str]) -> Spec:
        rng = self._rng
        return {
            f"p{index}": {"stages": self._stages(functions)}
            for index in range(rng.choice((1, 1, 2, 2, 3, 4)))
        }

    def _stages(self, functions: Sequence[str]) -> Spec:
        rng = self._rng
        shape = rng.choices(
            ("single", "chain", "fork", "diamond", "general", "cascade"), (40, 22, 10, 12, 12, 4)
        )[0]
        after: list[list[int]] = [[]]
        if shape in ("chain", "cascade"):
            length = 2 if shape == "cascade" else rng.randint(2, 4)
            after += [[index] for index in range(length - 1)]
        elif shape == "fork":
            after += [[0] for _ in range(rng.randint(2, 4))]
        elif shape == "diamond":
            width = rng.randint(2, 4)
            after += [[0] for _ in range(width)] + [list(range(1, width + 1))]
        elif shape == "general":
            for index in range(1, rng.randint(3, 6)):
                before = rng.sample(range(index), rng.randint(0, min(2, index)))
                after.append(sorted(before))
        stages: Spec = {}
        for index, before in enumerate(after):
            stages[f"s{index}"] = {"function": rng.choice(functions)}
            if before:
                stages[f"s{index}"]["after"] = [f"s{each}" for each in before]
        if shape == "cascade":
            stages["s1"] |= {
                "only_if_unsure": True,
                "unsure_probability": f"{rng.randint(10, 60)}%",
            }
        return stages

    def _clients(self) -> Spec:
        rng = self._rng
        count = rng.choice((1, 1, 1, 2, 2, 3))
        return {f"c{index}": {"weight": rng.choice((1, 1, 2, 4))} for index in range(count)}

    def _items(self, functions: Spec) -> list[int]:
        """The sizes of requests: at most the smallest of the largest batches."""
        largest = min(
            max(int(size) for size in variant["exec_time"])
            for body in functions.values()
            for variant in body["variants"].values()
        )
        if not self._has_items or largest == 1:
            return [1]
        return sorted({1, self._rng.randint(1, largest), self._rng.randint(1, largest)})

    def _streams(self, pipelines: list[str], clients: list[str]) -> dict[tuple[str, str], float]:
        """The share of each class in the requests. Every pipeline and every client has some."""
        rng = self._rng
        pairs = [(client, name) for client in clients for name in pipelines]
        kept = [pair for pair in pairs if rng.random() < 0.7]
        for index, name in enumerate(pipelines):
            if all(pair[1] != name for pair in kept):
                kept.append((clients[index % len(clients)], name))
        weights = {pair: self._log(1, 10) for pair in kept}
        total = sum(weights.values())
        return {pair: weight / total for pair, weight in weights.items()}

    def _objectives(
        self, app: App, shares: Mapping[str, float], items: int
    ) -> dict[str, float | None]:
        """By pipeline: its objective in ns; None for best effort, at most 60 % of the requests."""
        objectives: dict[str, float | None] = {}
        best_effort = 0.0
        for pipeline in app.pipelines:
            is_best_effort = self._rng.random() < 0.12
            if is_best_effort and best_effort + shares[pipeline.name] > 0.6:
                is_best_effort = False
            best_effort += shares[pipeline.name] * is_best_effort
            factor = self._log(2.0, 400.0)
            path_ns = critical_path_ns(app, pipeline, items)
            objectives[pipeline.name] = None if is_best_effort else factor * path_ns
        return objectives

    def _window_s(
        self,
        app: App,
        objectives: dict[str, float | None],
        rate_per_s: float,
        items: int,
    ) -> float | None:
        """The length of the window; cuts objectives to it. None if that cannot be."""
        given = [latency_ns for latency_ns in objectives.values() if latency_ns is not None]
        wanted_s = max(
            _OBJECTIVES_PER_WINDOW * max(given) / 1e9,
            self._rng.uniform(1_500, 4_000) / rate_per_s,
        )
        window_s = min(wanted_s, _REQUESTS_MAX / rate_per_s)
        longest_ns = window_s * 1e9 / _OBJECTIVES_PER_WINDOW
        for pipeline in app.pipelines:
            latency_ns = objectives[pipeline.name]
            if latency_ns is None:
                continue
            least_ns = self._least_factor * critical_path_ns(app, pipeline, items)
            if min(latency_ns, least_ns) > longest_ns:
                return None
            objectives[pipeline.name] = min(latency_ns, longest_ns)
        return window_s

    def _slo(self, latency_ns: float) -> Spec:
        rng = self._rng
        slo: Spec = {"latency": _duration(latency_ns, is_up=True)}
        slo["quantile"] = rng.choice(("99%", "99%", "99%", "99%", "95%", "90%"))
        if rng.random() < 0.15:
            slo["hard_deadline"] = True
        return slo

    def _process(self, rate_per_s: float, window_s: float, items: list[int]) -> str:
        rng = self._rng
        kind = rng.choices(("poisson", "gamma", "mmpp", "stepped"), (80, 8, 6, 6))[0]
        if kind == "gamma":
            text = f"gamma:rate={_rate(rate_per_s)},cv={rng.choice((2, 3, 4))}"
        elif kind == "mmpp":
            # A fifth of the time at `high` times the mean rate, the rest at what is left.
            high = rng.uniform(2.0, 4.0)
            rates = f"{_rate(rate_per_s * (1 - 0.2 * high) / 0.8)}+{_rate(rate_per_s * high)}"
            stay_ns = window_s * 1e9 / self._log(5, 50)
            text = f"mmpp:rates={rates},stay={_duration(0.8 * stay_ns)}+{_duration(0.2 * stay_ns)}"
        elif kind == "stepped":
            steps = rng.randint(2, 6)
            parts = [self._log(1, 6) for _ in range(steps)]
            mean = sum(parts) / steps
            rates = "+".join(_rate(rate_per_s * part / mean) for part in parts)
            text = f"stepped:rates={rates},every={_duration(window_s * 1e9 / steps)}"
        else:
            text = f"poisson:rate={_rate(rate_per_s)}"
        if items != [1]:
            text += f",items={'+'.join(map(str, items))}"
        if self._has_priorities:
            claimed = self._priorities.sample(range(8), self._priorities.randint(1, 2))
            text += f",priority={'+'.join(map(str, claimed))}"
        return text


def _single_spec(rng: Random) -> Spec:
    """Draw a world of one function on one pool."""
    batch_max = rng.choice((1, 2, 4, 8, 16, 32))
    times = _batch_times(_log_uniform(rng, 1, 1_000), rng.uniform(0.0, 0.95), batch_max)
    busy_ns = parse_duration(times[str(batch_max)])
    pool: Spec = {"nodes": rng.choice((1, 1, 2, 4, 8, 16))}
    if rng.random() < 0.35:
        delay_ns = busy_ns * _log_uniform(rng, 0.01, 0.5)
        pool["network_delay"] = _duration(delay_ns)
        busy_ns += 2 * round(delay_ns)
    latency_ns = _log_uniform(rng, *_SINGLE_FACTOR) * busy_ns
    load = _log_uniform(rng, *_SINGLE_LOAD)
    most = _SINGLE_BATCHES_MAX // (_SINGLE_WINDOW * latency_ns / busy_ns)
    pool["nodes"] = max(1, min(pool["nodes"], int(most)))
    rate_per_s = load * pool["nodes"] * batch_max / (busy_ns / SECOND_NS)
    kind = f"gamma:rate={_rate(rate_per_s)},cv=2" if rng.random() < 0.25 else None
    window_s = max(_SINGLE_REQUESTS / rate_per_s, _SINGLE_WINDOW * latency_ns / SECOND_NS)
    stage = {"stages": {"s0": {"function": "f0"}}}
    slo = {"latency": _duration(latency_ns, is_up=True), "quantile": "99%"}
    process = kind or f"poisson:rate={_rate(rate_per_s)}"
    return {
        "functions": {"f0": {"exec_time": times}},
        "pools": {"pool0": pool},
        "pipelines": {"p0": {**stage, "slo": slo}},
        "clients": {"c0": {"weight": 1}},
        "workload": {
            "duration": _duration(window_s * 1e9),
            "arrivals": [{"pipeline": "p0", "client": "c0", "process": process}],
        },
    }


def _log_uniform(rng: Random, low: float, high: float) -> float:
    return exp(rng.uniform(log(low), log(high)))


def _add_compute(rng: Random, pools: Spec, functions: Spec) -> None:
    """Give nodes CPUs and GPUs, and builds shapes, in place of slots with a slowdown."""
    for name, pool in pools.items():
        if pool.get("tier") == "serverless":
            continue
        pool["slots"] = rng.choice((2, 4, 8, 8, 16, 16))
        pool["cpus"] = rng.choice((4, 8, 16, 32))
        has_gpu = rng.random() < 0.75
        if has_gpu:
            pool["gpu_share"] = "7/7"
        pool["compute"] = rng.choices(_COMPUTE, (70, 15, 15))[0]
        if rng.random() < 0.5:
            pool["cpu_price"] = f"${rng.uniform(0.01, 0.1):.3g}/h"
            if has_gpu:
                pool["gpu_price"] = f"${rng.uniform(0.5, 4):.3g}/h"
        for body in functions.values():
            if name in body["variants"]:
                _add_shapes(rng, pool, body["variants"][name])


def _add_shapes(rng: Random, pool: Spec, variant: Spec) -> None:
    """Give a build one to eight shapes. The first one drawn is its own, of any size."""
    variant.pop("slowdown", None)
    variant["concurrency"] = 1 if rng.random() < 0.4 else pool["slots"]
    sevenths = _SHAPE_SEVENTHS if "gpu_share" in pool else (0,)
    grid = [(cpus, part) for cpus in _SHAPE_CPUS if cpus <= pool["cpus"] for part in sevenths]
    count = 1 if rng.random() < 0.1 else rng.randint(2, min(8, len(grid)))
    by_cpus = 1.0 if sevenths == (0,) else rng.uniform(0.0, 0.6)  # of the time, on one CPU
    cpu_power, gpu_power = rng.uniform(0.1, 0.95), rng.uniform(0.1, 0.95)
    times_ns = {size: parse_duration(time) for size, time in variant["exec_time"].items()}
    shapes: list[Spec] = []
    for cpus, part in rng.sample(grid, count):
        on_cpus = by_cpus * cpus**-cpu_power
        on_gpu = (1.0 - by_cpus) * (part / 7) ** -gpu_power if part else 0.0
        shape: Spec = {"cpus": cpus}
        if part:
            shape["gpu_share"] = f"{part}/7"
        # CPUs treat the items of a batch one by one; what a batch saves, it saves on the GPU.
        per_item = times_ns["1"] if part else 0.0
        shape["exec_time"] = {
            size: _duration(on_gpu * time_ns + on_cpus * (int(size) * per_item or time_ns))
            for size, time_ns in times_ns.items()
        }
        shapes.append(shape)
    variant |= shapes[0]
    if shapes[1:]:
        variant["shapes"] = shapes[1:]


def critical_path_ns(app: App, pipeline: Pipeline, items: int = 1) -> float:
    """The longest path with each stage alone on its fastest build and shape, network included."""
    times = [
        min(
            v.exec_ns(min(items, v.items_max(shape_id)), shape_id)
            + 2 * app.pools[pool_id].network_ns
            for v in stage.function.variants
            for pool_id in v.pool_ids
            for shape_id in shapes_on(v, app.pools[pool_id])
        )
        for stage in pipeline.stages
    ]
    return max(pipeline.longest_to(times))


def _used_pools(pools: Spec, functions: Spec) -> Spec:
    used = {name for body in functions.values() for name in body["variants"]}
    return {name: body for name, body in pools.items() if name in used}


def _batch_times(single_ms: float, fixed: float, batch_max: int) -> Spec:
    """Times of batches of 1 and of the largest; those between lie on the line."""
    times: Spec = {"1": _duration(single_ms * 1e6)}
    if batch_max > 1:
        times[str(batch_max)] = _duration(single_ms * (fixed + (1 - fixed) * batch_max) * 1e6)
    return times


def _duration(time_ns: float, *, is_up: bool = False) -> str:
    """A duration with four digits, for people; at least a microsecond."""
    digits = 10 ** max(0, len(str(int(time_ns))) - 4)
    rounded = -(-int(time_ns) // digits) if is_up else round(time_ns / digits)
    return format_duration(max(1_000, rounded * digits))


def _rate(rate_per_s: float) -> str:
    rounded = float(f"{rate_per_s:.5g}")
    return f"{rounded:f}".rstrip("0").rstrip(".") + "/s"  # no exponent: `+` separates rates


def has_objective(pipeline: Pipeline) -> bool:
    """Whether requests of a pipeline are scored."""
    return pipeline.slo.latency_ns != NEVER_NS
