"""Inputs that a function keeps stay valid, whatever is sent later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worker_rig import code, row, worker

from headgate.functions.arrays import Array

SIZE = 16_384  # elements of four bytes: too large to be sent inside a message


def large(value: float, items: int = 1) -> dict[str, Array]:
    return {"x": np.full((items, SIZE), value, np.float32)}


@pytest.mark.parametrize("how", ["array", "view", "memory", "decoded"])
def test_kept_inputs_are_not_overwritten_by_later_requests(tmp_path: Path, how: str) -> None:
    """The gateway reuses a block as soon as it is released.

    Blocks of kept inputs are not released.
    """
    with worker(tmp_path, {"keeps": code("Keeps", options={"how": how})}) as process:
        gateway = process.gateway()
        gateway.start()
        elements = SIZE - 2 if how == "view" else SIZE
        for number in range(1, 13):
            gateway.run(large(number), shares=True)
            (result,) = gateway.ran().results
            expected = [float(n * elements) for n in range(1, number + 1)]
            assert gateway.arrays(result)["sums"].tolist() == [expected]
        assert len(gateway.in_use) == 12
        gateway.run(large(0), shares=True)  # it releases everything
        gateway.ran()
        gateway.ask(large(1))  # releases everything that was pending
        assert not gateway.in_use


def test_kept_inputs_of_one_batch_stay_valid(tmp_path: Path) -> None:
    with worker(tmp_path, {"keeps": code("Keeps", options={"how": "decoded"})}) as process:
        gateway = process.gateway()
        gateway.start()
        for number in range(4):
            gateway.run(large(2 * number + 1), large(2 * number + 2), shares=True)
            *_, last = gateway.ran().results
        expected = [float(n * SIZE) for n in range(1, 9)]
        assert gateway.arrays(last)["sums"].tolist() == [expected]


def test_other_inputs_are_released_with_the_reply(tmp_path: Path) -> None:
    functions = {"double": code("double"), "picky": code("picky")}
    with worker(tmp_path, functions, pool={"queue_max": 0}) as process:
        gateway = process.gateway()
        gateway.start(0, 0)
        gateway.start(1, 1)
        sent = {"x": np.ones((SIZE, 2), np.float32)}
        # status 400, and the function never sees an array
        wrong = {"x": np.ones((SIZE, 3), np.float32)}
        gateway.run(sent, wrong, sent, shares=True)
        assert [result.status for result in gateway.ran().results] == [200, 400, 200]
        assert not gateway.in_use
        poison = {"x": np.full(SIZE, -1, np.float32)}
        gateway.run({"x": poison["x"] * -1}, poison, instance_id=1, shares=True)
        assert [result.status for result in gateway.ran().results] == [200, 500]
        gateway.ask(row(1), instance_id=1)
        assert not gateway.in_use


def test_kept_inputs_outlive_their_gateway(tmp_path: Path) -> None:
    """Its shared memory is unmapped when nothing references it any more, and not before."""
    functions = {"keeps": code("Keeps"), "nap": code("nap")}
    with worker(tmp_path, functions, pool={"queue_max": 4}) as process:
        gateway, other = process.gateway(), process.gateway()
        for index, each in enumerate((gateway, other)):
            each.start(10 * index, 0)
            each.start(10 * index + 1, 1)
        gateway.run(large(1), shares=True)
        gateway.ran()
        gateway.run({"x": np.full(SIZE, 0.2, np.float32)}, instance_id=1, shares=True)
        gateway.close()  # while the batch runs
        (result,) = other.ask(large(2), instance_id=10)
        assert other.arrays(result)["sums"].tolist() == [[2.0 * SIZE]]  # an instance of its own
        follower = process.gateway()
        (result,) = follower.ask(large(3))
        assert follower.arrays(result)["sums"].tolist() == [[1.0 * SIZE, 3.0 * SIZE]]
