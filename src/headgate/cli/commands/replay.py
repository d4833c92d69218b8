"""`headgate replay`: decides everything in a log again, or tells what became of one request."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click
from rich.text import Text

from headgate.app import LoadedApp, from_spec, make_config
from headgate.cli.chosen import known_policy
from headgate.cli.narrator import Narrator
from headgate.cli.options import json_option
from headgate.cli.progress import Progress
from headgate.cli.screen import show, show_json
from headgate.core.clock import MILLISECOND_NS
from headgate.core.errors import ConfigError, DriverError
from headgate.core.log import LogHeader, LogReader, ReplayResult, read_log, replay
from headgate.core.rng import stream
from headgate.core.scheduler import Scheduler
from headgate.core.story import story
from headgate.core.wire import to_wire


@click.command("replay")
@click.argument("log", type=click.Path(path_type=Path))
@json_option
@click.option(
    "request_id", "--story", type=int, metavar="REQUEST_ID", help="Tell one request's story."
)
def command(log: Path, as_json: bool, request_id: int | None) -> int:
    """Feed the events of LOG to a fresh Scheduler and compare every action.

    Exits with 1 at the first difference. Logs come from headgate simulate --log. What is compared
    are decisions: this is no seal against edits of a log that change none.

    \b
    headgate replay run.log
    headgate replay run.log --story 17
    """
    header, entries = read_log(log)
    with closing(entries):
        loaded = from_spec(header.app, f"{log}:1: app")
        if request_id is not None:
            _tell(log, loaded, entries, request_id, as_json)
            return 0
        scheduler = _scheduler(header, loaded, f"{log}:1")
        with Progress(f"replaying {log.name}"):
            result = _replay(entries, scheduler)
    if as_json:
        show_json(_to_json(log, header, entries, result))
    else:
        _show(log, header, entries, result)
    return 0 if result.first_difference is None else 1


def _scheduler(header: LogHeader, loaded: LoadedApp, where: str) -> Scheduler:
    kind = known_policy(header.policy, where, "policy")
    config = make_config(kind.config, header.settings, where)
    rng = stream(header.seed, f"policy/{header.index}")
    return Scheduler(loaded.app, kind, config, rng=rng, index=header.index, peers=header.peers)


def _replay(entries: LogReader, scheduler: Scheduler) -> ReplayResult:
    try:
        return replay(entries, scheduler)
    except DriverError as error:
        # No Scheduler of ours wrote this event after those before it: the log is damaged.
        raise ConfigError(f"the Scheduler refuses it: {error}", where=entries.where) from None


def _to_json(
    log: Path, header: LogHeader, entries: LogReader, result: ReplayResult
) -> dict[str, object]:
    difference = result.first_difference
    return {
        "log": str(log),
        "policy": header.policy,
        "seed": header.seed,
        "events": result.events,
        "actions": result.actions,
        # Nothing is read beyond a difference, so there the end is unknown.
        "complete": entries.is_complete if difference is None else None,
        "is_identical": difference is None,
        "difference": None
        if difference is None
        else {
            "seq": difference.seq,
            "now_ns": difference.now_ns,
            "event": to_wire(difference.event),
            "logged": difference.expected,
            "decided": difference.got,
        },
    }


def _show(log: Path, header: LogHeader, entries: LogReader, result: ReplayResult) -> None:
    difference = result.first_difference
    if difference is not None:
        at_ms = difference.now_ns / MILLISECOND_NS
        show(
            Text(f"✗ event {difference.seq} is decided differently", "bold red"),
            Text(f"  at       {at_ms:,.3f} ms"),
            Text(f"  event    {to_wire(difference.event)}"),
            Text(f"  logged   {difference.expected}"),
            Text(f"  decided  {difference.got}"),
        )
    else:
        _show_end(entries)
        counts = f"{result.events:,} events, {result.actions:,} actions"
        show(Text(f"✓ {log}: {counts} of {header.policy}, decided again and identical", "green"))


def _show_end(entries: LogReader) -> None:
    if not entries.is_complete:
        end = f"the log ends without its end mark after {entries.events:,} events"
        show(Text(f"{end}: it was cut short", "yellow"))


def _tell(log: Path, loaded: LoadedApp, entries: LogReader, request_id: int, as_json: bool) -> None:
    narrator = Narrator(loaded.app)
    with Progress(f"reading {log.name}"):
        found = story(narrator.hear(entries), request_id)
    if not found:
        raise ConfigError("no such request", where=str(log), key="--story", value=request_id)
    if as_json:
        show_json(
            [
                {
                    "seq": entry.seq,
                    "now_ns": entry.now_ns,
                    "event": to_wire(entry.event),
                    "actions": [to_wire(action) for action in entry.actions],
                }
                for entry in found
            ]
        )
    else:
        _show_end(entries)
        show(*(Text(line) for line in narrator.tell(found)))
