"""A live image pipeline on two workers: batches and cores from the frontier, beside other ways.

Three stages with ONNX models are served in three ways that differ in the batch sizes and cores of
their stages alone: those that the frontier plans, equal cores with batches of one, and the optimum
of each stage by itself. All get the same requests, Poisson and bursty, at a share of what the
workers can do one request at a time by their profiles. Each event log is calibrated and simulated,
so that the prediction of the simulator stands beside the measurement. The ways take turns in
several rounds, because machines are noisy, and means over the rounds count.

Core time is that of the worker processes, as the kernel counts it. Beside it stands the core time
of the gateway and the sender: on a machine with few cores they take it from the workers. Of that
the simulator knows what calibration finds: what an arrival, or a refusal, takes from batches.
Requests that are rejected count as missed.

The stages: `resize` turns bytes into numbers and halves the size, `features` convolves, and
`classify` is wide: it reads about 75 MB of weights per batch, whatever its size, so batches pay
there and nowhere else. The weights are random, which costs as much as if they were fitted. Profiles
are measured here, one process, the cores pinned, with the loop that workers measure with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headgate.config import from_spec
from headgate.config.build import interpolated
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.model import App
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.measure import MeasureRequest, example_call
from headgate.functions.measure import measure as measure_calls
from headgate.functions.model import OnnxModel
from headgate.lab.bench._server_under_test import serving, simulate_log
from headgate.lab.bench.live.server_process import Running, descendants
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.loadgen.loops import run_open_loop
from headgate.loadgen.requests import LoadOptions
from headgate.loadgen.results import LoadResult, summarise_load
from headgate.planning.frontier.candidates import pipeline_frontier, stage_candidates
from headgate.planning.frontier.configs import StageConfig
from headgate.workload import Arrivals, gamma, poisson

NAME = "pipeline"
TITLE = "a live image pipeline on two workers, with batches and cores from the frontier"

_SOURCE: Final = "docs/benchmarks.md"
_SLO_FACTOR: Final = 4.0  # objective, as a multiple of the fastest path
_PLAN_SHARE: Final = 0.5  # of the objective for the plan; the rest is for queueing
_P50_ERROR_MAX: Final = 0.10
_HIT_ERROR_MAX: Final = 0.02
_FIGURES: Final = ("requests", "p50_ms", "p99_ms", "slo_attainment")
_HIT_SLACK: Final = 0.02  # two runs of one way differ by as much

STAGES: Final = ("resize", "features", "classify")
PIPELINE: Final = "pictures"
NODES: Final = 2
BATCHES: Final = (1, 2, 4, 8, 16, 32)
FRONTIER, FIXED, OWN = "frontier", "equal cores, batch 1", "each stage's optimum"

_SIZE: Final = 256
_PIXELS: Final = _SIZE // 2
_FILTERS: Final = ((32, 1), (64, 2), (128, 2))  # (filters, stride) per layer
_WIDTHS: Final = (128, 3072, 3072, 3072, 10)
_USD_PER_CORE_HOUR: Final = 0.04

Profiles = Mapping[str, Mapping[int, tuple[int, ...]]]  # by stage and cores: ns by batch size


@dataclass(frozen=True, slots=True)
class StageSettings:
    """The largest batch of a stage, and its cores."""

    batch: int
    cores: int


Way = Mapping[str, StageSettings]  # by stage


def cores_per_worker() -> int:
    """Return the cores of each of two workers, with two left for the gateway and the clients
    where there are more than three.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, (cores if cores < 4 else cores - 2) // NODES)


def core_counts(cores: int) -> list[int]:
    """Return the core counts that a stage may have: powers of two, and all.

    >>> core_counts(7)
    [1, 2, 4, 7]
    """
    return sorted({*(1 << power for power in range(cores.bit_length())), cores} - {0})


def measure_profiles(folder: Path, counts: Sequence[int], seconds: float) -> Profiles:
    """Measure all stages, each batch size for this long."""
    return {
        stage: {count: _measure(folder / f"{stage}.onnx", count, seconds) for count in counts}
        for stage in STAGES
    }


def fastest_ns(profiles: Profiles) -> int:
    """Return the time of a single request on idle workers, each stage at its fastest."""
    return sum(min(times[0] for times in by_cores.values()) for by_cores in profiles.values())


def choose_ways(profiles: Profiles, cores: int, slo_ns: int, plan_ns: int) -> dict[str, Way]:
    """Return the ways to compare, by name.

    The frontier plans a request within `plan_ns`, which leaves the rest of the objective for
    queueing. The optimum of a stage by itself is its cheapest configuration within the objective.
    """
    app = from_spec(_spec(profiles, cores, slo_ns), "the image pipeline").app
    plan = pipeline_frontier(app, app.pipelines[0]).plan(plan_ns)
    own = [_own_optimum(app, index, slo_ns) for index in range(len(STAGES))]
    return {
        FRONTIER: dict(zip(STAGES, map(_choice, plan.configs), strict=True)),
        FIXED: dict.fromkeys(STAGES, StageSettings(1, cores)),
        OWN: dict(zip(STAGES, map(_choice, own), strict=True)),
    }


def core_ns(profiles: Profiles, way: Way) -> float:
    """Return the core time of a request in full batches, by its profiles."""
    return sum(
        choice.cores * profiles[stage][choice.cores][choice.batch - 1] / choice.batch
        for stage, choice in way.items()
    )


def served_app(profiles: Profiles, way: Way, cores: int, slo_ns: int) -> dict[str, object]:
    """Return the application that serves the pipeline in one of the ways."""
    functions = {
        stage: {
            "model": f"{stage}.onnx",
            "cpus": choice.cores,  # and so its threads
            "exec_time": [f"{t}ns" for t in profiles[stage][choice.cores][: choice.batch]],
        }
        for stage, choice in way.items()
    }
    return {**_pipeline(cores, slo_ns), "functions": functions, "serve": {"port": 0}}


def write_models(folder: Path) -> None:
    """Write the ONNX files, with fixed seeds."""
    import onnx  # noqa: PLC0415  # optional dependency

    for stage, model in (("resize", _resize()), ("features", _features()), ("classify", _wide())):
        onnx.save(model, folder / f"{stage}.onnx")


def _measure(path: Path, cores: int, seconds: float) -> tuple[int, ...]:
    """Return the times of all batch sizes, those in between interpolated."""
    with _pinned(cores):
        model = OnnxModel(path, threads=cores)
        model.load()
        runner = BatchRunner(path.stem, model, is_idempotent=True)
        example = runner.example()
        assert example is not None
        times_ns: dict[int, int] = {}
        for batch in BATCHES:
            call = example_call(runner, example, batch)
            call()
            p50_ms = measure_calls(call, MeasureRequest(1, batch, seconds, 20)).p50_ms
            times_ns[batch] = max([round(p50_ms * 1e6), *times_ns.values()])  # monotone
    return interpolated(times_ns)


@contextmanager
def _pinned(count: int) -> Iterator[None]:
    """Run on this many cores: the highest numbers, which workers get first."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[-count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _own_optimum(app: App, index: int, slo_ns: int) -> StageConfig:
    candidates = stage_candidates(app, app.pipelines[0].stages[index].function)
    in_time = [config for config in candidates if config.time_ns <= slo_ns]
    return min(in_time, key=lambda config: (config.cost, config.time_ns))


def _choice(config: StageConfig) -> StageSettings:
    return StageSettings(config.batch, config.cpu_milli // 1000)


def _spec(profiles: Profiles, cores: int, slo_ns: int) -> dict[str, object]:
    """Return the application with all configurations that a stage may have."""
    functions = {}
    for stage, by_cores in profiles.items():
        shapes = [
            {"cpus": count, "exec_time": [f"{t}ns" for t in times]}
            for count, times in by_cores.items()
        ]
        functions[stage] = {**shapes[0], "shapes": shapes[1:]}
    return {**_pipeline(cores, slo_ns), "functions": functions}


def _pipeline(cores: int, slo_ns: int) -> dict[str, object]:
    stages: dict[str, object] = {STAGES[0]: {"function": STAGES[0]}}
    for before, stage in pairwise(STAGES):
        stages[stage] = {"function": stage, "after": [before]}
    pool = {
        "tier": "dedicated",
        "nodes": NODES,
        "cpus": cores,
        "slots": cores,
        "price": f"${cores * _USD_PER_CORE_HOUR:g}/h",
    }
    slo = {"latency": f"{slo_ns / MILLISECOND_NS:g}ms", "quantile": 0.95}
    return {
        "pipelines": {PIPELINE: {"stages": stages, "slo": slo}},
        "pools": {"workers": pool},
    }


# `Any` below: onnx is optional, and has no types where it is missing.


def _resize() -> Any:
    from onnx import TensorProto, helper  # noqa: PLC0415

    nodes = [
        helper.make_node("Cast", ["image"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["numbers"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node(
            "AveragePool", ["planes"], ["halved"], kernel_shape=[2, 2], strides=[2, 2]
        ),
        helper.make_node("Div", ["halved", "scale"], ["pixels"]),
    ]
    weights = {"scale": np.array(255, np.float32)}
    given = helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", _SIZE, _SIZE, 3])
    return _model("resize", nodes, weights, given, ("pixels", 3, _PIXELS, _PIXELS))


def _features() -> Any:
    from onnx import TensorProto, helper  # noqa: PLC0415

    rng = np.random.default_rng(1)
    nodes, weights, last, channels = [], {}, "pixels", 3
    for layer, (filters, stride) in enumerate(_FILTERS):
        weights[f"w{layer}"] = _scaled(rng, (filters, channels, 3, 3), channels * 9)
        inputs, strides = [last, f"w{layer}"], [stride, stride]
        nodes.append(helper.make_node("Conv", inputs, [f"c{layer}"], pads=[1] * 4, strides=strides))
        last, channels = f"r{layer}", filters
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [last]))
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["mean"]))
    nodes.append(helper.make_node("Flatten", ["mean"], ["features"]))
    shape = (3, _PIXELS, _PIXELS)
    given = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", *shape])
    return _model("features", nodes, weights, given, ("features", channels))


def _wide() -> Any:
    from onnx import TensorProto, helper  # noqa: PLC0415

    rng = np.random.default_rng(2)
    nodes, weights, last = [], {}, "features"
    for layer, size in enumerate(pairwise(_WIDTHS)):
        weights[f"w{layer}"] = _scaled(rng, size, size[0])
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]))
        last = f"r{layer}"
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [last]))
    nodes.append(helper.make_node("Softmax", [last], ["probabilities"], axis=1))
    given = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", _WIDTHS[0]])
    return _model("classify", nodes, weights, given, ("probabilities", _WIDTHS[-1]))


def _scaled(rng: np.random.Generator, size: tuple[int, ...], inputs: int) -> NDArray[np.float32]:
    return rng.standard_normal(size, dtype=np.float32) * np.float32(np.sqrt(2 / inputs))


def _model(
    name: str,
    nodes: list[Any],
    weights: Mapping[str, NDArray[np.float32]],
    given: Any,
    output: tuple[str, *tuple[int, ...]],
) -> Any:
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    result = helper.make_tensor_value_info(output[0], TensorProto.FLOAT, ["n", *output[1:]])
    constants = [numpy_helper.from_array(weight, key) for key, weight in weights.items()]
    graph = helper.make_graph(nodes, name, [given], [result], constants)
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9)


@dataclass(frozen=True, slots=True)
class ImagePipelinePlan:
    """Loads, as shares of what the workers can do one request at a time, and durations.

    Profiles are of cores that nothing else uses, and here gateway and sender use them, too: with
    these loads all of them together use about half of two cores.
    """

    poisson_load: float = 0.3
    bursty_load: float = 0.2
    bursty_cv: float = 2.0
    rounds: int = 2
    seconds: float = 10.0
    profile_seconds: float = 0.5  # for each stage, core count and batch size


@dataclass(frozen=True, slots=True)
class CoreSeconds:
    """Core time by kind of process: of a whole run, or of a request."""

    workers: float
    gateway: float  # and its supervisor
    sender: float

    def since(self, before: CoreSeconds, requests: int) -> CoreSeconds:
        """Return what was used since then, by request."""
        return CoreSeconds(
            (self.workers - before.workers) / max(1, requests),
            (self.gateway - before.gateway) / max(1, requests),
            (self.sender - before.sender) / max(1, requests),
        )


@dataclass(frozen=True, slots=True)
class WayRun:
    """One way under one arrival process, live and simulated."""

    way: str
    arrivals: str
    round: int
    choices: Way
    rate_per_s: float
    slo_ms: float
    live: dict[str, float]
    simulated: dict[str, float]
    core_s: CoreSeconds


@dataclass(frozen=True, slots=True)
class WayMean:
    """The means of one way under one arrival process, over its rounds."""

    way: str
    arrivals: str
    hit_rate: float
    core_s: float
    p50_error: float
    hit_error: float


def run(*, progress: Progress) -> Result:
    """Measure. Takes about six minutes."""
    return report(measure(ImagePipelinePlan(), progress))


def measure(plan: ImagePipelinePlan, progress: Progress) -> list[WayRun]:
    """Measure the stages, plan, and serve the pipeline in every way under both processes."""
    cores = cores_per_worker()
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        progress("measuring the stages")
        write_models(folder)
        profiles = measure_profiles(folder, core_counts(cores), plan.profile_seconds)
        slo_ns = round(_SLO_FACTOR * fastest_ns(profiles) / MILLISECOND_NS) * MILLISECOND_NS
        slo_ns = max(slo_ns, MILLISECOND_NS)
        ways = choose_ways(profiles, cores, slo_ns, round(_PLAN_SHARE * slo_ns))
        capacity_rps = NODES * cores * SECOND_NS / core_ns(profiles, ways[FIXED])
        runs = []
        server = PipelineServer(folder, profiles, cores, slo_ns)
        for number in range(1, plan.rounds + 1):
            for kind, arrivals in _arrivals(plan, capacity_rps, number):
                for name, way in ways.items():
                    rate = f"{arrivals.mean_rate_per_s:.0f} requests/s"
                    progress(f"round {number} of {plan.rounds}: {name}, {kind} at {rate}")
                    live, simulated, core_s = server.run(way, arrivals)
                    rate_per_s, slo_ms = arrivals.mean_rate_per_s, slo_ns / MILLISECOND_NS
                    runs.append(
                        WayRun(name, kind, number, way, rate_per_s, slo_ms, live, simulated, core_s)
                    )
        return runs


def report(runs: list[WayRun]) -> Result:
    by_key: dict[tuple[str, str], list[WayRun]] = {}
    for run in runs:
        by_key.setdefault((run.way, run.arrivals), []).append(run)
    means = [_mean(rounds) for rounds in by_key.values()]
    checks = [*_way_checks(means), *(check for each in means for check in _fidelity_checks(each))]
    return Result(NAME, [_row(run) for run in runs], checks)


@dataclass(frozen=True, slots=True)
class PipelineServer:
    """Serves the pipeline in any way."""

    folder: Path  # with the models
    profiles: Profiles
    cores: int
    slo_ns: int

    def run(
        self, way: Way, arrivals: Arrivals
    ) -> tuple[dict[str, float], dict[str, float], CoreSeconds]:
        """Serve requests. Returns the figures, live and simulated, and the core time of one.

        The core time of workers is by response, the others' by request: rejections take it, too.
        """
        log = self.folder / "live.log"
        options = LoadOptions(model=PIPELINE, slo_ns=self.slo_ns, is_binary=True)
        app = served_app(self.profiles, way, self.cores, self.slo_ns)
        with serving(app, self.folder, log) as server:
            before_s = core_seconds(server)
            result = run_open_loop(server.url, arrivals, options)
            after_s = core_seconds(server)
        used_s = after_s.since(before_s, len(result))
        by_response_s = after_s.since(before_s, _responses(result)).workers
        return (
            _figures(summarise_load(result).run.to_json()),
            simulate_log(self.folder, log, result, _FIGURES),
            replace(used_s, workers=by_response_s),
        )


def core_seconds(server: Running) -> CoreSeconds:
    """Return the CPU time that the processes of a server, and this one, have used so far."""
    workers = others = 0
    for pid in (server.pid, *descendants(server.pid)):
        with suppress(OSError, IndexError):
            # The name in field 2 may contain spaces; behind it, fields 14 and 15 are times.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            if "headgate.live.worker" in Path(f"/proc/{pid}/cmdline").read_text():
                workers += ticks
            else:
                others += ticks
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return CoreSeconds(workers / ticks_per_s, others / ticks_per_s, process_time())


def _arrivals(
    plan: ImagePipelinePlan, capacity_rps: float, seed: int
) -> Iterator[tuple[str, Arrivals]]:
    duration_ns = round(plan.seconds * SECOND_NS)
    yield "poisson", poisson(plan.poisson_load * capacity_rps, duration_ns, seed=seed)
    rate_per_s = plan.bursty_load * capacity_rps
    yield "bursty", gamma(rate_per_s, plan.bursty_cv, duration_ns, seed=seed)


def _mean(rounds: list[WayRun]) -> WayMean:
    live, simulated = (
        {name: fmean(each[name] for each in figures) for name in ("p50_ms", "slo_attainment")}
        for figures in ([run.live for run in rounds], [run.simulated for run in rounds])
    )
    return WayMean(
        rounds[0].way,
        rounds[0].arrivals,
        live["slo_attainment"],
        fmean(run.core_s.workers for run in rounds),
        abs(simulated["p50_ms"] - live["p50_ms"]) / live["p50_ms"],
        abs(simulated["slo_attainment"] - live["slo_attainment"]),
    )


def _responses(result: LoadResult) -> int:
    return int((result.status == 200).sum())


def _figures(summary: dict[str, object]) -> dict[str, float]:
    return {name: float(str(summary[name])) for name in _FIGURES}


def _row(run: WayRun) -> Row:
    choices = [run.choices[stage] for stage in STAGES]
    return {
        "way": run.way,
        "batch": "/".join(str(choice.batch) for choice in choices),
        "cores": "/".join(str(choice.cores) for choice in choices),
        "arrivals": run.arrivals,
        "round": run.round,
        "requests_per_s": round(run.rate_per_s, 1),
        "slo_ms": run.slo_ms,
        "hit_rate": round(run.live["slo_attainment"], 4),
        "simulated_hit_rate": round(run.simulated["slo_attainment"], 4),
        "p50_ms": round(run.live["p50_ms"], 2),
        "simulated_p50_ms": round(run.simulated["p50_ms"], 2),
        "p99_ms": round(run.live["p99_ms"], 1),
        "core_ms_per_request": round(run.core_s.workers * 1e3, 2),
        "gateway_core_ms": round(run.core_s.gateway * 1e3, 2),
        "sender_core_ms": round(run.core_s.sender * 1e3, 2),
    }


def _way_checks(means: list[WayMean]) -> Iterator[Check]:
    by_key = {(each.way, each.arrivals): each for each in means}
    for other in means:
        if other.way == FRONTIER:
            continue
        own = by_key[FRONTIER, other.arrivals]
        claim = f"{other.arrivals}: hit rate of the frontier's way, beside {other.way}"
        expected = f">= {other.hit_rate:.4f} - {_HIT_SLACK}"
        holds = own.hit_rate >= other.hit_rate - _HIT_SLACK
        yield Check(claim, _SOURCE, expected, round(own.hit_rate, 4), holds)
        if other.way == FIXED:
            claim = f"{other.arrivals}: core time of a request, as a share of {other.way}"
            share = own.core_s / other.core_s if other.core_s else 1.0
            yield Check(claim, _SOURCE, "< 1", round(share, 3), share < 1)


def _fidelity_checks(run: WayMean) -> Iterator[Check]:
    at = f"{run.way}, {run.arrivals}"
    yield Check(
        f"{at}: error of the simulated p50",
        _SOURCE,
        f"within {100 * _P50_ERROR_MAX:g} %",
        f"{100 * run.p50_error:.1f} %",
        run.p50_error <= _P50_ERROR_MAX,
    )
    yield Check(
        f"{at}: error of the simulated hit rate",
        _SOURCE,
        f"within {100 * _HIT_ERROR_MAX:g} points",
        f"{100 * run.hit_error:.1f} points",
        run.hit_error <= _HIT_ERROR_MAX,
    )
