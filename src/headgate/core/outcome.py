"""The six ways a request can end, every request in exactly one, and why some are turned away."""

from __future__ import annotations

from typing import Final


class Outcome:
    """Small integers rather than an `Enum`: they live in columns and on the hot path."""

    MET: Final = 0  # answered by its deadline
    LATE: Final = 1  # answered, but after its deadline
    REJECTED: Final = 2  # turned away at admission
    EXPIRED: Final = 3  # admitted, then given up: pruned or timed out while it waited
    FAILED: Final = 4  # admitted, then broken: no attempt succeeded and none may be made
    CANCELLED: Final = 5  # withdrawn by its client


class Rejection:
    """Why a request is turned away: the words that clients, logs and metrics see."""

    OVERLOADED: Final = "overloaded"  # it would be late behind what is here already
    UNFAIR: Final = "over_fair_share"  # its client has more than its share here already
    INFEASIBLE: Final = "infeasible"  # it would be late even alone: more capacity will not help
    UNAVAILABLE: Final = "unavailable"  # nothing that could run it is there just now
    FULL: Final = "too_many_open"  # a bound of the Scheduler's
    LOAD_FAILED: Final = "load_failed"  # a function that it needs cannot be loaded just now
    TOO_LARGE: Final = "too_large"  # no platform can carry it, and there is no other place for it


class Failure:
    """Why what was admitted could not be run: words in the reason of a FAILED request."""

    LOST: Final = "lost"  # nobody knows whether it ran, and it may not be repeated
    KILLED_WORKER: Final = "its worker died while running it alone"
    REFUSED: Final = "refused too often"
    POLICY_FAULT: Final = "policy fault"  # a hook of the policy raised an exception over it
    TOO_LARGE: Final = "too_large"  # as of a rejection, but found out only when it was run


OUTCOME_NAMES: Final = ("met", "late", "rejected", "expired", "failed", "cancelled")
