"""Prints the kind of build and a hash of every decision, per policy, under faults.

`test_compiled` runs it as a script, once for each build.
"""

from __future__ import annotations

import json
from hashlib import sha256

from headgate.config import declare
from headgate.core import build_kind
from headgate.core.actions import Action
from headgate.core.clock import SECOND_NS
from headgate.core.event_log import to_wire
from headgate.core.events import Event
from headgate.core.model import App
from headgate.policies import find_policy, policy_names
from headgate.sim.faults import random_plan
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, simulate
from headgate.workload import mix, named, poisson

SEEDS = range(3)
DURATION_NS = 2 * SECOND_NS

# Models that do not fit into memory together, so that weights are loaded and evicted.
CROWDED = declare(
    functions={
        "a": {"exec_time": "4ms", "cold_start": "20ms", "memory": "6GB"},
        "b": {"exec_time": "18ms", "cold_start": "60ms", "swap_in": "8ms", "memory": "12GB"},
    },
    pools={"gpu": {"nodes": 4, "memory": "16GB", "host_memory": "64GB"}},
    slo={"latency": "200ms", "hard_deadline": True},
    limits={"timeout_factor": 4},
).app
# A cascade on nodes whose concurrent batches slow each other down, behind a network.
SHARED = declare(
    functions={
        "small": {"exec_time": "4ms", "slowdown": [1, 1.5, 2.5, 4]},
        "large": {"exec_time": "18ms", "slowdown": [1, 1.5, 2.5, 4], "concurrency": 2},
    },
    pipelines={
        "a": {"stages": {"only": {"function": "small"}}},
        "b": {
            "stages": {
                "first": {"function": "small"},
                "then": {
                    "function": "large",
                    "after": ["first"],
                    "only_if_unsure": True,
                    "unsure_probability": 0.5,
                },
            }
        },
    },
    pools={"gpu": {"nodes": 3, "slots": 4, "network_delay": "1ms"}},
).app

# The same with an objective that not every request can meet, in shapes to choose from.
STAGED = declare(
    functions={
        "small": {"exec_time": ["4ms", "6ms"], "gpu_share": "1/7"},
        "large": {
            "exec_time": ["18ms", "27ms"],
            "gpu_share": "1/7",
            "shapes": [{"gpu_share": "3/7", "exec_time": ["9ms", "14ms"]}],
        },
    },
    pipelines={
        "a": {"stages": {"only": {"function": "small"}}},
        "b": {
            "stages": {
                "first": {"function": "small"},
                "then": {"function": "large", "after": ["first"]},
            }
        },
    },
    pools={"gpu": {"nodes": 2, "slots": 4, "gpu_share": "3/7"}},
    slo={"latency": "20ms"},
).app
STAGED_POLICIES = ("aquatope", "brute_force", "esg", "headgate", "orion")


class _Hasher(Observer):
    """Hashes every event and every action."""

    def __init__(self) -> None:
        self.digest = sha256()
        self.actions = 0

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        wires = [to_wire(action) for action in actions]
        self.actions += len(wires)
        self.digest.update(json.dumps([now_ns, scheduler, to_wire(event), wires]).encode())


def hashed(app: App, policy: str, seed: int) -> str:
    """Return the number of actions of one run under one fault plan, and a hash of the run."""
    observer = _Hasher()
    arrivals = mix(
        [
            named(poisson(300.0, DURATION_NS, seed=seed), "a"),
            named(poisson(60.0, DURATION_NS, seed=seed + 100), "b"),
        ]
    )
    setup = Setup(
        app,
        find_policy(policy),
        seed=seed,
        truth=GroundTruthConfig("lognormal", cv=0.5),
        faults=random_plan(app, DURATION_NS, seed, intensity=2.0).actions(),
    )
    requests = simulate(setup, arrivals, observer=observer).requests
    for column in (requests.started_ns, requests.finished_ns, requests.outcome):
        observer.digest.update(column.tobytes())
    return f"{observer.actions} {observer.digest.hexdigest()}"


def main() -> None:
    """Print the hashes as JSON."""
    runs = {
        f"{policy} {seed}": hashed(CROWDED, policy, seed)
        for policy in policy_names()
        for seed in SEEDS
    }
    runs |= {f"shared {seed}": hashed(SHARED, "balance", seed) for seed in SEEDS}
    runs |= {
        f"staged {policy} {seed}": hashed(STAGED, policy, seed)
        for policy in STAGED_POLICIES
        for seed in SEEDS
    }
    print(json.dumps({"build": build_kind(), "runs": runs}))


if __name__ == "__main__":
    main()
