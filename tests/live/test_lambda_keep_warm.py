"""Keep-warm with real boto3 calls to a platform that counts them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_lambda import FakeLambda
from remote_app import write_app

sys.path.append(str(Path(__file__).parents[1] / "unit" / "live"))
from remote_rig import PLATFORM as RIGS
from remote_rig import Rig

pytest.importorskip("boto3")

from headgate.config.providers import Provider
from headgate.live.pools import remote_pool
from headgate.live.pools.aws_client import make_client
from headgate.live.pools.lambda_pool import LambdaFunctions
from headgate.live.pools.remote_pool import Failed, WarmKeeper

PLATFORM = replace(RIGS, keep_alive_ns=2_000_000_000)  # longer than any of these tests
PERIOD_S = PLATFORM.ping_every_ns / 1e9


class WarmRig:
    """A platform, and the keep-warm of a gateway for it."""

    def __init__(self, cloud: FakeLambda, target: str) -> None:
        provider = Provider("lambda", target, cloud.url)
        client = make_client(
            "lambda", provider, connections=8, hang_s=5, where="here", key="pools.cloud"
        )
        functions = LambdaFunctions(client, provider, PLATFORM.payload_bytes_max)
        self.rig = Rig(lambda _: Failed("nobody calls"), threads=8)
        self.keeper = WarmKeeper(
            self.rig.pool,
            PLATFORM,
            functions.ping,
            functions.provision,
            self.rig,
            lambda function, start_ns: self.rig.starts.append((function, start_ns)),
        )


def keep(
    tmp_path: Path, target: str, scenario: Callable[[FakeLambda, WarmRig], object]
) -> FakeLambda:
    with FakeLambda(write_app(tmp_path, "http://unused")) as cloud:

        async def run() -> None:
            kept = WarmRig(cloud, target)
            result = scenario(cloud, kept)
            assert asyncio.iscoroutine(result)
            await result
            await kept.keeper.stop()
            await kept.rig.until(lambda: kept.rig.pool.threads.busy == 0)

        asyncio.run(run())
    return cloud


def test_target_instances_are_pinged_periodically(tmp_path: Path) -> None:
    """Concurrently, so that each ping reaches an instance of its own; with a lower target some may
    expire.
    """

    async def scenario(cloud: FakeLambda, kept: WarmRig) -> None:
        # so that all three pings are in flight before the first instance is ready
        cloud.start_s = 0.5
        began_s = time.monotonic()
        kept.keeper.set_target("double", 3, is_provisioned=False)
        await kept.rig.until(lambda: kept.keeper.pings >= 6)
        assert time.monotonic() - began_s >= PERIOD_S
        assert cloud.running_max == 3
        assert len(kept.rig.starts) == 3  # cold once, warm from then on
        kept.keeper.set_target("double", 1, is_provisioned=False)
        pings = kept.keeper.pings
        await kept.rig.until(lambda: kept.keeper.pings >= pings + 2)
        assert kept.keeper.pings == pings + 2
        kept.keeper.set_target("double", 0, is_provisioned=False)
        pings = kept.keeper.pings
        await asyncio.sleep(2 * PERIOD_S)
        assert kept.keeper.pings == pings
        assert len(kept.rig.warm_usd) == len(cloud.events)
        assert all(usd > 0.5 for usd in kept.rig.warm_usd)

    cloud = keep(tmp_path, "doubler", scenario)
    assert all(event["ping"] for event in cloud.events)


def test_running_instances_are_not_pinged(tmp_path: Path) -> None:
    async def scenario(cloud: FakeLambda, kept: WarmRig) -> None:
        kept.rig.pool.running["double"] = 2
        kept.keeper.set_target("double", 3, is_provisioned=False)
        assert kept.keeper.pings == 1

    keep(tmp_path, "doubler", scenario)


def test_provisioned_instances_are_requested_billed_and_removed(tmp_path: Path) -> None:
    async def scenario(cloud: FakeLambda, kept: WarmRig) -> None:
        kept.keeper.set_target("double", 2, is_provisioned=True)
        await kept.rig.until(lambda: len(cloud.provisioned) == 1)
        kept.keeper.set_target("double", 5, is_provisioned=True)
        await kept.rig.until(lambda: len(cloud.provisioned) >= 2)
        assert kept.keeper.pings == 0

    cloud = keep(tmp_path, "doubler:live", scenario)
    assert cloud.provisioned[:2] == [("doubler", "live", 2), ("doubler", "live", 5)]
    # provisioned instances are removed at the end
    assert cloud.provisioned[-1] == ("doubler", "live", 0)


def test_provisioning_needs_an_alias(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_pool, "DEPROVISION_WAIT_S", 0.1)

    async def scenario(cloud: FakeLambda, kept: WarmRig) -> None:
        kept.keeper.set_target("double", 2, is_provisioned=True)
        await kept.rig.until(lambda: "only an alias" in caplog.text)

    cloud = keep(tmp_path, "doubler", scenario)
    assert cloud.provisioned == []


def test_failing_pings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cloud: FakeLambda, kept: WarmRig) -> None:
        cloud.mode = "throttle"
        kept.keeper.set_target("double", 2, is_provisioned=False)
        await kept.rig.until(lambda: "cannot keep double warm" in caplog.text)
        assert kept.rig.warm_usd == []

    keep(tmp_path, "doubler", scenario)
