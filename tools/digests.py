"""Digests of every decision, to show that a change of names or layout changes no decision.

    python tools/digests.py [--experiments] > digests.json

Prints one hash for every policy in each of twenty random cases full of faults, and with
`--experiments` one for the rows of every experiment in its quick form. Only numbers are hashed:
times, ids, counts. Kinds of events and actions enter by an ordinal that is frozen here, and no
name or other text enters, so that a renamed thing keeps its digest. `PYTHONPATH` chooses the
build: interpreted or compiled.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterable
from hashlib import sha256

from headgate.core import build_kind
from headgate.core.actions import Action
from headgate.core.event_log import to_wire
from headgate.core.events import Event
from headgate.lab.experiments import experiment_names, find_experiment
from headgate.policies import find_policy, policy_names
from headgate.sim.fuzz import run_case
from headgate.sim.interfaces import Observer

CASES = range(20)

# Never reordered: a kind that is renamed keeps its place, and one that goes leaves a gap.
ORDINALS = {
    "Dispatch": 0,
    "CancelBatch": 1,
    "StartInstance": 2,
    "StopInstance": 3,
    "LoadWeights": 4,
    "EvictWeights": 5,
    "KeepWarm": 6,
    "SetTimer": 7,
    "CancelTimer": 8,
    "Settle": 9,
    "RequestArrived": 10,
    "RequestAnnounced": 11,
    "RequestCancelled": 12,
    "BatchFinished": 13,
    "BatchFailed": 14,
    "BatchRefused": 15,
    "BatchLost": 16,
    "InstanceStarted": 17,
    "InstanceAppeared": 18,
    "InstanceStopped": 19,
    "WeightsLoaded": 20,
    "WeightsEvicted": 21,
    "NodeJoined": 22,
    "NodeLost": 23,
    "TimerFired": 24,
    "LoadFailed": 25,
    "ReportFault": 26,
    "ReportWouldReject": 27,
    "InstanceUseChanged": 28,
    "GatewaysChanged": 29,
}


def numbers_of(value: object) -> Iterable[float]:
    """Every number in a value, in order; names and other text are left out."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from numbers_of(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from numbers_of(each)
    elif value is None:
        yield -1


class Digest(Observer):
    """Hashes what the schedulers of a run are told and what they decide."""

    def __init__(self) -> None:
        self.hash = sha256()

    def add(self, value: object) -> None:
        for number in numbers_of(value):
            self.hash.update(
                struct.pack("<d", number) if isinstance(number, float) else b"%d;" % number
            )

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.add((now_ns, scheduler, len(actions)))
        things: list[Event | Action] = [event, *actions]
        for thing in things:
            name, *values = to_wire(thing)
            if name in ("Dispatch", "StartInstance") and values[-1] == 0:
                values.pop()  # the shape, which is younger than these digests
            self.add((ORDINALS[str(name)], values))


def case_digest(policy: str, seed: int) -> str:
    """The digest of one policy in one random case."""
    digest = Digest()
    run = run_case(find_policy(policy), seed, digest)
    digest.add([int(outcome) for outcome in run.requests.outcome])
    return digest.hash.hexdigest()[:16]


def experiment_digest(name: str) -> str:
    """The digest of an experiment's rows."""
    digest = Digest()
    print(name, file=sys.stderr)
    result = find_experiment(name).run(quick=True, out=None, progress=lambda line: None)
    for row in result.rows:
        digest.add(list(row.values()))
    for check in result.checks:
        digest.add((check.expected, check.measured, check.holds))
    return digest.hash.hexdigest()[:16]


def main() -> None:
    """Print the digests as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--experiments", action="store_true")
    options = parser.parse_args()
    found = {"build": build_kind()}
    for policy in sorted(policy_names()):
        found |= {f"{policy}:{seed}": case_digest(policy, seed) for seed in CASES}
    if options.experiments:
        found |= {name: experiment_digest(name) for name in sorted(experiment_names())}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
