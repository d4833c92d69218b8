"""Events and actions survive a round trip through JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

from headgate.core import actions, events
from headgate.core import event_log as wire_module
from headgate.core.actions import Action, Dispatch, Settle
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogHeader, LogWriter, from_wire, to_wire
from headgate.core.events import BatchRefused, Event, RequestArrived
from headgate.core.states import Outcome, Settlement

CLASSES = [*Event.__subclasses__(), *Action.__subclasses__()]
IS_COMPILED = not str(events.__file__).endswith(".py")


def fields_of(cls: type) -> dict[str, object]:
    """The annotations of the fields in the log: a settlement counts as its own fields."""
    fields: dict[str, object] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name == "settlement":
            for field in dataclasses.fields(Settlement):
                kind = field.type  # a class in a compiled build
                fields[field.name] = kind if isinstance(kind, str) else kind.__name__
        else:
            fields[name] = parameter.annotation
    return fields


def made_up(cls: type) -> list[object]:
    """The wire of a thing with a different value in every field."""
    wire: list[object] = [cls.__name__]
    for place, name in enumerate(fields_of(cls)):
        if name == "key":
            wire.append(["timer", place])
        elif name in ("failed_tasks", "instances", "task_ids", "too_large", "unsure"):
            wire.append([100, place])
        elif name in ("is_hard", "is_in_use", "is_provisioned", "node_died"):
            wire.append(True)
        elif name in ("client_request_id", "error", "hook", "name", "short_of", "stage") or (
            name == "reason" and cls is not BatchRefused
        ):
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
    for name, annotation in fields_of(cls).items():
        kind = str(annotation)
        if kind == "TimerKey" or kind.startswith("tuple"):
            assert isinstance(getattr(thing, name), tuple)
        elif kind.startswith("list"):
            assert isinstance(getattr(thing, name), list)


def test_every_annotation_is_one_that_is_checked() -> None:
    """A field of a new type would go unchecked. (Compiled, only a settlement has annotations.)"""
    kinds = {kind for cls in CLASSES for kind in fields_of(cls).values()}
    known = {
        "int",
        "bool",
        "float",
        "int | None",
        "str",
        "list[int]",
        "tuple[int, ...]",
        "TimerKey",
    }
    assert kinds in (known, {inspect.Parameter.empty, "float", "int", "str"})


def test_a_settle_may_be_older_than_the_last_fields_of_a_settlement() -> None:
    settle = from_wire(["Settle", 3, Outcome.REJECTED, "full"])
    assert isinstance(settle, Settle)
    assert settle.settlement == Settlement(Outcome.REJECTED, "full")
    with pytest.raises(ConfigError, match="too few"):
        from_wire(["Settle", 3])


def test_an_arrival_may_be_older_than_its_last_fields() -> None:
    arrived = from_wire(["RequestArrived", 3, 0, 0, 1, 0, 0, False, 0])
    assert isinstance(arrived, RequestArrived)
    assert (arrived.cost_usd, arrived.client_request_id) == (0.0, "")
    with pytest.raises(ConfigError, match="too few"):
        from_wire(["RequestArrived", 3, 0, 0, 1, 0, 0, False])


def test_an_arrival_without_an_id_is_written_as_before_there_were_ids() -> None:
    """A simulated log does not grow by a field that only clients fill."""
    lines: list[object] = []
    writer = LogWriter(lines.append, LogHeader({}, "fifo", {}, 0))
    writer.write(0, 5, RequestArrived(3, 0), [])
    writer.write(1, 5, RequestArrived(4, 0, client_request_id="c0ffee-1"), [])
    assert lines[1:] == [
        [0, 5, ["RequestArrived", 3, 0, 0, 1, 0, 0, False, 0], []],
        [1, 5, ["RequestArrived", 4, 0, 0, 1, 0, 0, False, 0, 0.0, "c0ffee-1"], []],
    ]


@pytest.mark.skipif(IS_COMPILED, reason="native constructors check, less strictly")
@pytest.mark.parametrize("wrong", [None, True, 1.5, {}, [None], ["t", True], 2**63])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_no_field_takes_a_value_of_another_type(cls: type, wrong: object) -> None:
    for place, (name, kind) in enumerate(fields_of(cls).items(), start=1):
        wire = made_up(cls)
        wire[place] = wrong
        if wrong is True and kind == "bool":
            assert getattr(from_wire(wire), name) is True
            continue
        if wrong == 1.5 and kind == "float":
            assert to_wire(from_wire(wire))[place] == 1.5
            continue
        if wrong is None and kind == "int | None":
            assert getattr(from_wire(wire), name) is None
            continue
        with pytest.raises(ConfigError, match=rf"^a.log:7: {cls.__name__}.{name}: .*wrong type"):
            from_wire(wire, where="a.log:7")


@pytest.mark.skipif(IS_COMPILED, reason="native constructors check, less strictly")
@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (
            ["BatchFinished", None, [], [], []],
            "BatchFinished.batch_id: null is a wrong type (allowed: an integer of 64 bits)",
        ),
        (
            ["BatchFinished", 1, [2, "3"], [], []],
            "BatchFinished.unsure: [2, '3']: is of a wrong type (allowed: a list of integers)",
        ),
        (
            ["TimerFired", ["plan", 0, 1]],
            "TimerFired.key: ['plan', 0, 1]: is of a wrong type (allowed: [string, integer])",
        ),
    ],
)
def test_a_wrong_type_is_said_with_field_value_and_what_is_allowed(
    wire: object, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_wire(wire, where="a.log:7")
    assert str(caught.value) == f"a.log:7: {message}"


def test_where_there_are_no_annotations_the_constructor_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a compiled build: what it does not check is what lists hold, and how long integers are.

    Interpreted, the constructor decides nothing, so a missing integer comes through.
    """
    unannotated = {
        cls.__name__: {name: wire_module._STRICT.get(name, "") for name in fields_of(cls)}
        for cls in CLASSES
    }
    monkeypatch.setattr(wire_module, "_FIELDS", unannotated)
    for cls in CLASSES:
        assert to_wire(from_wire(made_up(cls))) == made_up(cls)
    if not IS_COMPILED:
        assert to_wire(from_wire(["WeightsLoaded", None])) == ["WeightsLoaded", None]
    for wrong in (
        ["TimerFired", 7],
        ["BatchFinished", 1, [None], [], []],
        ["WeightsLoaded", 2**63],
    ):
        with pytest.raises(ConfigError, match="a wrong type"):
            from_wire(wrong)


def test_the_vocabulary_is_everything_in_both_modules_and_no_name_is_used_twice() -> None:
    names = [cls.__name__ for cls in CLASSES]
    assert len(names) == len(set(names)) == 18 + 12
    public = {name for module in (events, actions) for name in vars(module)}
    assert set(names) <= public


def test_fields_stand_in_the_order_of_the_constructor() -> None:
    arrived = RequestArrived(
        7,
        1,
        client=2,
        items=3,
        priority=4,
        deadline_ns=5,
        payload_bytes=6,
        cost_usd=0.5,
        client_request_id="c0ffee-1",
    )
    assert to_wire(arrived) == ["RequestArrived", 7, 1, 2, 3, 4, 5, False, 6, 0.5, "c0ffee-1"]


def test_a_request_may_be_older_than_cost_objectives() -> None:
    arrived = from_wire(["RequestArrived", 7, 1, 2, 3, 4, 5, False, 6])
    assert isinstance(arrived, RequestArrived)
    assert arrived.cost_usd == 0.0


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
        (["BatchLost"], r"too few or too many fields \(allowed: batch_id, node_died\)"),
        (["BatchLost", 1, True, 2], "too few or too many fields"),
        (["TimerFired", 7], "a wrong type"),
    ],
)
def test_what_cannot_be_built_is_said_with_its_place(wire: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^a.log:7: .*{problem}"):
        from_wire(wire, where="a.log:7")
