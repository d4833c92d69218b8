"""One platform for all tests of a module that do not need their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from platform_rig import Caller, platform_in

from headgate.lambda_emulator import EmbeddedPlatform


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Write the keys of test platforms outside of the user's home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedPlatform, Caller]]:
    """A platform with the limits of AWS, and its client."""
    with platform_in(tmp_path_factory.mktemp("platform")) as both:
        yield both


@pytest.fixture
def platform(served: tuple[EmbeddedPlatform, Caller]) -> EmbeddedPlatform:
    """The platform shared by the tests of a module."""
    return served[0]


@pytest.fixture
def caller(served: tuple[EmbeddedPlatform, Caller]) -> Caller:
    """The client of the shared platform."""
    return served[1]
