"""A call that an RPC waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, final

from headgate.live.call import Call
from headgate.live.gateway.answers import expired
from headgate.live.gateway.refusal import Refused
from headgate.live.serving import Serving

_LOG: Final = logging.getLogger(__name__)


@final
class Pending:
    """Turns the callback of a call into something to wait for."""

    def __init__(self, respond: Callable[[Call], bytes]) -> None:
        self._respond = respond
        # A refusal is a result here: an exception that nobody fetches would be complained about.
        self._answer: asyncio.Future[bytes | Refused] = asyncio.get_running_loop().create_future()

    def answered(self, call: Call) -> None:
        """For the runtime to call.

        The response is made at once, for the outputs may lie in memory that is lent until then.
        """
        if self._answer.done():
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
            if timer is not None:
                timer.cancel()
        if isinstance(answer, Refused):
            raise answer
        return answer

    def _expire(self, call: Call) -> None:
        if not self._answer.done():
            self._answer.set_result(expired(call))
