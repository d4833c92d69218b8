"""The core: records, events, actions, and the three pure machines that decide.

`Scheduler` (one per gateway), `Backend` (one per node) and `Broker` (one per shared pool). Nothing
in here imports anything but the standard library, reads a clock, or waits.
"""

from __future__ import annotations

from importlib.util import find_spec


def build_kind() -> str:
    """Return "compiled" if mypyc has turned the core into C extensions, else "interpreted".

    Both builds come from the same source and make the same decisions, to the bit.
    """
    spec = find_spec("headgate.core.scheduler.scheduler")
    is_source = spec is not None and str(spec.origin).endswith(".py")
    return "interpreted" if is_source else "compiled"
