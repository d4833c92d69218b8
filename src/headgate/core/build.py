"""Which build this is. Both come from the same source and decide the same, to the bit."""

from __future__ import annotations

from headgate.core import scheduler


def build_kind() -> str:
    """Return "compiled" where mypyc has turned the core into C extensions, else "interpreted"."""
    return "interpreted" if str(scheduler.__file__).endswith(".py") else "compiled"
