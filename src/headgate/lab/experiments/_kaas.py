"""Shared by the experiments on chapter 6 of the thesis: models, policies, environment and figures.

The thesis is "Making the Most of Serverless Accelerators" (Berkeley, 2022). Its simulator counts
timesteps; here one timestep is a millisecond, and arrivals fall on whole timesteps. The figures
need matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Final, Literal

from headgate.core.clock import MILLISECOND_NS
from headgate.core.model import App, Client, Function, Pipeline, Pool, Profile, Stage, Variant
from headgate.lab.figures import DASHES, label_rows
from headgate.lab.harness import Case, Environment, PolicyCase, RunResult, is_above
from headgate.metrics.confidence import Interval
from headgate.metrics.report.comparison_plots import sweep_figure
from headgate.metrics.report.style import (
    MARKERS,
    MUTED,
    SERIES,
    add_legend,
    new_axes,
    number_log_axis,
    style_axes,
)
from headgate.workload import Arrivals, assign, mix, poisson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Mix = Literal["equal work", "equal rates"]
_WAIT_LABEL: Final = "mean time in the queue (timesteps)"
MIXES: Final[tuple[Mix, ...]] = ("equal work", "equal rates")


@dataclass(frozen=True, slots=True)
class KaasModel:
    """A model with its evaluation time and the additional time of a cold start on a GPU."""

    name: str
    exec_ms: float
    cold_ms: float


Models = tuple[KaasModel, ...]
STATED: Final[Models] = (KaasModel("RESNET", 5, 5), KaasModel("BERT", 20, 10))
# The printed traces contradict the stated times. The fitted times reproduce all five traces; of
# BERT's two times only the sum is known, because no trace runs BERT twice on one GPU.
FITTED: Final[Models] = (KaasModel("RESNET", 2, 4), KaasModel("BERT", 8, 10))


ROUND_ROBIN: Final = PolicyCase("round_robin")
BALANCE: Final = PolicyCase("balance")
SRTF: Final = PolicyCase("srtf")
MLFQ: Final = PolicyCase("mlfq")
EXCLUSIVE_FIXED: Final = PolicyCase.of(
    "exclusive", "exclusive, fixed", adapt_every=0, steal_factor=0.0
)
EXCLUSIVE: Final = PolicyCase("exclusive")
AFFINITY: Final = PolicyCase("affinity")
HEADGATE: Final = PolicyCase("headgate")
SRTF_PRINTED: Final = PolicyCase.of("srtf", "srtf, printed", announces=True, clairvoyant=True)
MLFQ_PRINTED: Final = PolicyCase.of("mlfq", "mlfq, printed", announces=True, clairvoyant=True)

THESIS_POLICIES: Final = (ROUND_ROBIN, BALANCE, SRTF, MLFQ, EXCLUSIVE_FIXED)
ALL_POLICIES: Final = (*THESIS_POLICIES, EXCLUSIVE, AFFINITY)


@dataclass(frozen=True, slots=True)
class GpuScenario:
    """Poisson arrivals on GPUs. `load` is the evaluation time offered per GPU time."""

    models: Models = STATED
    gpus: int = 4
    load: float = 0.8
    mix: Mix = "equal work"
    duration_ms: int = 1000
    clients_per_model: int = 1

    def environment(self, seed: int) -> Environment:
        clients = [client_names(model, self.clients_per_model) for model in self.models]
        rates = rates_per_ms(self.models, self.load * self.gpus, self.mix)
        streams = [
            PoissonStream(model.name, 1000 * rate, names)
            for model, rate, names in zip(self.models, rates, clients, strict=True)
        ]
        return Environment(
            build_app(self.models, self.gpus, [name for names in clients for name in names]),
            draw_arrivals(streams, self.duration_ms, seed),
        )


GpuCase = Case[GpuScenario]
Runs = dict[GpuCase, list[RunResult]]


@dataclass(frozen=True, slots=True)
class PoissonStream:
    """Requests for one model, from clients with equal rates."""

    model: str
    rate_per_s: float  # of all its clients
    clients: Sequence[str]


def build_app(models: Models, gpus: int, clients: Sequence[str]) -> App:
    """Return an application with GPUs GPU1, GPU2, ... that can each hold all models at once."""
    functions = tuple(_function(number, model) for number, model in enumerate(models))
    return App(
        functions=functions,
        pipelines=tuple(Pipeline(f.id, f.name, (Stage(f),)) for f in functions),
        pools=(Pool(0, "GPU", nodes=gpus),),
        clients=tuple(Client(number, name) for number, name in enumerate(clients)),
    )


def waits(results: Sequence[RunResult], model: int | None = None) -> list[float]:
    """Return the mean wait of each run, of all requests or of those for one model."""
    if model is None:
        return [one.mean_wait_ms for one in results]
    return [one.pipelines[model].mean_wait_ms for one in results]


def client_names(model: KaasModel, count: int) -> list[str]:
    """Return the names of the clients that send requests for one model."""
    return [f"{model.name}-{number + 1}" for number in range(count)]


def draw_arrivals(streams: Sequence[PoissonStream], duration_ms: int, seed: int) -> Arrivals:
    """Return Poisson arrivals on whole timesteps.

    A Poisson stream split at random among clients is a Poisson stream of each client, so the number
    of clients changes who sends a request, and not when.
    """
    duration_ns = duration_ms * MILLISECOND_NS
    parts = [
        assign(
            poisson(stream.rate_per_s, duration_ns, seed=stream_seed(seed, index, len(streams))),
            {stream.model: 1.0},
            dict.fromkeys(stream.clients, 1.0),
            seed=seed,
        )
        for index, stream in enumerate(streams)
    ]
    return on_timesteps(mix(parts))


def stream_seed(seed: int, index: int, streams: int) -> int:
    """Return the seed of one of several streams: no two of any runs are equal."""
    return seed * streams + index


def rates_per_ms(models: Models, gpus_busy: float, mix: Mix) -> list[float]:
    """Return the requests per timestep of each model that keep `gpus_busy` GPUs busy.

    >>> rates_per_ms(STATED, 3.2, "equal work"), rates_per_ms(STATED, 2.5, "equal rates")
    ([0.32, 0.08], [0.1, 0.1])
    """
    if mix == "equal work":
        return [gpus_busy / len(models) / model.exec_ms for model in models]
    return [gpus_busy / sum(model.exec_ms for model in models)] * len(models)


def on_timesteps(arrivals: Arrivals) -> Arrivals:
    """Move every arrival back to the start of its timestep; the order is kept."""
    return replace(arrivals, times_ns=arrivals.times_ns // MILLISECOND_NS * MILLISECOND_NS)


def _function(number: int, model: KaasModel) -> Function:
    profile = Profile(
        exec_ns=(round(model.exec_ms * MILLISECOND_NS),),
        cold_start_ns=round(model.cold_ms * MILLISECOND_NS),
    )
    return Function(number, model.name, (Variant(number, model.name, number, (0,), profile),))


def beats(theirs: Sequence[RunResult], ours: Sequence[RunResult]) -> bool:
    """Whether `theirs` has no more cold starts and significantly shorter waits than `ours`."""
    cold = fmean(one.cold_starts for one in theirs), fmean(one.cold_starts for one in ours)
    return cold[0] <= cold[1] and is_above(waits(ours), waits(theirs))


def waits_figure(series: Mapping[str, Mapping[str, Interval]], *, title: str) -> Figure:
    """Plot a mean with its interval per model (series) and policy (row), on a log scale."""
    policies = list(next(iter(series.values())))
    figure, axes = new_axes(1.5 + 0.34 * len(policies))
    handles = []
    for index, (colour, marker, by_policy) in enumerate(
        zip(SERIES, MARKERS, series.values(), strict=False)
    ):
        rows = [row + 0.24 * (index - (len(series) - 1) / 2) for row in range(len(policies))]
        intervals = [by_policy[policy] for policy in policies]
        low, high = [each.low for each in intervals], [each.high for each in intervals]
        axes.hlines(rows, low, high, color=colour, linewidth=2)
        means = [each.mean for each in intervals]
        handles += axes.plot(means, rows, marker, color=colour, markersize=6)
    axes.set_xscale("log")
    label_rows(axes, policies)
    style_axes(axes, title=title, x_label=_WAIT_LABEL, grid="x")
    number_log_axis(axes.xaxis)
    axes.tick_params(axis="y", length=0)
    add_legend(axes, handles, list(series))
    return figure


def load_figure(
    loads: Sequence[float], lines: Mapping[str, Sequence[Interval]], wait: float
) -> Figure:
    """Plot BERT's wait under SRTF against load, and mark the wait that the thesis prints."""
    title = f"BERT under SRTF as load rises; dashed: {wait} (thesis)"
    x_label = "load (evaluation time offered per GPU time)"
    figure = sweep_figure(loads, lines, title=title, x_label=x_label, y_label=_WAIT_LABEL)
    figure.axes[0].axhline(wait, color=MUTED, linewidth=1.1, linestyle=DASHES)
    return figure


def log_sweep_figure(
    x: Sequence[float], lines: Mapping[str, Sequence[Interval]], *, title: str, x_label: str
) -> Figure:
    """Plot a sweep with waits on a log scale, because those of round robin are far longer."""
    figure = sweep_figure(x, lines, title=title, x_label=x_label, y_label=_WAIT_LABEL)
    axes = figure.axes[0]
    axes.set_yscale("log")
    least = min(interval.mean for line in lines.values() for interval in line)
    # A band that reaches zero has no lower end on a log scale.
    axes.set_ylim(bottom=max(least, 0.005) / 2)
    number_log_axis(axes.yaxis)
    return figure
