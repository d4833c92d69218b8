"""A run ends with an error when a policy starves requests, and waits for whatever is under way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.clock import HOUR_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Instance, Node, Task
from headgate.policies import find_policy
from headgate.sim.recorder import PATIENCE_NS
from headgate.sim.run import Setup, simulate

from .apps import GPU, at_ms, make_app


class Starve(Policy):
    """Serves the first request, and no other."""

    def on_task_ready(self, task: Task) -> None:
        if task.request.id == 0:
            self.orders.dispatch([task], self.view.nodes[0])

    def on_capacity(self, node: Node) -> None:
        pass


class StarveAndWake(Starve):
    """Starves, and wakes up once in a minute, for ever."""

    def on_task_ready(self, task: Task) -> None:
        super().on_task_ready(task)
        self.on_timer("look", 0)

    def on_timer(self, name: str, number: int) -> None:
        self.orders.set_timer("look", self.view.now_ns + 60 * SECOND_NS)


class StarveAndRestart(Starve):
    """Starves, and starts and stops an instance for ever: something is always under way."""

    def on_instance_started(self, instance: Instance) -> None:
        self.orders.stop(instance)

    def on_instance_gone(self, instance: Instance) -> None:
        self.orders.start(instance.variant, self.view.nodes[0])


@pytest.mark.parametrize("policy", [Starve, StarveAndWake, StarveAndRestart])
def test_starved_requests_end_a_run_with_an_error_that_names_them(policy: type[Policy]) -> None:
    app = make_app(start_ms=60_000)
    with pytest.raises(ConfigError) as caught:
        simulate(Setup(app, PolicyKind(policy)), at_ms(0, 1500, 3000))
    expected = "wait for ever: 2 of p0; the first is request 1, which arrived at 1.5 s; the simul"
    assert expected in str(caught.value)


def test_what_takes_longer_than_the_patience_is_waited_for() -> None:
    """A boot, then a batch; the second request waits for the first one's."""
    long_ms = 3 * PATIENCE_NS // 1_000_000
    app = make_app(
        exec_ms=[long_ms], pools=(replace(GPU, is_elastic=True, boot_ns=9 * PATIENCE_NS),)
    )
    requests = simulate(Setup(app, find_policy("balance")), at_ms(1, 2)).requests
    assert requests.finished_ns[1] >= 15 * PATIENCE_NS


def test_a_run_with_a_time_limit_ends_there_with_open_requests() -> None:
    setup = Setup(make_app(), PolicyKind(StarveAndWake), limit_ns=HOUR_NS)
    columns = simulate(setup, at_ms(0, 1500))
    assert columns.end_ns <= HOUR_NS
    assert len(columns.requests) == 2
