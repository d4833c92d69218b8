"""Arrival specifications: `poisson:rate=50/s`, `closed:clients=5+20,every=10s`.

A specification is a kind and its parameters; several values of one parameter are joined by `+`. Any
kind takes a `pipeline` and a `client`, the names that its requests have; any kind but a closed loop
takes `items`, the sizes of its requests, and `priority`, the priorities that they claim. Several
sizes or priorities are equally likely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np

from headgate.core.errors import ConfigError
from headgate.core.units import parse_duration, parse_rate
from headgate.workload import generators
from headgate.workload.arrivals import (
    ARRIVALS_MAX,
    DEFAULT_NAME,
    Arrivals,
    ClosedLoop,
    ConcurrencyStep,
    Int32,
    check_positive,
)
from headgate.workload.transforms import named

# Columns that are drawn for each request, with the least and the largest value.
_DRAWN: Final = {"items": (1, 1_000_000), "priority": (0, 1_000)}
CLIENTS_MAX: Final = 1_000_000  # in one closed loop; more is surely a mistake
Value = TypeVar("Value")


def parse_arrivals(spec: str, *, duration_ns: int, seed: int) -> Arrivals | ClosedLoop:
    """Return the arrivals, or the closed loop, of a specification, over `duration_ns`.

    Raises ConfigError for an unknown kind or parameter, listing those that exist.

    >>> len(parse_arrivals("deterministic:rate=10/s", duration_ns=10**9, seed=0))
    10
    """
    kind, _, text = spec.strip().partition(":")
    if kind not in _KINDS:
        allowed = ", ".join(_KINDS)
        raise ConfigError("unknown kind of arrivals", value=kind, allowed=allowed)
    names, build = _KINDS[kind]
    drawn = () if kind == "closed" else tuple(_DRAWN)
    values = _values(kind, text, (*names, "pipeline", "client", *drawn))
    labels = values.get("pipeline", DEFAULT_NAME), values.get("client", DEFAULT_NAME)
    try:
        parameters = _Parameters(kind, values, duration_ns, seed)
        arrivals = build(parameters)
        if isinstance(arrivals, Arrivals):
            arrivals = _with_drawn_columns(arrivals, parameters)
    except ConfigError as error:
        if error.key not in values:
            raise
        key, value = f"{kind}.{error.key}", values[error.key]  # as written in the specification
        raise ConfigError(error.problem, key=key, value=value, allowed=error.allowed) from None
    if isinstance(arrivals, ClosedLoop):
        return replace(arrivals, pipeline=labels[0], client=labels[1])
    return named(arrivals, *labels)


def _values(kind: str, text: str, names: tuple[str, ...]) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in text.split(",") if text else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in names or not equals or name in values:
            problem = "is given twice" if name in values else "is not a parameter with a value"
            raise ConfigError(problem, key=kind, value=part, allowed=", ".join(names))
        values[name] = value
    return values


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of one specification, parsed on demand."""

    kind: str
    values: dict[str, str]
    duration_ns: int
    seed: int

    def one(self, name: str, parse: Callable[..., Value], default: str = "") -> Value:
        text = self.values.get(name, default)
        if not text:
            key = f"{self.kind}.{name}"
            raise ConfigError("is missing", key=key, allowed=f"{name}={_EXAMPLES[name]}")
        return parse(text, key=f"{self.kind}.{name}")

    def several(self, name: str, parse: Callable[..., Value]) -> list[Value]:
        def parse_all(text: str, key: str) -> list[Value]:
            return [parse(piece, key=key) for piece in text.split("+")]

        return self.one(name, parse_all)


def _number(text: str, key: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError("is not a number", key=key, value=text, allowed="2, 0.5") from None


def _whole(text: str, key: str, least: int, most: int) -> int:
    if not text.isdecimal():
        allowed = f"{least} to {most:,}"
        raise ConfigError("is not a whole number", key=key, value=text, allowed=allowed)
    if len(text) > 20 or not least <= int(text) <= most:  # int() raises for thousands of digits
        allowed = f"{least} to {most:,}"
        raise ConfigError("is out of range", key=key, value=text, allowed=allowed)
    return int(text)


def _with_drawn_columns(arrivals: Arrivals, spec: _Parameters) -> Arrivals:
    """Draw the size and the priority of each request, from those of a specification."""
    columns: dict[str, Int32] = {}
    for name, (least, most) in _DRAWN.items():
        if name in spec.values:
            choices = spec.several(name, partial(_whole, least=least, most=most))
            rng = generators.column_stream(spec.seed, name)
            columns[name] = rng.choice(np.array(choices, dtype=np.int32), len(arrivals))
    return replace(
        arrivals,
        items=columns.get("items", arrivals.items),
        priority=columns.get("priority", arrivals.priority),
    )


def _gamma(spec: _Parameters) -> Arrivals:
    rate_per_s, cv = spec.one("rate", parse_rate), spec.one("cv", _number)
    return generators.gamma(rate_per_s, cv, spec.duration_ns, seed=spec.seed)


def _mmpp(spec: _Parameters) -> Arrivals:
    rates_per_s = spec.several("rates", parse_rate)
    dwells_ns = spec.several("stay", parse_duration)
    return generators.mmpp(rates_per_s, dwells_ns, spec.duration_ns, seed=spec.seed)


def _stepped(spec: _Parameters) -> Arrivals:
    rates_per_s, step_ns = spec.several("rates", parse_rate), spec.one("every", parse_duration)
    return generators.stepped(rates_per_s, step_ns, spec.duration_ns, seed=spec.seed)


def _closed(spec: _Parameters) -> ClosedLoop:
    clients = spec.several("clients", partial(_whole, least=0, most=CLIENTS_MAX))
    every_ns = 0
    if len(clients) > 1:
        every_ns = spec.one("every", parse_duration)
        check_positive("every", every_ns)
    limit = partial(_whole, least=1, most=ARRIVALS_MAX)
    return ClosedLoop(
        tuple(ConcurrencyStep(step * every_ns, number) for step, number in enumerate(clients)),
        spec.duration_ns,
        think_ns=spec.one("think", parse_duration, "0s"),
        requests_max=spec.one("requests", limit) if "requests" in spec.values else None,
    )


_EXAMPLES: Final = {  # of parameters without a default
    "rate": "50/s",
    "cv": "2",
    "rates": "10/s+100/s",
    "stay": "30s+5s",
    "clients": "5+20",
    "every": "10s",
}
_KINDS: Final[dict[str, tuple[tuple[str, ...], Callable[[_Parameters], Arrivals | ClosedLoop]]]] = {
    "deterministic": (
        ("rate",),
        lambda spec: generators.deterministic(spec.one("rate", parse_rate), spec.duration_ns),
    ),
    "poisson": (
        ("rate",),
        lambda spec: generators.poisson(
            spec.one("rate", parse_rate), spec.duration_ns, seed=spec.seed
        ),
    ),
    "gamma": (("rate", "cv"), _gamma),
    "mmpp": (("rates", "stay"), _mmpp),
    "stepped": (("rates", "every"), _stepped),
    "closed": (("clients", "every", "think", "requests"), _closed),
}
