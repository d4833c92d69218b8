"""Settings of all tests, and the order in which they run."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Examples of Hypothesis take as long as they take: a busy machine is no reason to fail.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the compiled build, the longest test: begun last, it would run on all alone."""
    items.sort(key=lambda item: item.get_closest_marker("compiled") is None)
