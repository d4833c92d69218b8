"""Everybody measured, round after round: rows as they come, and why somebody is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headgate.bench.live.bodies import make_request
from headgate.bench.live.contestant import Contestant
from headgate.bench.live.drive import Lap, drive
from headgate.bench.live.environment import NotInstalledError, python_of
from headgate.bench.live.models import Alone, example, expected, measure_alone, write_models
from headgate.bench.live.process import ServerError, running
from headgate.experiments.experiment import Progress


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured and for how long."""

    contestants: tuple[Contestant, ...]
    cache: Path  # where environments and models are kept
    models: tuple[str, ...] = ("echo", "cnn", "wide")
    concurrencies: tuple[int, ...] = (1, 8, 32, 64)
    rounds: int = 2
    seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Stay:
    """One server's turn in one round: how it started, what it held, how fast it was."""

    contestant: Contestant
    model: str
    round: int
    first_answer_s: float
    memory_mib: float  # after all laps
    laps: dict[int, Lap]  # by concurrency


@dataclass(slots=True)
class Measured:
    """Everything that was found, and the reason for whatever was not."""

    plan: Plan
    stays: list[Stay] = field(default_factory=list)
    alone: list[Alone] = field(default_factory=list)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)  # by contestant and model

    def of(self, contestant: Contestant, model: str) -> list[Stay]:
        """The turns of one contestant with one model."""
        return [
            stay
            for stay in self.stays
            if stay.contestant.name == contestant.name and stay.model == model
        ]


def measure(plan: Plan, progress: Progress) -> Measured:
    """Measure everybody. Who cannot be installed or does not answer rightly is in `missing`."""
    found = Measured(plan)
    models = plan.cache / "models"
    progress("making the models")
    write_models(models)
    pythons = _install(plan, found, progress)
    for number in range(plan.rounds):
        for model in plan.models:
            if model != "echo":
                found.alone += [measure_alone(model, b, models, plan.seconds) for b in (1, 8)]
            for contestant in plan.contestants:
                if contestant.name in pythons and model in contestant.models:
                    progress(f"round {number + 1} of {plan.rounds}: {contestant.name}, {model}")
                    _stay(found, contestant, model, number, pythons[contestant.name])
    return found


def _install(plan: Plan, found: Measured, progress: Progress) -> dict[str, Path]:
    pythons = {}
    for contestant in plan.contestants:
        progress(f"installing {contestant.name}")
        try:
            requirements, folder = contestant.requirements, contestant.folder.name
            pythons[contestant.name] = python_of(requirements, plan.cache, folder)
        except NotInstalledError as error:
            for model in contestant.models:
                found.missing[contestant.name, model] = f"not installed: {error}"
    return pythons


def _stay(found: Measured, contestant: Contestant, model: str, number: int, python: Path) -> None:
    plan = found.plan
    models = plan.cache / "models"
    body = make_request(contestant.models[model].body, example(model))
    right = expected(model, models)
    try:
        with running(contestant, model, python, models, body, right) as server:
            laps = {c: drive(server.url, body, c, plan.seconds) for c in plan.concurrencies}
            memory_mib = server.memory_mib()
            stay = Stay(contestant, model, number, server.first_answer_s, memory_mib, laps)
    except ServerError as error:
        found.missing[contestant.name, model] = str(error)
    else:
        found.stays.append(stay)
