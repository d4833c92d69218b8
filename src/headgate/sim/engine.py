"""The simulation engine: a discrete-event loop that drives one or more Schedulers.

The engine pops the next item, gives the resulting event to a Scheduler and carries out the actions
that the Scheduler returns. It takes no decision of its own. Items at the same instant are processed
in the order completions, arrivals, timers, and within one rank in the order of insertion. Open-loop
arrivals are read from sorted columns; everything else is on the event queue. A run ends when no
request is open and no client has anything left to do, at a limit, or when requests are starved
(`StarvationWatch`). `simulate`, or the checkers if there is a limit, report what is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop
from typing import Final, final

from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    KeepWarm,
    PlacedAction,
    ReportFault,
    ReportWouldReject,
    SetTimer,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.backend import NODE_LOST
from headgate.core.clock import NEVER_NS
from headgate.core.errors import DriverError, PolicyError
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    GatewaysChanged,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    InstanceUseChanged,
    LoadFailed,
    NodeJoined,
    NodeLost,
    Rank,
    RequestAnnounced,
    RequestArrived,
    RequestCancelled,
    TimerFired,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.ids import IDS_PER_SCHEDULER, first_id, owner
from headgate.core.model import App
from headgate.core.records import STAGES_MAX
from headgate.core.states import Failure, Outcome, Settlement
from headgate.sim.event_queue import (
    ActionInTransit,
    ArrivalCursor,
    Callback,
    EventQueue,
    QueueItem,
    Submission,
    TimerDue,
)
from headgate.sim.faas import SimFaasPlatform, SimInvocation
from headgate.sim.gateways import Gateways, GatewayWork
from headgate.sim.ground_truth import GroundTruth
from headgate.sim.interfaces import Observer, SimClient
from headgate.sim.node import RESTART_NS, EventInTransit, NodeJob, SimNode
from headgate.sim.recorder import Recorder, StarvationWatch
from headgate.sim.shared_pools import SharedPools

# Compiled code reads a Final directly, and what is imported from a dictionary.
_heappop: Final = heappop
_CRASHED: Final = Settlement(Outcome.FAILED, Failure.GATEWAY_CRASHED)


@final
class Engine:
    """One simulation run: build it, call `run()` once, then read the recorder."""

    def __init__(
        self,
        app: App,
        gateways: Gateways,
        nodes: list[SimNode],
        platforms: dict[int, SimFaasPlatform],
        queue: EventQueue,
        recorder: Recorder,
        cursor: ArrivalCursor,
        truth: GroundTruth,
        *,
        clients: Sequence[SimClient] = (),
        observer: Observer | None = None,
        decision_ns: int = 0,
        work_unit_ns: int = 0,
        gateway_work: GatewayWork | None = None,
        limit_ns: int = NEVER_NS,
        survives_faults: bool = False,
        membership_delay_ns: int = 0,
    ) -> None:
        self.app = app
        self.gateways = gateways
        self.nodes = nodes
        self.platforms = platforms  # by pool id
        self.queue = queue
        self.recorder = recorder
        self.truth = truth  # faults may change it
        self.poisonous_requests: set[int] = set()  # a node that runs one of these crashes
        self.now_ns = 0
        self._cursor = cursor
        self._clients = clients
        self._observer = observer
        self._membership_delay_ns = membership_delay_ns  # until a crash is known to the others
        self._is_alone = len(gateways.schedulers) == 1  # one gateway, which has never crashed
        self._decision_ns = decision_ns
        self._work_unit_ns = work_unit_ns
        self._gateway_work = gateway_work
        self._has_decision_cost = decision_ns > 0 or work_unit_ns > 0
        self._network_ns = [pool.network_ns for pool in app.pools]
        self._is_direct = self._is_alone and not any(self._network_ns)
        self._limit_ns = limit_ns
        self._survives_faults = survives_faults  # continue after a PolicyError, as live
        self._token = 0
        self._pending_clients = 0  # submissions and wake-ups of clients on the queue
        self._senders: dict[int, SimClient] = {}
        self._shared = SharedPools(app, nodes, queue)
        self._starts: dict[int, StartInstance] = {}  # by instance id, as they were ordered
        self._life_of_start: dict[int, int] = {}  # by instance id: which life of its node it is for
        self._announced: set[int] = set()  # instances that the Schedulers know to have started

    def run(self) -> None:
        """Run to the end."""
        for node in self.nodes:
            self.join(0, node)
        for sender in self._clients:
            sender.on_start(self)
        heap = self.queue.heap
        cursor = self._cursor
        while cursor.read():
            # zip without `strict`: mypyc compiles this form to a loop that builds no tuples.
            for arrival_ns, pipeline, client, items, priority in zip(  # noqa: B905
                cursor.times, cursor.pipelines, cursor.clients, cursor.items, cursor.priorities
            ):
                while heap:
                    first = heap[0]
                    at_ns = first[0]
                    if at_ns >= arrival_ns and (at_ns > arrival_ns or first[1] > Rank.ARRIVAL):
                        break
                    self.now_ns = at_ns
                    self._process(at_ns, _heappop(heap)[3])
                self.now_ns = arrival_ns
                self._admit(arrival_ns, pipeline, client, items, priority)
        watch = StarvationWatch(self.now_ns, self.queue, self.recorder)
        while heap and not self._is_finished(heap[0][0]) and not watch.has_stalled(heap[0][0]):
            self.now_ns, _, _, item = _heappop(heap)
            self._process(self.now_ns, item)

    def _is_finished(self, next_ns: int) -> bool:
        is_idle = self.recorder.count == self.recorder.ended and self._pending_clients == 0
        return is_idle or next_ns > self._limit_ns

    def _admit(
        self,
        now_ns: int,
        pipeline: int,
        client: int,
        items: int,
        priority: int = 0,
        timeout_ns: int = 0,
        cost_usd: float = 0.0,
        payload_bytes: int = 0,
    ) -> None:
        recorder = self.recorder
        request_id = recorder.count
        recorder.count = request_id + 1
        if recorder.records_arrivals:
            recorder.arrived(now_ns, pipeline, client, timeout_ns)
        index = 0
        if not self._is_alone:
            receiver = self.gateways.receiver(request_id)
            if receiver is None:
                self._turn_away(now_ns, request_id, pipeline)
                return
            index = self.gateways.receivers[request_id] = receiver
        event = RequestArrived(request_id, pipeline, client, items, priority)
        if cost_usd or payload_bytes:
            event.cost_usd, event.payload_bytes = cost_usd, payload_bytes
        # The event may wait in the Scheduler's inbox; the deadline counts from the arrival.
        if timeout_ns:
            event.deadline_ns, event.is_hard = now_ns + timeout_ns, True
        elif self._has_decision_cost:
            event.deadline_ns = self.app.pipelines[pipeline].slo.deadline_ns(now_ns)
        self.handle_event(now_ns, index, event)

    def _process(self, now_ns: int, item: QueueItem) -> None:
        if isinstance(item, NodeJob):
            if (
                self.poisonous_requests
                and item.ends_ns == now_ns
                and self._is_poisoned(item.action)
            ):
                self._kill_node(now_ns, item.node)
                return
            event = item.node.end_job(now_ns, item)
            if self._is_direct and isinstance(event, BatchFinished):
                self.handle_event(now_ns, 0, event)
            elif event is not None:
                self._deliver_after_network(now_ns, event, item.node.pool.network_ns)
        elif isinstance(item, SimInvocation):
            finished = item.platform.complete(now_ns, item)
            if finished is not None:
                self._deliver_after_network(now_ns, finished, item.platform.pool.network_ns)
        elif isinstance(item, TimerDue):
            timers = self.gateways.timers[item.scheduler]
            if timers.get(item.key) == item.token:
                del timers[item.key]
                self.handle_event(now_ns, item.scheduler, TimerFired(item.key))
        elif isinstance(item, EventInTransit):
            self._deliver(now_ns, item.event)
        elif isinstance(item, ActionInTransit):
            self._execute(now_ns, item.action)
        elif isinstance(item, Submission):
            self._pending_clients -= 1
            if item.sender is not None:
                self._senders[self.recorder.count] = item.sender
                item.sender.on_arrived(self, now_ns, self.recorder.count)
            self._admit(
                now_ns,
                item.pipeline,
                item.client,
                item.items,
                item.priority,
                item.timeout_ns,
                item.cost_usd,
                item.payload_bytes,
            )
        elif isinstance(item, Callback):
            item.call(now_ns)
        else:
            raise DriverError(f"unknown kind of queue item: {type(item).__name__}")

    def _deliver_after_network(self, now_ns: int, event: Event, network_ns: int) -> None:
        if network_ns:
            self.queue.push(now_ns + network_ns, Rank.COMPLETION, EventInTransit(event))
        else:
            self._deliver(now_ns, event)

    def _deliver(self, now_ns: int, event: Event) -> None:
        """Send a batch's event to the Scheduler that dispatched it, an instance's to all."""
        if isinstance(event, BatchFinished | BatchFailed | BatchRefused | BatchLost):
            self.handle_event(now_ns, owner(event.batch_id), event)
            return
        assert isinstance(
            event,
            InstanceStarted | InstanceStopped | InstanceUseChanged | WeightsLoaded | WeightsEvicted,
        )
        instance_id, own = event.instance_id, owner(event.instance_id)
        if isinstance(event, InstanceStarted):
            if instance_id not in self.nodes[event.node_id].backend.instances:
                return  # the node has crashed since, and every Scheduler knows
            self._shared.on_started(instance_id)
            self._announced.add(instance_id)
        elif isinstance(event, InstanceStopped):
            self._shared.on_stopped(now_ns, instance_id)
            if instance_id not in self._announced:  # nobody else has ever heard of it
                self.handle_event(now_ns, own, event)
                return
            self._announced.discard(instance_id)
        for index in self.gateways.alive():
            if index == own or not isinstance(event, InstanceStarted):
                self.handle_event(now_ns, index, event)
            else:
                self._announce_instance(now_ns, index, instance_id, event.node_id)

    def _announce_instance(self, now_ns: int, index: int, instance_id: int, node_id: int) -> None:
        """Tell a Scheduler of an instance that another one has started."""
        start = self._starts[instance_id]
        appeared = InstanceAppeared(instance_id, start.variant_id, node_id, start.shape_id)
        self.handle_event(now_ns, index, appeared)

    def handle_event(self, now_ns: int, index: int, event: Event) -> None:
        """Give one Scheduler one event and carry out the actions it returns, if it still lives."""
        if not self._is_alone and not self.gateways.is_alive(index):
            return
        if self._has_decision_cost:
            self._handle_with_decision_cost(now_ns, index, event)
            return
        try:
            actions = self.gateways.schedulers[index].handle(now_ns, event)
        except PolicyError as error:
            actions = self._actions_after(error)
        if self._observer is not None:
            self._observer.on_event(now_ns, index, event, actions)
        if self._gateway_work is not None:
            self._gateway_work.on_event(now_ns, event, actions)
        for action in actions:
            if isinstance(action, Settle):
                self.recorder.settled(now_ns, action.request_id, action.settlement)
                if self._senders or not self._is_alone:
                    self._forget_request(now_ns, action.request_id, action.settlement)
            elif self._is_direct and isinstance(action, Dispatch) and action.node_id is not None:
                self.nodes[action.node_id].execute_batch(now_ns, action)
            else:
                self._send_action(now_ns, index, action)

    def _actions_after(self, error: PolicyError) -> list[Action]:
        """Return the actions to carry out after a policy failed, or raise its error again."""
        if not self._survives_faults:
            raise error
        return [action for action in error.actions if isinstance(action, Action)]

    def _handle_with_decision_cost(self, now_ns: int, index: int, event: Event) -> None:
        """Handle an event now, or queue it while the Scheduler is busy with a decision.

        Events are handled first come, first served, also at the instant at which a decision ends.
        """
        inbox = self.gateways.inboxes[index]
        if inbox:
            inbox.append(event)
        elif now_ns < self.gateways.free_at_ns[index]:
            inbox.append(event)
            self._decide_when_free(index)
        else:
            self._decide(now_ns, index, event)

    def _decide_when_free(self, index: int) -> None:
        due = Callback(partial(self._read_inbox, index))
        self.queue.push(self.gateways.free_at_ns[index], Rank.COMPLETION, due)

    def _read_inbox(self, index: int, now_ns: int) -> None:
        inbox = self.gateways.inboxes[index]
        if inbox:  # else the gateway has crashed
            self._decide(now_ns, index, inbox.popleft())
            if inbox:
                self._decide_when_free(index)

    def _decide(self, now_ns: int, index: int, event: Event) -> None:
        scheduler = self.gateways.schedulers[index]
        work = scheduler.work
        try:
            actions = scheduler.handle(now_ns, event)
        except PolicyError as error:
            actions = self._actions_after(error)
        if self._observer is not None:
            self._observer.on_event(now_ns, index, event, actions)
        if self._gateway_work is not None:
            self._gateway_work.on_event(now_ns, event, actions)
        if isinstance(event, NodeLost):
            self.gateways.lives[index][event.node_id] += 1
        cost_ns = self._decision_ns + (scheduler.work - work) * self._work_unit_ns
        if isinstance(event, RequestAnnounced):
            cost_ns = 0  # announcements precede the run, and so does the work they cause
        done_ns = now_ns + cost_ns
        self.gateways.free_at_ns[index] = done_ns
        for action in actions:
            if isinstance(action, StartInstance):
                self._note_start(index, action)
            send = Callback(partial(self._send_if_alive, index=index, action=action))
            self.queue.push(done_ns, Rank.COMPLETION, send)

    def _send_if_alive(self, now_ns: int, index: int, action: Action) -> None:
        if self.gateways.is_alive(index):
            self._send_action(now_ns, index, action)

    def _send_action(self, now_ns: int, index: int, action: Action) -> None:
        """Carry out an action, after the network delay of its pool."""
        if isinstance(action, Dispatch):
            if self._network_ns[action.pool_id]:
                at_ns = now_ns + self._network_ns[action.pool_id]
                self.queue.push(at_ns, Rank.COMPLETION, ActionInTransit(action))
            elif action.node_id is not None:
                self.nodes[action.node_id].execute_batch(now_ns, action)
            else:
                self.platforms[action.pool_id].invoke(now_ns, action)
        elif isinstance(action, SetTimer):
            self._token += 1
            self.gateways.timers[index][action.key] = self._token
            due = TimerDue(index, action.key, self._token)
            self.queue.push(max(now_ns, action.at_ns), Rank.TIMER, due)
        elif isinstance(action, CancelTimer):
            self.gateways.timers[index].pop(action.key, None)
        elif isinstance(action, Settle):
            self._settle(now_ns, action.request_id, action.settlement)
        elif isinstance(action, KeepWarm):
            self.platforms[action.pool_id].keep_warm(now_ns, action)
        elif isinstance(action, ReportWouldReject):
            self.recorder.would_reject(action.request_id)
        elif not isinstance(action, ReportFault):  # a report is for operators: nothing to do
            self._send_to_node(now_ns, index, action)

    def _send_to_node(self, now_ns: int, index: int, action: Action) -> None:
        assert isinstance(action, PlacedAction)
        if isinstance(action, StartInstance) and not self._has_decision_cost:
            self._note_start(index, action)
        node_id = action.node_id
        network_ns = 0 if node_id is None else self.nodes[node_id].pool.network_ns
        if network_ns:
            self.queue.push(now_ns + network_ns, Rank.COMPLETION, ActionInTransit(action))
        else:
            self._execute(now_ns, action)

    def _note_start(self, index: int, action: StartInstance) -> None:
        """Note what is started, and on which life of its node: the one its Scheduler knows of."""
        self._starts[action.instance_id] = action
        if action.node_id is not None:
            self._life_of_start[action.instance_id] = self.gateways.lives[index][action.node_id]

    def _execute(self, now_ns: int, action: Action) -> None:
        """Carry out an action that has reached its node, its platform or its shared pool."""
        if isinstance(action, Dispatch) and action.node_id is None:
            self.platforms[action.pool_id].invoke(now_ns, action)
        elif isinstance(action, StartInstance) and action.node_id is None:
            self._shared.request_start(now_ns, action)
        elif isinstance(action, StopInstance) and action.node_id is None:
            self._shared.cancel_start(now_ns, action)
        else:
            assert isinstance(action, PlacedAction)
            if action.node_id is not None:
                node = self.nodes[action.node_id]
                if isinstance(action, StartInstance):
                    node.start(now_ns, action, self._life_of_start[action.instance_id])
                else:
                    node.execute(now_ns, action)

    def _settle(self, now_ns: int, request_id: int, settlement: Settlement) -> None:
        self.recorder.settled(now_ns, request_id, settlement)
        self._forget_request(now_ns, request_id, settlement)

    def _forget_request(self, now_ns: int, request_id: int, settlement: Settlement) -> None:
        """Notify the client that sent a request, if one did, of the outcome."""
        self.gateways.receivers.pop(request_id, None)
        sender = self._senders.pop(request_id, None)
        if sender is not None:
            sender.on_settled(self, now_ns, request_id, settlement)

    def submit(
        self,
        at_ns: int,
        pipeline: int,
        client: int,
        items: int = 1,
        sender: SimClient | None = None,
        priority: int = 0,
        timeout_ns: int = 0,
        cost_usd: float = 0.0,
        payload_bytes: int = 0,
    ) -> None:
        """Have a request arrive at `at_ns`; `sender` is notified of its arrival and its outcome."""
        self._pending_clients += 1
        submission = Submission(
            pipeline, client, items, priority, timeout_ns, cost_usd, payload_bytes, sender
        )
        self.queue.push(at_ns, Rank.ARRIVAL, submission)

    def cancel(self, at_ns: int, request_id: int) -> None:
        """Cancel a request at `at_ns`, if it is still open then."""
        self.queue.push(at_ns, Rank.ARRIVAL, Callback(partial(self._on_cancelled, request_id)))

    def _on_cancelled(self, request_id: int, now_ns: int) -> None:
        index = 0 if self._is_alone else self.gateways.receivers.get(request_id)
        if index is not None:  # else it has ended, perhaps with its gateway
            self.handle_event(now_ns, index, RequestCancelled(request_id))

    def wake_client(self, at_ns: int, client: SimClient) -> None:
        """Call `client.on_wake` at `at_ns`."""
        self._pending_clients += 1
        self.queue.push(at_ns, Rank.ARRIVAL, Callback(partial(self._on_wake, client)))

    def _on_wake(self, client: SimClient, now_ns: int) -> None:
        self._pending_clients -= 1
        client.on_wake(self, now_ns)

    def announce(self, request_id: int, pipeline: int, client: int, arrival_ns: int) -> None:
        """Announce to a clairvoyant policy, before the run, a request that will arrive."""
        index = self.gateways.receiver(request_id)
        assert index is not None, "no gateway crashes before the run"
        self.handle_event(0, index, RequestAnnounced(request_id, pipeline, client, arrival_ns))

    def schedule_fault(self, at_ns: int, apply: Callable[[int], None]) -> None:
        """Call `apply` with the time at `at_ns`: a fault begins or ends."""
        self.queue.push(at_ns, Rank.TIMER, Callback(apply))

    def has_pending_work(self) -> bool:
        """Whether anything is in flight, or a client is still to be woken. O(queue length)."""
        # A start that waits for a node of a shared pool is in flight: it is granted, or withdrawn.
        is_waiting = self._pending_clients > 0 or self._shared.has_waiting_starts()
        return is_waiting or any(entry[1] == Rank.COMPLETION for entry in self.queue.heap)

    def open_requests(self) -> list[int]:
        """Return the ids of the requests that have arrived and not ended. O(requests)."""
        return self.recorder.open_rows()

    def _is_poisoned(self, action: Action) -> bool:
        return isinstance(action, Dispatch) and any(
            task_id // STAGES_MAX in self.poisonous_requests for task_id in action.task_ids
        )

    def _kill_node(self, now_ns: int, node: SimNode) -> None:
        """Crash a node because of the request it runs, and restart it after `RESTART_NS`."""
        self.crash(now_ns, node)
        self.queue.push(now_ns + RESTART_NS, Rank.TIMER, Callback(partial(self.join, node=node)))

    def crash(self, now_ns: int, node: SimNode) -> None:
        """Take a node down; its batches are lost and its instances are gone. Idempotent."""
        if not node.is_up:
            return
        events = node.crash(now_ns)
        orphans = self._shared.on_node_lost(node)
        for event in events:
            self._deliver(now_ns, event)
        for index in self.gateways.alive():
            if not self._has_decision_cost:
                self.gateways.lives[index][node.id] += 1
            self.handle_event(now_ns, index, NodeLost(node.id))
        for instance_id in orphans:
            self._deliver(now_ns, InstanceStopped(instance_id, NODE_LOST))

    def join(self, now_ns: int, node: SimNode) -> None:
        """Bring a node up, empty, at the start of a run or after a crash. Idempotent."""
        if node.is_up:
            return
        node.join(now_ns)
        for index in self.gateways.alive():
            self.handle_event(now_ns, index, NodeJoined(node.id, node.pool.id, node.name))
        self._shared.on_node_joined(now_ns, node)
        for index in self.gateways.alive():
            self._report_unloadable(now_ns, index, node)

    def _report_unloadable(self, now_ns: int, index: int, node: SimNode) -> None:
        """A node tries its models before it joins, and tells which of them cannot be loaded."""
        for variant in self.app.variants if self.truth.unloadable else ():
            if node.pool.id in variant.pool_ids and variant.function_id in self.truth.unloadable:
                failed = LoadFailed(variant.id, node.id, "cannot be loaded")
                self.handle_event(now_ns, index, failed)

    def crash_gateway(self, now_ns: int, gateway: int) -> None:
        """Take a gateway down. Its open requests fail, and its instances live on. Idempotent.

        What is on its way to a node arrives there, what is on its way back is lost. The others
        learn the number of gateways that are left only after a while.
        """
        index = self.gateways.crash(gateway)
        if index is None:
            return
        receivers = self.gateways.receivers
        if self._is_alone:
            receivers.update(dict.fromkeys(self.recorder.open_rows(), 0))
            self._is_alone = self._is_direct = False
        ids = range(first_id(index), first_id(index) + IDS_PER_SCHEDULER)
        for node in self.nodes:
            if node.is_up:
                node.scheduler_left(now_ns, ids)
        self._shared.on_gateway_crashed(ids)
        if self._observer is not None:
            self._observer.on_gateway_crashed(now_ns, index)
        for request_id in [r for r, receiver in receivers.items() if receiver == index]:
            self._settle(now_ns, request_id, _CRASHED)
        self._count_gateways(now_ns)

    def restart_gateway(self, now_ns: int, gateway: int) -> None:
        """Replace a gateway that is down. The new one learns what there is. Idempotent."""
        index = self.gateways.replace(gateway)
        if index is None:
            return
        self.gateways.lives[index].update({node.id: node.life for node in self.nodes})
        self.handle_event(now_ns, index, GatewaysChanged(len(self.gateways.alive())))
        for node in self.nodes:
            if node.is_up:
                self._introduce_node(now_ns, index, node)
                self._report_unloadable(now_ns, index, node)
        self._count_gateways(now_ns)

    def _introduce_node(self, now_ns: int, index: int, node: SimNode) -> None:
        """Tell a new Scheduler of a node and of the instances on it that can be used."""
        flat: list[int] = []
        for instance in node.backend.instances.values():
            if instance.is_ready and not instance.stop_reason and instance.id in self._announced:
                flat += (instance.id, instance.variant.id, instance.shape_id)
        self.handle_event(now_ns, index, NodeJoined(node.id, node.pool.id, node.name, tuple(flat)))

    def _count_gateways(self, now_ns: int) -> None:
        """Tell all gateways how many they are, after the time that it takes to notice."""
        news = Callback(partial(self._tell_gateways, len(self.gateways.alive())))
        self.queue.push(now_ns + self._membership_delay_ns, Rank.COMPLETION, news)

    def _tell_gateways(self, count: int, now_ns: int) -> None:
        for index in self.gateways.alive():
            self.handle_event(now_ns, index, GatewaysChanged(max(1, count)))

    def _turn_away(self, now_ns: int, request_id: int, pipeline: int) -> None:
        """No gateway is left: the client cannot even connect."""
        if self._observer is not None:
            self._observer.on_turned_away(now_ns, request_id, pipeline)
        self._settle(now_ns, request_id, _CRASHED)
