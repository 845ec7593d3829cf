"""What a file must hold, written like the value itself; a file from elsewhere may hold anything.

    {"step": COUNT, "note?": TEXT, "layers": {str: [NUMBER]}, "best": (None, {"loss": NUMBER})}

A name ending in "?" may be missing, other names are ignored; `{str: …}` has any names, `[…]` any length, and `(…, …)`
lists alternatives.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

_LARGEST = 2**64
"""Larger numbers cannot be stored or compared with floats."""
_LONGEST = 1000


@dataclass(frozen=True)
class Kind:
    """A kind of single value."""

    words: str
    """What it is, for errors."""
    fits: Callable[[Any], bool] = field(compare=False)


class Record(dict[str, Any]):
    """A schema of exactly these names."""


class Row(list[Any]):
    """A schema of a list with exactly these parts."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _is_text(value: Any) -> bool:
    # Escape sequences would reach the terminal, and lone surrogates cannot be written to a file.
    return isinstance(value, str) and len(value) <= _LONGEST and (value.isprintable() or not value)


ANY = Kind("anything", lambda value: True)
WHOLE = Kind("a whole number", _is_whole)
COUNT = Kind("a whole number from 0 on", lambda value: _is_whole(value) and value >= 0)
POSITIVE = Kind("a whole number from 1 on", lambda value: _is_whole(value) and value >= 1)
NUMBER = Kind("a finite number", lambda value: _is_number(value) and math.isfinite(value))
FIGURE = Kind("a number", _is_number)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind(f"a text of at most {_LONGEST} printable characters", _is_text)
TENSOR = Kind("a tensor", lambda value: isinstance(value, Tensor))


def wrong(value: Any, schema: Any, place: str = "") -> str | None:
    """The first thing in which a value differs from a schema, in words; None if it fits."""
    difference = next(_wrong(value, schema, place), None)
    return None if difference is None else difference()


def _wrong(value: Any, schema: Any, place: str) -> Iterator[Callable[[], str]]:
    """What differs; put in words only if it is shown, as the text of a tensor takes longer than all checks."""
    if isinstance(schema, tuple):
        if all(any(True for _ in _wrong(value, choice, place)) for choice in schema):
            yield from _wrong(value, schema[-1], place)
    elif isinstance(schema, dict):
        yield from _wrong_names(value, schema, place)
    elif isinstance(schema, list):
        exact = isinstance(schema, Row)
        if not isinstance(value, list) or (exact and len(schema) != len(value)):
            yield partial(_sentence, value, f"a list of {len(schema)}" if exact else "a list", place)
        else:
            for number, part in enumerate(value):
                yield from _wrong(part, schema[number % len(schema)], f"{place}[{number}]")
    elif schema is None:
        if value is not None:
            yield partial(_sentence, value, "null", place)
    elif not schema.fits(value):
        yield partial(_sentence, value, schema.words, place)


def _wrong_names(value: Any, schema: dict[Any, Any], place: str) -> Iterator[Callable[[], str]]:
    if not isinstance(value, dict):
        yield partial(_sentence, value, "an object", place)
    elif str in schema:
        for name, part in value.items():
            yield from _wrong(name, TEXT, f"a name in {place}" if place else "a name")
            yield from _wrong(part, schema[str], _inside(place, name))
    else:
        for name, part in schema.items():
            bare = name.removesuffix("?")
            if bare in value:
                yield from _wrong(value[bare], part, _inside(place, bare))
            elif bare == name:
                yield partial("it has no {!r}".format, _inside(place, name))
        if isinstance(schema, Record) and (odd := value.keys() - schema.keys()):
            yield partial("it has {!r}, which does not belong there".format, _inside(place, min(odd)))


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _sentence(value: Any, words: str, place: str) -> str:
    short = " ".join(repr(value).split())[:60]
    shown = f"{len(value):,} characters" if isinstance(value, str) and len(value) > 60 else short
    return f"{place or 'it'!r} is {shown}, not {words}"


def like(value: Any, *, fresh: bool) -> Any:
    """A schema of what a value may become, with numbers, texts, lists and objects where it has them.

    None may become anything. A value that was just built is `fresh`, and has all the numbers that it will ever have;
    later on some may be None again.
    """
    if value is None:
        return ANY
    if isinstance(value, bool | int | float):
        kind = (
            FLAG if isinstance(value, bool) else FIGURE if isinstance(value, float) else COUNT if value >= 0 else WHOLE
        )
        return kind if fresh else (None, kind)
    return None, _like_several(value, fresh)


def _like_several(value: Any, fresh: bool) -> Any:
    if isinstance(value, Tensor):
        return TENSOR  # of any shape: those of other groups and phases are others
    if isinstance(value, list | tuple):
        kinds = [like(part, fresh=fresh) for part in value]
        return [kinds[0] if kinds and all(kind == kinds[0] for kind in kinds) else ANY]
    if isinstance(value, dict):
        named = {name: like(part, fresh=fresh) for name, part in value.items()}
        kinds = list(named.values())
        # Values of one kind are by layer or parameter, and others may come; a mixture has names of its own.
        if all(kind == kinds[0] for kind in kinds):
            return {str: kinds[0] if kinds else ANY}
        return Record(named)
    return TEXT
