"""Training of `aquatope`: Bayesian optimisation of its configurations on the simulator.

Zhou, Zhang and Delimitrou, "AQUATOPE" (ASPLOS 2023), minimises the cost of an application subject
to its objective, from noisy runs: a number of random ones first, then rounds in which a model of
all runs so far proposes the next. Rules marked [own] are ours.

- Every pipeline has a study of its own, one after the other: a configuration is fixed per
  application. A trial is a configuration for every stage of the pipeline: variant and pool, GPU
  share, vCPUs, batch size. It is run on the simulator, in the same environments each time, with the
  load of all pipelines; the others run as trained so far, or in their plan by profiles.
- A trial yields the cost of a request and the share of requests of each pipeline that met its
  objective. Cost is minimised subject to the quantiles of this pipeline and of those trained before
  it. Defaults are Aquatope's: 10 random trials, then 20 rounds of 3 (here 60 rounds of one).
- The first two trials of a study are not random [own]: the cheapest plans in time by the profiles,
  in full batches and one item at a time. Other policies know the profiles as well.
- The model is optuna's tree-structured Parzen estimator with constraints [own: Aquatope has two
  Gaussian processes and noisy expected improvement; those of optuna need PyTorch]. It takes
  categories as they are, and configurations that do not exist need no penalty.
- The result of a study is the cheapest trial that kept these objectives; if none did, the one that
  violated them least [own].

Everything is drawn from the seed, so equal calls give equal results. Needs the extra `aquatope`.

    trained = train(scenario, seeds=(100, 101))
    PolicyCase.of("aquatope", configs=trained.configs)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean
from typing import TYPE_CHECKING, Final, final

from headgate.core.errors import ConfigError
from headgate.core.model import App, Pipeline
from headgate.lab.harness import Environment, PolicyCase, Scenario, result_of
from headgate.planning.frontier.candidates import (
    node_candidates,
    pipeline_graph,
    priced,
    visits,
)
from headgate.planning.frontier.configs import InfeasibleError, StageConfig
from headgate.planning.frontier.pipeline import PipelineFrontier
from headgate.policies.aquatope import StageChoice

if TYPE_CHECKING:
    from optuna.trial import Trial

_RANDOM_TRIALS: Final = 10  # before the sampler learns from them
_TOLERANCE: Final = 0.01  # what a plan by the profiles may cost more than the cheapest


@dataclass(frozen=True, slots=True)
class Trained:
    """The configurations that training found, and what its own runs say about them."""

    configs: tuple[str, ...]  # the setting of the policy
    usd_per_request: float  # of the compute that batches used
    violations: tuple[float, ...]  # by pipeline: its quantile less the share that met it; 0: none
    runs: int  # different configurations that were simulated


def train(
    scenario: Scenario,
    *,
    seeds: Sequence[int] = (0,),
    trials: int = 70,
    seed: int = 0,
) -> Trained:
    """Return the best configurations for the environments of these seeds, of which all are run.

    Seeds should be others than those of the runs that are to be judged. Raises `ConfigError` if
    optuna is not installed.
    """
    try:
        import optuna  # noqa: PLC0415 - an extra
    except ImportError:
        problem = "training needs optuna: pip install 'headgate[aquatope]'"
        raise ConfigError(problem, where="aquatope") from None
    runs = _Runs([(scenario.environment(each), each) for each in seeds])
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # not a line per trial
    configs: tuple[str, ...] = ()
    try:
        for pipeline in runs.app.pipelines:
            objective = _Objective(runs, pipeline, configs)
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM_TRIALS)
            study = optuna.create_study(direction="minimize", sampler=sampler)
            for first in objective.first_trials():
                study.enqueue_trial(first, skip_if_exists=True)
            study.optimize(objective, n_trials=trials)
            configs = objective.best()
    finally:
        optuna.logging.set_verbosity(verbosity)
    cost, violations = runs.run(configs)
    return Trained(configs, cost, violations, runs.count)


@final
class _Runs:
    """Runs configurations in every environment, and keeps what came out."""

    def __init__(self, environments: Sequence[tuple[Environment, int]]) -> None:
        self._environments = environments
        self._found: dict[tuple[str, ...], tuple[float, tuple[float, ...]]] = {}

    @property
    def app(self) -> App:
        return self._environments[0][0].app

    @property
    def count(self) -> int:
        """How many different configurations were run."""
        return len(self._found)

    def run(self, configs: tuple[str, ...]) -> tuple[float, tuple[float, ...]]:
        """Return the cost of a request, and by pipeline how far its objective was missed."""
        if configs not in self._found:
            self._found[configs] = self._simulate(configs)
        return self._found[configs]

    def _simulate(self, configs: tuple[str, ...]) -> tuple[float, tuple[float, ...]]:
        costs: list[float] = []
        missed: list[list[float]] = []
        for environment, seed in self._environments:
            run = environment.simulate(PolicyCase.of("aquatope", configs=configs), seed)
            result = result_of(run, environment.since_ns)
            costs.append(sum(use.usage_usd for use in run.resources) / max(1, len(run.requests)))
            missed.append(
                [
                    # One without requests misses nothing.
                    0.0 if isnan(group.slo_attainment) else quantile - group.slo_attainment
                    for group, quantile in zip(
                        result.pipelines,
                        [pipeline.slo.quantile for pipeline in environment.app.pipelines],
                        strict=True,
                    )
                ]
            )
        return fmean(costs), tuple(max(0.0, fmean(each)) for each in zip(*missed, strict=True))


@final
class _Objective:
    """What the study of one pipeline minimises, the pipelines before it as they were trained."""

    def __init__(self, runs: _Runs, pipeline: Pipeline, before: tuple[str, ...]) -> None:
        self._runs = runs
        self._pipeline = pipeline
        self._before = before
        self._stages = list(_stages(runs.app, pipeline))
        self._tried: dict[tuple[str, ...], tuple[float, float]] = {}  # violation and cost

    def __call__(self, trial: Trial) -> float:
        """Return the cost of a trial; the violations of pipelines trained so far constrain it."""
        configs = (*self._before, *(str(stage.suggest(trial)) for stage in self._stages))
        cost, violations = self._runs.run(configs)
        kept = violations[: self._pipeline.id + 1]
        for number, violation in enumerate(kept):
            trial.set_constraint(str(number), violation)
        self._tried[configs] = (sum(kept), cost)
        return cost

    def first_trials(self) -> Iterator[dict[str, str | int]]:
        """Yield the cheapest plans in time by the profiles: in full batches, and one by one."""
        pipeline, app = self._pipeline, priced(self._runs.app)
        candidates = node_candidates(app, pipeline)
        frontier = PipelineFrontier(
            pipeline_graph(pipeline), candidates, visits=visits(pipeline), tolerance=_TOLERANCE
        )
        smallest = max(min(config.batch for config in configs) for configs in candidates)
        for plans in (frontier, frontier.capped(smallest)):
            try:
                configs = plans.plan(pipeline.slo.latency_ns).configs
            except InfeasibleError:
                configs = plans.plan_at(0).configs
            params: dict[str, str | int] = {}
            for stage, config in zip(self._stages, configs, strict=True):
                params |= stage.params(config)
            yield params

    def best(self) -> tuple[str, ...]:
        """Return the cheapest of what violated the objectives least."""
        return min(self._tried, key=self._tried.__getitem__)


@final
class _Stage:
    """The parameters of one stage: those of which there is more than one value."""

    def __init__(self, app: App, pipeline: str, stage: str, configs: list[StageConfig]) -> None:
        self._app = app
        self._pipeline = pipeline
        self._stage = stage
        self._by_build: dict[str, list[StageConfig]] = {}  # by variant and pool
        for config in configs:
            self._by_build.setdefault(self._build(config), []).append(config)

    def suggest(self, trial: Trial) -> StageChoice:
        """Return the configuration nearest to what the sampler suggests."""
        builds = list(self._by_build)
        build = trial.suggest_categorical(self._name, builds) if len(builds) > 1 else builds[0]
        configs = self._by_build[build]
        gpu_sevenths, cpu_milli, batch = (
            values[trial.suggest_int(name, 0, len(values) - 1)]
            for name, values in self._values(build).items()
        )
        # Not every shape and batch size need exist.
        nearest = min(
            configs,
            key=lambda config: (
                config.gpu_sevenths != gpu_sevenths,
                abs(config.cpu_milli - cpu_milli),
                abs(config.batch - batch),
            ),
        )
        return StageChoice(
            self._pipeline,
            self._stage,
            self._app.variants[nearest.build].name,
            self._app.pools[nearest.place].name,
            nearest.shape_id,
            nearest.batch,
        )

    def params(self, config: StageConfig) -> dict[str, str | int]:
        """Return the parameters with which a configuration is suggested."""
        build = self._build(config)
        values = zip(
            self._values(build).items(),
            (config.gpu_sevenths, config.cpu_milli, config.batch),
            strict=True,
        )
        params: dict[str, str | int] = {name: each.index(value) for (name, each), value in values}
        return {self._name: build, **params} if len(self._by_build) > 1 else params

    @property
    def _name(self) -> str:
        return f"{self._pipeline} {self._stage}"

    def _build(self, config: StageConfig) -> str:
        variants, pools = self._app.variants, self._app.pools
        return f"{variants[config.build].name} on {pools[config.place].name}"

    def _values(self, build: str) -> dict[str, list[int]]:
        """Return the values of each parameter of a build, by the name of the parameter."""
        configs = self._by_build[build]
        return {
            f"{self._name}: {build}, {key}": sorted(values)
            for key, values in (
                ("GPU share", {config.gpu_sevenths for config in configs}),
                ("vCPUs", {config.cpu_milli for config in configs}),
                ("batch", {config.batch for config in configs}),
            )
        }


def _stages(app: App, pipeline: Pipeline) -> Iterator[_Stage]:
    names = pipeline_graph(pipeline).names
    for name, configs in zip(names, node_candidates(app, pipeline), strict=True):
        yield _Stage(app, pipeline.name, name, configs)
