"""What workers found out about functions, written into the application.

So the Scheduler is built of plain data that its log can carry, and a replay needs no worker.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Final, Literal, final

from headgate.app import LoadedApp, from_spec
from headgate.app.functions import variant_spec
from headgate.app.objectives import unreachable_objectives
from headgate.core.errors import ConfigError
from headgate.core.model import App
from headgate.live.messages import FunctionFacts

_LOG: Final = logging.getLogger(__name__)

# Which functions must be loaded for a gateway to begin. At the first start, one: the others are
# worth serving. After a change, all: what was served before is better. Later, none.
LoadsNeeded = Literal["all", "one", "none"]


@final
class LoadsFailed(ConfigError):
    """Functions cannot be loaded, and without them there is no use in serving."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def check_loads(app: App, facts: Mapping[str, FunctionFacts], needed: LoadsNeeded) -> None:
    """See that enough functions can be loaded. Raises `LoadsFailed`, with a line for each.

    A function that has another build, or runs elsewhere as well, can be served.
    """
    broken = [
        f"{variant.name}: cannot be loaded: {facts[variant.name].problem}"
        for variant in app.variants
        if facts[variant.name].problem
    ]
    is_served = [
        any(not facts[variant.name].problem for variant in function.variants)
        for function in app.functions
    ]
    if (needed == "all" and broken) or (needed == "one" and not any(is_served)):
        raise LoadsFailed(broken)


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
