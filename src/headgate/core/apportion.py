"""Sharing whole things out in proportion to real numbers."""

from __future__ import annotations


def apportion(total: int, weights: list[float]) -> list[int]:
    """Split `total` by largest remainder; everybody gets one first, as far as that goes.

    Equal weights, or none at all, share evenly; ties go to the earlier.

    >>> apportion(4, [1.0, 1.0])
    [2, 2]
    >>> apportion(4, [9.0, 1.0])
    [3, 1]
    >>> apportion(2, [1.0, 1.0, 5.0])
    [1, 0, 1]
    """
    count = len(weights)
    if total <= count:
        chosen = sorted(range(count), key=lambda i: (-weights[i], i))[:total]
        return [1 if i in chosen else 0 for i in range(count)]
    whole = sum(weights)
    shares = [total * w / whole if whole > 0 else total / count for w in weights]
    parts = [max(1, int(share)) for share in shares]
    while sum(parts) > total:  # the ones that everybody gets went beyond the total
        richest = max(range(count), key=lambda i: (parts[i] - shares[i] if parts[i] > 1 else -1, i))
        parts[richest] -= 1
    while sum(parts) < total:
        neediest = max(range(count), key=lambda i: (shares[i] - parts[i], -i))
        parts[neediest] += 1
    return parts
