"""Dataclasses as schemas: annotations check and convert field values, from Python, JSON or TOML.

`batch: Annotated[int, at_least(1)]` is checked wherever it comes from. Errors name the value by its
path, such as `devices[0].points[2].seconds`. A `Document` is a dataclass with a JSON file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache, partial
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union

from poplar.values.regular_files import naming, read_regular

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
_Convert = Callable[[Any, str], Any]
"""Converts a value, with its path for errors, to the annotated type."""

_NOUN_BY_FIELD = {
    "micro_batches": "plan",
    "devices": "profile",
    "runs": "recorded run",
    "placements": "programme",
}
"""A field that only one kind of document has."""


class Rule(NamedTuple):
    """A condition on a value; the description completes "must be"."""

    description: str
    holds: Callable[[Any], bool]
    explain: Callable[[Any], str] = lambda value: ""
    """What a refused value amounts to, for the end of the message."""


def at_least(minimum: int) -> Rule:
    """A bound of whole numbers."""
    return Rule(f"at least {minimum}", lambda value: value >= minimum)


ALL_DIFFERENT = Rule("all different", lambda values: len(set(values)) == len(values))
Count = Annotated[int, at_least(0)]
PositiveCount = Annotated[int, at_least(1)]
Finite = Annotated[float, Rule("finite", math.isfinite)]
NonNegative = Annotated[float, Rule("finite and at least 0", lambda x: 0.0 <= x < math.inf)]
Positive = Annotated[float, Rule("finite and above 0", lambda x: 0.0 < x < math.inf)]
Fraction = Annotated[float, Rule("from 0 to 1", lambda x: 0.0 <= x <= 1.0)]


class Document:
    """A dataclass that is stored as JSON with a version number."""

    __slots__ = ()

    _noun: ClassVar[str]
    _version: ClassVar[int]
    """The format that is written and read."""
    _remedy: ClassVar[str]
    """What to do about content that cannot be read."""

    def to_dict(self) -> dict[str, Any]:
        """This value as JSON types, for `from_dict`."""
        content: dict[str, Any] = to_json_types(self)
        return content

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """The value that `to_dict` wrote.

        Raises:
            ValueError: unknown version, unknown or missing fields, or invalid values.
        """
        fields = cls._current_fields(content)
        try:
            return from_fields(cls, fields)
        except ValueError as error:
            raise ValueError(
                f"not a {cls._noun} of format {content['version']}: {error}; {cls._remedy}"
            ) from error

    def to_json(self, path: str | Path) -> None:
        """Write a file that `from_json` reads.

        Raises:
            OSError: it cannot be written.
        """
        text = json_text(self.to_dict(), indent=2) + "\n"
        with naming(path):
            Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a file that `to_json` wrote.

        Raises:
            OSError: it cannot be read, or is no regular file.
            ValueError: the file is damaged or its content is invalid; names the file.
        """
        try:
            content = parse_json(read_regular(path).decode())
        except ValueError as error:  # decoding errors are values, too
            raise ValueError(f"{path} is damaged or not JSON ({error}); {cls._remedy}") from error
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _current_fields(cls, content: Any) -> dict[str, Any]:
        """The fields in JSON content, without the version."""
        written = f"{cls._noun} written by {cls.__name__}.to_json"
        if not isinstance(content, Mapping) or "version" not in content:
            raise ValueError(f"this is not a {written}: it has no field 'version'")
        for field, noun in _NOUN_BY_FIELD.items():
            if field in content and noun != cls._noun:
                raise ValueError(f"this is a {noun}, not a {written}")
        if type(content["version"]) is not int or content["version"] != cls._version:
            raise ValueError(
                f"{cls._noun} format {content['version']!r}, but this version of Poplar reads "
                f"format {cls._version}; {cls._remedy}"
            )
        return {name: value for name, value in content.items() if name != "version"}


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON types as JSON text, for files and other programs.

    JSON has no NaN and no infinity: other readers refuse them, so they are null.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def parse_json(text: str | bytes) -> Any:
    """The value that JSON text describes.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {_shown(twice)} twice")
    return content


def checked(annotation: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type; sequences become tuples.

    Raises:
        TypeError: a value of another type; the message starts with `path`.
        ValueError: a value that breaks a rule of the annotation.
    """
    return _converter(annotation)(value, path)


def positive_count(value: Any) -> int | None:
    """An integer above 0, of Python or of NumPy, as Python's; None: the value is none."""
    try:
        count = operator.index(value)
    except TypeError:
        return None
    return count if count > 0 and not isinstance(value, bool) else None


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
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if is_required and field.name not in content:
            raise ValueError(f"{inside}{field.name} is missing")
    try:
        values = {name: converters[name](content[name], f"{inside}{name}") for name in content}
    except TypeError as error:
        raise ValueError(str(error)) from error
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error


def to_json_types(value: Any) -> Any:
    """Dataclasses and mappings as dictionaries, tuples as lists; documents with their version."""
    if type(value) in (int, float, str):  # nearly all of the values of a plan of many ranks
        return value
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        content = {field.name: to_json_types(getattr(value, field.name)) for field in fields}
        if isinstance(value, Document):
            return {"version": value._version, **content}
        return content
    if isinstance(value, Mapping):
        return {key: to_json_types(item) for key, item in value.items()}
    return [to_json_types(item) for item in value] if isinstance(value, (tuple, list)) else value


def _converters_of(kind: Any) -> dict[str, _Convert]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: _converter(hints[field.name]) for field in dataclasses.fields(kind)}


_converters: Callable[[Any], dict[str, _Convert]] = cache(_converters_of)


@cache
def _converter(annotation: Any) -> _Convert:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return partial(_by_rules, _converter(arguments[0]), arguments[1:])
    if origin is Literal:
        choice = Rule(f"one of {', '.join(arguments)}", arguments.__contains__)
        return partial(_by_rules, _converter(str), (choice,))
    if origin in (Union, UnionType):
        converts = tuple(_converter(kind) for kind in arguments if kind is not NoneType)
        convert = converts[0] if len(converts) == 1 else partial(_one_of, converts)
        return partial(_optional, convert) if NoneType in arguments else convert
    if origin is tuple and arguments[-1] is Ellipsis:
        return partial(_items, _converter(arguments[0]))
    if origin is tuple:
        return partial(_entries, tuple, tuple(map(_converter, arguments)))
    if origin is Mapping:
        return partial(_mapping, _converter(arguments[1]))
    if annotation is Any:
        return lambda value, path: value
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return partial(_member, annotation)
    if isinstance(annotation, type) and issubclass(annotation, tuple):
        hints = typing.get_type_hints(annotation, include_extras=True)
        make = typing.cast(Any, annotation)._make
        return partial(_entries, make, tuple(map(_converter, hints.values())))
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


def _entries(make: Any, converts: tuple[_Convert, ...], value: Any, path: str) -> Any:
    """A sequence of fixed length, or a named tuple."""
    if not isinstance(value, (tuple, list)) or len(value) != len(converts):
        raise TypeError(f"{path} must have {len(converts)} entries, got {value!r}")
    return make(convert(item, path) for convert, item in zip(converts, value, strict=True))


def _mapping(convert: _Convert, value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{path} must be a mapping, got {value!r}")
    return {key: convert(item, f"{path}[{key!r}]") for key, item in value.items()}


def _one_of(converts: tuple[_Convert, ...], value: Any, path: str) -> Any:
    """The value as the first type that it can have."""
    *others, last = converts
    for convert in others:
        with suppress(TypeError, ValueError):
            return convert(value, path)
    return last(value, path)


def _member(kind: type[Enum], value: Any, path: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{path} must be one of {known}, got {_shown(value)}") from None


def _instance(kind: Any, value: Any, path: str) -> Any:
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        is_document = issubclass(kind, Document)
        return from_fields(kind, kind._current_fields(value) if is_document else value, path)
    raise TypeError(f"{path} must be a {kind.__name__} or a table of its fields, got {value!r}")


def _shown(value: Any) -> str:
    """The value in an error, shortened: a plan may have thousands of ranks."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


_LARGEST = 1e30
"""Largest number: products of a few of them are finite."""
_INTEGERS = 2**63
_EXPECTED = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}


def _scalar(kind: type, value: Any, path: str) -> Any:
    if isinstance(value, bool) == (kind is bool):
        if kind is float and isinstance(value, Real):
            number = 2 * _LARGEST  # if it is too large for a float
            with suppress(OverflowError):
                number = float(value)
            if math.isfinite(number) and abs(number) > _LARGEST:
                expected = f"at most {_LARGEST:g} in absolute value"
                raise ValueError(f"{path} must be {expected}, got {_shown(value)}")
            return number + 0.0  # turns -0.0 into 0.0: equal values must have equal digests
        if kind is int and hasattr(value, "__index__"):
            if abs(operator.index(value)) >= _INTEGERS:
                raise ValueError(f"{path} must be below 2**63, got {_shown(value)}")
            return operator.index(value)
        if kind in (str, bool) and isinstance(value, kind):
            return value
    raise TypeError(f"{path} must be {_EXPECTED[kind]}, got {_shown(value)}")
