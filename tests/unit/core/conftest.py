"""Every Scheduler in these tests runs in `validate` mode and is checked as a whole at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .rig import Rig


@pytest.fixture
def make_rig() -> Iterator[type[Rig]]:
    """Make rigs, and check the invariants of each when the test is over."""
    rigs: list[Rig] = []

    class Checked(Rig):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            rigs.append(self)

    yield Checked
    for rig in rigs:
        rig.check()
