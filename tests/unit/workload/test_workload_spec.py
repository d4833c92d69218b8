from __future__ import annotations

import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload import (
    Arrivals,
    ClosedLoop,
    ConcurrencyStep,
    deterministic,
    gamma,
    mmpp,
    parse_arrivals,
    poisson,
    stepped,
)

MINUTE_NS = 60 * SECOND_NS


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("deterministic:rate=10/s", deterministic(10.0, MINUTE_NS)),
        ("poisson:rate=50/s", poisson(50.0, MINUTE_NS, seed=3)),
        ("gamma:rate=50/s,cv=4", gamma(50.0, 4.0, MINUTE_NS, seed=3)),
        (
            "mmpp:rates=10/s+100/s,stay=30s+5s",
            mmpp([10.0, 100.0], [30 * SECOND_NS, 5 * SECOND_NS], MINUTE_NS, seed=3),
        ),
        (
            "stepped:rates=5/s+20/s, every=10s",
            stepped([5.0, 20.0], 10 * SECOND_NS, MINUTE_NS, seed=3),
        ),
    ],
)
def test_a_specification_gives_the_arrivals_of_its_generator(spec: str, expected: Arrivals) -> None:
    arrivals = parse_arrivals(spec, duration_ns=MINUTE_NS, seed=3)
    assert isinstance(arrivals, Arrivals)
    assert arrivals.times_ns.tolist() == expected.times_ns.tolist()
    assert arrivals.duration_ns == MINUTE_NS


def test_a_closed_loop() -> None:
    spec = "closed:clients=5+20,every=10s,think=100ms,requests=1000,pipeline=ocr,client=lab"
    assert parse_arrivals(spec, duration_ns=MINUTE_NS, seed=0) == ClosedLoop(
        (ConcurrencyStep(0, 5), ConcurrencyStep(10 * SECOND_NS, 20)),
        MINUTE_NS,
        think_ns=SECOND_NS // 10,
        pipeline="ocr",
        client="lab",
        requests_max=1000,
    )


def test_a_closed_loop_of_one_step_needs_only_clients() -> None:
    loop = parse_arrivals("closed:clients=5", duration_ns=MINUTE_NS, seed=0)
    assert loop == ClosedLoop((ConcurrencyStep(0, 5),), MINUTE_NS)


def test_names_can_be_given_to_any_kind() -> None:
    spec = "poisson:rate=50/s,pipeline=ocr,client=lab"
    arrivals = parse_arrivals(spec, duration_ns=MINUTE_NS, seed=3)
    assert isinstance(arrivals, Arrivals)
    assert (arrivals.pipelines, arrivals.clients) == (("ocr",), ("lab",))


def test_sizes_can_be_given_to_any_open_kind() -> None:
    """They are equally likely and do not change the times."""
    plain = parse_arrivals("poisson:rate=50/s", duration_ns=MINUTE_NS, seed=3)
    sized = parse_arrivals("poisson:rate=50/s,items=1+4+4", duration_ns=MINUTE_NS, seed=3)
    again = parse_arrivals("poisson:rate=50/s,items=1+4+4", duration_ns=MINUTE_NS, seed=3)
    assert isinstance(plain, Arrivals)
    assert isinstance(sized, Arrivals)
    assert isinstance(again, Arrivals)
    assert sized.times_ns.tolist() == plain.times_ns.tolist()
    assert sized.sizes.tolist() == again.sizes.tolist()
    assert set(sized.sizes.tolist()) == {1, 4}
    assert sized.sizes.mean() == pytest.approx(3.0, abs=0.2)


def test_priorities_can_be_given_to_any_open_kind() -> None:
    both = "poisson:rate=50/s,items=1+4,priority=0+7"
    arrivals = parse_arrivals(both, duration_ns=MINUTE_NS, seed=3)
    alone = parse_arrivals("poisson:rate=50/s,items=1+4", duration_ns=MINUTE_NS, seed=3)
    assert isinstance(arrivals, Arrivals)
    assert isinstance(alone, Arrivals)
    assert set(arrivals.priorities.tolist()) == {0, 7}
    assert arrivals.sizes.tolist() == alone.sizes.tolist()  # each column has a stream of its own
    assert alone.priority is None
    assert set(alone.priorities.tolist()) == {0}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("uniform:rate=5/s", "'uniform': unknown kind .*allowed: deterministic, poisson, gamma,"),
        ("", "unknown kind"),
        ("poisson", "poisson.rate: is missing .allowed: rate=50/s"),
        ("poisson:rate=", "poisson.rate: is missing"),
        ("poisson:rate=50", "poisson.rate: '50': needs a unit"),
        (
            "poisson:speed=50/s",
            "'speed=50/s': is not a parameter .*allowed: rate, pipeline, client",
        ),
        ("poisson:rate", "'rate': is not a parameter with a value"),
        ("poisson:rate=5/s,rate=6/s", "is given twice"),
        ("gamma:rate=5/s,cv=x", "gamma.cv: 'x': is not a number"),
        ("mmpp:rates=5/s+6/s,stay=1s", "one dwell time for each of 2 rates"),
        ("closed:clients=2.5", "closed.clients: '2.5': is not a whole number"),
        ("closed:clients=2+3", "closed.every: is missing .allowed: every=10s"),
        ("gamma:rate=5/s", "gamma.cv: is missing .allowed: cv=2"),
        ("stepped:every=5s", "stepped.rates: is missing .allowed: rates="),
        ("mmpp:rates=5/s+6/s", "mmpp.stay: is missing .allowed: stay="),
        ("closed:clients=2+3,every=0s", "^closed.every: '0s': must be positive .*more than 0"),
        ("poisson:rate=5/s,items=0", "^poisson.items: '0': .*allowed: 1 to "),
        ("poisson:rate=5/s,items=1+x", "^poisson.items: '.*': is not a whole number"),
        ("closed:clients=2,items=2", "'items=2': is not a parameter"),
        ("closed:clients=1000001", "^closed.clients: '1000001': .*allowed: 0 to 1,000,000"),
        ("closed:clients=" + "9" * 5_000, "is out of range"),
        ("closed:clients=2,requests=0", "^closed.requests: '0': .*allowed: 1 to "),
        ("mmpp:rates=5/s+6/s,stay=0s+1s", r"^mmpp.stay: '0s\+1s': must be positive"),
        ("poisson:rate=0/s", "^poisson.rate: '0/s': must be positive .*more than 0"),
        ("gamma:rate=5/s,cv=0", "^gamma.cv: '0': is out of range"),
    ],
)
def test_a_bad_specification_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arrivals(spec, duration_ns=MINUTE_NS, seed=0)
