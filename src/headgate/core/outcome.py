"""The six ways a request can end. Every request ends in exactly one of them."""

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


OUTCOME_NAMES: Final = ("met", "late", "rejected", "expired", "failed", "cancelled")
