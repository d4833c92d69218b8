"""The engine: takes what is due, tells the Scheduler, and does what it says.

A driver of the seam, and a small one: no decision is made here. At one instant things happen in
the order completions, arrivals, timers, and among equals in the order they came about. Open-loop
arrivals come from presorted columns; everything else is on the agenda. A run ends when nothing is
left to happen, so every request has been settled or something is wrong (and the checkers say so).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop
from typing import final

from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    KeepWarm,
    PlacedAction,
    ReportFault,
    SetTimer,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.clock import NEVER_NS
from headgate.core.errors import DriverError, PolicyError
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    LoadFailed,
    NodeJoined,
    NodeLost,
    Rank,
    RequestAnnounced,
    RequestArrived,
    RequestCancelled,
    TimerFired,
    TimerKey,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App
from headgate.core.records import STAGES_MAX
from headgate.core.scheduler.scheduler import Scheduler
from headgate.sim.event_queue import (
    ActionInTransit,
    ArrivalCursor,
    Cancellation,
    ClientDue,
    DelayedAction,
    EventQueue,
    FaultDue,
    Inbox,
    QueueItem,
    Submission,
    TimerDue,
)
from headgate.sim.faas import KeepWarmTick, SimFaasPlatform, SimInvocation
from headgate.sim.ground_truth import GroundTruth
from headgate.sim.interfaces import FaultAction, Observer, SimClient
from headgate.sim.node import RESTART_NS, EventInTransit, NodeJob, Restart, SimNode, Wake
from headgate.sim.recorder import Recorder
from headgate.sim.shared_pools import SharedPools


@final
class Engine:
    """One run. Build it, `run()` it once, read the recorder."""

    def __init__(
        self,
        app: App,
        schedulers: list[Scheduler],
        nodes: list[SimNode],
        platforms: dict[int, SimFaasPlatform],
        agenda: EventQueue,
        recorder: Recorder,
        feed: ArrivalCursor,
        truth: GroundTruth,
        *,
        clients: Sequence[SimClient] = (),
        observer: Observer | None = None,
        decision_ns: int = 0,
        work_unit_ns: int = 0,
        limit_ns: int = NEVER_NS,
        survives_faults: bool = False,
    ) -> None:
        self.app = app
        self.schedulers = schedulers
        self.nodes = nodes
        self.platforms = platforms  # by pool id
        self.agenda = agenda
        self.recorder = recorder
        self.truth = truth  # faults may change it
        self.killers: set[int] = set()  # requests whose tasks end the node that runs them
        self.now_ns = 0
        self._feed = feed
        self._clients = clients
        self._observer = observer
        self._peers = len(schedulers)
        self._decision_ns = decision_ns
        self._work_unit_ns = work_unit_ns
        self._thinking_takes_time = decision_ns > 0 or work_unit_ns > 0
        self._network_ns = [pool.network_ns for pool in app.pools]
        self._is_direct = self._peers == 1 and not any(self._network_ns)
        self._free_at_ns = [0] * self._peers
        self._inboxes: list[deque[Event]] = [deque() for _ in schedulers]
        self._limit_ns = limit_ns
        self._survives_faults = survives_faults  # of policies, as a live gateway does
        self._timers: list[dict[TimerKey, int]] = [{} for _ in schedulers]
        self._token = 0
        self._expected = 0  # submissions and clients on the agenda
        self._senders: dict[int, SimClient] = {}
        self._shared = SharedPools(app, nodes, agenda)
        self._variant_of: dict[int, int] = {}  # instance id -> variant id, where pools are shared

    # --- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Let everything happen."""
        for node in self.nodes:
            self.join(0, node)
        for sender in self._clients:
            sender.on_start(self)
        heap = self.agenda.heap
        feed = self._feed
        while feed.read():
            # A plain zip: a compiled build makes no tuples of it.
            for arrival_ns, pipeline, client, items in zip(  # noqa: B905
                feed.times, feed.pipelines, feed.clients, feed.items
            ):
                while heap:
                    first = heap[0]
                    at_ns = first[0]
                    if at_ns >= arrival_ns and (at_ns > arrival_ns or first[1] > Rank.ARRIVAL):
                        break
                    self.now_ns = at_ns
                    self._happen(at_ns, heappop(heap)[3])
                self.now_ns = arrival_ns
                self._submit_now(arrival_ns, pipeline, client, items)
        while heap and not self._is_over(heap[0][0]):
            at_ns, _, _, what = heappop(heap)
            self.now_ns = at_ns
            self._happen(at_ns, what)

    def _is_over(self, next_ns: int) -> bool:
        recorder = self.recorder
        is_idle = recorder.count == recorder.ended and self._expected == 0
        return is_idle or next_ns > self._limit_ns

    def _submit_now(self, now_ns: int, pipeline: int, client: int, items: int) -> None:
        recorder = self.recorder
        request_id = recorder.count
        recorder.count = request_id + 1
        if recorder.records_arrivals:
            recorder.arrived(now_ns, pipeline, client)
        index = 0 if self._peers == 1 else self._scheduler_of_request(request_id)
        event = RequestArrived(request_id, pipeline, client, items)
        if self._thinking_takes_time:  # a deadline counts from now, not from when it is heard of
            event.deadline_ns = self.app.pipelines[pipeline].slo.deadline_ns(now_ns)
        self.tell(now_ns, index, event)

    def _scheduler_of_request(self, request_id: int) -> int:
        """What stands in front of the gateways spreads requests evenly, and not in lockstep."""
        return (request_id * 2_654_435_761 >> 16) % self._peers

    def _happen(self, now_ns: int, what: QueueItem) -> None:
        if isinstance(what, NodeJob):
            if self.killers and what.ends_ns == now_ns and self._kills(what.order):
                self._die(now_ns, what.node)
                return
            event = what.node.end_job(now_ns, what)
            if self._is_direct and isinstance(event, BatchFinished):
                self.tell(now_ns, 0, event)
            elif event is not None:
                self._reported(now_ns, event, what.node.pool.network_ns)
        elif isinstance(what, SimInvocation):
            platform = what.platform
            self._reported(now_ns, platform.end(now_ns, what), platform.pool.network_ns)
        elif isinstance(what, TimerDue):
            timers = self._timers[what.scheduler]
            if timers.get(what.key) == what.token:
                del timers[what.key]
                self.tell(now_ns, what.scheduler, TimerFired(what.key))
        elif isinstance(what, EventInTransit):
            self._deliver(now_ns, what.event)
        elif isinstance(what, ActionInTransit):
            self._carry_out(now_ns, what.scheduler, what.action)
        else:
            self._happen_rarely(now_ns, what)

    def _happen_rarely(self, now_ns: int, what: QueueItem) -> None:
        if isinstance(what, Submission):
            self._expected -= 1
            if what.sender is not None:
                self._senders[self.recorder.count] = what.sender
                what.sender.on_arrived(self, now_ns, self.recorder.count)
            self._submit_now(now_ns, what.pipeline, what.client, what.items)
        elif isinstance(what, ClientDue):
            self._expected -= 1
            what.client.on_wake(self, now_ns)
        elif isinstance(what, Cancellation):
            index = self._scheduler_of_request(what.request_id)
            self.tell(now_ns, index, RequestCancelled(what.request_id))
        elif isinstance(what, Wake):
            what.node.wake(now_ns, what.instance_id)
        elif isinstance(what, Inbox):
            self._think(now_ns, what.scheduler, self._inboxes[what.scheduler].popleft())
            if self._inboxes[what.scheduler]:
                self.agenda.push(self._free_at_ns[what.scheduler], Rank.COMPLETION, what)
        elif isinstance(what, DelayedAction):
            self._perform(now_ns, what.scheduler, what.action)
        elif isinstance(what, KeepWarmTick):
            what.platform.awaken(now_ns, what)
        elif isinstance(what, FaultDue):
            what.trouble.apply(self, now_ns)
        elif isinstance(what, Restart):
            self.join(now_ns, what.node)
        else:
            raise DriverError(f"nothing is known about {type(what).__name__}")

    # --- to the Schedulers ---------------------------------------------------------------------

    def _reported(self, now_ns: int, event: Event, network_ns: int) -> None:
        if network_ns:
            self.agenda.push(now_ns + network_ns, Rank.COMPLETION, EventInTransit(event))
        else:
            self._deliver(now_ns, event)

    def _deliver(self, now_ns: int, event: Event) -> None:
        """Tell whom it concerns: the sender of a batch, or everybody about instances."""
        if isinstance(event, BatchFinished | BatchFailed | BatchRefused | BatchLost):
            self.tell(now_ns, event.batch_id % self._peers, event)
            return
        assert isinstance(event, InstanceStarted | InstanceStopped | WeightsLoaded | WeightsEvicted)
        owner = event.instance_id % self._peers
        if isinstance(event, InstanceStarted):
            if event.instance_id not in self.nodes[event.node_id].backend.instances:
                return  # the node has crashed since, and everybody was told
            self._shared.started(event.instance_id)
        elif isinstance(event, InstanceStopped):
            self._shared.stopped(now_ns, event.instance_id)
        for index in range(self._peers):
            if index == owner or not isinstance(event, InstanceStarted):
                self.tell(now_ns, index, event)
            else:
                variant_id = self._variant_of[event.instance_id]
                appeared = InstanceAppeared(event.instance_id, variant_id, event.node_id)
                self.tell(now_ns, index, appeared)

    def tell(self, now_ns: int, index: int, event: Event) -> None:
        """Feed one Scheduler one event and carry out what it says."""
        if self._thinking_takes_time:
            self._tell_a_thinker(now_ns, index, event)
            return
        try:
            actions = self.schedulers[index].handle(now_ns, event)
        except PolicyError as error:
            actions = self._actions_of(error)
        if self._observer is not None:
            self._observer.on_event(now_ns, index, event, actions)
        for action in actions:
            if isinstance(action, Settle):
                self.recorder.settled(now_ns, action.request_id, action.outcome)
                if self._senders:
                    self._answer(now_ns, action)
            elif self._is_direct and isinstance(action, Dispatch) and action.node_id is not None:
                self.nodes[action.node_id].take_batch(now_ns, action)
            else:
                self._perform(now_ns, index, action)

    def _actions_of(self, error: PolicyError) -> list[Action]:
        """What is to be done after a fault of a policy, if the run is to go on after one."""
        if not self._survives_faults:
            raise error
        return [action for action in error.actions if isinstance(action, Action)]

    def _tell_a_thinker(self, now_ns: int, index: int, event: Event) -> None:
        """Events wait in line: none overtakes another, even at the instant the thinking ends."""
        inbox = self._inboxes[index]
        if inbox:
            inbox.append(event)
        elif now_ns < self._free_at_ns[index]:
            inbox.append(event)
            self.agenda.push(self._free_at_ns[index], Rank.COMPLETION, Inbox(index))
        else:
            self._think(now_ns, index, event)

    def _think(self, now_ns: int, index: int, event: Event) -> None:
        scheduler = self.schedulers[index]
        work = scheduler.work
        try:
            actions = scheduler.handle(now_ns, event)
        except PolicyError as error:
            actions = self._actions_of(error)
        if self._observer is not None:
            self._observer.on_event(now_ns, index, event, actions)
        cost_ns = self._decision_ns + (scheduler.work - work) * self._work_unit_ns
        if isinstance(event, RequestAnnounced):
            cost_ns = 0  # that was thought before the run
        done_ns = now_ns + cost_ns
        self._free_at_ns[index] = done_ns
        for action in actions:
            self.agenda.push(done_ns, Rank.COMPLETION, DelayedAction(index, action))

    # --- from the Schedulers -------------------------------------------------------------------

    def _perform(self, now_ns: int, index: int, action: Action) -> None:
        """Carry an action out, after the time the network takes."""
        if isinstance(action, Dispatch):
            if self._network_ns[action.pool_id]:
                at_ns = now_ns + self._network_ns[action.pool_id]
                self.agenda.push(at_ns, Rank.COMPLETION, ActionInTransit(index, action))
            elif action.node_id is not None:
                self.nodes[action.node_id].take_batch(now_ns, action)
            else:
                self.platforms[action.pool_id].take(now_ns, action)
        elif isinstance(action, SetTimer):
            self._token += 1
            self._timers[index][action.key] = self._token
            due = TimerDue(index, action.key, self._token)
            self.agenda.push(max(now_ns, action.at_ns), Rank.TIMER, due)
        elif isinstance(action, CancelTimer):
            self._timers[index].pop(action.key, None)
        elif isinstance(action, Settle):
            self.recorder.settled(now_ns, action.request_id, action.outcome)
            self._answer(now_ns, action)
        elif isinstance(action, KeepWarm):
            self.platforms[action.pool_id].keep_warm(now_ns, action)
        elif not isinstance(action, ReportFault):  # that is for people
            self._perform_on_node(now_ns, index, action)

    def _perform_on_node(self, now_ns: int, index: int, action: Action) -> None:
        assert isinstance(action, PlacedAction)
        if isinstance(action, StartInstance):
            self._variant_of[action.instance_id] = action.variant_id
        node_id = action.node_id
        network_ns = 0 if node_id is None else self.nodes[node_id].pool.network_ns
        if network_ns:
            self.agenda.push(now_ns + network_ns, Rank.COMPLETION, ActionInTransit(index, action))
        else:
            self._carry_out(now_ns, index, action)

    def _carry_out(self, now_ns: int, index: int, action: Action) -> None:
        """An action has reached the place where it is carried out."""
        if isinstance(action, Dispatch) and action.node_id is None:
            self.platforms[action.pool_id].take(now_ns, action)
        elif isinstance(action, StartInstance) and action.node_id is None:
            self._shared.ask(now_ns, action)
        elif isinstance(action, StopInstance) and action.node_id is None:
            self._shared.call_off(now_ns, action)
        else:
            assert isinstance(action, PlacedAction)
            if action.node_id is not None:
                self.nodes[action.node_id].take(now_ns, action)

    def _answer(self, now_ns: int, action: Settle) -> None:
        """Tell whoever sent this request how it ended, if that is somebody who wants to know."""
        sender = self._senders.pop(action.request_id, None)
        if sender is not None:
            sender.on_settled(self, now_ns, action.request_id, action.outcome)

    # --- what clients and faults may do --------------------------------------------------------

    def submit(
        self,
        at_ns: int,
        pipeline: int,
        client: int,
        items: int = 1,
        sender: SimClient | None = None,
    ) -> None:
        """Have a request arrive."""
        self._expected += 1
        self.agenda.push(at_ns, Rank.ARRIVAL, Submission(pipeline, client, items, sender))

    def cancel(self, now_ns: int, request_id: int) -> None:
        """Have a client withdraw its request, if it is still open."""
        self.agenda.push(now_ns, Rank.ARRIVAL, Cancellation(request_id))

    def wake_client(self, at_ns: int, client: SimClient) -> None:
        """Call `client.woken` then."""
        self._expected += 1
        self.agenda.push(at_ns, Rank.ARRIVAL, ClientDue(client))

    def announce(self, request_id: int, pipeline: int, client: int, arrival_ns: int) -> None:
        """Tell clairvoyant policies, before the run, of a request that will arrive."""
        index = self._scheduler_of_request(request_id)
        self.tell(0, index, RequestAnnounced(request_id, pipeline, client, arrival_ns))

    def expect_trouble(self, at_ns: int, trouble: FaultAction) -> None:
        """Have a fault begin or end then."""
        self.agenda.push(at_ns, Rank.TIMER, FaultDue(trouble))

    def _kills(self, order: Action) -> bool:
        return isinstance(order, Dispatch) and any(
            task_id // STAGES_MAX in self.killers for task_id in order.task_ids
        )

    def _die(self, now_ns: int, node: SimNode) -> None:
        """A node is killed by what it runs; something starts it again."""
        self.crash(now_ns, node)
        self.agenda.push(now_ns + RESTART_NS, Rank.TIMER, Restart(node))

    def crash(self, now_ns: int, node: SimNode) -> None:
        """A node goes down and takes everything on it with it."""
        if not node.is_up:
            return
        events = node.crash(now_ns)
        orphans = self._shared.node_lost(node)
        for event in events:
            self._deliver(now_ns, event)
        for index in range(self._peers):
            self.tell(now_ns, index, NodeLost(node.id))
        for instance_id in orphans:
            self._deliver(now_ns, InstanceStopped(instance_id, "its node is gone"))

    def join(self, now_ns: int, node: SimNode) -> None:
        """A node is there, or back."""
        if node.is_up:
            return
        node.join(now_ns)
        for index in range(self._peers):
            self.tell(now_ns, index, NodeJoined(node.id, node.pool.id, node.name))
        self._shared.node_joined(now_ns, node)
        for variant in self.app.variants_on(node.pool.id) if self.truth.unloadable else ():
            if variant is not None and variant.function_id in self.truth.unloadable:
                for index in range(self._peers):  # it has tried before it joined
                    self.tell(now_ns, index, LoadFailed(variant.id, node.id, "cannot be loaded"))
