"""`headgate replay`: decides everything in a log again, or tells what became of one request."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
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
from headgate.core.errors import ConfigError, DriverError, PolicyError
from headgate.core.log import Difference, LogHeader, LogReader, read_log, replay
from headgate.core.rng import stream
from headgate.core.scheduler import Scheduler
from headgate.core.story import story
from headgate.core.wire import to_wire


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a replay came, and what ended it if not the end of the log."""

    events: int
    actions: int
    difference: Difference | None = None
    refusal: str = ""  # what the Scheduler said about an event that it would not take

    @property
    def is_identical(self) -> bool:
        """Whether every decision came out as it is logged."""
        return self.difference is None and not self.refusal


@click.command("replay")
@click.argument("log", type=click.Path(path_type=Path))
@json_option
@click.option(
    "request_id", "--story", type=int, metavar="REQUEST_ID", help="Tell one request's story."
)
def command(log: Path, as_json: bool, request_id: int | None) -> int:
    """Feed the events of LOG to a fresh Scheduler and compare every action.

    Exits with 1 at the first difference. Logs come from headgate simulate --log.

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
            verdict = _replay(entries, scheduler)
    if as_json:
        show_json(_to_json(log, header, entries, verdict))
    else:
        _show(log, header, entries, verdict)
    return 0 if verdict.is_identical else 1


def _scheduler(header: LogHeader, loaded: LoadedApp, where: str) -> Scheduler:
    kind = known_policy(header.policy, where, "policy")
    config = make_config(kind.config, header.settings, where)
    rng = stream(header.seed, f"policy/{header.index}")
    return Scheduler(loaded.app, kind, config, rng=rng, index=header.index, peers=header.peers)


def _replay(entries: LogReader, scheduler: Scheduler) -> Verdict:
    try:
        result = replay(entries, scheduler)
    except (DriverError, PolicyError) as error:
        # No Scheduler of ours wrote this event after those before it: the log was tampered with.
        return Verdict(0, 0, refusal=f"{entries.where}: {error}")
    return Verdict(result.events, result.actions, result.first_difference)


def _to_json(
    log: Path, header: LogHeader, entries: LogReader, verdict: Verdict
) -> dict[str, object]:
    difference = verdict.difference
    return {
        "log": str(log),
        "policy": header.policy,
        "seed": header.seed,
        "events": verdict.events,
        "actions": verdict.actions,
        "is_truncated": entries.is_truncated,
        "is_identical": verdict.is_identical,
        "refusal": verdict.refusal or None,
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


def _show(log: Path, header: LogHeader, entries: LogReader, verdict: Verdict) -> None:
    if entries.is_truncated:
        show(Text("the log is cut off in its last line: everything before it counts", "yellow"))
    difference = verdict.difference
    if difference is not None:
        at_ms = difference.now_ns / MILLISECOND_NS
        show(
            Text(f"✗ event {difference.seq} is decided differently", "bold red"),
            Text(f"  at       {at_ms:,.3f} ms"),
            Text(f"  event    {to_wire(difference.event)}"),
            Text(f"  logged   {difference.expected}"),
            Text(f"  decided  {difference.got}"),
        )
    elif verdict.refusal:
        show(Text(f"✗ the Scheduler refuses an event: {verdict.refusal}", "bold red"))
    else:
        counts = f"{verdict.events:,} events, {verdict.actions:,} actions"
        show(Text(f"✓ {log}: {counts} of {header.policy}, decided again and identical", "green"))


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
        show(*(Text(line) for line in narrator.tell(found)))
