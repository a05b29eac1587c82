"""Records are dataclasses: whatever is done to one gives what the standard library's gives."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.formats.records import record


def _classes(make: Callable[..., Any]) -> dict[str, Any]:
    """The same classes, made by `make`."""

    @make(frozen=True)
    class Point:
        """A point."""

        x: int
        y: tuple[int, ...] = ()
        tags: dict[str, int] = field(default_factory=dict)
        note: str | None = field(default=None, compare=False, repr=False)

        def __post_init__(self) -> None:
            if self.x == 7:
                raise ValueError("seven")

        @property
        def double(self) -> int:
            return 2 * self.x

    @make(frozen=True)
    class Named(Point):  # type: ignore[misc, valid-type]
        name: str = "none"

    @make
    class Open:
        first: Any
        items: list[Any] = field(default_factory=list)
        kept: int = field(default=3, init=False)
        later: int = field(init=False)

        def __str__(self) -> str:
            return "open"

    @make(frozen=True)
    class One:
        fields: Any

    @make(eq=False)
    class Unequal:
        only: Any

    @make(frozen=True)
    class Empty:
        pass

    return {made.__name__: made for made in (Point, Named, Open, One, Unequal, Empty)}


OURS, THEIRS = _classes(record), _classes(dataclass)
VALUES = st.integers(5, 9) | st.text(max_size=1) | st.none()


def _outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except (TypeError, ValueError, AttributeError) as error:
        return type(error)


@given(
    st.sampled_from(sorted(OURS)),
    st.lists(VALUES, max_size=4),
    st.dictionaries(st.sampled_from(["x", "y", "tags", "note", "name", "first", "items", "only", "kept"]), VALUES),
    st.lists(VALUES, max_size=2),
)
def test_they_are_made_shown_and_compared_alike(
    name: str, arguments: list[Any], named: dict[str, Any], others: list[Any]
) -> None:
    def acts(cls: Any) -> list[Any]:
        made = _outcome(lambda: cls(*arguments, **named))
        if not isinstance(made, cls):
            return [made]
        other = _outcome(lambda: cls(*others))
        return [
            _outcome(lambda: repr(made).split(".")[-1]),
            _outcome(lambda: made == other),
            _outcome(lambda: made == copy.copy(made)),
            _outcome(lambda: hash(made) == hash(copy.copy(made))),
            _outcome(lambda: asdict(made)),
            _outcome(lambda: repr(replace(made, **named)).split(".")[-1]),
        ]

    assert acts(OURS[name]) == acts(THEIRS[name])


@pytest.mark.parametrize("name", sorted(OURS))
def test_they_look_alike_from_outside(name: str) -> None:
    ours, theirs = OURS[name], THEIRS[name]
    assert is_dataclass(ours) and ours.__match_args__ == theirs.__match_args__
    assert [(f.name, f.type, f.init, f.repr, f.compare, f.default) for f in fields(ours)] == [
        (f.name, f.type, f.init, f.repr, f.compare, f.default) for f in fields(theirs)
    ]
    ours_takes, theirs_takes = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    assert list(ours_takes) == list(theirs_takes)
    assert get_type_hints(ours.__init__) == get_type_hints(theirs.__init__)
    assert bool(ours.__hash__) == bool(theirs.__hash__)
    for attribute in ("y", "note", "kept", "tags"):
        assert getattr(ours, attribute, "none") == getattr(theirs, attribute, "none")


def test_frozen_ones_stay_as_they_are() -> None:
    point = OURS["Point"](1)
    for act in (lambda: setattr(point, "x", 2), lambda: setattr(point, "new", 2), lambda: delattr(point, "x")):
        with pytest.raises(FrozenInstanceError):
            act()
    assert point.x == 1 and point.double == 2
    opened = OURS["Open"](1)
    opened.first, opened.later = 2, 5
    assert (opened.first, opened.later, opened.kept, str(opened)) == (2, 5, 3, "open")


def test_a_default_is_made_for_each() -> None:
    first, second = OURS["Open"](1), OURS["Open"](1)
    first.items.append(1)
    assert not second.items


def test_fields_without_defaults_come_first() -> None:
    with pytest.raises(TypeError, match="'late' has no default"):

        @record
        class Wrong:
            early: int = 1
            late: str  # type: ignore[misc]


def test_one_that_holds_itself_can_be_shown() -> None:
    opened = OURS["Open"](None)
    opened.first, opened.later = opened, 1
    assert "..." in repr(opened)


def test_fields_can_be_asked_for_by_several_threads_at_once() -> None:
    for _ in range(50):
        made, start = _classes(record)["Point"], threading.Barrier(4)
        seen: list[tuple[str, ...]] = []

        def ask(made: Any = made, start: threading.Barrier = start, seen: list[tuple[str, ...]] = seen) -> None:
            start.wait()
            seen.append(tuple(entry.name for entry in fields(made)))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [("x", "y", "tags", "note")] * 4


@record(frozen=True)
class Kept:
    """At the top of a module, where pickle finds it."""

    value: int
    more: list[int] = field(default_factory=list)


def test_they_are_pickled_and_matched() -> None:
    kept = Kept(3, [4])
    assert pickle.loads(pickle.dumps(kept)) == kept and copy.deepcopy(kept) == kept
    match kept:
        case Kept(value, more):
            assert (value, more) == (3, [4])
    assert dataclasses.astuple(kept) == (3, [4])
