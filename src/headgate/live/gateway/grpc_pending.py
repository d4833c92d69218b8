"""A call that an RPC waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, final

from headgate.live.call import Call
from headgate.live.gateway.answers import expired
from headgate.live.gateway.budget import Hold
from headgate.live.gateway.refusal import Refused
from headgate.live.serving import Serving

_LOG: Final = logging.getLogger(__name__)


@final
class Pending:
    """Turns the callback of a call into something to wait for."""

    def __init__(self, respond: Callable[[Call], bytes]) -> None:
        self.is_expired = False  # answered at its deadline; the runtime may have the call still
        self._is_over = False  # the runtime is done with the call
        self._left: Hold | None = None  # what is held for the call until then
        self._respond = respond
        self._withdraw: Callable[[], None] | None = None
        # A refusal is a result here: an exception that nobody fetches would be complained about.
        self._answer: asyncio.Future[bytes | Refused] = asyncio.get_running_loop().create_future()

    def answered(self, call: Call) -> None:
        """For the runtime to call.

        The response is made at once, for the outputs may lie in memory that is lent until then.
        """
        self._is_over = True
        if self._answer.done():
            if self._left is not None:
                self._left.release()
            return
        try:
            self._answer.set_result(self._respond(call))
        except Refused as refused:
            self._answer.set_result(refused)
        except Exception:
            _LOG.exception("an answer broke the gateway")
            self._answer.set_result(Refused(500, "the gateway made a mistake", reason="internal"))

    async def wait(self, serving: Serving, call: Call) -> bytes:
        """The response. Raises `Refused`, also at the deadline of a call that gives up then.

        When the RPC is cancelled, so is the call; but not at its deadline, where its end is that it
        was late and not that it was unwanted: the runtime finds that out by itself.
        """
        timer = None
        self._withdraw = lambda: serving.cancel(call)
        if call.gives_up:
            left_s = (call.deadline_ns - serving.now_ns()) * 1e-9
            timer = asyncio.get_running_loop().call_later(left_s, self._expire, call)
        try:
            answer = await self._answer
        except asyncio.CancelledError:
            is_late = call.gives_up and serving.now_ns() >= call.deadline_ns
            if self._answer.cancelled() and not is_late:
                serving.cancel(call)
            raise
        finally:
            self._withdraw = None
            if timer is not None:
                timer.cancel()
        if isinstance(answer, Refused):
            raise answer
        return answer

    def leave(self, hold: Hold) -> None:
        """Hold this until the runtime is done with the call, which nobody waits for any more."""
        if self._is_over:
            hold.release()
        else:
            self._left = hold

    def give_up(self, refused: Refused) -> None:
        """Answer now, for the call will not be."""
        if not self._answer.done():
            if self._withdraw is not None:
                self._withdraw()
            self._answer.set_result(refused)

    def _expire(self, call: Call) -> None:
        if not self._answer.done():
            self.is_expired = True
            self._answer.set_result(expired(call))
