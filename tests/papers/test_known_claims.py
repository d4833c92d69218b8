"""Claims that are known not to hold: each experiment declares its own, and a page explains them."""

from __future__ import annotations

import pytest
from paper_page import explained_claims

from headgate.lab.experiments import (
    Check,
    Known,
    Result,
    experiment_names,
    find_experiment,
    known_claims,
)

CHECKS = [
    Check("the sky is blue", "paper 1", 1, 1, holds=True),
    Check("pigs fly", "paper 2", 1, 0, holds=False),
    Check("snow is warm", "paper 3", 1, 0, holds=False),
]


@pytest.mark.parametrize("name", experiment_names())
def test_the_page_of_a_known_claim_explains_it(name: str) -> None:
    known = known_claims(find_experiment(name))
    assert len({each.claim for each in known}) == len(known)
    for each in known:
        assert each.forms
        assert each.claim in explained_claims(each.page)


def test_known_claims_are_told_from_those_that_fail() -> None:
    known = (Known("pigs fly", "docs/pigs.md"), Known("snow is warm", "docs/snow.md", ("long",)))
    result = Result("toy", [], CHECKS)
    quick, long = (result.mark_known(known, quick=quick) for quick in (True, False))
    assert [check.known for check in quick.checks] == [None, "docs/pigs.md", None]
    assert ([c.claim for c in quick.known], [c.claim for c in quick.failing]) == (
        ["pigs fly"],
        ["snow is warm"],
    )
    assert not quick.is_as_expected
    assert (len(long.known), long.failing, long.outdated) == (2, [], [])
    assert long.is_as_expected


def test_a_known_claim_that_holds_is_outdated() -> None:
    result = Result("toy", [], CHECKS[:1])
    marked = result.mark_known((Known("the sky is blue", "docs/sky.md"),), quick=True)
    assert (marked.failing, marked.known) == ([], [])
    assert [check.claim for check in marked.outdated] == ["the sky is blue"]
    assert not marked.is_as_expected
    assert marked.to_json()["checks"] == [
        {
            "claim": "the sky is blue",
            "source": "paper 1",
            "expected": 1,
            "measured": 1,
            "holds": True,
            "known": "docs/sky.md",
        }
    ]
