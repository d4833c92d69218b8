"""The core: records, events, actions, and the three pure machines that decide.

`Scheduler` (one per gateway), `Backend` (one per node) and `Broker` (one per shared pool). Nothing
in here imports anything but the standard library, reads a clock, or waits.
"""

from __future__ import annotations

from importlib.util import find_spec

# Which build this is. Both come from the same source and decide the same, to the bit.


def build_kind() -> str:
    """Return "compiled" where mypyc has turned the core into C extensions, else "interpreted"."""
    spec = find_spec("headgate.core.scheduler.scheduler")
    is_source = spec is not None and str(spec.origin).endswith(".py")
    return "interpreted" if is_source else "compiled"
