"""Events and actions survive JSON."""

from __future__ import annotations

import inspect
import json

import pytest

from headgate.core import actions, events
from headgate.core.actions import Action, Dispatch
from headgate.core.errors import ConfigError
from headgate.core.events import BatchRefused, Event, RequestArrived
from headgate.core.wire import from_wire, to_wire

CLASSES = [*Event.__subclasses__(), *Action.__subclasses__()]


def made_up(cls: type) -> list[object]:
    """The wire of a thing with a different value in every field."""
    wire: list[object] = [cls.__name__]
    for place, name in enumerate(inspect.signature(cls).parameters):
        if name == "key":
            wire.append(["timer", place])
        elif name in ("task_ids", "unsure"):
            wire.append([100, place])
        elif name == "name" or (name == "reason" and cls is not BatchRefused):
            wire.append(f"text {place}")
        else:
            wire.append(100 + place)
    return wire


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_everything_goes_to_json_and_back(cls: type) -> None:
    wire = made_up(cls)
    thing = from_wire(json.loads(json.dumps(wire)))
    assert type(thing) is cls
    assert to_wire(thing) == wire


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_what_a_constructor_wants_as_a_tuple_it_gets_as_a_tuple(cls: type) -> None:
    """A timer's key is looked up in a dict, so a list would not do. (Compiled, this says less.)"""
    thing = from_wire(made_up(cls))
    for name, parameter in inspect.signature(cls).parameters.items():
        kind = str(parameter.annotation)
        if kind == "TimerKey" or kind.startswith("tuple"):
            assert isinstance(getattr(thing, name), tuple)
        elif kind.startswith("list"):
            assert isinstance(getattr(thing, name), list)


def test_the_vocabulary_is_everything_in_both_modules_and_no_name_is_used_twice() -> None:
    names = [cls.__name__ for cls in CLASSES]
    assert len(names) == len(set(names)) == 15 + 9
    public = {name for module in (events, actions) for name in vars(module)}
    assert set(names) <= public


def test_fields_stand_in_the_order_of_the_constructor() -> None:
    assert to_wire(RequestArrived(7, 1, client=2, items=3, priority=4, deadline_ns=5)) == [
        "RequestArrived", 7, 1, 2, 3, 4, 5
    ]  # fmt: skip


def test_what_may_be_absent_is_null() -> None:
    dispatch = from_wire(to_wire(Dispatch(1, 2, [3], 1, 4, None, None)))
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.node_id, dispatch.instance_id) == (None, None)


def test_a_wire_shares_nothing_with_its_action() -> None:
    dispatch = Dispatch(1, 2, [3], 1, 4, 5, 6)
    to_wire(dispatch)[3].append(4)  # type: ignore[attr-defined]
    assert dispatch.task_ids == [3]


@pytest.mark.parametrize(
    ("wire", "problem"),
    [
        ([], "neither an event nor an action"),
        ("BatchLost", "neither an event nor an action"),
        ([["BatchLost"], 1], "neither an event nor an action"),
        (["Event"], "neither an event nor an action"),
        (["BatchLost"], r"too few or too many fields \(allowed: batch_id\)"),
        (["BatchLost", 1, 2], "too few or too many fields"),
        (["TimerFired", 7], "a wrong type"),
    ],
)
def test_what_cannot_be_built_is_said_with_its_place(wire: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^a.log:7: .*{problem}"):
        from_wire(wire, where="a.log:7")
