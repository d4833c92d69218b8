"""Setup of the demonstration: model, sizing to this machine, calibration, and application.

The application has one machine of one core, and functions for the excess load. Machines differ by
an order of magnitude, and a request of a millisecond would measure the gateway and not the
recommender. So the number of sessions per request is chosen such that a request takes about 20 ms
on one core, and SLO and load follow from the measured profile.

A profile is measured without a gateway, on an otherwise idle machine. What the worker and the
connection to it add, and how functions that share a core slow each other down, is in the event log
of a live run: `read_times` calibrates the simulation with it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Final

import numpy as np

from headgate.config import from_spec
from headgate.config.prices import PriceList
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.event_log import read_log
from headgate.core.model import MIB, FaasOffering, InstanceType, Profile
from headgate.core.units import format_duration
from headgate.functions.model import OnnxModel
from headgate.functions.tensor import TensorSpec, TensorSpecsLike, parse_specs
from headgate.lab.experiments import Progress
from headgate.metrics.columns import Int64
from headgate.metrics.from_log import read_columns
from headgate.planning.capacity.latency_model import Characterisation, profile_of
from headgate.profiling.probe_client import ProbeTask
from headgate.profiling.profiler import ProfilerSettings, profile, this_machine, usable_cores
from headgate.workload import Arrivals, stepped


class SessionModel(OnnxModel):
    """An ONNX model with a fixed number of rows (sessions) per request.

    The number of rows sets the execution time of a request; requests are not batched.
    """

    def __init__(self, path: str, sessions: int) -> None:
        super().__init__(path, batches=False)
        self._sessions = sessions

    def load(self) -> None:
        """Load the file. Raises `ConfigError` if it cannot be loaded."""
        super().load()
        self.inputs = self._fixed(self.inputs)
        self.outputs = self._fixed(self.outputs)

    def _fixed(self, declared: TensorSpecsLike) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(spec.name, spec.datatype, (self._sessions, *spec.shape[1:]))
            for spec in parse_specs(declared, "recommender")
        )


FUNCTION: Final = "recommend"
CODE: Final = f"{SessionModel.__module__}:{SessionModel.__name__}"
QUANTILE: Final = 0.95  # there are a few hundred requests: a higher one would depend on a handful
FEW: Final = 5  # concurrent clients that one machine serves within the SLO (as in the paper)
MANY: Final = 20  # concurrent clients in a burst (as in the paper)
CONCURRENCIES: Final = (1, 2, 3, 4, 5, 6, 8, 12, MANY)
OVERHEAD_MS: Final = 3.0  # of the gateway, on a busy machine
_REQUEST_MS: Final = 20.0
_TRIAL_SESSIONS: Final = 16  # sessions per request in the first, coarse measurement
_SESSIONS_MAX: Final = 256
# Load of a burst: more than one machine can serve, and less than with the functions' core.
_BURST_LOAD: Final = 1.35

MACHINE: Final = "core"
FUNCTIONS: Final = "functions"
FUNCTIONS_MAX: Final = 4
MEMORY_MB: Final = 1_769  # one vCPU
_REFERENCE_INSTANCE: Final = "ml.c5.large"  # two cores: half of its price is that of one
_ON_ONE_CORE: Final = Profile((MILLISECOND_NS,), slowdown=(1.0, 2.0))  # calls share the core
_CALLS_MIN: Final = 10  # fewer calls give no reliable mean

Spec = dict[str, object]


@dataclass(frozen=True, slots=True)
class DemoSchedule:
    """Steps of the load: burst, quiet, burst, ... The first two steps are warm-up."""

    step_s: float = 2.0
    steps: int = 7

    @property
    def warm_up_ns(self) -> int:
        """End of the warm-up; earlier requests are not counted."""
        return round(2 * self.step_s * SECOND_NS)


@dataclass(frozen=True, slots=True)
class Scale:
    """Request size, profile and SLO for this machine."""

    model: Path
    sessions: int  # per request
    measured: Characterisation
    slo_ms: float
    schedule: DemoSchedule

    @property
    def capacity_per_s(self) -> float:
        """Requests per second of one core, at the largest concurrency within the SLO."""
        return FEW / self.measured.time_ms(1, FEW) * 1e3

    @property
    def rates_per_s(self) -> tuple[float, float]:
        """Quiet rate and burst rate, in the ratio of 5 to 20 clients."""
        burst = _BURST_LOAD * self.capacity_per_s
        return burst * FEW / MANY, burst

    def arrivals(self, seed: int) -> Arrivals:
        """Return the arrivals, which are the same for live and simulated runs."""
        rates = [self.rates_per_s[1 - step % 2] for step in range(self.schedule.steps)]
        step_ns = round(self.schedule.step_s * SECOND_NS)
        return stepped(rates, step_ns, self.schedule.steps * step_ns, seed=seed)


def fit_to_machine(
    model: Path, schedule: DemoSchedule, budget_s: float, progress: Progress
) -> Scale:
    """Measure the recommender on this machine, and derive request size, SLO and load."""
    cores = len(usable_cores())
    if cores < 2:
        problem = "needs two cores, one for the machine and one for the functions"
        raise ConfigError(problem, where="this machine", value=cores)
    device = this_machine().cpu

    def measure(sessions: int, of_budget: float, settings: ProfilerSettings) -> Characterisation:
        task = ProbeTask(FUNCTION, None, CODE, options(model, sessions), str(model.parent))
        settings = replace(settings, budget_s=of_budget * budget_s)
        return profile(
            task, settings, device, lambda title, done, total: progress(f"profiling: {title}")
        ).characterisation

    trial = measure(_TRIAL_SESSIONS, 0.1, ProfilerSettings((1,), (1,), (1,)))
    sessions = round(_TRIAL_SESSIONS * _REQUEST_MS / trial.time_ms(1, 1))
    sessions = max(1, min(_SESSIONS_MAX, sessions))
    one = measure(sessions, 0.7, ProfilerSettings((1,), CONCURRENCIES, (1,)))
    two = measure(
        sessions, 0.2, ProfilerSettings((2,), (1, FEW), (1,))
    )  # to extrapolate to more cores
    measured = replace(one, points=(*one.points, *two.points))
    # Slightly more than `FEW` concurrent requests take, so that slightly more are late already.
    slo_ms = ceil(1.05 * measured.time_ms(1, FEW, 1, QUANTILE) + OVERHEAD_MS)
    return Scale(model, sessions, measured, slo_ms, schedule)


def options(model: Path, sessions: int) -> dict[str, object]:
    return {"path": str(model.resolve()), "sessions": sessions}


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a single request, on the machine and as a function call."""

    machine_ms: float
    call_ms: float
    cv: float | None = None  # coefficient of variation; None: as profiled


def read_times(log: Path, before: Times) -> Times:
    """Return the times in an event log; `before` for times that the log does not contain."""
    header, entries = read_log(log)
    with closing(entries):
        app = from_spec(header.app, str(log)).app
        batches = read_columns(entries, app).batches
    machine = next(v for v in app.variants if app.pools[v.pool_ids[0]].faas is None)
    is_call = batches.variant != machine.id
    calls = is_call & (batches.finished == 1)  # on warm instances: all were started before
    call_ns = single_request_ns(_ON_ONE_CORE, batches.sent_ns[calls], batches.ended_ns[calls])
    rows = ~is_call
    machine_ns = single_request_ns(machine.profile, batches.sent_ns[rows], batches.ended_ns[rows])
    alone_ns = batches.alone_ns[rows]
    return Times(
        machine_ns / MILLISECOND_NS if rows.any() else before.machine_ms,
        call_ns / MILLISECOND_NS if np.count_nonzero(calls) >= _CALLS_MIN else before.call_ms,
        float(alone_ns.std() / alone_ns.mean()) if rows.any() else before.cv,
    )


def single_request_ns(profile: Profile, began_ns: Int64, ended_ns: Int64) -> float:
    """Return the time of a single request, from the times of requests that shared a machine.

    While n requests run, each is slowed down by the profile's factor for n, so that n / factor of
    the work of one request is done per unit of time. The total work divided by the number of
    requests is the time of a single request.

    >>> profile = Profile((10,), slowdown=(1.0, 2.0))
    >>> single_request_ns(profile, np.array([0, 0]), np.array([24, 24]))
    12.0
    """
    instants_ns = np.concatenate((began_ns, ended_ns))
    changes = np.repeat((1, -1), (len(began_ns), len(ended_ns)))
    order = np.argsort(instants_ns, kind="stable")
    running = np.cumsum(changes[order])[:-1]
    lengths_ns = np.diff(instants_ns[order])
    most = int(running.max(initial=0))
    single_ns = profile.exec_ns[0]
    factors = np.array([1.0, *(profile.time_ns(1, n) / single_ns for n in range(1, most + 1))])
    done_ns = (lengths_ns * running / factors[running]).sum()
    return float(done_ns) / max(1, len(began_ns))


def one_core(prices: PriceList) -> InstanceType:
    """Return the machine of the demonstration: one core at the price of a cloud core."""
    (reference,) = prices.instances_named([_REFERENCE_INSTANCE], "the demonstration")
    return InstanceType(
        name=MACHINE,
        cpus=1,
        memory_bytes=reference.memory_bytes // 2,
        usd_per_hour=reference.usd_per_hour / 2,
        network_ns=round(OVERHEAD_MS * 1e6 / 2),
    )


def application(
    scale: Scale,
    machine: InstanceType,
    platform: FaasOffering,
    times: Times,
    *,
    endpoint_url: str = "http://localhost",
    cores: int = 1,
) -> Spec:
    """Return the application spec.

    With more `cores`, the machine is a larger one, extrapolated from the profile.
    """
    terms = platform.sized(MEMORY_MB * MIB)
    variants = _variants(scale, times, cores)
    return {
        "functions": {FUNCTION: {"prewarm_nodes": 1, "variants": variants}},
        "slo": {"latency": f"{scale.slo_ms:g}ms", "quantile": QUANTILE},
        "pools": {
            MACHINE: {
                "tier": "dedicated",
                "slots": MANY,
                "cpus": cores,
                "price": f"${cores * machine.usd_per_hour:.6f}/h",
            },
            FUNCTIONS: {
                "tier": "serverless",
                "provider": "lambda",
                "target": FUNCTION,
                "endpoint_url": endpoint_url,
                "memory": f"{MEMORY_MB}MiB",
                "price": f"${terms.usd_per_gb_s:.12f}/GB-s",
                "request_price": f"${terms.usd_per_request * 1e6:.6f}/1M",
                "concurrency": FUNCTIONS_MAX,
                "host": FUNCTIONS,
            },
        },
        "hosts": {FUNCTIONS: {"cpus": 1}},  # the core that the functions share here
        "serve": {"port": 0, "lame_duck": "0s"},
    }


def _variants(scale: Scale, times: Times, cores: int) -> Spec:
    """Return the function on the machine, and as a call."""
    profile = profile_of(scale.measured, cores)
    speed_factor = profile.exec_ns[0] / profile_of(scale.measured, 1).exec_ns[0]
    common: Spec = {
        "code": CODE,
        "options": options(scale.model, scale.sessions),
        "cold_start": format_duration(profile.cold_start_ns),
    }
    return {
        MACHINE: {
            **common,
            "exec_time": f"{speed_factor * times.machine_ms:.4f}ms",
            "slowdown": [round(factor, 4) for factor in profile.slowdown],
            "concurrency": MANY,
            "pools": [MACHINE],
        },
        FUNCTIONS: {**common, "exec_time": f"{times.call_ms:.4f}ms", "pools": [FUNCTIONS]},
    }
