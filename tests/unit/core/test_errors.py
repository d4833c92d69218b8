"""Errors go from a process to another: experiments run in several."""

from __future__ import annotations

import pickle

from headgate.core.actions import ReportFault
from headgate.core.errors import PolicyError


def test_a_policy_error_is_pickled_without_its_actions() -> None:
    error = PolicyError("plan raised ValueError")
    error.actions = [ReportFault("plan", "ValueError")]
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, PolicyError)
    assert str(copy) == "plan raised ValueError" and copy.actions == ()
