"""The error for a name that is not known, with the closest one that is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from headgate.core.errors import ConfigError


def unknown_name_error(
    noun: str, name: str, known: Iterable[str], *, where: str, key: str | None
) -> ConfigError:
    """Return the error for a name that is not among the known ones.

    >>> pools = ["gpu", "cpu"]
    >>> str(unknown_name_error("pool", "gpus", pools, where="app.yaml", key="functions.f.pools"))
    "app.yaml: functions.f.pools: 'gpus': unknown pool, did you mean gpu? (allowed: gpu, cpu)"
    """
    names = list(known)
    # Truncated, because finding the closest name takes time quadratic in the length.
    close = difflib.get_close_matches(name[:64], names, n=1)
    problem = f"unknown {noun}" + (f", did you mean {close[0]}?" if close else "")
    allowed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return ConfigError(problem, where=where, key=key, value=name, allowed=allowed or "none")
