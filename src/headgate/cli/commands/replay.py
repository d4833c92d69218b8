"""`headgate replay`: replays an event log and compares every action, or traces one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import click
from rich.text import Text

from headgate.cli.app_loading import known_policy
from headgate.cli.options import json_option
from headgate.cli.output import Progress, show, show_json
from headgate.config import AppConfig, from_spec, make_config
from headgate.core.actions import (
    Action,
    CancelBatch,
    CancelTimer,
    Dispatch,
    LoadWeights,
    ReportFault,
    ReportWouldReject,
    SetTimer,
    Settle,
    StartInstance,
)
from headgate.core.clock import MILLISECOND_NS
from headgate.core.errors import ConfigError, DriverError
from headgate.core.event_log import (
    LogEntry,
    LogHeader,
    LogReader,
    ReplayResult,
    read_log,
    replay,
    to_wire,
)
from headgate.core.events import (
    REFUSAL_NAMES,
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
    LoadFailed,
    NodeJoined,
    NodeLost,
    RequestArrived,
    TimerFired,
    WeightsLoaded,
)
from headgate.core.model import App
from headgate.core.request_trace import request_trace
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import OUTCOME_NAMES, Settlement


@click.command("replay")
@click.argument("log", type=click.Path(path_type=Path))
@json_option
@click.option(
    "--request",
    metavar="ID",
    help="Print the trace of one request: its events and the actions they led to. ID is the one in "
    "its answer (X-Request-Id), or its number in the log.",
)
def command(log: Path, as_json: bool, request: str | None) -> int:
    """Feed the events of LOG to a fresh Scheduler and compare every action.

    Exits with 1 at the first difference. Logs come from headgate simulate --log and headgate serve
    --log; of a rotated log, all segments beside LOG are read. Only decisions are compared: edits of
    a log that change no decision are not detected.

    \b
    headgate replay run.log
    headgate replay run.log --request 17
    headgate replay run.log --request 3f8a5c01b2d4-11
    """
    header, entries = read_log(log)
    with closing(entries):
        config = from_spec(header.app, f"{log}:1: app")
        if request is not None:
            _show_trace(log, config, entries, request, as_json)
            return 0
        if entries.missing:
            problem = (
                f"{entries.missing}: what is left can be traced (--request) and calibrated, but"
            )
            raise ConfigError(f"{problem} not replayed", where=str(log))
        scheduler = _scheduler(header, config, f"{log}:1")
        with Progress(f"replaying {log.name}"):
            result = _replay(entries, scheduler)
    if as_json:
        show_json(_to_json(log, header, entries, result))
    else:
        _show(log, header, entries, result)
    return 0 if result.first_difference is None else 1


def _scheduler(header: LogHeader, app_config: AppConfig, where: str) -> Scheduler:
    kind = known_policy(header.policy, where, "policy")
    config = make_config(kind.config, header.settings, where)
    rng = stream(header.seed, f"policy/{header.index}")
    return Scheduler(app_config.app, kind, config, rng=rng, index=header.index, peers=header.peers)


def _replay(entries: LogReader, scheduler: Scheduler) -> ReplayResult:
    try:
        return replay(entries, scheduler)
    except DriverError as error:
        # No Scheduler wrote this event after those before it: the log is damaged.
        raise ConfigError(
            f"the Scheduler refuses the event: {error}", where=entries.where
        ) from None


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
        # Reading stops at a difference, so whether the log is complete is unknown then.
        "complete": entries.is_complete if difference is None else None,
        "stopped": entries.stopped or None,
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
        show(Text(f"✓ {log}: {counts} of {header.policy}, replayed and identical", "green"))


def _show_end(entries: LogReader) -> None:
    if entries.missing:
        show(Text(entries.missing, "yellow"))
    if entries.stopped:
        end = f"the log was ended after {entries.first_seq + entries.events:,} events"
        show(Text(f"{end}: {entries.stopped}", "yellow"))
    elif not entries.is_complete:
        end = f"the log ends without its end mark after {entries.events:,} events"
        show(Text(f"{end}: it was cut short, or is still being written", "yellow"))


def _show_trace(
    log: Path, config: AppConfig, entries: LogReader, request: str, as_json: bool
) -> None:
    formatter = EventFormatter(config.app)
    with Progress(f"reading {log.name}"):
        trace = request_trace(formatter.learn_names(entries), request)
    if not trace.entries:
        allowed = "the number of a request in the log, or the X-Request-Id of its response"
        raise ConfigError(
            "no such request", where=str(log), key="--request", value=request, allowed=allowed
        )
    if trace.left_out:
        more = f"{trace.left_out:,} more requests have the id {request!r}"
        note = f"{more}: name one of them by its number in the log"
        click.echo(f"headgate: warning: {log}: {note}", err=True)
    if as_json:
        show_json(
            [
                {
                    "seq": entry.seq,
                    "now_ns": entry.now_ns,
                    "event": to_wire(entry.event),
                    "actions": [to_wire(action) for action in entry.actions],
                }
                for entry in trace.entries
            ]
        )
    else:
        _show_end(entries)
        show(*(Text(line) for line in formatter.format(trace.entries)))


class EventFormatter:
    """Formats events and actions of a log as sentences, with the names of the application.

    `learn_names` must see the log first, because nodes get their names in its events.
    """

    def __init__(self, app: App) -> None:
        self._pipelines = [pipeline.name for pipeline in app.pipelines]
        self._clients = [client.name for client in app.clients]
        self._variants = [variant.name for variant in app.variants]
        self._pools = [pool.name for pool in app.pools]
        self._nodes: dict[int, str] = {}

    def learn_names(self, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
        """Pass the entries on, and keep the names of nodes."""
        for entry in entries:
            if isinstance(entry.event, NodeJoined):
                self._nodes[entry.event.node_id] = entry.event.name
            yield entry

    def format(self, entries: Iterable[LogEntry]) -> Iterator[str]:
        """Yield a line for each event, followed by one for each action that it led to."""
        for entry in entries:
            yield f"{entry.now_ns / MILLISECOND_NS:14,.3f} ms  {self.event(entry.event)}"
            for action in entry.actions:
                yield f"{'':17}    -> {self.action(action)}"

    def event(self, event: Event) -> str:
        match event:
            case RequestArrived():
                pipeline = _name(self._pipelines, event.pipeline)
                client = _name(self._clients, event.client)
                most = f", for at most ${event.cost_usd:.6g}" if event.cost_usd else ""
                id = f" (id {event.client_request_id})" if event.client_request_id else ""
                return f"request {event.request_id}{id} arrived: {pipeline}, from {client}{most}"
            case BatchFinished():
                return f"batch {event.batch_id} finished"
            case BatchFailed():
                return f"batch {event.batch_id} failed: {event.reason}"
            case BatchRefused():
                reason = REFUSAL_NAMES.get(event.reason, str(event.reason))
                return f"batch {event.batch_id} was refused: {reason}"
            case BatchLost():
                return f"batch {event.batch_id} was lost"
            case InstanceStarted():
                return f"instance {event.instance_id} started on {self._node(event.node_id)}"
            case InstanceStopped():
                return f"instance {event.instance_id} stopped: {event.reason}"
            case LoadFailed():
                name = _name(self._variants, event.variant_id)
                return f"{name} cannot be loaded on {self._node(event.node_id)}: {event.reason}"
            case WeightsLoaded():
                return f"instance {event.instance_id} has its weights on the device"
            case NodeLost():
                return f"node {self._node(event.node_id)} was lost"
            case TimerFired():
                return f"timer {event.key[0]} {event.key[1]} fired"
        return _fallback(event)

    def action(self, action: Action) -> str:
        match action:
            case Dispatch():
                name = _name(self._variants, action.variant_id)
                where = self._place(action.pool_id, action.node_id)
                items = "" if action.items == 1 else f", {action.items} items"
                shape = f", shape {action.shape_id}" if action.shape_id else ""
                return f"dispatch batch {action.batch_id} of {name} to {where}{items}{shape}"
            case StartInstance():
                name = _name(self._variants, action.variant_id)
                where = self._place(action.pool_id, action.node_id)
                shape = f", shape {action.shape_id}" if action.shape_id else ""
                return f"start instance {action.instance_id} of {name} on {where}{shape}"
            case LoadWeights():
                return f"load the weights of instance {action.instance_id}"
            case CancelBatch():
                return f"cancel batch {action.batch_id}"
            case SetTimer():
                at_ms = action.at_ns / MILLISECOND_NS
                return f"set timer {action.key[0]} {action.key[1]} to {at_ms:,.3f} ms"
            case CancelTimer():
                return f"cancel timer {action.key[0]} {action.key[1]}"
            case Settle():
                settlement = action.settlement
                reason = f": {settlement.reason}" if settlement.reason else ""
                outcome = _name(OUTCOME_NAMES, settlement.outcome)
                why = _explanation(settlement)
                return f"settle request {action.request_id}, {outcome}{reason}{why}"
            case ReportFault():
                return f"fault of the policy in {action.hook}: {action.error}"
            case ReportWouldReject():
                return f"request {action.request_id} would be rejected: {action.reason}"
        return _fallback(action)

    def _place(self, pool_id: int, node_id: int | None) -> str:
        return _name(self._pools, pool_id) if node_id is None else self._node(node_id)

    def _node(self, node_id: int) -> str:
        return self._nodes.get(node_id, str(node_id))


def _name(names: Sequence[str], number: int) -> str:
    """Return the name, or the number if it has none, as in a damaged log."""
    return names[number] if 0 <= number < len(names) else str(number)


def _fallback(message: Event | Action) -> str:
    """Describe an event or action that is too rare to have a sentence of its own."""
    name, *fields = to_wire(message)
    return f"{name} {', '.join(map(str, fields))}"


def _explanation(settlement: Settlement) -> str:
    """What a refusal told its client, as the rest of a line.

    >>> _explanation(Settlement(2, predicted_ns=5_000_000, margin_ns=1_000_000, retry_ns=2_000_000))
    ' (predicted 5.0 ms, with a margin of 1.0 ms; retry after 2.0 ms)'
    """
    parts = []
    if settlement.predicted_ns:
        margin = _ms(settlement.margin_ns)
        with_margin = f", with a margin of {margin}" if settlement.margin_ns else ""
        parts.append(f"predicted {_ms(settlement.predicted_ns)}{with_margin}")
    if settlement.predicted_usd:
        parts.append(f"${settlement.predicted_usd:.6g}")
    if settlement.short_of:
        parts.append(f"short of {settlement.short_of}")
    if settlement.accepted_ns:
        parts.append(f"{_ms(settlement.accepted_ns)} would have been accepted")
    if settlement.accepted_usd:
        parts.append(f"${settlement.accepted_usd:.6g} would have been accepted")
    if settlement.retry_ns:
        parts.append(f"retry after {_ms(settlement.retry_ns)}")
    return f" ({'; '.join(parts)})" if parts else ""


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / MILLISECOND_NS:,.1f} ms"
