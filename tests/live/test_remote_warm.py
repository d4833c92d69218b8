"""Functions that are kept ready: real boto3 calls to a platform that counts them."""

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
from headgate.live.pools.aws_client import make_client
from headgate.live.pools.lambda_pool import LambdaFunctions
from headgate.live.pools.remote_pool import Failed, WarmKeeper

PLATFORM = replace(RIGS, keep_alive_ns=2_000_000_000)  # longer than anything here takes
PERIOD_S = PLATFORM.ping_every_ns / 1e9


class Kept:
    """A platform, and the wishes of a gateway for it."""

    def __init__(self, cloud: FakeLambda, target: str) -> None:
        provider = Provider("lambda", target, cloud.url)
        client = make_client(
            "lambda", provider, connections=8, hang_s=5, where="here", key="pools.cloud"
        )
        functions = LambdaFunctions(client, provider, PLATFORM.payload_bytes_max)
        self.rig = Rig(lambda _: Failed("nobody calls"), threads=8)
        self.warmth = WarmKeeper(
            self.rig.outpost,
            PLATFORM,
            functions.ping,
            functions.provision,
            self.rig,
            lambda function, start_ns: self.rig.starts.append((function, start_ns)),
        )


def keep(tmp_path: Path, target: str, story: Callable[[FakeLambda, Kept], object]) -> FakeLambda:
    with FakeLambda(write_app(tmp_path, "http://unused")) as cloud:

        async def run() -> None:
            kept = Kept(cloud, target)
            result = story(cloud, kept)
            assert asyncio.iscoroutine(result)
            await result
            await kept.warmth.stop()
            await kept.rig.until(lambda: kept.rig.outpost.threads.busy == 0)

        asyncio.run(run())
    return cloud


def test_as_many_as_are_wished_for_are_called_again_and_again(tmp_path: Path) -> None:
    """At the same time, so that each call meets an instance of its own; fewer, and some may go."""

    async def story(cloud: FakeLambda, kept: Kept) -> None:
        cloud.start_s = 0.5  # so that all three are there before the first of them is ready
        began_s = time.monotonic()
        kept.warmth.set_target("double", 3, is_provisioned=False)
        await kept.rig.until(lambda: kept.warmth.pings >= 6)
        assert time.monotonic() - began_s >= PERIOD_S
        assert cloud.running_max == 3
        assert len(kept.rig.starts) == 3  # cold once, and warm from then on
        kept.warmth.set_target("double", 1, is_provisioned=False)
        pings = kept.warmth.pings
        await kept.rig.until(lambda: kept.warmth.pings >= pings + 2)
        assert kept.warmth.pings == pings + 2
        kept.warmth.set_target("double", 0, is_provisioned=False)
        pings = kept.warmth.pings
        await asyncio.sleep(2 * PERIOD_S)
        assert kept.warmth.pings == pings
        assert len(kept.rig.warm_usd) == len(cloud.events)
        assert all(usd > 0.5 for usd in kept.rig.warm_usd)

    cloud = keep(tmp_path, "doubler", story)
    assert all(event["ping"] for event in cloud.events)


def test_those_that_run_need_not_be_called(tmp_path: Path) -> None:
    async def story(cloud: FakeLambda, kept: Kept) -> None:
        kept.rig.outpost.running["double"] = 2
        kept.warmth.set_target("double", 3, is_provisioned=False)
        assert kept.warmth.pings == 1

    keep(tmp_path, "doubler", story)


def test_provisioned_ones_are_ordered_paid_for_and_given_back(tmp_path: Path) -> None:
    async def story(cloud: FakeLambda, kept: Kept) -> None:
        kept.warmth.set_target("double", 2, is_provisioned=True)
        await kept.rig.until(lambda: len(cloud.provisioned) == 1)
        kept.warmth.set_target("double", 5, is_provisioned=True)
        await kept.rig.until(lambda: len(cloud.provisioned) >= 2)
        assert kept.warmth.pings == 0

    cloud = keep(tmp_path, "doubler:live", story)
    assert cloud.provisioned[:2] == [("doubler", "live", 2), ("doubler", "live", 5)]
    assert cloud.provisioned[-1] == ("doubler", "live", 0)  # nobody pays for what nobody uses


def test_without_an_alias_nothing_can_be_provisioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(cloud: FakeLambda, kept: Kept) -> None:
        kept.warmth.set_target("double", 2, is_provisioned=True)
        await kept.rig.until(lambda: "only an alias" in caplog.text)

    cloud = keep(tmp_path, "doubler", story)
    assert cloud.provisioned == []


def test_a_platform_that_does_not_answer_pings_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(cloud: FakeLambda, kept: Kept) -> None:
        cloud.mode = "throttle"
        kept.warmth.set_target("double", 2, is_provisioned=False)
        await kept.rig.until(lambda: "cannot keep double warm" in caplog.text)
        assert kept.rig.warm_usd == []

    keep(tmp_path, "doubler", story)
