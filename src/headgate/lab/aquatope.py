"""Training of `aquatope`: Bayesian optimisation of its configurations on the simulator.

Zhou, Zhang and Delimitrou, "AQUATOPE" (ASPLOS 2023), minimises the cost of an application subject
to its objective, from noisy runs: a number of random ones first, then rounds in which a model of
all runs so far proposes the next. Rules marked [own] are ours.

- A trial is a configuration for every stage of every pipeline: variant and pool, GPU share, vCPUs,
  batch size. It is run on the simulator, in the same environments each time, and yields the cost of
  a request and the share of requests of each pipeline that met its objective.
- Cost is minimised subject to each pipeline's quantile. Defaults are Aquatope's: 10 random trials,
  then 20 rounds of 3 (here 60 rounds of one).
- The model is optuna's tree-structured Parzen estimator with constraints [own: Aquatope has two
  Gaussian processes and noisy expected improvement; those of optuna need PyTorch]. It takes
  categories as they are, and configurations that do not exist need no penalty.
- The result is the cheapest trial that kept every objective; if none did, the one that violated
  them least [own].

Everything is drawn from the seed, so equal calls give equal results. Needs the extra `aquatope`.

    trained = train(scenario, seeds=(100, 101))
    PolicyCase.of("aquatope", configs=trained.configs)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean
from typing import TYPE_CHECKING, final

from headgate.core.errors import ConfigError
from headgate.core.model import App
from headgate.lab.harness import Environment, PolicyCase, Scenario, result_of
from headgate.planning.frontier.candidates import node_candidates, pipeline_graph
from headgate.planning.frontier.configs import StageConfig
from headgate.policies.aquatope import StageChoice

if TYPE_CHECKING:
    from optuna.trial import Trial


@dataclass(frozen=True, slots=True)
class Trained:
    """The configurations that training found, and what its own runs say about them."""

    configs: tuple[str, ...]  # the setting of the policy
    usd_per_request: float  # of the compute that batches used
    violations: tuple[float, ...]  # by pipeline: its quantile less the share that met it; 0: none
    runs: int  # different configurations that were simulated

    @property
    def is_feasible(self) -> bool:
        """Whether every objective was kept."""
        return not any(self.violations)


def train(
    scenario: Scenario,
    *,
    seeds: Sequence[int] = (0,),
    trials: int = 70,
    random_trials: int = 10,
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
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=random_trials)
    objective = _Objective([(scenario.environment(each), each) for each in seeds])
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # not a line per trial
    try:
        study = optuna.create_study(direction="minimize", sampler=sampler)
        study.optimize(objective, n_trials=trials)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return objective.best()


@final
class _Objective:
    """Runs the configurations of a trial in every environment, and keeps what came out."""

    def __init__(self, environments: Sequence[tuple[Environment, int]]) -> None:
        self._environments = environments
        self._stages = list(_stages(environments[0][0].app))
        self._found: dict[tuple[str, ...], tuple[float, tuple[float, ...]]] = {}

    def __call__(self, trial: Trial) -> float:
        """Return the cost of a trial; its violations are the constraints."""
        configs = tuple(str(stage.suggest(trial)) for stage in self._stages)
        if configs not in self._found:
            self._found[configs] = self._run(configs)
        cost, violations = self._found[configs]
        for number, violation in enumerate(violations):
            trial.set_constraint(str(number), violation)
        return cost

    def _run(self, configs: tuple[str, ...]) -> tuple[float, tuple[float, ...]]:
        """Return the cost of a request, and by pipeline how far its objective was missed."""
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

    def best(self) -> Trained:
        """Return the cheapest of what violated the objectives least."""
        configs = min(
            self._found, key=lambda each: (sum(self._found[each][1]), self._found[each][0])
        )
        cost, violations = self._found[configs]
        return Trained(configs, cost, violations, len(self._found))


@final
class _Stage:
    """The parameters of one stage: those of which there is more than one value."""

    def __init__(self, app: App, pipeline: str, stage: str, configs: list[StageConfig]) -> None:
        self._app = app
        self._pipeline = pipeline
        self._stage = stage
        self._by_build: dict[str, list[StageConfig]] = {}  # by variant and pool
        for config in configs:
            build = f"{app.variants[config.build].name} on {app.pools[config.place].name}"
            self._by_build.setdefault(build, []).append(config)

    def suggest(self, trial: Trial) -> StageChoice:
        """Return the configuration nearest to what the sampler suggests."""
        name = f"{self._pipeline} {self._stage}"
        builds = list(self._by_build)
        build = trial.suggest_categorical(name, builds) if len(builds) > 1 else builds[0]
        configs = self._by_build[build]
        gpu_sevenths, cpu_milli, batch = (
            values[trial.suggest_int(f"{name}: {build}, {key}", 0, len(values) - 1)]
            for key, values in (
                ("GPU share", sorted({config.gpu_sevenths for config in configs})),
                ("vCPUs", sorted({config.cpu_milli for config in configs})),
                ("batch", sorted({config.batch for config in configs})),
            )
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


def _stages(app: App) -> Iterator[_Stage]:
    for pipeline in app.pipelines:
        names = pipeline_graph(pipeline).names
        for name, configs in zip(names, node_candidates(app, pipeline), strict=True):
            yield _Stage(app, pipeline.name, name, configs)
