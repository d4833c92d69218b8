"""`python -m headgate.live.gateway RUN_DIR`: the gateway of a supervisor."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from pathlib import Path
from typing import Final

import uvloop

from headgate.core.errors import ConfigError
from headgate.live.deployment import read_deployment
from headgate.live.driver import Membership
from headgate.live.gateway.process import GatewayProcess
from headgate.live.model_registry import LoadsFailed
from headgate.live.supervisor import BAD_CONFIGURATION, problems_line
from headgate.live.telemetry import logs
from headgate.system.process import keep_freed_memory

INTERNAL_ERROR_EXIT: Final = 70
# Collections of the second generation before the oldest is searched, ten times the default. That
# search stops the gateway: with 3,000 open RPCs for 0.1 to 0.3 s, every two seconds while they
# arrived, and it found next to nothing. Between two searches at most some 800,000 objects can pile
# up, about 100 MB.
_COLLECTIONS_BEFORE_OLDEST: Final = 100

_LOG: Final = logging.getLogger("headgate.live.gateway")


def main() -> int:
    """Serve until shutdown. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="headgate.live.gateway", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--http-fd",
        type=int,
        help="file descriptor of the socket to listen on; without it, one of several gateways that "
        "share the port",
    )
    parser.add_argument(
        "--control-fd",
        type=int,
        required=True,
        help="file descriptor of the connection to the supervisor",
    )
    parser.add_argument("--slot", type=int, default=0, help="place among the gateways")
    parser.add_argument(
        "--index", type=int, default=0, help="number that no other gateway has or had"
    )
    parser.add_argument(
        "--gateways", type=int, default=1, help="gateways that serve once this one does"
    )
    parser.add_argument(
        "--heartbeat-fd",
        type=int,
        required=True,
        help="file descriptor of the pipe for readiness and heartbeats",
    )
    parser.add_argument("--log", type=Path, help="path of the event log")
    parser.add_argument(
        "--listens-when-ready",
        action="store_true",
        help="listen only when all models are ready; a predecessor may serve until then",
    )
    parser.add_argument(
        "--loads-needed",
        choices=("all", "one", "none"),
        default="none",
        help="functions that must load successfully before the gateway becomes ready",
    )
    options = parser.parse_args()
    # gRPC's C core writes to stderr itself, and would block if nobody reads it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _limit_pauses()
    keep_freed_memory()
    serve = read_deployment(options.run_dir).load().serve
    name = "gateway" if serve.gateways == 1 else f"gateway {options.slot}"
    with logs.configured(serve, name):
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_run(options))
        except ConfigError as error:  # the supervisor reports it
            problems = error.problems if isinstance(error, LoadsFailed) else [str(error)]
            os.write(options.heartbeat_fd, problems_line(problems))
            return BAD_CONFIGURATION
        except Exception:
            _LOG.critical("the gateway ends after an internal error", exc_info=True)
            return INTERNAL_ERROR_EXIT


def _limit_pauses() -> None:
    """Make pauses for garbage collection rare, and leave out what is never garbage."""
    gc.collect()
    gc.freeze()  # modules and classes
    youngest, second, _ = gc.get_threshold()
    gc.set_threshold(youngest, second, _COLLECTIONS_BEFORE_OLDEST)


async def _run(options: argparse.Namespace) -> int:
    process = GatewayProcess(
        options.run_dir,
        options.http_fd,
        options.heartbeat_fd,
        options.log,
        Membership(options.slot, options.index, options.gateways),
        control_fd=options.control_fd,
        listens_when_ready=options.listens_when_ready,
        loads_needed=options.loads_needed,
    )
    return await process.run()


if __name__ == "__main__":
    sys.exit(main())
