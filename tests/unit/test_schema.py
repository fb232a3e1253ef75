"""Fields are checked and converted by their annotations; errors name the path of a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from poplar.values.plan import Plan
from poplar.values.schema import (
    Document,
    Fraction,
    PositiveCount,
    Rule,
    check_fields,
    from_fields,
    to_json_types,
)


@dataclass(frozen=True, kw_only=True)
class Part:
    count: PositiveCount
    fraction: Fraction = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.count == 13:
            raise ValueError("unlucky")


@dataclass(frozen=True, kw_only=True)
class Whole:
    parts: Annotated[tuple[Part, ...], Rule("at least one part", bool)]
    name: str | None = None
    named: tuple[tuple[str, float], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    size: Literal["small", "large"] = "small"

    def __post_init__(self) -> None:
        check_fields(self)


def test_values_are_converted():
    whole = Whole(parts=[Part(count=2, fraction=1)], named=[["a", 1]])
    assert whole.parts == (Part(count=2, fraction=1.0),)
    assert isinstance(whole.parts[0].fraction, float)
    assert whole.named == (("a", 1.0),)


def test_json_round_trip():
    whole = Whole(parts=(Part(count=1), Part(count=2)), extra={"a": (1, 2)}, named=(("b", 2.0),))
    content = to_json_types(whole)
    assert content["parts"][1] == {"count": 2, "fraction": 0.0}
    assert content["extra"] == {"a": [1, 2]}
    assert from_fields(Whole, content).parts == whole.parts


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([], "Whole must be a table of fields, got"),
        ({}, "parts is missing"),
        ({"parts": []}, "parts must be at least one part"),
        ({"parts": [{"count": 1}], "part": 1}, "part is unknown; expected parts, name"),
        ({"parts": [{"count": 1}, {"count": 0}]}, r"parts\[1\]\.count must be at least 1, got 0"),
        ({"parts": [{"count": 1.0}]}, r"parts\[0\]\.count must be a whole number, got 1\.0"),
        ({"parts": [{"count": 1, "fraction": 2}]}, r"parts\[0\]\.fraction must be from 0 to 1"),
        ({"parts": [{"count": 13}]}, r"parts\[0\]: unlucky"),
        ({"parts": [{"count": 1}], "name": 3}, "name must be a string, got 3"),
        ({"parts": [{"count": 1}], "named": [["a"]]}, r"named\[0\] must have 2 entries"),
        ({"parts": [{"count": 1}], "extra": 3}, "extra must be a mapping, got 3"),
        ({"parts": [{"count": 1}], "size": "tiny"}, "size must be one of small, large, got 'tiny'"),
    ],
)
def test_invalid_content_raises_with_the_path(content, complaint):
    with pytest.raises(ValueError, match=complaint):
        from_fields(Whole, content)


def test_a_long_value_is_shortened_in_errors():
    with pytest.raises(TypeError) as raised:
        Whole(parts="x" * 10_000)
    assert len(str(raised.value)) < 200


@dataclass(frozen=True, kw_only=True)
class Note(Document):
    _noun = "note"
    _version = 2
    _remedy = "write it again"

    text: str
    answers: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)


def test_documents_inside_a_document_keep_their_versions(tmp_path):
    note = Note(text="a", answers=(Note(text="b"),))
    note.to_json(tmp_path / "note.json")
    assert Note.from_json(tmp_path / "note.json") == note
    content = note.to_dict()
    assert [content["version"], content["answers"][0]["version"]] == [2, 2]
    content["answers"][0]["version"] = 3
    with pytest.raises(ValueError, match=r"note format 3, but .* reads format 2; write it again"):
        Note.from_dict(content)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shares", [1e308, 1e308], r"shares\[0\] must be at most 1e\+30"),
        ("shares", [-(10**400), 1], r"shares\[0\] must be at most 1e\+30 in absolute value"),
        ("global_batch", 2**70, r"global_batch must be below 2\*\*63"),
        ("version", True, "plan format True"),
        ("prediction", {"step_seconds": 1e308}, r"prediction\.step_seconds must be at most"),
        ("prediction", {"memory_bytes": "x"}, r"prediction\.memory_bytes must be a sequence"),
        ("prediction", {"busy_fraction": [-1]}, r"prediction\.busy_fraction\[0\] must be from 0"),
    ],
)
def test_absurd_values_in_a_file_are_refused_by_their_path(tmp_path, field, value, message):
    content = Plan.even(2, 8, 4, 1).to_dict()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**content, field: value}))
    with pytest.raises(ValueError, match=message):
        Plan.from_json(path)


def test_a_key_that_comes_twice_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(Plan.even(2, 8, 4, 1).to_dict())[:-1] + ', "stage": 3}')
    with pytest.raises(ValueError, match=r"plan.json .* the key 'stage' twice"):
        Plan.from_json(path)


def test_deep_nesting_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"plan.json .* nested too deeply"):
        Plan.from_json(path)
