"""The application of the demonstration: one machine of one core, and functions for the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Final

import numpy as np

from headgate.config import from_spec
from headgate.config.prices import PriceList
from headgate.core.catalog import MIB, FaasOffering, InstanceType
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.event_log import read_log
from headgate.core.model import Profile
from headgate.core.units import format_duration
from headgate.functions.onnx_model import OnnxModel
from headgate.functions.tensor import Declared, TensorSpec, read_specs
from headgate.metrics.columns import Int64
from headgate.metrics.from_log import read_columns
from headgate.planning.latency_model import Characterisation, profile_of
from headgate.profiling.machine import this_machine, usable_cores
from headgate.profiling.probe_client import ProbeTask
from headgate.profiling.profiler import ProfilerSettings, profile
from headgate.workload import Arrivals, stepped

# The recommender, asked for the same number of sessions in every request.


class SessionModel(OnnxModel):
    """An ONNX file of which a request wants so many rows, which are one piece of work.

    So a request takes as long as its sender likes, and there is nothing to put together.
    """

    def __init__(self, path: str, sessions: int) -> None:
        super().__init__(path)
        self._sessions = sessions

    def load(self) -> None:
        """Read the file. Raises `ConfigError` if that cannot be done."""
        super().load()
        self.inputs = self._fixed(self.inputs)
        self.outputs = self._fixed(self.outputs)
        self.batches = False

    def _fixed(self, declared: Declared) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(spec.name, spec.datatype, (self._sessions, *spec.shape[1:]))
            for spec in read_specs(declared, "recommender")
        )


# The demonstration, cut to this machine: how large a request is, how soon it must be answered,
# and how many of them come.
#
# Machines differ by an order of magnitude, and a request that takes a millisecond would measure
# the gateway and not the recommender. So requests have as many sessions as take about 20 ms on
# one core, and everything else follows from what was measured.


FUNCTION: Final = "recommend"
CODE: Final = f"{SessionModel.__module__}:{SessionModel.__name__}"
QUANTILE: Final = 0.95  # of a few hundred requests; a higher one would be decided by a handful
FEW: Final = 5  # clients that one machine can serve in time, and
MANY: Final = 20  # clients that it cannot: the paper's workload
AT_ONCE: Final = (1, 2, 3, 4, 5, 6, 8, 12, MANY)
OVERHEAD_MS: Final = 3.0  # of the way through the gateway, on a machine that is busy
_REQUEST_MS: Final = 20.0
_TRIED: Final = 16  # sessions in the request that tells how many it should have
_SESSIONS_MAX: Final = 256
# A burst brings more than one machine can take, and not more than the functions' core can add.
_BURST_LOAD: Final = 1.35

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoSchedule:
    """How the load goes: a burst, quiet, a burst, ... The first two steps only warm up."""

    step_s: float = 2.0
    steps: int = 7

    @property
    def warm_up_ns(self) -> int:
        """Requests before that do not count."""
        return round(2 * self.step_s * SECOND_NS)


@dataclass(frozen=True, slots=True)
class Scale:
    """What the demonstration asks of this machine."""

    model: Path
    sessions: int  # in a request
    measured: Characterisation
    slo_ms: float
    course: DemoSchedule

    @property
    def capacity_per_s(self) -> float:
        """Requests that one core answers in a second, with as many at once as are in time."""
        return FEW / self.measured.time_ms(1, FEW) * 1e3

    @property
    def rates_per_s(self) -> tuple[float, float]:
        """When it is quiet, and in a burst: as 5 and as 20 clients would send."""
        burst = _BURST_LOAD * self.capacity_per_s
        return burst * FEW / MANY, burst

    def arrivals(self, seed: int) -> Arrivals:
        """Return the requests. Live and simulated get the very same."""
        rates = [self.rates_per_s[1 - step % 2] for step in range(self.course.steps)]
        step_ns = round(self.course.step_s * SECOND_NS)
        return stepped(rates, step_ns, self.course.steps * step_ns, seed=seed)


def fit_to_machine(model: Path, course: DemoSchedule, budget_s: float, progress: Progress) -> Scale:
    """Measure the recommender on this machine, and choose accordingly."""
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

    tried = measure(_TRIED, 0.1, ProfilerSettings((1,), (1,), (1,)))
    sessions = round(_TRIED * _REQUEST_MS / tried.time_ms(1, 1))
    sessions = max(1, min(_SESSIONS_MAX, sessions))
    one = measure(sessions, 0.7, ProfilerSettings((1,), AT_ONCE, (1,)))
    two = measure(sessions, 0.2, ProfilerSettings((2,), (1, FEW), (1,)))  # what more cores would do
    measured = replace(one, points=(*one.points, *two.points))
    # A little more than the few take: so the many are late, and so are a few more.
    slo_ms = ceil(1.05 * measured.time_ms(1, FEW, 1, QUANTILE) + OVERHEAD_MS)
    return Scale(model, sessions, measured, slo_ms, course)


def options(model: Path, sessions: int) -> dict[str, object]:
    """Return what the function is made with."""
    return {"path": str(model.resolve()), "sessions": sessions}


# How long requests took in a live run, so that its simulation knows what it could not know before.
#
# A profile is measured without a gateway, and with nobody else on the machine. What a worker and
# the way to it add, and what functions that share a core do to each other, stands in the log.


_CALLS_MIN: Final = 10  # fewer say nothing


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, that has the machine to itself, or that calls a function."""

    machine_ms: float
    call_ms: float


def read_times(log: Path, before: Times) -> Times:
    """Return what a log says; what it does not say stays as it was `before`."""
    header, entries = read_log(log)
    with closing(entries):
        app = from_spec(header.app, str(log)).app
        batches = read_columns(entries, app).batches
    machine = next(v for v in app.variants if app.pools[v.pool_ids[0]].faas is None)
    is_call = batches.variant != machine.id
    is_usual = (batches.finished == 1) & (batches.cold == 0)
    calls_ns = (batches.ended_ns - batches.sent_ns)[is_call & is_usual]
    rows = ~is_call
    machine_ns = alone_ns(machine.profile, batches.sent_ns[rows], batches.ended_ns[rows])
    return Times(
        machine_ns / MILLISECOND_NS if rows.any() else before.machine_ms,
        float(calls_ns.mean()) / MILLISECOND_NS if len(calls_ns) >= _CALLS_MIN else before.call_ms,
    )


def alone_ns(profile: Profile, began_ns: Int64, ended_ns: Int64) -> float:
    """Return how long a request would take alone, from when requests ran that shared a machine.

    While n run, each is slowed down by the profile's factor for n, so that n / factor of a lone
    request is done in the time of one; all of them together are as many as there were.

    >>> profile = Profile((10,), slowdown=(1.0, 2.0))
    >>> alone_ns(profile, np.array([0, 0]), np.array([24, 24]))
    12.0
    """
    instants_ns = np.concatenate((began_ns, ended_ns))
    changes = np.repeat((1, -1), (len(began_ns), len(ended_ns)))
    order = np.argsort(instants_ns, kind="stable")
    running = np.cumsum(changes[order])[:-1]
    lengths_ns = np.diff(instants_ns[order])
    most = int(running.max(initial=0))
    alone = profile.exec_ns[0]
    factors = np.array([1.0, *(profile.time_ns(1, n) / alone for n in range(1, most + 1))])
    done_ns = (lengths_ns * running / factors[running]).sum()
    return float(done_ns) / max(1, len(began_ns))


MACHINE: Final = "core"
FUNCTIONS: Final = "functions"
# They share a core here: more of them at once would only be slower, each of them.
FUNCTIONS_MAX: Final = 4
MEMORY_MB: Final = 1_769  # comes with one CPU
_LIKE: Final = "ml.c5.large"  # has two: half of its price is that of one

Spec = dict[str, object]


def one_core(prices: PriceList) -> InstanceType:
    """Return the machine that the demonstration has, at the price of such a core."""
    (like,) = prices.instances_named([_LIKE], "the demonstration")
    return InstanceType(
        name=MACHINE,
        cpus=1,
        memory_bytes=like.memory_bytes // 2,
        usd_per_hour=like.usd_per_hour / 2,
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
    """Return the application file, as plain data.

    With more `cores` the machine is another one, as the profile tells what it would be like.
    """
    profile = profile_of(scale.measured, cores)
    faster = profile.exec_ns[0] / profile_of(scale.measured, 1).exec_ns[0]
    start = format_duration(profile.cold_start_ns)
    terms = platform.sized(MEMORY_MB * MIB)
    common: Spec = {
        "code": CODE,
        "options": options(scale.model, scale.sessions),
        "cold_start": start,
    }
    return {
        "functions": {
            FUNCTION: {
                "prewarm_nodes": 1,
                "variants": {
                    MACHINE: {
                        **common,
                        "exec_time": f"{faster * times.machine_ms:.4f}ms",
                        "slowdown": [round(factor, 4) for factor in profile.slowdown],
                        "concurrency": MANY,
                        "pools": [MACHINE],
                    },
                    FUNCTIONS: {
                        **common,
                        "exec_time": f"{times.call_ms:.4f}ms",
                        "pools": [FUNCTIONS],
                    },
                },
            }
        },
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
            },
        },
        "serve": {"port": 0, "lame_duck": "0s"},
    }
