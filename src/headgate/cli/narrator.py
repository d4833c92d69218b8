"""Events and actions of a log as sentences, with the names that the application gives things."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headgate.core.actions import (
    Action,
    CancelBatch,
    CancelTimer,
    Dispatch,
    LoadWeights,
    ReportFault,
    SetTimer,
    Settle,
    StartInstance,
)
from headgate.core.clock import MILLISECOND_NS
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
from headgate.core.log import LogEntry
from headgate.core.model import App
from headgate.core.outcome import OUTCOME_NAMES
from headgate.core.wire import to_wire


class Narrator:
    """Tells entries. It must hear the log first, because that is where nodes get their names."""

    def __init__(self, app: App) -> None:
        self._pipelines = [pipeline.name for pipeline in app.pipelines]
        self._clients = [client.name for client in app.clients]
        self._variants = [variant.name for variant in app.variants]
        self._pools = [pool.name for pool in app.pools]
        self._nodes: dict[int, str] = {}

    def hear(self, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
        """Pass the entries on, and remember who is who."""
        for entry in entries:
            if isinstance(entry.event, NodeJoined):
                self._nodes[entry.event.node_id] = entry.event.name
            yield entry

    def tell(self, entries: Iterable[LogEntry]) -> Iterator[str]:
        """Yield a line for each event, and below it one for each action that it led to."""
        for entry in entries:
            yield f"{entry.now_ns / MILLISECOND_NS:14,.3f} ms  {self.event(entry.event)}"
            for action in entry.actions:
                yield f"{'':17}    -> {self.action(action)}"

    def event(self, event: Event) -> str:
        """Say what happened."""
        match event:
            case RequestArrived():
                pipeline = _name(self._pipelines, event.pipeline)
                client = _name(self._clients, event.client)
                return f"request {event.request_id} arrived: {pipeline}, from {client}"
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
        return _anything(event)

    def action(self, action: Action) -> str:
        """Say what was ordered."""
        match action:
            case Dispatch():
                name = _name(self._variants, action.variant_id)
                where = self._place(action.pool_id, action.node_id)
                items = "" if action.items == 1 else f", {action.items} items"
                return f"dispatch batch {action.batch_id} of {name} to {where}{items}"
            case StartInstance():
                name = _name(self._variants, action.variant_id)
                where = self._place(action.pool_id, action.node_id)
                return f"start instance {action.instance_id} of {name} on {where}"
            case LoadWeights():
                return f"load the weights of instance {action.instance_id}"
            case CancelBatch():
                return f"call batch {action.batch_id} back"
            case SetTimer():
                at_ms = action.at_ns / MILLISECOND_NS
                return f"set timer {action.key[0]} {action.key[1]} to {at_ms:,.3f} ms"
            case CancelTimer():
                return f"forget timer {action.key[0]} {action.key[1]}"
            case Settle():
                reason = f": {action.reason}" if action.reason else ""
                outcome = _name(OUTCOME_NAMES, action.outcome)
                return f"settle request {action.request_id}, {outcome}{reason}"
            case ReportFault():
                return f"fault of the policy in {action.hook}: {action.error}"
        return _anything(action)

    def _place(self, pool_id: int, node_id: int | None) -> str:
        return _name(self._pools, pool_id) if node_id is None else self._node(node_id)

    def _node(self, node_id: int) -> str:
        return self._nodes.get(node_id, str(node_id))


def _name(names: Sequence[str], number: int) -> str:
    """The number itself if nothing has it: stories are told of damaged logs too."""
    return names[number] if 0 <= number < len(names) else str(number)


def _anything(thing: Event | Action) -> str:
    """What is told too seldom for a sentence of its own."""
    name, *fields = to_wire(thing)
    return f"{name} {', '.join(map(str, fields))}"
