"""Price lists: the bundled ones, and those of the user that replace them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.config.prices import BUNDLED, FaasSpec, InstanceSpec, read_prices
from headgate.core.errors import ConfigError
from headgate.core.model import MIB

OWN = """
title: our rack
as_of: "2026-01-02"
instances:
  node: {cpus: 12, memory: 64GB, price: $0.30/h}
"""


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_bundled_price_lists() -> None:
    """Numbers that the plan of the hybrid-serving paper rests on."""
    prices = read_prices()
    (functions,) = prices.platforms
    assert functions.cpus(1769 * MIB) == 1.0
    assert functions.sizes_bytes[-1] == 10_240 * MIB
    assert functions.cpus(functions.sizes_bytes[-1]) == pytest.approx(5.79, abs=0.01)
    terms = functions.sized(6656 * MIB)
    assert terms.usd(130_000_000) == pytest.approx(1.43e-5, rel=0.01)
    assert (terms.concurrency_max, terms.burst_concurrency, terms.burst_refill_per_s) == (
        1_000,
        1_000,
        100.0,
    )
    assert terms.bills_cold_start
    by_name = {offer.name: offer for offer in prices.instances}
    assert by_name["ml.c5.large"].cpus == 2
    assert by_name["ml.c5.2xlarge"].usd_per_hour == pytest.approx(0.41, abs=0.01)


def test_a_managed_instance_costs_more_than_the_bare_one() -> None:
    by_name = {offer.name: offer for offer in read_prices().instances}
    pairs = [(name, f"ml.{name}") for name in by_name if f"ml.{name}" in by_name]
    assert pairs
    for plain, managed in pairs:
        assert by_name[managed].cpus == by_name[plain].cpus
        assert by_name[managed].usd_per_hour > by_name[plain].usd_per_hour


@pytest.mark.parametrize("path", sorted(BUNDLED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_number_has_a_provenance(path: Path) -> None:
    """Each key of a list is covered by its provenance, and what is not assumed has a source."""
    prices = read_prices([str(path)])
    first = prices.titles[0]
    rows = [row for row in prices.provenance if f"{row.title} ({row.as_of})" == first]
    covered = {key for row in rows for key in row.keys}
    kinds = (FaasSpec, InstanceSpec)
    assert any(covered == set(kind.__struct_encode_fields__) for kind in kinds), covered
    assert all(row.source for row in rows if row.confidence != "assumed")
    assert path.stem.endswith(rows[0].as_of[:7])


def test_instances_of_the_user_replace_the_bundled_ones(tmp_path: Path) -> None:
    prices = read_prices([write(tmp_path / "own.yaml", OWN)])
    assert [offer.name for offer in prices.instances] == ["node"]
    assert [platform.name for platform in prices.platforms] == ["aws-lambda"]
    assert prices.titles[0] == "our rack (2026-01-02)"


def test_instance_types_by_name() -> None:
    prices = read_prices()
    assert len(prices.instances_named([], "--instance")) == len(prices.instances)
    managed = prices.instances_named(["ml.*", "c5.large"], "--instance")
    assert {offer.name.partition(".")[0] for offer in managed} == {"ml", "c5"}
    with pytest.raises(ConfigError, match=r"'ml.c5.lrge': unknown .* did you mean ml.c5.large"):
        prices.instances_named(["ml.c5.lrge"], "--instance")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("price: $0.30/h", "price: $0.30", "instances.node.price: '$0.30': needs a unit"),
        ("cpus: 12", "cpus: 0", "instances.node.cpus: 0: must be more than zero"),
        ("cpus: 12", "cpus: 2.1234", "instances.node.cpus: 2.1234: has more than three decimals"),
        ("memory: 64GB", "memory: 64", "instances.node.memory: 64: "),
        ("memory", "memori", "'memori': unknown key, did you mean memory?"),
        ('"2026-01-02"', '"January"', "as_of: 'January'"),
        ("title: our rack", "", "title: is missing"),
    ],
)
def test_invalid_price_lists(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = write(tmp_path / "own.yaml", OWN.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_prices([path])
    assert str(caught.value).startswith(path)
    assert problem in str(caught.value)


def test_invalid_function_sizes(tmp_path: Path) -> None:
    text = OWN + "functions: {f: {cpu_memory: 1GiB, price: $1/GB-s, sizes: {SIZES}}}\n"
    for sizes, problem in (
        ("min: 2GiB, max: 1GiB, step: 1GiB", "is larger than `max`"),
        ("min: 1MiB, max: 9GiB, step: 1MiB", "too many sizes"),
        ("min: 1GB, max: 9GB, step: 1GB", "is not a whole number of MiB"),
        ("min: 0B, max: 9GiB, step: 1GiB", "is not a whole number of MiB"),
        ("min: 1GiB, max: unlimited, step: 1GiB", "is not a number with a unit"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_prices([write(tmp_path / "own.yaml", text.replace("SIZES", sizes))])
