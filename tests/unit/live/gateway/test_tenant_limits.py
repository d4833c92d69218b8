"""Limits of tenants where several gateways share them."""

from __future__ import annotations

import pytest

from headgate.config import declare
from headgate.core.clock import SECOND_NS
from headgate.live.gateway.config import GatewayConfig, TenantLimit, gateway_config
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.tenants import ApiKeys, Tenant


def admitted(tenant: Tenant, now_ns: int) -> int:
    """Return how many requests a tenant may have at once, from now on."""
    count = 0
    with pytest.raises(RequestError):
        while count < 1_000:
            tenant.admit(now_ns)
            count += 1
    return count


@pytest.mark.parametrize(("gateways", "concurrency", "rate"), [(1, 10, 8), (2, 5, 4), (3, 4, 2)])
def test_gateways_divide_concurrency_and_rate(gateways: int, concurrency: int, rate: int) -> None:
    """Together they allow no more than the limit, but for rounding up concurrency."""
    limits = TenantLimit(0, concurrency_max=10), TenantLimit(1, rate_per_s=8.0, burst=8)
    keys = ApiKeys(GatewayConfig(tenants=limits))
    keys.divide(gateways, 0)
    tenants = keys._tenants
    assert admitted(tenants[0], 0) == concurrency
    assert admitted(tenants[1], 0) == rate
    assert admitted(tenants[1], SECOND_NS) == rate


def test_gateways_that_come_and_go_give_no_client_a_fresh_burst() -> None:
    """A client with an empty bucket has what its rate has earned since, and no more."""
    tenant = Tenant(TenantLimit(1, rate_per_s=8.0, burst=8))
    assert admitted(tenant, 0) == 8
    for gateways in (2, 1) * 20:
        tenant.divide(gateways, 0)
    assert admitted(tenant, 0) == 0
    tenant.divide(2, SECOND_NS // 2)  # half a second has filled half of the bucket
    assert admitted(tenant, SECOND_NS // 2) == 2


@pytest.mark.parametrize(
    ("client", "burst"),
    [
        ({"rate": "1/s"}, 1),
        ({"rate": "30/min"}, 1),
        ({"rate": "2.5/s"}, 3),
        ({"rate": "250/s"}, 250),
        ({"rate": "250/s", "burst": 2}, 2),
    ],
)
def test_the_burst_of_a_client_is_a_second_of_its_rate(client: object, burst: int) -> None:
    functions = {"f": {"exec_time": "1ms"}}
    config = declare(functions=functions, pools={"cpu": {}}, clients={"a": client})
    (limit,) = gateway_config(config).tenants
    assert limit.burst == burst
    assert admitted(Tenant(limit), 0) == burst


def test_connections_and_memory_are_divided() -> None:
    serve = {"gateways": 4, "connections_max": 100, "memory_max": "400MiB"}
    config = declare(functions={"f": {"exec_time": "1ms"}}, pools={"cpu": {}}, serve=serve)
    divided = gateway_config(config)
    assert (divided.connections_max, divided.memory_bytes_max) == (25, 100 << 20)
