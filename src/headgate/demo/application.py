"""The application of the demonstration: one machine of one core, and functions for the rest."""

from __future__ import annotations

from typing import Final

from headgate.app.prices import PriceList
from headgate.core.offers import MIB, FunctionPlatform, InstanceType
from headgate.core.units import format_duration
from headgate.demo.scale import CODE, FUNCTION, MANY, OVERHEAD_MS, QUANTILE, Scale, options
from headgate.demo.times import Times
from headgate.planning.characterisation import profile_of

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
    platform: FunctionPlatform,
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
    start = format_duration(profile.start_ns)
    terms = platform.sized(MEMORY_MB * MIB)
    common: Spec = {
        "code": CODE,
        "options": options(scale.model, scale.sessions),
        "start": start,
    }
    return {
        "functions": {
            FUNCTION: {
                "warm": 1,
                "variants": {
                    MACHINE: {
                        **common,
                        "exec": f"{faster * times.machine_ms:.4f}ms",
                        "slowdown": [round(factor, 4) for factor in profile.slowdown],
                        "concurrency": MANY,
                        "pools": [MACHINE],
                    },
                    FUNCTIONS: {
                        **common,
                        "exec": f"{times.call_ms:.4f}ms",
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
