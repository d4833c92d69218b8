"""What workers found out about functions, written into the application.

So the Scheduler is built of plain data that its log can carry, and a replay needs no worker.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Final

from headgate.app import LoadedApp, from_spec
from headgate.app.functions import variant_spec
from headgate.app.objectives import unreachable_objectives
from headgate.live.messages import FunctionFacts

_LOG: Final = logging.getLogger(__name__)


def with_facts(loaded: LoadedApp, facts: Mapping[str, FunctionFacts], where: str) -> LoadedApp:
    """Return the application with measured times and sizes where none were declared."""
    spec = copy.deepcopy(loaded.spec)
    for variant in loaded.app.variants:
        source = loaded.sources[variant.id]
        found = facts.get(variant.name)
        if source is not None and found is not None:
            entry = variant_spec(spec, variant.name)
            if source.is_measured:
                # Where nothing could be measured, what is assumed is written down all the same.
                times_ns = found.exec_ns or variant.profile.exec_ns
                entry["exec"] = [f"{time_ns}ns" for time_ns in times_ns]
            _fill(entry, found)
    measured = from_spec(spec, where)
    for problem in unreachable_objectives(measured, where):
        _LOG.warning("%s", problem)
    return measured


def _fill(entry: dict[str, Any], facts: FunctionFacts) -> None:
    if entry["start"] == 0:
        entry["start"] = f"{facts.start_ns}ns"
    if entry["memory"] == "0B":
        entry["memory"] = f"{facts.memory_bytes}B"
