"""What the engine puts on its agenda, other than the work that nodes and platforms have begun."""

from __future__ import annotations

from typing import final

from headgate.core.actions import Action
from headgate.core.events import TimerKey
from headgate.sim.agenda import Happening
from headgate.sim.hooks import Client, Trouble


@final
class TimerDue(Happening):
    """A Scheduler's timer."""

    __slots__ = ("key", "scheduler", "token")

    def __init__(self, scheduler: int, key: TimerKey, token: int) -> None:
        self.scheduler = scheduler
        self.key = key
        self.token = token


@final
class Submission(Happening):
    """A client, or a fault, sends a request."""

    __slots__ = ("client", "items", "pipeline", "sender")

    def __init__(self, pipeline: int, client: int, items: int, sender: Client | None) -> None:
        self.pipeline = pipeline
        self.client = client
        self.items = items
        self.sender = sender


@final
class Cancellation(Happening):
    """A client withdraws a request."""

    __slots__ = ("request_id",)

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id


@final
class ClientDue(Happening):
    """A client asked to be woken."""

    __slots__ = ("client",)

    def __init__(self, client: Client) -> None:
        self.client = client


@final
class TroubleDue(Happening):
    """A fault begins or ends."""

    __slots__ = ("trouble",)

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble


@final
class Order(Happening):
    """An action on its way to where it is carried out."""

    __slots__ = ("action", "scheduler")

    def __init__(self, scheduler: int, action: Action) -> None:
        self.scheduler = scheduler
        self.action = action


@final
class Decided(Happening):
    """An action that took the Scheduler until now to decide on."""

    __slots__ = ("action", "scheduler")

    def __init__(self, scheduler: int, action: Action) -> None:
        self.scheduler = scheduler
        self.action = action


@final
class Inbox(Happening):
    """A Scheduler that was thinking looks at the next event that waits for it."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: int) -> None:
        self.scheduler = scheduler
