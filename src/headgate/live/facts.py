"""What workers found out about functions, written into the application.

So the Scheduler is built of plain data that its log can carry, and a replay needs no worker.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from headgate.app import LoadedApp, from_spec
from headgate.live.messages import FunctionFacts


def with_facts(loaded: LoadedApp, facts: Mapping[str, FunctionFacts], where: str) -> LoadedApp:
    """Return the application with measured times and sizes where none were declared."""
    spec = copy.deepcopy(loaded.spec)
    functions = spec["functions"]
    assert isinstance(functions, dict)
    for variant in loaded.app.variants:
        source = loaded.sources[variant.id]
        found = facts.get(variant.name)
        if source is not None and found is not None:
            _fill(_entry(functions, variant.name), found, is_measured=source.is_measured)
    return from_spec(spec, where)


def _entry(functions: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of the file that speaks of a variant: `function`, or `function/variant`."""
    function, _, variant = name.partition("/")
    found: dict[str, Any] = functions[function]
    if variant:
        found = found["variants"][variant]
    return found


def _fill(entry: dict[str, Any], facts: FunctionFacts, *, is_measured: bool) -> None:
    if is_measured and facts.exec_ns:
        entry["exec"] = [f"{time_ns}ns" for time_ns in facts.exec_ns]
    if entry["start"] == 0:
        entry["start"] = f"{facts.start_ns}ns"
    if entry["memory"] == "0B":
        entry["memory"] = f"{facts.memory_bytes}B"
