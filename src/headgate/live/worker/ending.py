"""How a worker ends: at once, and not leaving behind what its models have started."""

from __future__ import annotations

import os
import signal
from typing import Final, NoReturn

from headgate.live import logs

HUNG_EXIT: Final = 70  # something took longer than it may
BROKEN_EXIT: Final = 71


def end(status: int) -> NoReturn:
    """End this process, whatever threads of models and libraries do, and its children."""
    logs.flush()
    if os.getpgrp() == os.getpid():  # else the group is that of whoever started us
        os.killpg(os.getpid(), signal.SIGTERM)  # of which we ourselves only take note
    os._exit(status)
