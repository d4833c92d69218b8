"""The constants of the default policy whose value is a choice.

Names, bounds of arrays, steps of rounding and units stand where they are used; here is what could
have been another number. Each was chosen on a few worlds. To try others, `tools/sensitivity.py`
halves and doubles each in worlds on which none was chosen. docs/constants.md has the table that it
made: which constants matter, and what another value costs; and it names those that are younger than
the table. A comment names the experiment that a value comes from where there was one of its own.
"""

from __future__ import annotations

from typing import Final

from headgate.core.clock import HOUR_NS, MINUTE_NS, SECOND_NS

# Service times as they are observed (`pools/build`).

# Relative standard deviation of a service time before any was observed.
TIME_DEVIATION: Final = 0.1
# Observations that a profile counts for, before any and after a surprise.
PROFILE_WEIGHT: Final = 2
# Observations after which older ones are forgotten.
OBSERVATIONS_KEPT: Final = 20
# One observation counts at most as so many times as long, or as short, as expected.
OBSERVATION_CLIP: Final = 4.0
# Standard deviations beyond which an observation is a surprise: the function has changed.
SURPRISE: Final = 4.0
# Lane time of a batch over what was booked for it, of which more is taken for an accident.
OVERRUN_MAX: Final = 3.0
# Standard deviations that a lane is expected to be free later than on average.
END_CAUTION: Final = 1.0

# Batches (`pools/build`, `pools/concurrency`, `dispatch/shapes`, `frontier/candidates`).

# Batches may grow by this factor over recent ones.
BATCH_GROWTH: Final = 1.5
# Weight of one batch in what is learnt about batches.
BATCH_STEP: Final = 0.1
# Time per item, relative to the least, with which a batch is large enough.
BATCH_TOLERANCE: Final = 1.02
# Share of a stage's time for its batch; the rest is for waiting.
BATCH_SHARE: Final = 0.5
# Throughput at the knee, relative to the best.
KNEE_THROUGHPUT: Final = 0.97
# Share of a latency objective that execution may take at the knee.
LATENCY_SHARE: Final = 0.7
# Share of a latency objective that running batches may take in the plan by which a function has its
# shape, of several; the rest is for waiting.
RUNNING_SHARE: Final = 0.9
# Weight of one batch in what is learnt about the CPUs and the GPUs that batches take.
MIX_STEP: Final = 0.01
# With 4.0, the scarcer of the two counts alone if 12 % more of it are taken than of the other.
MIX_GAIN: Final = 4.0
# Observed times of a build, relative to those in its frontiers, beyond which these are built anew:
# as much as a single service time is taken to deviate (`TIME_DEVIATION`).
DRIFT: Final = 0.1
# Time constant of the rate at which tasks arrive, where batches wait for more of them.
RATE_MEMORY_NS: Final = 2 * SECOND_NS

# The calendar (`pools/calendar`).

# Buckets in the shortest objective: deadlines lose 1/16 of it.
BUCKETS_PER_WINDOW: Final = 16
# Share of the starts that may be later than booked.
LATE_STARTS: Final = 0.02
# Inflation of the booked work per late start.
LATE_START_STEP: Final = 0.02
INFLATION_MAX: Final = 2.0
# Where functions take turns in the memory of nodes, starts, of which the calendar knows nothing,
# may take many times as long as the work.
INFLATION_MAX_SCARCE: Final = 8.0
# Change of the inflation after which the tree of a calendar is made anew, in O(buckets): two late
# starts, or many that are not late.
INFLATION_TOLERANCE: Final = 0.03
# Part of a batch per lane that may run beyond its latest start, of 0.5 at most.
BEYOND: Final = 0.25

# Margins of promises, and how a pipeline's time is divided (`admission/control`).

# Margin z of a pipeline before a promise of it was judged.
Z_START: Final = 3.0
Z_MAX: Final = 8.0
# Of z, per miss.
Z_STEP: Final = 0.25
# Misses to aim at, relative to what the objective allows.
MISS_TARGET: Final = 0.3
# Of the slack of a request.
MARGIN_MAX: Final = 0.5
# Part of the margin that is left once a batch is sent.
SENT_MARGIN: Final = 0.33
# Share of the allowed time that is kept per unit of z.
MARGIN_UNIT: Final = 0.01
# Part of a pipeline's time that its stages have in equal shares.
EQUAL_SHARE: Final = 0.25
# Objectives between two probes of a pipeline that is refused, where no promise of it is kept in
# between.
PROBE_EVERY: Final = 2
# Longest time between two probes of a pipeline that estimated times rule out: they cost an idle
# server little, and requests of a function that takes its time are late no more often than that.
PROBE_EVERY_MAX_NS: Final = MINUTE_NS
# Of its expected time, by which a function is faster than at the last probe: the estimate is wrong,
# and the next probe need not wait. More than the scatter of the mean of a few observations.
PROBE_GAIN: Final = 0.1
# Time to the next probe, relative to that for which probes have failed: what was slow for 20 s is
# probed within 1 s, half of the 2 s after which it has to be served again.
PROBE_BACKOFF: Final = 0.05
# The same for a pipeline of which no promise was ever kept: twice the time takes 1.7 more probes.
PROBE_BACKOFF_UNKEPT: Final = 0.5
# However long probes have failed, one is made so often, for the cause may be gone.
PROBE_BACKOFF_MAX_NS: Final = MINUTE_NS
# Slack of a call, relative to that of a stage that waits for a node: the stages before it may be
# late. Of 0, 0.25 and 0.5 the one with which quantiles are kept where only some of the stages of a
# pipeline can be calls, and the others wait for nodes (worlds 70043 and 80026).
CALL_SLACK: Final = 0.5

# Fair shares, and best effort (`shares`, `feasibility`, `task_queues`).

# Time constant of the load estimate of a class, in declared objectives.
SHARES_MEMORY: Final = 20.0
# Weight of one request in the objective of its class, where clients claim different deadlines.
OBJECTIVE_STEP: Final = 1 / 16
# Share that a class may save up, in declared objectives.
SHARES_BURST: Final = 1.0
# Weight of one division in the usual load, but for the first ones.
USUAL_STEP: Final = 0.1
# Part of the calendar that a class leaves to others when it has used its share.
LEFT_TO_OTHERS: Final = 0.25
# Part that a class leaves which has not, but wants more: it would fill the calendar, and a class
# with few requests would find it full.
LEFT_BY_LARGE: Final = 0.125
# Part of what a class is allotted, below which it is starved if it is admitted less. Half is what
# the regret search demands for every class.
STARVED_BELOW: Final = 0.75
# Time per item of a full batch, relative to that of one that no longer waits for more tasks while a
# class is starved. To wait until it is full costs a tenth where objectives of 20 and 34 ms share a
# node with others that are several times as long (worlds 700049 and 700002).
ENOUGH_EFFICIENCY: Final = 0.5
# Part of the time that urgent requests can wait, within which the lanes that a patient batch leaves
# them must be free.
LANES_WITHIN: Final = 0.25
# Execution times after its arrival at which best effort is due (`default_deadline_factor`): short
# requests go first, and none starves.
BEST_EFFORT_DUE: Final = 30.0
# Part of the time that a patient task can wait, for which it leaves the nodes that all gateways
# leave to urgent requests.
WAIT_MAX: Final = 0.875
# Price of the time of a pool without a backlog, relative to a full one.
PRICE_MIN: Final = 0.1
# Part of the lane time of a pool that best effort gets while it waits: a little more than 5 % of
# all, which the regret search demands (docs/regret.md). Of 5.5 %, 4.9 % were left in a few worlds:
# nodes can do more than their lanes where slots slow each other down, and the end of a run finds
# requests half done.
BEST_EFFORT_SHARE: Final = 0.06
# Objectives for which a late request waits until it may make others late for its share.
LATE_WAIT: Final = 30
# A batch of best effort counts as the work that it does in full batches, but as this part of its
# lane time at least: small ones may cost promised tasks at most twice the share.
FULL_BATCH_MIN: Final = 0.5

# What a refusal says (`admission/refusals`).

# Of the latency objective: the least excess that is tried.
EXCESS_MIN: Final = 1 / 16
# Latencies that are tried until one is accepted, each with twice the excess of the one before.
EXCESSES_TRIED: Final = 5
# Times that the excess which was accepted is halved.
EXCESS_HALVED: Final = 2
# Nobody is told to retry later than that, and deadlines that are longer count as so long.
RETRY_HORIZON_NS: Final = 10 * MINUTE_NS
# Of a pool, that is left to those who come back.
RETRY_SHARE_MIN: Final = 0.1
# So many of those who were told to come back may stay away before none is waited for. With half of
# it, or twice as many, those who do come back after a burst are served just as well.
RETRIES_AWAITED: Final = 32

# Which nodes hold which functions (`pools/build`, `pools/builds`, `dispatch/placement`).

# Time constant of the load of a build, in cold starts or in runs, whichever is longer.
LOAD_STARTS: Final = 50
LOAD_RUNS: Final = 200
# Load in nodes, below which a build has no share of a pool's memory.
LOAD_MIN: Final = 0.02
# Load in lanes, below which a build is started on demand only.
PRESTART_LOAD: Final = 0.05
# Load per node that is left, up to which a build can spare one. The only value tried, where every
# node has memory for one function, and one of two is in time on the fast node alone (world 400116).
SPARE_LOAD: Final = 0.5
# Objectives for which nothing was sent to a build that is spared altogether.
SPARE_UNUSED: Final = 10.0
# Standard deviations of its batches within which another pool must be in time, so that a function
# which it holds need take no node from others. The only value tried, where a function is late in
# the other pool as often as not (world 2000368).
ELSEWHERE_MARGIN: Final = 1.0

# Times as long as its start took for which a function stays on a node where others that are refused
# want its place: at most a third of the node's time is then lost to starts. With 4, five functions
# that exclude each other have 31 % in time instead of 26 %, but 63 random worlds with scarce memory
# lose 0.004 of the share.
TURN_STARTS: Final = 2

# Calls of FaaS platforms, and what is kept warm there (`admission/spillover`, `pools/warm_pool`).

# A task is called for if with so many standard deviations a node is too late.
LATE_Z: Final = 2.0
# Time constant of the demand for warm instances.
WARM_MEMORY_NS: Final = HOUR_NS
# Warm instances relative to the largest recent demand.
WARM_HEADROOM: Final = 1.25
# The largest recent demand, in concurrent calls, up to which none is kept warm: that of one call
# three time constants ago.
WARM_DEMAND_MIN: Final = 0.05
# Hysteresis: fewer are kept warm only where less than this part of them is wanted.
SCALE_IN_BELOW: Final = 0.7
# At most one resize per 1/50 of a cold start.
RESIZES_PER_START: Final = 50

# Rented nodes (`rent_or_call` and `fleet_size` of `autoscaling`, `forecast`).

# Regret, in costs of a boot, that starts a node (for Poisson arrivals) and that stops it.
START_REGRET: Final = 0.15
STOP_REGRET: Final = 0.25
STOP_REGRET_MAX: Final = 4.0
# Factor on the regret that stops a node if it is needed again this soon after a stop.
STOP_REGRET_STEP: Final = 4.0
NEEDED_AGAIN_NS: Final = 15 * MINUTE_NS
# Window and time constant of the index of dispersion of arrivals.
DISPERSION_WINDOW_NS: Final = 5 * SECOND_NS
DISPERSION_MEMORY_NS: Final = 30 * MINUTE_NS
# Weight, in arrivals, of the prior that arrivals are Poisson.
DISPERSION_PRIOR: Final = 3.0
# Least correlation of a rate with itself, a period before, of what is said to recur: noise of as
# many values as are compared at first, 256, correlates by 0.06.
RECURRING_MIN: Final = 0.4
# Seasons that must have been seen.
RECURRING_SEASONS: Final = 2
# Searches for a period while all steps that are kept are replaced.
RECURRING_SEARCHES: Final = 16
# Cost of a missed request where no FaaS target exists, in rent per request.
MISS_COST: Final = 20.0
# Time constant of the parts that functions have in the work of a pool.
WORK_MEMORY_NS: Final = 5 * MINUTE_NS
# Time that a request without an objective may take on rented nodes: that, or so many times what it
# takes alone. Where nothing can be called and nodes hold all functions, `BEST_EFFORT_DUE` times.
ALLOWED_NS: Final = SECOND_NS
ALLOWED_TIMES: Final = 2
# Work of a function that is loaded, in that of one that is not and would take its place on rented
# nodes which cannot hold both.
LOADED_WORK: Final = 2.0
# A function that was asked for so recently is on rented nodes.
IN_USE_NS: Final = 15 * MINUTE_NS
# Objective, in times from a cold start to the answer, that can wait for a start.
START_SLACK: Final = 2.0
# Standard deviations by which a shorter window of arrivals contradicts a longer one.
RISE_DEVIATIONS: Final = 3.0
# Shortest windows of arrivals in the longest one, at least.
WINDOWS_FOR_MEAN: Final = 8
# Time until a rise is noticed.
REACTION_NS: Final = 3 * SECOND_NS
# Time after the first arrival from which on the rate counts as known.
SETTLED_AFTER_NS: Final = 8 * SECOND_NS
# Time for which the most that was wanted is kept, at least.
HOLD_MIN_NS: Final = 5 * SECOND_NS
# Coefficient of variation of execution times; that of models is low.
EXECUTION_CV: Final = 0.3
# Misses that are planned for, of those that the objective allows; by one gateway, and by several,
# which have no queue in common: of requests that fill one node to 0.42, 0.6 % miss five times their
# length where 8 gateways ask for it, and 0.3 % in one queue. With 0.25 the service `wave` of
# docs/papers/swayam.md has as few misses as with 0.35 and costs 8 % more, with 0.5 it has more.
PLANNED_MISSES: Final = 0.5
PLANNED_MISSES_SHARED: Final = 0.35
# Standard deviations of its forecast by which another gateway may want more than this one.
DISPUTE_DEVIATIONS: Final = 2.0
# Of the instances wanted, and one: what is beyond that stops at once.
SURPLUS: Final = 1.25
# Set-up times for which other surplus instances stay.
SURPLUS_SETUPS: Final = 5

# Several gateways (`GatewayShare` of `pools/node_lanes`, `dispatch/busy_nodes`).

# Time constants of the load and of the part of it that is admitted, in objectives.
GATEWAY_MEMORY: Final = 10
GATEWAY_MEMORY_SLOW: Final = 50
# Divisor of a gateway's part in overload: its most, and its step per promise that was broken.
CAUTION_MAX: Final = 2.0
CAUTION_STEP: Final = 0.1
# Standard deviations by which the recent load contradicts that of a longer time.
GATEWAY_DEVIATIONS: Final = 2.0
# Weight of one arrival in the mean work.
GATEWAY_STEP: Final = 1 / 32
# A busy node is asked again after this part of the time of a batch, times the square of how many
# batches long the most urgent task can still wait, within the two bounds. On one node with random
# arrivals and 0.35 and 0.42 Erlangs, half as many miss five times their length as with an eighth of
# the time that the task can wait, and a sixteenth of a batch at least; the node is asked a third
# more often.
RETRY_SLACK: Final = 1 / 32
RETRY_MIN: Final = 1 / 64
RETRY_MAX: Final = 1 / 2
# And not sooner than that, however short the batches.
RETRY_MIN_NS: Final = 100_000
# Refusals of one task, after which it is refused as it is where there is a single gateway.
REFUSALS_MAX: Final = 1000
# By which the time until best effort asks again grows with each refusal.
RETRY_GROWTH: Final = 1 / 16
# Part of the time of a batch for which a slot that is free again is left to other gateways, after
# so many batches at most.
YIELD: Final = 1 / 32
YIELD_BATCHES_MAX: Final = 4
# Time after which best effort asks again while other gateways have need of all slots.
BEST_EFFORT_RETRY_NS: Final = SECOND_NS // 10

# How much is examined for a decision, and how often what is learnt is divided anew.

# Of more lanes, every k-th is examined and counts k times.
LANES_EXAMINED: Final = 48
# Nodes that hold a function and are asked when they will be free.
HOLDERS_MAX: Final = 16
# Free nodes that are looked at for a cold start.
CANDIDATES_MAX: Final = 16
# Queues that are tried for a free node.
HEADS_EXAMINED: Final = 8
# Divisions of a pipeline's time that are tried.
TRIES: Final = 2
# Arrivals between two divisions of a pool among classes (or the number of classes), of its memory
# among functions, and of its lanes among gateways.
SHARES_REVIEW: Final = 32
MEMORY_REVIEW: Final = 64
GATEWAY_REVIEW: Final = 8
