"""The Broker of a live pool: the supervisor grants the nodes of real workers to gateways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from worker_rig import WorkerProcess, code, row, worker

from headgate.core.actions import StartInstance, StopInstance
from headgate.core.backend import STARTED_ALREADY
from headgate.core.events import Event, InstanceStopped
from headgate.core.ids import first_id
from headgate.live.deployment import read_deployment
from headgate.live.node_grants import NodeGrants

ONE, OTHER = first_id(1), first_id(2)


class Grants:
    """The supervisor's part, and what it has told the gateways."""

    def __init__(self, run_dir: Path) -> None:
        deployment = read_deployment(run_dir)
        self.told: list[tuple[int, int, str]] = []  # gateway, instance, reason
        self.grants = NodeGrants(deployment.load().app, deployment.nodes, run_dir, self._tell)

    def _tell(self, index: int, event: Event) -> None:
        assert isinstance(event, InstanceStopped)
        self.told.append((index, event.instance_id, event.reason))

    def start(self, instance_id: int, *, nth: int = 0) -> None:
        self.grants.order(StartInstance(instance_id, 0, 0, None, nth=nth))

    def poll_until(self, is_true: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 60
        while not is_true():
            self.grants.poll()
            assert time.monotonic() < end_s
            time.sleep(0.01)


@contextmanager
def pool_of_one(base: Path) -> Iterator[tuple[WorkerProcess, Grants]]:
    with worker(base, {"nap": code("nap")}) as process:
        process.gateway().close()  # it is ready
        grants = Grants(base)
        try:
            yield process, grants
        finally:
            grants.grants.close()


def present(process: WorkerProcess) -> list[int]:
    gateway = process.gateway()
    try:
        return [each.id for each in gateway.hello.instances if each.stage == "ready"]
    finally:
        gateway.close()


def test_granted_node_is_freed_and_granted_to_the_next(tmp_path: Path) -> None:
    """1. One gateway gets the only node, the other waits. 2. The first stops its instance: the
    other's is started. 3. Every gateway learns of both from the worker.
    """
    with pool_of_one(tmp_path) as (process, grants):
        gateway = process.gateway()
        grants.start(ONE)
        grants.start(OTHER)
        grants.poll_until(lambda: present(process) == [ONE])
        gateway.order(StopInstance(ONE, 0))
        assert gateway.event(InstanceStopped).instance_id == ONE
        grants.poll_until(lambda: present(process) == [OTHER])
        gateway.run(row(0.0), instance_id=OTHER)
        assert gateway.ran().results[0].status == 200
        assert gateway.appeared == [ONE, OTHER]
        assert grants.told == []


def test_gateway_that_died_waits_no_more_but_keeps_what_it_was_granted(tmp_path: Path) -> None:
    with pool_of_one(tmp_path) as (process, grants):
        grants.start(ONE)
        grants.start(ONE + 1)
        grants.start(OTHER)
        grants.poll_until(lambda: present(process) == [ONE])
        grants.grants.gateway_left(1)
        gateway = process.gateway()
        gateway.order(StopInstance(ONE, 0))
        grants.poll_until(lambda: present(process) == [OTHER])
        assert grants.told == []


def test_same_instance_ordered_twice_is_started_once(tmp_path: Path) -> None:
    with pool_of_one(tmp_path) as (process, grants):
        grants.start(ONE, nth=1)
        grants.start(OTHER, nth=1)
        assert grants.told == [(2, OTHER, STARTED_ALREADY)]
        grants.poll_until(lambda: present(process) == [ONE])


def test_start_that_is_called_off_or_lost_with_its_node_is_reported(tmp_path: Path) -> None:
    with pool_of_one(tmp_path) as (process, grants):
        grants.start(ONE)
        grants.start(OTHER)
        grants.grants.order(StopInstance(OTHER, None))
        assert grants.told == [(2, OTHER, "the start was cancelled")]
        gateway = process.gateway()
        grants.poll_until(lambda: present(process) == [ONE])
        gateway.run(row(30.0), instance_id=ONE)
        grants.start(OTHER + 1)
        gateway.order(StopInstance(ONE, 0))  # its node is not free while the batch runs
        process.process.kill()
        process.process.wait()
        grants.poll_until(lambda: not grants.grants.fds())
        grants.grants.order(StopInstance(OTHER + 1, None))
        grants.grants.order(StopInstance(ONE, None))
        assert grants.told[1:] == [
            (2, OTHER + 1, "the start was cancelled"),
            (1, ONE, "the instance had already stopped"),
        ]
