"""One page of metrics for several gateways."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

from headgate.config import declare
from headgate.live.telemetry.merged_pages import MergedPages, merge_pages
from headgate.live.telemetry.metrics import Metrics
from headgate.live.telemetry.prometheus import OPEN_METRICS, Exposition


def exposition(starts: int) -> Exposition:
    functions = {name: {"exec_time": "1ms"} for name in ("f", "g")}
    app = declare(functions=functions, pools={"cpu": {}}).app
    metrics = Metrics(app)
    for _ in range(starts):
        metrics.cold_started("f", 5)
    return Exposition(metrics)


def test_both_formats_can_be_parsed_and_hold_every_sample_once() -> None:
    for accept, parse in (("", text), (OPEN_METRICS, openmetrics)):
        pages = {slot: exposition(slot + 1).text(accept)[0] for slot in range(2)}
        own = {
            slot: sum(len(family.samples) for family in parse(page.decode()))
            for slot, page in pages.items()
        }
        families = list(parse(merge_pages(pages).decode()))
        samples = [sample for family in families for sample in family.samples]
        keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples]
        assert len(set(keys)) == len(keys) == sum(own.values()) + 2
        starts = {s.labels["gateway"]: s.value for s in samples if s.name.endswith("starts_total")}
        assert starts == {"0": 1.0, "1": 2.0}
        assert len({family.name for family in families}) == len(families)


def test_gateway_that_does_not_answer_is_down(tmp_path: Path) -> None:
    """1. Of three gateways one never ran. 2. Another ends. 3. A killed one is replaced."""

    async def scenario() -> None:
        pages = [MergedPages(tmp_path, slot, 3, exposition(slot).text) for slot in range(2)]
        for each in pages:
            await each.start()
        assert await up(pages[0]) == await up(pages[1]) == [1.0, 1.0, 0.0]
        pages[1].close()
        assert await up(pages[0]) == [1.0, 0.0, 0.0]
        again = MergedPages(tmp_path, 1, 3, exposition(1).text)
        (tmp_path / "metrics-1.sock").touch()
        await again.start()
        assert await up(pages[0]) == await up(again) == [1.0, 1.0, 0.0]
        for each in (pages[0], again):
            each.close()

    async def up(pages: MergedPages) -> list[float]:
        page, _ = await pages.collect("")
        families = text(page.decode())
        (family,) = (each for each in families if each.name == "headgate_gateway_up")
        return [sample.value for sample in family.samples]

    asyncio.run(scenario())
