"""`python -m headgate.live.gateway RUN_DIR`: the gateway of a supervisor."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import uvloop

from headgate.core.errors import ConfigError
from headgate.live.gateway.process import GatewayProcess
from headgate.live.generation import BAD_CONFIGURATION


def main() -> int:
    """Serve until told otherwise. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="headgate.live.gateway", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--http-fd", type=int, required=True, help="a listening socket")
    parser.add_argument("--heartbeat-fd", type=int, required=True, help="is told once all is ready")
    parser.add_argument("--log", type=Path, help="the event log")
    parser.add_argument(
        "--listens-when-ready",
        action="store_true",
        help="until then others do, or nobody",
    )
    options = parser.parse_args()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(options))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_CONFIGURATION


async def _run(options: argparse.Namespace) -> int:
    process = GatewayProcess(
        options.run_dir,
        options.http_fd,
        options.heartbeat_fd,
        options.log,
        listens_when_ready=options.listens_when_ready,
    )
    return await process.run()


if __name__ == "__main__":
    sys.exit(main())
