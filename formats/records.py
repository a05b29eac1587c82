"""Dataclasses that are cheap to define: `record` makes what `dataclasses.dataclass` makes, in a sixth of the time.

A program that answers one prompt defines dozens of them before its first token. `dataclass` writes out each method of
each class as text and compiles it by itself, a third of a millisecond for a class; here that is `__init__` alone, when
the first instance is made, and the other methods are closures. `dataclasses.fields`, `replace`, `asdict` and
`is_dataclass` take records: what they look at is made when it is first asked for. To the type checker `record` is
`dataclass`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, field
from functools import partial
from inspect import get_annotations
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as record

__all__ = ["record"]

_SPECS = "__record_specs__"
_LOCK = threading.RLock()  # taken again for the fields of bases
_MADE_ANEW = object()  # stands for a default that is made for each instance, in the signature of __init__


class _DataclassFields:
    """Stands where `dataclass` puts a class's fields, and has it put them there once somebody looks."""

    def __get__(self, instance: object, owner: type) -> Mapping[str, Field[Any]]:
        from dataclasses import dataclass

        with _LOCK:
            if owner.__dict__["__dataclass_fields__"] is self:
                for name in get_annotations(owner):
                    setattr(owner, name, owner.__dict__[_SPECS][name])
                dataclass(init=False, repr=False, eq=False)(owner)
        found: Mapping[str, Field[Any]] = owner.__dict__["__dataclass_fields__"]
        return found


class _InitializerWhenNeeded:
    """Stands where `__init__` belongs, and has it compiled and put there once somebody makes an instance, or looks."""

    def __init__(self, cls: type, specs: list[Field[Any]], frozen: bool) -> None:
        self._cls, self._specs, self._frozen = cls, specs, frozen

    def __get__(self, instance: object, owner: type) -> Callable[..., None]:
        init = _initializer(self._cls, self._specs, self._frozen)
        if self._cls.__dict__["__init__"] is self:
            setattr(self._cls, "__init__", init)  # noqa: B010
        bound: Callable[..., None] = init if instance is None else init.__get__(instance, owner)
        return bound


if not TYPE_CHECKING:

    def record(cls: type | None = None, /, *, frozen: bool = False, eq: bool = True) -> Any:
        """Make a class a dataclass; a decorator, with or without arguments, which mean what they do to `dataclass`.

        There are no slots, keyword-only fields, InitVar or ClassVar. Bases may be records themselves. Raises TypeError
        for a field without a default behind one with a default.
        """
        return partial(_define, frozen=frozen, eq=eq) if cls is None else _define(cls, frozen=frozen, eq=eq)


def _define(cls: Any, *, frozen: bool, eq: bool) -> type:
    specs: dict[str, Field[Any]] = {}
    for base in reversed(cls.__mro__[1:]):
        specs.update(base.__dict__.get(_SPECS, {}))
    for name, annotation in get_annotations(cls).items():
        given = cls.__dict__.get(name, MISSING)
        spec = given if isinstance(given, Field) else field(default=given)
        spec.name, spec.type = name, annotation
        specs[name] = spec
        if spec is given and spec.default is MISSING:
            delattr(cls, name)
        elif spec is given:
            setattr(cls, name, spec.default)
    setattr(cls, _SPECS, specs)
    cls.__dataclass_fields__ = _DataclassFields()
    setattr(cls, "__match_args__", tuple(name for name, spec in specs.items() if spec.init))  # noqa: B010
    _check_order_of_defaults(cls, specs.values())
    cls.__init__ = _InitializerWhenNeeded(cls, list(specs.values()), frozen)
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = _representation(tuple(name for name, spec in specs.items() if spec.repr))
    if eq:
        _compare_by(cls, tuple(name for name, spec in specs.items() if spec.compare), frozen)
    if frozen:
        cls.__setattr__, cls.__delattr__ = _refuse_to_assign, _refuse_to_delete
    return cls  # type: ignore[no-any-return]


def _check_order_of_defaults(cls: type, specs: Iterable[Field[Any]]) -> None:
    has_default = False
    for spec in specs:
        if not spec.init:
            continue
        if spec.default is not MISSING or spec.default_factory is not MISSING:
            has_default = True
        elif has_default:
            raise TypeError(f"{cls.__qualname__}: the field {spec.name!r} has no default, and one before it has")


def _initializer(cls: type, specs: list[Field[Any]], frozen: bool) -> Callable[..., None]:
    """Compile `__init__`; inside of a function, whose arguments are the defaults."""
    parameters, body = ["self"], ["_values = self.__dict__"] if frozen else []
    held: dict[str, Any] = {"_made_anew": _MADE_ANEW}
    for spec in specs:
        name = value = spec.name
        default = ""
        if spec.default_factory is not MISSING:
            held[f"_new_{name}"] = spec.default_factory
            default, value = "=_made_anew", f"_new_{name}()"
            if spec.init:
                value += f" if {name} is _made_anew else {name}"
        elif spec.default is not MISSING:
            held[f"_default_{name}"] = spec.default
            default = f"=_default_{name}"
            value = name if spec.init else f"_default_{name}"
        elif not spec.init:
            continue  # whoever has the field gives it its value
        if spec.init:
            parameters.append(name + default)
        body.append(f"_values[{name!r}] = {value}" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    text = f"def make({', '.join(held)}):\n def __init__({', '.join(parameters)}):\n  " + "\n  ".join(body or ["pass"])
    made: dict[str, Any] = {}
    module = sys.modules.get(cls.__module__)  # where the annotations mean something
    exec(f"{text}\n return __init__", {} if module is None else vars(module), made)
    init: Callable[..., None] = made["make"](**held)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {spec.name: spec.type for spec in specs if spec.init} | {"return": None}
    return init


def _representation(names: tuple[str, ...]) -> Callable[[Any], str]:
    @recursive_repr()
    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _compare_by(cls: Any, names: tuple[str, ...], frozen: bool) -> None:
    key: Callable[[Any], tuple[Any, ...]] = attrgetter(*names) if len(names) > 1 else _key_of_few(names)

    def __eq__(self: Any, other: Any) -> bool:
        return bool(key(self) == key(other)) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(key(self))

    has_hash = cls.__dict__.get("__hash__") is not None
    if "__eq__" not in cls.__dict__:
        cls.__eq__ = __eq__
    if not has_hash:
        cls.__hash__ = __hash__ if frozen else None


def _key_of_few(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what `attrgetter` does not: a tuple of the values of none or one of the fields."""

    def key(instance: Any) -> tuple[Any, ...]:
        return tuple(getattr(instance, name) for name in names)

    return key


def _refuse_to_assign(self: Any, name: str, value: Any) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
