"""After a fault of the policy: nobody waits for ever for what the policy may have forgotten.

A hook that raised may not have used what it was offered, so whatever is free is offered again after
a moment. It may also have lost a task that it had taken out of its queue, or a node. What a policy
has forgotten cannot be seen from outside; but from the first fault on, a task that has been ready
for a minute or two without being sent out fails.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.clock import MILLISECOND_NS, MINUTE_NS
from headgate.core.hooks import Hooks
from headgate.core.ledger import Ledger
from headgate.core.lifecycle import TaskState
from headgate.core.records import Task
from headgate.core.requests import Requests
from headgate.core.view import View

OFFER: Final = "offer_again"  # the timers
FORGOTTEN: Final = "forgotten"
OFFER_AFTER_NS: Final = 100 * MILLISECOND_NS
FORGOTTEN_AFTER_NS: Final = MINUTE_NS


@final
class Recovery:
    """Looks after those who wait, once the policy cannot be trusted to."""

    def __init__(self, view: View, ledger: Ledger, requests: Requests, hooks: Hooks) -> None:
        self._view = view
        self._ledger = ledger
        self._requests = requests
        self._hooks = hooks
        self._waiting: list[tuple[Task, int]] = []  # with how often each had been sent out

    def watch(self, is_fault: bool) -> None:
        """After an event, from the first fault on: see to it that somebody looks again."""
        view = self._view
        if not view.requests:
            return
        if is_fault and (OFFER, 0) not in view.timers:
            self._ledger.set_timer((OFFER, 0), view.now_ns + OFFER_AFTER_NS)
        if (FORGOTTEN, 0) not in view.timers:
            self._ledger.set_timer((FORGOTTEN, 0), view.now_ns + FORGOTTEN_AFTER_NS)
            self._waiting = [
                (task, _tries(task))
                for request in view.requests.values()
                for task in request.tasks
                if task.state == TaskState.READY
            ]

    def offer_again(self) -> None:
        """The hook that raised may have had yet to use what is free."""
        self._hooks.offer_nodes()
        for pool in self._view.app.pools:
            if self._view.is_pool_open(pool.id):
                self._hooks.pool_open(pool.id)

    def fail_forgotten(self) -> None:
        """Who was waiting the last time, and has not been sent out since, is served by nobody."""
        waiting, self._waiting = self._waiting, []
        for task, tries in waiting:
            if _tries(task) == tries:
                self._requests.fail_if_ready(task)


def _tries(task: Task) -> int:
    return task.attempts_made + task.refusals
