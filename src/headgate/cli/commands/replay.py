"""`headgate replay`: decides everything in a log again, or tells what became of one request."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from headgate.app import LoadedApp, from_spec, make_config
from headgate.cli.narrator import Narrator
from headgate.cli.options import json_option
from headgate.cli.progress import Progress
from headgate.cli.screen import show, show_json
from headgate.core.errors import ConfigError, DriverError, PolicyError
from headgate.core.log import LogHeader, LogReader, ReplayResult, read_log, replay
from headgate.core.rng import stream
from headgate.core.scheduler import Scheduler
from headgate.core.story import story
from headgate.core.wire import to_wire
from headgate.policies import find_policy


@click.command("replay")
@click.argument("log", type=click.Path(path_type=Path))
@json_option
@click.option(
    "request_id", "--story", type=int, metavar="REQUEST_ID", help="Tell one request's story."
)
def command(log: Path, as_json: bool, request_id: int | None) -> int:
    """Feed the events of LOG to a fresh Scheduler and compare every action.

    Exits with 1 at the first difference. Logs come from headgate simulate --log.
    """
    header, entries = read_log(log)
    loaded = from_spec(header.app, f"{log}:1: app")
    if request_id is not None:
        _tell(log, loaded, entries, request_id, as_json)
        return 0
    scheduler = _scheduler(header, loaded, f"{log}:1")
    with Progress(f"replaying {log.name}"):
        result, problem = _replay(entries, scheduler)
    if as_json:
        show_json(_to_json(header, entries, result, problem))
    else:
        _show(log, header, entries, result, problem)
    return 1 if problem else 0


def _scheduler(header: LogHeader, loaded: LoadedApp, where: str) -> Scheduler:
    kind = find_policy(header.policy, where)
    config = make_config(kind.config, header.settings, where)
    rng = stream(header.seed, f"policy/{header.index}")
    return Scheduler(
        loaded.app, kind, config, rng=rng, index=header.index, peers=header.peers, validate=True
    )
