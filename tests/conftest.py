"""Settings of all tests, and the order in which they run."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Examples of Hypothesis take as long as they take: a busy machine is no reason to fail.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(trylast=True)  # once `-m` has taken out what is not run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest tests: begun last, one would run on all alone.

    With `--dist worksteal` each process begins with an equal part of all tests, in their order. The
    files with the longest tests are dealt out to the beginnings of these parts.
    """
    processes: int = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.get_closest_marker("long") is not None]
    rest = [item for item in items if item.get_closest_marker("long") is None]
    files = list(dict.fromkeys(item.path for item in long))
    dealt: list[pytest.Item] = []
    for process in range(processes):
        begun = [item for item in long if files.index(item.path) % processes == process]
        part = (len(items) - len(dealt)) // (processes - process)
        filled = max(part - len(begun), 0)
        dealt += [*begun, *rest[:filled]]
        del rest[:filled]
    items[:] = dealt + rest
