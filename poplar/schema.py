"""Dataclasses as schemas: annotations check and convert field values, from Python, JSON or TOML.

`batch: Annotated[int, at_least(1)]` is checked wherever it comes from. Errors name the value by its
path, such as `devices[0].points[2].seconds`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Convert = Callable[[Any, str], Any]
"""From a value and its path to the value of the annotated type."""


class Rule(NamedTuple):
    """A condition on a value; the description completes "must be"."""

    description: str
    holds: Callable[[Any], bool]
    explain: Callable[[Any], str] = lambda value: ""
    """What a refused value amounts to, for the end of the message."""


def at_least(minimum: int) -> Rule:
    """A bound of whole numbers."""
    return Rule(f"at least {minimum}", lambda value: value >= minimum)


Count = Annotated[int, at_least(0)]
PositiveCount = Annotated[int, at_least(1)]
Finite = Annotated[float, Rule("finite", math.isfinite)]
NonNegative = Annotated[float, Rule("finite and at least 0", lambda x: 0.0 <= x < math.inf)]
Positive = Annotated[float, Rule("finite and above 0", lambda x: 0.0 < x < math.inf)]
Fraction = Annotated[float, Rule("from 0 to 1", lambda x: 0.0 <= x <= 1.0)]


def checked(annotation: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type; sequences become tuples.

    Raises:
        TypeError: a value of another type; the message starts with `path`.
        ValueError: a value that breaks a rule of the annotation.
    """
    return _converter(annotation)(value, path)


def check_fields(instance: Any) -> None:
    """Check and convert every field of a frozen dataclass, in its `__post_init__`."""
    kind = type(instance)
    for name, convert in _converters(kind).items():
        value = convert(getattr(instance, name), f"{kind.__name__}.{name}")
        object.__setattr__(instance, name, value)


def from_fields(kind: type[T], content: Any, path: str = "") -> T:
    """Create a dataclass from a JSON object or TOML table.

    Raises:
        ValueError: unknown or missing fields, or invalid values; names the path of the field.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{path or kind.__name__} must be a table of fields, got {content!r}")
    converters = _converters(kind)
    inside = f"{path}." if path else ""
    for name in content:
        if name not in converters:
            raise ValueError(f"{inside}{name} is unknown; expected {', '.join(converters)}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if _is_required(field) and field.name not in content:
            raise ValueError(f"{inside}{field.name} is missing")
    try:
        values = {
            name: converters[name](value, f"{inside}{name}") for name, value in content.items()
        }
    except TypeError as error:
        raise ValueError(str(error)) from error
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error


def to_json_types(value: Any) -> Any:
    """Dataclasses and mappings as dictionaries, tuples as lists."""
    if dataclasses.is_dataclass(value):
        names = _converters(type(value))
        return {name: to_json_types(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: to_json_types(item) for key, item in value.items()}
    return [to_json_types(item) for item in value] if isinstance(value, (tuple, list)) else value


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON types to a file."""
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: str | Path, parse: Callable[[Any], T], remedy: str) -> T:
    """Read a JSON file and parse its content.

    Raises:
        ValueError: a damaged file, with the remedy, or an error of `parse`; names the file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both
        raise ValueError(f"{path} is damaged or not JSON ({error}); {remedy}") from error
    try:
        return parse(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _field_converters(kind: Any) -> dict[str, _Convert]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _converter(hints[field.name]) for field in dataclasses.fields(kind)}


_converters: Callable[[Any], dict[str, _Convert]] = cache(_field_converters)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@cache
def _converter(annotation: Any) -> _Convert:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return partial(_by_rules, _converter(arguments[0]), arguments[1:])
    if NoneType in arguments:
        (own,) = (argument for argument in arguments if argument is not NoneType)
        return partial(_optional, _converter(own))
    if origin is tuple and arguments[-1] is Ellipsis:
        return partial(_items, _converter(arguments[0]))
    if origin is tuple:
        return partial(_entries, tuple(map(_converter, arguments)))
    if origin is Mapping:
        return _mapping
    return partial(_instance if dataclasses.is_dataclass(annotation) else _scalar, annotation)


def _by_rules(convert: _Convert, rules: Iterable[Rule], value: Any, path: str) -> Any:
    converted = convert(value, path)
    for rule in rules:
        if not rule.holds(converted):
            got = f"{_shown(converted)}{rule.explain(converted)}"
            raise ValueError(f"{path} must be {rule.description}, got {got}")
    return converted


def _optional(convert: _Convert, value: Any, path: str) -> Any:
    return None if value is None else convert(value, path)


def _items(convert: _Convert, value: Any, path: str) -> tuple[Any, ...]:
    """A sequence of any length. Equal numbers and tuples are converted once: there are many."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{path} must be a sequence, got {_shown(value)}")
    converted: dict[Any, Any] = {}
    items = []
    for index, item in enumerate(value):
        if type(item) not in (int, float, tuple):
            items.append(convert(item, f"{path}[{index}]"))
            continue
        if item not in converted:
            converted[item] = convert(item, f"{path}[{index}]")
        items.append(converted[item])
    return tuple(items)


def _entries(converts: tuple[_Convert, ...], value: Any, path: str) -> tuple[Any, ...]:
    """A sequence of fixed length."""
    if not isinstance(value, (tuple, list)) or len(value) != len(converts):
        raise TypeError(f"{path} must have {len(converts)} entries, got {value!r}")
    return tuple(convert(item, path) for convert, item in zip(converts, value, strict=True))


def _mapping(value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{path} must be a mapping, got {value!r}")
    return dict(value)


def _instance(kind: type, value: Any, path: str) -> Any:
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        return from_fields(kind, value, path)
    raise TypeError(f"{path} must be a {kind.__name__} or a table of its fields, got {value!r}")


def _shown(value: Any) -> str:
    """The value in an error, shortened: a plan may have thousands of ranks."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


_EXPECTED = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}


def _scalar(kind: type, value: Any, path: str) -> Any:
    if isinstance(value, bool) == (kind is bool):
        if kind is float and isinstance(value, Real):
            return float(value) + 0.0  # turns -0.0 into 0.0: equal values must have equal digests
        if kind is int and hasattr(value, "__index__"):
            return operator.index(value)
        if kind in (str, bool) and isinstance(value, kind):
            return value
    raise TypeError(f"{path} must be {_EXPECTED[kind]}, got {value!r}")
