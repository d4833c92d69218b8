"""Fuzz target: replay of an event log. It is replayed, or refused with a one-line error.

An input that begins with `[` is entries without a header, and a valid header is put in front: most
mutations would break the header, and the entries would never be reached.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from fuzzing import fuzz

from headgate.config import from_spec, make_config
from headgate.core.errors import ConfigError, DriverError, PolicyError
from headgate.core.event_log import LogHeader, LogWriter, json_lines, read_log, replay
from headgate.core.events import (
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    RequestArrived,
    RequestCancelled,
    TimerFired,
)
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.policies import find_policy

APP = {
    "functions": {
        "f": {"exec_time": "5ms", "prewarm_nodes": 1},
        "g": {"exec_time": ["2ms", "3ms"], "cold_start": "1s"},
    },
    "pools": {"p": {"tier": "dedicated", "nodes": 2}},
    "slo": {"latency": "50ms"},
}
ARRIVED = [RequestArrived(id, id % 2, 0, 1, 0, 0, False) for id in range(4)]
EVENT_SEQUENCES: list[list[Event]] = [
    [NodeJoined(0, 0, "n"), InstanceStarted(0, 0), *ARRIVED, BatchFinished(0), NodeLost(0)],
    [NodeJoined(0, 0, "n"), InstanceStarted(0, 0), ARRIVED[0], BatchLost(0), RequestCancelled(0)],
    [NodeJoined(1, 0, "n"), InstanceStarted(0, 1), ARRIVED[0], BatchRefused(0, 0)],
    [NodeJoined(1, 0, "n"), InstanceStopped(0, "no"), ARRIVED[1], TimerFired(("plan", 0))],
]


CONFIG = from_spec(APP, "fuzz")


def log(events: Sequence[Event], policy: str) -> bytes:
    """Return the log that a Scheduler writes of these events."""
    kind = find_policy(policy)
    config = make_config(kind.config, {}, "fuzz")
    scheduler = Scheduler(CONFIG.app, kind, config, rng=stream(0, "policy/0"))
    text = io.StringIO()
    writer = LogWriter(json_lines(text), LogHeader(CONFIG.spec, policy, {}, 0))
    for seq, event in enumerate(events):
        try:
            actions = scheduler.handle(seq * 1000, event)
        except (DriverError, PolicyError):
            break
        writer.write(seq, seq * 1000, event, actions)
    writer.close()
    return text.getvalue().encode()


LOGS = [log(events, policy) for events in EVENT_SEQUENCES for policy in ("balance", "headgate")]
HEADER = LOGS[0].splitlines(keepends=True)[0]
SEEDS = [*LOGS, *(text.partition(b"\n")[2] for text in LOGS)]


def target(data: bytes) -> None:
    """Do what `headgate replay` does."""
    fd = os.memfd_create("log")  # an anonymous file
    os.write(fd, HEADER + data if data.startswith(b"[") else data)
    try:
        header, entries = read_log(Path(f"/proc/self/fd/{fd}"))
        with closing(entries):
            is_known = header.app == CONFIG.spec  # parsing a specification is slow
            app_config = CONFIG if is_known else from_spec(header.app, "app")
            kind = find_policy(header.policy)
            config = make_config(kind.config, header.settings, "settings")
            rng = stream(header.seed, f"policy/{header.index}")
            replay(entries, Scheduler(app_config.app, kind, config, rng=rng))
    except (ConfigError, DriverError, PolicyError) as error:
        assert "\n" not in str(error), "more than one line"
    finally:
        os.close(fd)


if __name__ == "__main__":
    fuzz(target, SEEDS)
