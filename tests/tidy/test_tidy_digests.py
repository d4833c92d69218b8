"""The digests of decisions know every kind of event and action."""

from __future__ import annotations

import runpy

from tidy_sources import ROOT

from headgate.core import actions, events


def test_every_event_and_action_has_an_ordinal() -> None:
    """One without would end `tools/digests.py` at the first case in which it happens."""
    ordinals = runpy.run_path(str(ROOT / "tools" / "digests.py"))["ORDINALS"]
    kinds = {
        name
        for module, base in ((events, events.Event), (actions, actions.Action))
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }
    assert kinds == set(ordinals)
    assert len(set(ordinals.values())) == len(ordinals)
