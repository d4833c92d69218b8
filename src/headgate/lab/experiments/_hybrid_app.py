"""Shared by the hybrid experiments: an application on instances and functions, and its prices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Final

from headgate.config.prices import PriceList, read_prices
from headgate.core.clock import MILLISECOND_NS
from headgate.core.model import (
    MIB,
    App,
    FaasOffering,
    Function,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.planning.capacity.latency_model import Characterisation
from headgate.profiling.profile_file import bundled_profile

SURROGATE: Final = "surrogate"  # for figure 2 of the paper: agrees with all statements in its text


@cache
def price_list() -> PriceList:
    return read_prices()


@cache
def characterise(source: str) -> Characterisation:
    """Return the response times of the surrogate, or of a model measured on another machine."""
    return Characterisation.surrogate() if source == SURROGATE else bundled_profile(source)


@cache
def lambda_offering(network_ms: float) -> FaasOffering:
    """Return AWS Lambda from the price list, with this one-way network delay."""
    offering = next(each for each in price_list().platforms if each.name == "aws-lambda")
    return replace(offering, network_ns=round(network_ms * MILLISECOND_NS))


def instance_pool(name: str, *, nodes: int, slots: int, boot_ns: int, usd_per_hour: float) -> Pool:
    """Return instances of one type, rented up to a number of nodes."""
    return Pool(
        0,
        name,
        Tier.DEDICATED,
        nodes=nodes,
        slots=slots,
        is_elastic=True,
        boot_ns=boot_ns,
        usd_per_hour=usd_per_hour,
    )


def function_pool(offering: FaasOffering, memory_mb: int) -> Pool:
    return Pool(
        1,
        offering.name,
        Tier.SERVERLESS,
        nodes=0,
        network_ns=offering.network_ns,
        faas=offering.sized(memory_mb * MIB),
    )


def hybrid_app(
    name: str,
    instances: Pool,
    functions: Pool,
    on_instance: Profile,
    on_function: Profile,
    slo: Slo,
    prewarm_nodes: int = 1,
) -> App:
    """Return an application of one function, which runs on instances and as a function."""
    variants = (
        Variant(0, "instance", 0, (instances.id,), on_instance, concurrency=instances.slots),
        Variant(1, "function", 0, (functions.id,), on_function),
    )
    function = Function(0, name, variants, prewarm_nodes=prewarm_nodes)
    pipeline = Pipeline(0, name, (Stage(function),), slo)
    return App((function,), (pipeline,), (instances, functions))
