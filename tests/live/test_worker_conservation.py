"""Random actions of gateways: each batch and each instance ends exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from threading import Thread

import pytest
from worker_rig import Gateway, code, row, worker

from headgate.core.actions import CancelBatch, StartInstance, StopInstance
from headgate.core.event_log import from_wire
from headgate.core.events import BatchRefused, InstanceStarted, InstanceStopped
from headgate.live.ipc.messages import BatchRan, EventMessage


def play(gateway: Gateway, random: Random, steps: int, first_id: int) -> None:
    """Send random actions, and check that all of them end. Ids begin with `first_id`."""
    batches, ended = 0, Counter[int]()
    started, stopped = Counter[int](), Counter[int]()

    def hear(*, until: bool) -> None:
        gateway.sock.settimeout(60 if until else 0.0005)
        try:
            message = gateway.receive()
        except (TimeoutError, BlockingIOError):
            assert not until, "something never ends"
            return
        finally:
            gateway.sock.settimeout(60)  # for sending as well
        if isinstance(message, BatchRan):
            ended[message.batch_id - first_id] += 1
            return
        assert isinstance(message, EventMessage)
        event = from_wire(message.wire)
        if isinstance(event, BatchRefused):
            ended[event.batch_id - first_id] += 1
        elif isinstance(event, InstanceStarted):
            started[event.instance_id - first_id] += 1
        else:
            assert isinstance(event, InstanceStopped)
            if 0 <= event.instance_id - first_id < instances:  # else it is of the other gateway
                stopped[event.instance_id - first_id] += 1

    instances = 0
    for _ in range(steps):
        choice = random.random()
        if choice < 0.1 or not instances:
            gateway.order(StartInstance(first_id + instances, random.randrange(2), 0, 0))
            instances += 1
        elif choice < 0.15:
            gateway.order(StopInstance(first_id + random.randrange(instances), 0))
        elif choice < 0.3 and batches:
            gateway.order(CancelBatch(first_id + random.randrange(batches), 0, 0))
        else:
            instance_id = first_id + random.randrange(max(0, instances - 4), instances)
            nap = row(random.choice((0, 0, 0.001)))
            gateway.run(nap, batch_id=first_id + batches, instance_id=instance_id)
            batches += 1
        if random.random() < 0.5:
            hear(until=False)
    for instance_id in range(instances):
        if not stopped[instance_id]:
            gateway.order(StopInstance(first_id + instance_id, 0))
    while len(ended) < batches or len(stopped) < instances:
        hear(until=True)
    assert set(ended) == set(range(batches))
    assert set(ended.values()) == {1}
    assert set(started.values()) <= {1}


@pytest.mark.parametrize(("slots", "seed"), [(1, 1), (1, 2), (3, 3)])
def test_every_batch_and_instance_ends_once(tmp_path: Path, slots: int, seed: int) -> None:
    functions = {"echo": code("echo", concurrency=2), "nap": code("nap")}
    failures: list[BaseException] = []

    def guarded(gateway: Gateway, random: Random, first_id: int) -> None:
        try:
            play(gateway, random, 250, first_id)
        except BaseException as error:
            failures.append(error)

    with worker(tmp_path, functions, pool={"slots": slots, "queue_max": 4}) as process:
        quitter = process.gateway()  # disconnects in between
        quitter.start()
        threads = [
            Thread(
                target=guarded,
                args=(process.gateway(), Random(10 * seed + index), (index + 1) << 40),
            )
            for index in range(2)
        ]
        for thread in threads:
            thread.start()
        for batch_id in range(9):
            quitter.run(row(0), batch_id=batch_id)
        quitter.close()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert process.end() == 0
